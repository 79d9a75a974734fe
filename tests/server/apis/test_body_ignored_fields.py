"""Fields of other servers and clients: the table of neutral values, null, aliases, and unknown fields."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from foreword.config.options import Config
from foreword.server.apis.body import TABLES, IgnoredField, StrictModel
from foreword.server.apis.chat.body import ChatBody
from foreword.server.apis.completions import CompletionBody
from foreword.server.apis.embeddings import EmbeddingBody
from foreword.server.apis.ranking import RerankBody
from foreword.server.apis.responses.body import ResponsesBody
from foreword.server.routes.tokenize import TokenizeBody
from tests.server.conftest import RunningServer, run_server
from tests.support.budget import SHARED_FIXTURES, examples
from tests.support.fakes import FakeOutput
from tests.support.responses_events import without_ids

USER = [{"role": "user", "content": "Hi"}]
CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
# (path, smallest body, table) of each route with a table.
ROUTES: dict[str, tuple[str, dict[str, Any], Mapping[str, IgnoredField]]] = {
    "chat": (CHAT, {"messages": USER, "seed": 1}, TABLES["chat"]),
    "completion": (COMPLETIONS, {"prompt": "Hi", "seed": 1}, TABLES["completion"]),
    "responses": (RESPONSES, {"input": "Hi", "seed": 1}, TABLES["responses"]),
    "embedding": ("/v1/embeddings", {"input": "Hi"}, TABLES["embedding"]),
    "rerank": ("/v1/rerank", {"query": "a", "documents": ["b"]}, TABLES["ranking"]),
    "score": ("/v1/score", {"text_1": "a", "text_2": "b"}, TABLES["ranking"]),
    "tokenize": ("/tokenize", {"prompt": "Hi"}, TABLES["template"]),
    "detokenize": ("/detokenize", {"tokens": [97]}, TABLES["template"]),
}
MODELS: dict[str, type[StrictModel]] = {
    "chat": ChatBody,
    "completion": CompletionBody,
    "responses": ResponsesBody,
    "embedding": EmbeddingBody,
    "rerank": RerankBody,
    "tokenize": TokenizeBody,
}
# Objects inside a body: where their fields are, and a body with one such field.
NESTED: dict[str, tuple[Mapping[str, IgnoredField], Any]] = {
    "stream_options": (
        TABLES["stream_options"],
        lambda fields: {"messages": USER, "stream": True, "stream_options": fields},
    ),
    "response_format.json_schema": (
        TABLES["json_schema"],
        lambda fields: {
            "messages": USER,
            "response_format": {"type": "json_schema", "json_schema": {"schema": True, **fields}},
        },
    ),
    "structured_outputs": (
        TABLES["structured_outputs"],
        lambda fields: {"messages": USER, "structured_outputs": {"json": True, **fields}},
    ),
    "messages[0]": (TABLES["message"], lambda fields: {"messages": [{**USER[0], **fields}]}),
}


def post(served: RunningServer, path: str, body: Any) -> Any:
    return served.http.post(path, content=json.dumps(body), headers={"Content-Type": "application/json"})


def answer(served: RunningServer, path: str, body: Mapping[str, Any]) -> Any:
    """The answer without what differs between equal requests, and the engine's parameters."""
    served.client.submitted.clear()
    reply = post(served, path, body)
    assert reply.status_code == 200, reply.text
    kept = {name: value for name, value in reply.json().items() if name not in ("id", "created")}
    kept = without_ids(kept) if path == RESPONSES else kept
    return kept, [(request.params, request.prompt_ids) for request in served.client.submitted]


def error_of(served: RunningServer, path: str, body: Any) -> dict[str, Any]:
    reply = post(served, path, body)
    assert reply.status_code == 400, reply.text
    return dict(reply.json()["error"])


