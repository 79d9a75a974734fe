"""Any body gives an answer or a refusal in the envelope."""

import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from foreword.server.protocol.chat import ChatBody
from foreword.server.protocol.completions import CompletionBody
from foreword.server.protocol.messages_api import CountTokensBody, MessagesBody
from tests.server.conftest import RunningServer
from tests.support.budget import SHARED_FIXTURES, examples

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 300),
    st.integers(),
    st.floats(),
    st.text(max_size=4),
    st.sampled_from(["user", "text"]),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "system", "tool", ""]), "content": VALUES}
    ),
    max_size=3,
)


def bodies(schema: Any, required: dict[str, Any]) -> Any:
    names = [*schema.model_fields, *schema.peer_fields, *schema.aliases, "nonsense"]
    names = [name for name in names if name not in required]
    return st.builds(
        lambda fixed, free: fixed | free,
        st.fixed_dictionaries(required),
        st.dictionaries(st.sampled_from(names), VALUES, max_size=3),
    )


BODIES = bodies(ChatBody, {"messages": MESSAGES | VALUES}).map(
    lambda body: ("/v1/chat/completions", body)
) | bodies(CompletionBody, {"prompt": VALUES | st.text(max_size=8)}).map(
    lambda body: ("/v1/completions", body)
)

BLOCK_TYPES = ("text", "image", "document", "thinking", "tool_use", "tool_result", "tool_reference", "x")
BLOCK_KEYS = (
    "text",
    "source",
    "thinking",
    "signature",
    "id",
    "name",
    "input",
    "tool_use_id",
    "content",
    "data",
)
BLOCKS = st.recursive(
    VALUES,
    lambda inner: st.lists(
        st.builds(
            lambda kind, fields: {"type": kind, **fields},
            st.sampled_from(BLOCK_TYPES),
            st.dictionaries(st.sampled_from(BLOCK_KEYS), inner, max_size=4),
        ),
        max_size=3,
    ),
    max_leaves=6,
)
TURNS = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant", "system", ""]), "content": BLOCKS}),
    max_size=4,
)
TOOLS = st.lists(
    st.dictionaries(st.sampled_from(["name", "input_schema", "type", "strict", "defer_loading"]), VALUES),
    max_size=2,
)
MESSAGES_BODIES = st.builds(
    lambda path, body, tools: (path, body | tools),
    st.just("/v1/messages"),
    bodies(MessagesBody, {"messages": TURNS | VALUES}),
    st.fixed_dictionaries({}, optional={"tools": TOOLS}),
) | bodies(CountTokensBody, {"messages": TURNS | VALUES}).map(
    lambda body: ("/v1/messages/count_tokens", body)
)


@given(MESSAGES_BODIES)
@settings(max_examples=examples(80), suppress_health_check=SHARED_FIXTURES)
def test_any_body_of_anthropic_is_answered_or_refused(
    served: RunningServer, case: tuple[str, dict[str, Any]]
) -> None:
    path, body = case
    reply = served.http.post(path, content=json.dumps(body), headers={"Content-Type": "application/json"})
    if reply.status_code == 200:
        if body.get("stream"):
            assert reply.text.endswith('data: {"type":"message_stop"}\n\n')
        else:
            assert "input_tokens" in (reply.json() if "count" in path else reply.json()["usage"])
        return
    error = reply.json()
    assert error["type"] == "error" and error["error"]["message"]
    assert (reply.status_code, error["error"]["type"]) in [
        (400, "invalid_request_error"),
        (404, "not_found_error"),
    ], reply.text


@given(BODIES)
@settings(
    max_examples=examples(80),
    suppress_health_check=SHARED_FIXTURES,
)
def test_any_body_is_answered_or_refused(served: RunningServer, case: tuple[str, dict[str, Any]]) -> None:
    path, body = case
    reply = served.http.post(path, content=json.dumps(body), headers={"Content-Type": "application/json"})
    if reply.status_code == 200:
        assert (
            reply.text.endswith("data: [DONE]\n\n")
            if body.get("stream")
            else len(reply.json()["choices"]) >= 1
        )
        return
    error = reply.json()["error"]
    assert (reply.status_code, error["type"]) in [(400, "invalid_request_error"), (404, "not_found_error")], (
        reply.text
    )
    assert error["message"]
