"""Embeddings and scores over HTTP, with the openai client and a fake engine."""

from __future__ import annotations

import asyncio
import base64
import json
from array import array
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from foreword.config.options import Config
from foreword.embedding.encoder_messages import EncoderInfo, normalize_embedding
from foreword.server.answering import embeddings
from foreword.server.apis.embeddings import EmbeddingBody
from foreword.server.http import responses
from tests.server.conftest import MODEL, RunningServer, run_server
from tests.support.counted_work import record_threads
from tests.support.fakes import FakeOutput
from tests.support.waiting import WAIT_S


def embed(server: RunningServer, value: Any, **fields: Any) -> Any:
    return server.http.post("/v1/embeddings", json={"input": value, "model": MODEL, **fields})


def test_each_format_has_the_same_vectors(served: RunningServer) -> None:
    """The client's default is base64, which it decodes."""
    create = served.openai.embeddings.create
    texts = ["abc", "aab", "hhh"]
    default = create(model=MODEL, input=texts)
    plain = create(model=MODEL, input=texts, encoding_format="float")
    assert [one.embedding for one in default.data] == [one.embedding for one in plain.data]
    assert [one.index for one in plain.data] == [0, 1, 2]
    assert plain.data[1].embedding[:3] == pytest.approx([0.8944272, 0.4472136, 0.0])
    assert (plain.usage.prompt_tokens, plain.usage.total_tokens, plain.model) == (9, 9, MODEL)
    assert {request.pooling for request in served.client.submitted} == {"last"}