@pytest.mark.parametrize("route", MODELS)
def test_values_of_each_row(route: str) -> None:
    """Neutral values are dropped from the body; others are refused by name."""
    _, body, table = ROUTES[route]
    model = MODELS[route]
    expected = model.model_validate(body)
    for name, row in table.items():
        for value in (None, *((True, -1, "x", {"a": [1]}) if row.neutral is None else row.neutral)):
            assert model.model_validate({**body, name: value}) == expected, name
        if row.neutral is None:
            continue
        with pytest.raises(ValidationError) as caught:
            model.model_validate({**body, name: ["another value"]})
        (error,) = caught.value.errors()
        assert (error["type"], error["ctx"]["field"]) == ("unsupported", name)
        assert "got ['another value']" in error["msg"]
        assert all(json.dumps(value) in error["msg"] for value in row.neutral)


@pytest.mark.parametrize("route", ROUTES)
def test_other_values_are_refused_by_name(served: RunningServer, route: str) -> None:
    path, body, table = ROUTES[route]
    name = next(name for name, row in table.items() if row.neutral is not None)
    error = error_of(served, path, {**body, name: ["another value"]})
    assert (error["param"], error["code"]) == (name, "unsupported_parameter")
    assert error["message"].startswith(name) and "got ['another value']" in error["message"]


@pytest.mark.parametrize(
    ("path", "name"), [(path, name) for path, (table, _) in NESTED.items() for name in table]
)
def test_fields_inside_objects(served: RunningServer, path: str, name: str) -> None:
    table, body = NESTED[path]
    field = table[name]
    for value in (None, *(("x",) if field.neutral is None else field.neutral)):
        assert post(served, CHAT, body({name: value})).status_code == 200
    if field.neutral is not None:
        error = error_of(served, CHAT, body({name: "another"}))
        assert error["param"] == f"{path}.{name}" and error["message"].startswith(f"{path}.{name} ")


@pytest.mark.parametrize("route", ROUTES)
def test_all_neutral_values_at_once(served: RunningServer, route: str) -> None:
    path, body, table = ROUTES[route]
    expected = answer(served, path, body)
    fields = {
        name: "x" if row.neutral is None else row.neutral[0]
        for name, row in table.items()
        if row.neutral != ()
    }
    assert answer(served, path, {**body, **fields}) == expected
    assert answer(served, path, {**body, **dict.fromkeys(table)}) == expected


def test_true_is_not_one() -> None:
    assert TABLES["chat"]["best_of"].accepts(1.0) and not TABLES["chat"]["best_of"].accepts(True)
    assert TABLES["chat"]["echo"].accepts(False) and not TABLES["chat"]["echo"].accepts(0)


@pytest.mark.parametrize("model", [ChatBody, CompletionBody, EmbeddingBody, RerankBody])
def test_table_has_no_field_of_the_body(model: Any) -> None:
    """Such a row would drop a field that works."""
    names = {info.alias or name for name, info in model.model_fields.items()} | set(model.aliases)
    assert not names & set(model.peer_fields)


@pytest.mark.parametrize(
    "body",
    [
        {"model": "", "messages": USER},
        {"messages": USER, "foo": None, "my-field": None},
        {"messages": USER, "stream": True, "stream_options": {"foo": None, "include_usage": None}},
        {"messages": USER, "speculation": {"method": None, "foo": None}},
        {"messages": USER, "prediction": {"type": "content", "content": "x", "foo": None}},
        {"messages": USER, "response_format": {"type": "text", "json_schema": None, "foo": None}},
        {"messages": [{"role": "assistant", "content": "x", "tool_calls": None, "audio": None, "foo": None}]},
        {"messages": USER, "n_predict": None, "max_tokens": 5},
        {"messages": USER, "logit_bias": {"5": None}},
    ],
)
def test_null_is_absence(served: RunningServer, body: dict[str, Any]) -> None:
    assert post(served, CHAT, body).status_code == 200


def test_nulls_inside_free_objects_are_kept(served: RunningServer) -> None:
    """A JSON schema may hold a null."""
    schema = {"enum": [None, 1], "default": None}
    served.chat(structured_outputs={"json": schema})
    structured = served.client.submitted[0].params.structured
    assert json.loads(structured.text) == schema


def test_null_for_a_required_field(served: RunningServer) -> None:
    assert error_of(served, CHAT, {"messages": None})["message"] == "messages is required"


@pytest.mark.parametrize(
    ("alias", "value", "field"),
    [
        ("n_predict", 7, "max_tokens"),
        ("num_predict", 7, "max_tokens"),
        ("max_new_tokens", 7, "max_tokens"),
        ("n_cmpl", 1, "n"),
        ("repeat_penalty", 1.5, "repetition_penalty"),
        ("typical", 0.5, "typical_p"),
        ("nsigma", 2.0, "top_n_sigma"),
    ],
)
def test_aliases(served: RunningServer, alias: str, value: Any, field: str) -> None:
    for body in ({alias: value}, {alias: value, field: value}):
        served.client.submitted.clear()
        assert post(served, COMPLETIONS, {"prompt": "Hi", **body}).status_code == 200
        assert getattr(served.client.submitted[0].params, field) == value
    error = error_of(served, COMPLETIONS, {"prompt": "Hi", alias: value, field: 3})
    assert error["param"] == alias and field in error["message"]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [({"regex": "[ab]+"}, ("regex", "[ab]+")), ({"ebnf": 'root ::= "a"'}, ("gbnf", 'root ::= "a"'))],
)
def test_sglang_constraints(served: RunningServer, fields: dict[str, str], expected: tuple[str, str]) -> None:
    served.chat(**fields)
    structured = served.client.submitted[0].params.structured
    assert (structured.constraint_type, structured.text, structured.field) == (*expected, next(iter(fields)))


# Unknown fields

JSON_NAMES = st.text(min_size=1, max_size=12) | st.sampled_from(
    [
        "my-field",
        "speculative.x",
        "int",
        "str",
        "float",
        "bool",
        "Body",
        "schema_",
        "params",
        "__class__",
        "[0]",
    ]
)
KNOWN_NAMES = frozenset(
    name
    for model in (ChatBody, CompletionBody, RerankBody, EmbeddingBody)
    for name in (*model.model_fields, *model.aliases, *model.peer_fields)
) | {"json", "schema", "regex", "choice", "grammar", "method", "type", "content", "text"}
PLACES = {
    "": (CHAT, lambda field: {"messages": USER, **field}),
    "stream_options.": (CHAT, lambda field: {"messages": USER, "stream": True, "stream_options": field}),
    "speculation.": (CHAT, lambda field: {"messages": USER, "speculation": field}),
    "prediction.": (
        CHAT,
        lambda field: {"messages": USER, "prediction": {"type": "content", "content": "x", **field}},
    ),
    "response_format.json_schema.": (
        CHAT,
        lambda field: {
            "messages": USER,
            "response_format": {"type": "json_schema", "json_schema": {"schema": True, **field}},
        },
    ),
    "structured_outputs.": (COMPLETIONS, lambda field: {"prompt": "x", "structured_outputs": field}),
    "documents[1].": (
        "/v1/rerank",
        lambda field: {"query": "q", "documents": ["a", {"text": "b", **field}]},
    ),
}


@given(name=JSON_NAMES.filter(lambda name: name not in KNOWN_NAMES), place=st.sampled_from(sorted(PLACES)))
@settings(max_examples=examples(150), suppress_health_check=SHARED_FIXTURES)
def test_unknown_field_has_its_path(served: RunningServer, name: str, place: str) -> None:
    path, body = PLACES[place]
    error = error_of(served, path, body({name: 1}))
    assert error["param"] == place + name
    assert error["message"].startswith(f"unknown field {place + name!r}")