def test_json_of_many_vectors_is_written_in_pieces(
    served: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """2048 vectors of 1024 numbers held the interpreter's lock for 0.4 s at once."""
    sizes: list[int] = []

    def record(value: Any) -> bytes:
        sizes.append(len(json_bytes(value)))
        return json_bytes(value)

    json_bytes = responses.json_bytes
    monkeypatch.setattr(responses, "json_bytes", record)
    answer = embed(served, ["abc"] * 100)
    assert answer.json()["data"][99]["embedding"] == answer.json()["data"][0]["embedding"]
    assert max(sizes) < 200 < len(answer.content) / 20


def test_ids_and_texts_give_the_same_vectors(served: RunningServer) -> None:
    ids = list(b"abba")
    vectors = [
        embed(served, value).json()["data"][0]["embedding"] for value in ("abba", ids, [ids], ["abba"])
    ]
    assert all(vector == vectors[0] for vector in vectors)


def test_dimensions_are_cut_before_normalization(served: RunningServer) -> None:
    whole = embed(served, "aabbbbh", normalize=False).json()["data"][0]["embedding"]
    assert whole == [2, 4, 0, 0, 0, 0, 0, 1]
    cut = embed(served, "aabbbbh", dimensions=2).json()["data"][0]["embedding"]
    assert cut == pytest.approx([0.4472136, 0.8944272])
    assert embed(served, "aabbbbh", dimensions=2, use_activation=False).json()["data"][0]["embedding"] == [
        2,
        4,
    ]
    assert embed(served, "xyz").json()["data"][0]["embedding"] == [0.0] * 8, "a zero vector is not normalized"


def test_options_reach_the_engine(served: RunningServer) -> None:
    assert embed(served, "abc", pooling="mean", priority=-3, user="me").status_code == 200
    (request,) = served.client.submitted
    assert (request.pooling, request.priority) == ("mean", -3)


@pytest.mark.parametrize(("asked", "length"), [(5, 5), (-1, 2048)])
def test_longer_texts_are_truncated_on_request(served: RunningServer, asked: int, length: int) -> None:
    for value in ("ab" * 1100, [97] * 2200):
        reply = embed(served, value, truncate_prompt_tokens=asked)
        assert reply.json()["usage"]["prompt_tokens"] == length
    reply = embed(served, ["abc", "a" * 2049])
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "input[1]"
    assert "2049 tokens; the model takes at most 2048" in reply.json()["error"]["message"]
    assert reply.json()["error"]["code"] == "context_length_exceeded"
    assert embed(served, "a" * 2048).status_code == 200


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": ["a", ""]}, "input[1]"),
        ({"input": ["a", [97, 999]]}, "input[1]"),
        ({"input": ["a", [97, -1]]}, "input[1]"),
        ({"input": ["a", {"text": "b"}]}, "input[1]"),
        ({"input": [[97], []]}, "input[1]"),
        ({"input": ["a", "\ud800"]}, "input[1]"),
        ({"input": 7}, "input"),
        ({"input": None}, "input"),
        ({}, "input"),
        ({"input": ["a"] * 2049}, "input"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "dimensions": 9}, "dimensions"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format"),
        ({"input": "a", "pooling": "max"}, "pooling"),
        ({"input": "a", "truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        ({"input": "a", "normalize": True, "use_activation": False}, "normalize"),
        ({"input": "a", "prompt_name": "query"}, "prompt_name"),
        ({"input": "a", "truncation_side": "left"}, "truncation_side"),
        ({"input": "a", "nonsense": 1}, "nonsense"),
    ],
)
def test_invalid_fields_are_named(served: RunningServer, fields: dict[str, Any], param: str) -> None:
    reply = served.http.post(
        "/v1/embeddings", content=json.dumps(fields), headers={"Content-Type": "application/json"}
    )
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["param"] == param
    assert not served.client.submitted


def test_lists_of_ids_are_checked_in_a_thread(served: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    on_loop = record_threads(monkeypatch, EmbeddingBody, "inputs")
    for value in ("a", [[97] * 2000] * 5):
        assert embed(served, value).status_code == 200
    assert on_loop == [True, False]


def test_unknown_model(served: RunningServer) -> None:
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        served.openai.embeddings.create(model="other", input="a")


def test_failed_text_frees_the_others(served: RunningServer) -> None:
    served.set_output(
        lambda request: FakeOutput(fail_after=0) if request.prompt_ids == (98,) else FakeOutput(hang_after=0)
    )
    reply = embed(served, ["a", "b", "c"])
    assert reply.status_code == 500 and "the script says so" in reply.json()["error"]["message"]
    served.wait_until_idle()


def test_disconnect_frees_everything(served: RunningServer) -> None:
    served.set_output(FakeOutput(hang_after=0))
    served.disconnect("/v1/embeddings", {"input": ["a"] * 200}, lambda: served.client.submitted)
    served.wait_until_idle()
    assert 0 < len(served.client.submitted) < 200
    assert (
        'embedding_requests_total{kind="embed",model="fake-model",reason="abort"}'
        in served.http.get("/metrics").text
    )


def test_long_list_is_submitted_in_parts(served: RunningServer) -> None:
    """Two steps' worth of texts at once, so that a later request does not wait for all of them."""
    resolved = served.client.info.resolved
    open_tokens: list[int] = []

    def watch(request: Any) -> FakeOutput:
        live = [one for one in served.client.submitted if one.id in served.client.live]
        open_tokens.append(sum(len(one.prompt_ids) for one in live))
        return FakeOutput()

    served.set_output(watch)
    texts = [chr(97 + index % 8) * (1 + index * 37 % 400) for index in range(150)]
    data = embed(served, texts).json()["data"]
    assert max(open_tokens) <= 2 * resolved.max_num_batched_tokens
    assert [max(range(8), key=one["embedding"].__getitem__) for one in data] == [
        index % 8 for index in range(150)
    ]
    served.set_output(watch)
    open_tokens.clear()
    embed(served, ["a"] * 300)
    assert 1 < max(open_tokens) <= resolved.max_num_seqs


def test_admission_counts_every_text() -> None:
    with run_server(Config(max_waiting=4)) as server:
        assert embed(server, ["a"] * 5).status_code == 400
        server.set_output(FakeOutput(hang_after=0))
        replies = []

        def is_full() -> bool:
            if server.app.state.models.admission.num_open == 3:
                replies.append(embed(server, ["a", "b"]))
            return bool(replies)

        server.disconnect("/v1/embeddings", {"input": ["a"] * 3}, is_full)
        assert replies[0].status_code == 429 and replies[0].headers["Retry-After"] == "1"
        server.wait_until_idle()


def test_metrics(served: RunningServer) -> None:
    def value(name: str) -> float:
        lines = served.http.get("/metrics").text.splitlines()
        return float(next(line for line in lines if line.startswith(f"foreword_{name} ")).split()[-1])

    names = (
        'embedding_requests_total{kind="embed",model="fake-model",reason="done"}',
        'embedding_tokens_total{kind="embed",model="fake-model"}',
    )
    before = [value(name) for name in names]
    embed(served, ["abc", "de"])
    assert [value(name) - old for name, old in zip(names, before, strict=True)] == [1, 5]


@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank", "/rerank"])
def test_rerank(served: RunningServer, path: str) -> None:
    body = {"model": MODEL, "query": "aab", "documents": ["hhh", {"text": "aab"}, "ab", "hhh"]}
    answer = served.http.post(path, json=body).json()
    assert [one["index"] for one in answer["results"]] == [1, 2, 0, 3], "ties keep the order of the request"
    assert answer["results"][0] == {
        "index": 1,
        "relevance_score": pytest.approx(1.0),
        "document": {"text": "aab"},
    }
    assert answer["usage"] == {"prompt_tokens": 8, "total_tokens": 8}, "each text is tokenized once"
    best = served.http.post(path, json={**body, "top_n": 1, "return_documents": False}).json()
    assert best["results"] == [{"index": 1, "relevance_score": pytest.approx(1.0)}]


@pytest.mark.parametrize(
    "names", [("text_1", "text_2"), ("data_1", "data_2"), ("queries", "documents"), ("queries", "items")]
)
@pytest.mark.parametrize("path", ["/v1/score", "/score"])
def test_score(served: RunningServer, names: tuple[str, str], path: str) -> None:
    def scores(first: Any, second: Any) -> list[float]:
        answer = served.http.post(path, json={names[0]: first, names[1]: second}).json()
        assert [one["index"] for one in answer["data"]] == list(range(len(answer["data"])))
        return [one["score"] for one in answer["data"]]

    assert scores("a", "a") == [pytest.approx(1.0)]
    assert scores("a", ["a", "b", "ab"]) == [pytest.approx(1.0), 0.0, pytest.approx(0.5**0.5)]
    assert scores(["a", "b"], ["a", "b"]) == [pytest.approx(1.0)] * 2


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/rerank", {"query": "a", "documents": []}, "documents"),
        ("/v1/rerank", {"query": "a", "documents": ["b", ""]}, "documents[1]"),
        ("/v1/rerank", {"query": "", "documents": ["b"]}, "query"),
        ("/v1/rerank", {"query": "a"}, "documents"),
        ("/v1/rerank", {"query": "a", "documents": ["b"], "top_n": -1}, "top_n"),
        ("/v1/rerank", {"query": "a", "documents": ["b" * 3000]}, "documents[0]"),
        ("/v1/score", {"text_1": "a"}, "text_1"),
        ("/v1/score", {"text_1": "a", "documents": "b"}, "text_1"),
        ("/v1/score", {"text_1": ["a", "b"], "text_2": "c"}, "text_1"),
        ("/v1/score", {"queries": "a", "documents": ["c", ""]}, "documents[1]"),
    ],
)
def test_invalid_ranking_fields_are_named(
    served: RunningServer, path: str, body: dict[str, Any], param: str
) -> None:
    reply = served.http.post(path, json=body)
    assert reply.status_code == 400 and reply.json()["error"]["param"] == param, reply.text
    assert not served.client.submitted


class FakeEncoder:
    """The encoder client's methods that the routes use."""

    def __init__(self, task: str) -> None:
        self.info = EncoderInfo(
            "bert-tiny", "bert", task, 2, 32, 100, 300, "cls", False, "fake", {"query": "q: "}
        )
        self.tokenizer = FakeTexts()
        self.alive = True
        self.asked: list[Any] = []
        self.cancelled = 0

    async def start(self) -> EncoderInfo:
        return self.info

    async def close(self) -> None:
        self.alive = False

    async def encode(self, inputs: Any, pooling: str | None = None) -> list[bytes]:
        self.asked.append((inputs, pooling))
        try:
            await asyncio.sleep(WAIT_S if any(len(ids) == 13 for ids in inputs) else 0)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return [array("f", [3.0, float(len(ids))]).tobytes() for ids in inputs]

    async def score(self, pairs: Any) -> list[float]:
        return [float(len(ids)) for ids, _ in pairs]


class FakeTexts:
    def encode(
        self,
        text: str,
        *,
        prompt: str | None = None,
        max_tokens: int | None = None,
        add_special_tokens: bool = True,
    ) -> list[int]:
        ids = list((("q: " if prompt else "") + text).encode())
        return ids if max_tokens is None else ids[: 32 if max_tokens == -1 else max_tokens]

    def encode_pair(
        self, first: str, second: str, *, max_tokens: int | None = None
    ) -> tuple[list[int], list[int]]:
        return list((first + second).encode())[:max_tokens], [0] * len(first) + [1] * len(second)


@pytest.fixture(params=["embed", "rank"])
def encoder_server(request: pytest.FixtureRequest) -> Iterator[tuple[RunningServer, FakeEncoder]]:
    """A server with an encoder of each task."""
    encoder = FakeEncoder(request.param)
    with run_server(encoder=encoder) as server:
        yield server, encoder
        server.wait_until_idle()


def test_both_models_are_listed(encoder_server: tuple[RunningServer, FakeEncoder]) -> None:
    server, _ = encoder_server
    assert [card.id for card in server.openai.models.list().data] == [MODEL, "bert-tiny"]
    assert server.openai.models.retrieve("bert-tiny").max_model_len == 32
    with pytest.raises(openai.NotFoundError, match="'fake-model' and 'bert-tiny'"):
        server.openai.models.retrieve("other")