def test_unknown_field_with_a_similar_name(served: RunningServer) -> None:
    assert error_of(served, CHAT, {"messages": USER, "temprature": 1})["message"] == (
        "unknown field 'temprature'; did you mean 'temperature'?"
    )
    assert "did you mean" not in error_of(served, CHAT, {"messages": USER, "colour": 1})["message"]
    assert len(error_of(served, CHAT, {"messages": USER, "x" * 100_000: 1})["message"]) < 300


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": USER, "speculation": {"method": 5}}, "speculation.method"),
        ({"messages": [*USER, {"role": "user", "content": "x", "audio": {"id": "a"}}]}, "messages[1].audio"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"id": "a"}]}]},
            "messages[0].tool_calls[0].function",
        ),
        ({"messages": USER, "stop": {"str": 1}}, "stop"),
        ({"messages": USER, "logit_bias": {"5": "x"}}, "logit_bias.5"),
        (
            {"messages": USER, "prediction": {"type": "content", "content": [{"type": "text"}]}},
            "prediction.content[0].text",
        ),
    ],
)
def test_errors_inside_objects_have_their_path(served: RunningServer, body: Any, param: str) -> None:
    error = error_of(served, CHAT, body)
    assert error["param"] == param and error["message"].startswith(param)


@pytest.fixture(scope="module")
def warned() -> Iterator[RunningServer]:
    with run_server(Config(unknown_fields="warn")) as server:
        yield server


@pytest.mark.parametrize("stream", [False, True])
def test_warn_ignores_and_names_unknown_fields(warned: RunningServer, stream: bool) -> None:
    body = {"messages": USER, "foo": 1, "my-field,é\n": 2, "speculation": {"bar": 3}, "stream": stream}
    reply = post(warned, CHAT, body)
    assert reply.status_code == 200
    assert reply.headers["X-Foreword-Ignored-Fields"] == "foo, my-field%2C%C3%A9%0A, speculation.bar"
    assert "X-Foreword-Ignored-Fields" not in post(warned, CHAT, {"messages": USER}).headers


@pytest.mark.parametrize(("path", "body"), [route[:2] for route in ROUTES.values()])
def test_every_route_reads_unknown_fields(warned: RunningServer, path: str, body: dict[str, Any]) -> None:
    assert post(warned, path, {**body, "foo": 1}).headers["X-Foreword-Ignored-Fields"] == "foo"


def test_refused_fields_are_refused_with_warn(warned: RunningServer) -> None:
    assert error_of(warned, CHAT, {"messages": USER, "mirostat": 2})["param"] == "mirostat"


def test_header_of_ignored_fields_is_bounded(warned: RunningServer) -> None:
    body = {"messages": USER, **{f"{i}{'é' * 1000}": 1 for i in range(100)}}
    value = post(warned, CHAT, body).headers["X-Foreword-Ignored-Fields"]
    assert len(value) < 2000 and value.endswith(", ...")


@pytest.mark.parametrize("path", [route[0] for route in ROUTES.values()])
def test_every_route_refuses_unknown_fields(served: RunningServer, path: str) -> None:
    body = next(body for other, body, _ in ROUTES.values() if other == path)
    assert error_of(served, path, {**body, "foo-bar": 1})["param"] == "foo-bar"


def ignored_count(served: RunningServer) -> float:
    return served.metrics()["foreword_ignored_message_fields_total",]


def test_unknown_fields_of_messages_are_ignored_and_counted(served: RunningServer) -> None:
    before = ignored_count(served)
    served.chat(
        messages=[
            {"role": "user", "content": "Hi", "colour": 1, "annotations": [], "shape": None},
            {"role": "assistant", "content": None, "tool_calls": [{**CALL, "index": 0}], "extra": 1},
            {
                "role": "user",
                "content": [{"type": "text", "text": "x", "cache_control": {}, "uuid": None}, "y"],
            },
        ]
    )
    assert ignored_count(served) == before + 4