def test_encoder_does_not_generate(encoder_server: tuple[RunningServer, FakeEncoder]) -> None:
    server, _ = encoder_server
    with pytest.raises(openai.BadRequestError, match="bert-tiny is an encoder; 'fake-model' generates text"):
        server.openai.completions.create(model="bert-tiny", prompt="a")


def test_requests_reach_the_right_model(encoder_server: tuple[RunningServer, FakeEncoder]) -> None:
    server, encoder = encoder_server
    create = server.openai.embeddings.create
    assert len(create(model=MODEL, input="ab").data[0].embedding) == 8
    if encoder.info.task == "rank":
        with pytest.raises(openai.BadRequestError, match="ranks pairs of texts; it has no embeddings"):
            create(model="bert-tiny", input="ab")
        assert len(embed(server, "ab", model=None).json()["data"][0]["embedding"]) == 8, (
            "the default is a model that can"
        )
    else:
        assert create(model="bert-tiny", input=["abcd"]).data[0].embedding == pytest.approx([0.6, 0.8])
        assert embed(server, "ab", model=None).json()["model"] == "bert-tiny"
        assert (
            embed(server, "a", model=None, prompt_name="query", pooling="mean").json()["usage"][
                "prompt_tokens"
            ]
            == 4
        )
        assert encoder.asked[-1] == ([list(b"q: a")], "mean")
        assert embed(server, ["a", "b" * 33], model=None).json()["error"]["param"] == "input[1]"
        assert (
            embed(server, "b" * 33, model=None, truncate_prompt_tokens=-1).json()["usage"]["prompt_tokens"]
            == 32
        )
    assert not encoder.asked or encoder.info.task == "embed"


def test_scores_come_from_the_ranker(encoder_server: tuple[RunningServer, FakeEncoder]) -> None:
    server, encoder = encoder_server
    body = {"query": "aa", "documents": ["b", "bbb", "bb"]}
    answer = server.http.post("/v1/rerank", json=body).json()
    assert answer["model"] == "bert-tiny"
    if encoder.info.task == "rank":
        assert [(one["index"], one["relevance_score"]) for one in answer["results"]] == [
            (1, 5.0),
            (2, 4.0),
            (0, 3.0),
        ]
        assert answer["usage"]["prompt_tokens"] == 12
        reply = server.http.post("/v1/rerank", json={**body, "documents": ["b" * 33]})
        assert reply.json()["error"]["param"] == "documents[0]"
    else:
        assert answer["results"][0]["index"] == 2 and answer["results"][0][
            "relevance_score"
        ] == pytest.approx(1.0)
    assert server.http.post("/v1/rerank", json={**body, "model": MODEL}).json()["model"] == MODEL


def test_work_on_a_repeated_query_is_bounded(
    encoder_server: tuple[RunningServer, FakeEncoder], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A query of 12 KB beside 1000 documents was tokenized a thousand times on the event loop."""
    server, encoder = encoder_server
    if encoder.info.task == "embed":
        return  # each text is embedded once
    on_loop = record_threads(monkeypatch, FakeTexts, "encode_pair")
    monkeypatch.setattr(embeddings, "MAX_REPEATED_CHARS", 300_000)
    body = {"query": "a" * 2000, "truncate_prompt_tokens": 32}
    for count, status in ((2, 200), (100, 200), (200, 400)):
        reply = server.http.post("/v1/rerank", json={**body, "documents": ["b"] * count})
        assert reply.status_code == status
    assert "query has 2000 characters, read with each of 200 texts" in reply.json()["error"]["message"]
    assert on_loop == [True] * 2 + [False] * 100
    equal = {"query": "q", "documents": ["b" * 3000] * 200, "truncate_prompt_tokens": 32}
    assert server.http.post("/v1/rerank", json=equal).status_code == 200, "a client has sent each of them"


def test_disconnect_cancels_the_encoder(encoder_server: tuple[RunningServer, FakeEncoder]) -> None:
    server, encoder = encoder_server
    if encoder.info.task == "embed":
        num_asked = len(encoder.asked)
        server.disconnect("/v1/embeddings", {"input": "x" * 13}, lambda: len(encoder.asked) > num_asked)
        server.wait_until_idle()
        assert encoder.cancelled == 1


def test_large_responses_use_little_memory() -> None:
    vector = array("f", [3.0, 4.0, 0.0]).tobytes()
    assert list(normalize_embedding(vector)) == pytest.approx([0.6, 0.8, 0.0])
    assert list(normalize_embedding(vector, 1)) == [1.0]
    assert base64.b64encode(normalize_embedding(vector, normalize=False)) == base64.b64encode(vector)