# Requests' ids and salts


def test_request_id_of_the_body(served: RunningServer) -> None:
    for field in ("request_id", "rid"):
        reply = post(served, CHAT, {"messages": USER, field: "mine-1"})
        assert reply.headers["X-Request-Id"] == "mine-1"
    reply = post(served, "/v1/embeddings", {"input": "x", "request_id": "mine-2"})
    assert reply.headers["X-Request-Id"] == "mine-2"
    for bad in ("a b", "x" * 129, "", "a\n"):
        error = error_of(served, CHAT, {"messages": USER, "request_id": bad})
        assert error["param"] == "request_id"


def test_cache_salt_is_a_namespace_of_the_request(served: RunningServer) -> None:
    served.chat()
    served.chat(cache_salt="a")
    served.chat(cache_salt="a")
    served.chat(cache_salt="b")
    served.chat(cache_salt="")
    none, first, second, other, empty = (request.cache_salt for request in served.client.submitted)
    assert first == second and len({none, first, other}) == 3 and none == empty
    assert error_of(served, CHAT, {"messages": USER, "cache_salt": "x" * 1025})["param"] == "cache_salt"


def test_cache_salts_separate_the_prefix_cache(demo: RunningServer) -> None:
    prompt = "A long prompt of several blocks, which is worth a place in the cache. " * 8

    def num_cached(**fields: Any) -> int:
        usage = demo.complete(prompt, max_tokens=1, temperature=0, **fields).usage
        return int(usage.prompt_tokens_details.cached_tokens)

    assert num_cached(cache_salt="salt-a") == 0
    assert num_cached(cache_salt="salt-a") > 0
    assert num_cached(cache_salt="salt-b") == 0


# Lengths and prompts


def test_minus_one_runs_to_the_end() -> None:
    bodies: list[tuple[str, dict[str, Any]]] = [
        (CHAT, {"messages": USER, "max_tokens": -1}),
        (CHAT, {"messages": USER, "max_completion_tokens": -1, "max_tokens": 3}),
        (COMPLETIONS, {"prompt": "Hi", "n_predict": -1}),
        (RESPONSES, {"input": "Hi", "max_output_tokens": -1}),
        ("/v1/messages", {"messages": USER, "max_tokens": -1}),
    ]
    with run_server(Config(default_max_tokens=5)) as server:
        for path, fields in bodies:
            assert server.http.post(path, json={**fields, "ignore_eos": True}).status_code == 200
            assert server.client.submitted[-1].params.max_tokens is None, path
        server.wait_until_idle()


def test_truncation_side(served: RunningServer) -> None:
    for side, kept in (("left", "hing"), ("right", "Some")):
        served.complete("Something", truncate_prompt_tokens=4, truncation_side=side)
        assert bytes(served.client.submitted[-1].prompt_ids).decode() == kept
    error = error_of(served, COMPLETIONS, {"prompt": "x", "truncation_side": "middle"})
    assert error["param"] == "truncation_side" and "left, right" in error["message"]


def test_tokens_as_token_ids(served: RunningServer) -> None:
    served.set_output(FakeOutput("h"))
    logprobs = (
        served.complete(logprobs=1, return_tokens_as_token_ids=True, echo=True, prompt="a")
        .choices[0]
        .logprobs
    )
    assert logprobs.tokens == ["token_id:97", "token_id:104", "token_id:257"]
    assert logprobs.top_logprobs[1] == {"token_id:104": -0.5}
    entry = (
        served.chat(logprobs=True, top_logprobs=1, return_tokens_as_token_ids=True)
        .choices[0]
        .logprobs.content[0]
    )
    assert (entry.token, entry.bytes, entry.top_logprobs[0].token) == ("token_id:104", [104], "token_id:104")


def test_model_list_with_a_slash(served: RunningServer) -> None:
    assert served.http.get("/v1/models/").json() == served.http.get("/v1/models").json()
