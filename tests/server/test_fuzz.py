"""Any body gives an answer or a refusal in the envelope."""

import json
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foreword.server.apis.chat.body import ChatBody
from foreword.server.apis.completions import CompletionBody
from foreword.server.apis.messages.body import CountTokensBody, MessagesBody
from foreword.server.apis.responses.body import FlatTool, InputTokensBody, ResponsesBody
from foreword.server.apis.responses.items import HOSTED_ITEMS, ID_PREFIXES, InputItem
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


NAMES = st.sampled_from(["f", "g", "", "a b"])
CALLED = st.fixed_dictionaries(
    {"name": NAMES}, optional={"arguments": VALUES | st.just("{}"), "input": VALUES}
)
HISTORY = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "tool"]), "content": st.none() | st.text(max_size=4)},
        optional={
            "reasoning": VALUES | st.text(max_size=4),
            "tool_calls": st.lists(
                st.fixed_dictionaries({}, optional={"id": VALUES, "function": CALLED, "custom": CALLED}),
                max_size=3,
            ),
            "tool_call_id": st.text(max_size=4),
        },
    ),
    max_size=4,
)
SCHEMAS = st.fixed_dictionaries(
    {"type": st.just("object") | VALUES},
    optional={"properties": st.dictionaries(st.text(max_size=3), VALUES, max_size=2), "not": VALUES},
)
FUNCTION = st.fixed_dictionaries(
    {"name": NAMES}, optional={"parameters": SCHEMAS, "strict": st.booleans(), "format": VALUES}
)
CHAT_TOOLS = st.lists(
    st.fixed_dictionaries({}, optional={"type": VALUES, "function": FUNCTION, "custom": FUNCTION}), max_size=3
)
CHOICES = st.sampled_from(["auto", "none", "required"]) | st.builds(
    lambda name: {"type": "function", "function": {"name": name}}, NAMES
)
CHAT_BODIES = st.builds(
    lambda body, tools: ("/v1/chat/completions", body | tools),
    bodies(ChatBody, {"messages": MESSAGES | HISTORY | VALUES}),
    st.fixed_dictionaries({}, optional={"tools": CHAT_TOOLS, "tool_choice": CHOICES | VALUES}),
)
BODIES = CHAT_BODIES | bodies(CompletionBody, {"prompt": VALUES | st.text(max_size=8)}).map(
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


ITEM_TYPES = (*ID_PREFIXES, *HOSTED_ITEMS[:2], "item_reference", "x")
ITEMS = st.lists(
    st.builds(
        lambda kind, fields: {"type": kind, **fields},
        st.sampled_from(ITEM_TYPES),
        st.dictionaries(st.sampled_from([*InputItem.model_fields]), VALUES | st.just("a"), max_size=5),
    ),
    max_size=4,
)
FLAT_TOOLS = st.lists(
    st.builds(
        lambda kind, fields: {"type": kind, **fields},
        st.sampled_from(["function", "custom", "namespace", "web_search"]),
        st.dictionaries(st.sampled_from([*FlatTool.model_fields]), VALUES | st.just("f"), max_size=4),
    ),
    max_size=2,
)
RESPONSES_BODIES = st.builds(
    lambda path, body, tools: (path, body | tools),
    st.just("/v1/responses"),
    bodies(ResponsesBody, {"input": ITEMS | VALUES}),
    st.fixed_dictionaries({}, optional={"tools": FLAT_TOOLS}),
) | bodies(InputTokensBody, {"input": ITEMS | VALUES}).map(lambda body: ("/v1/responses/input_tokens", body))


def is_complete(body: dict[str, Any], reply: httpx.Response) -> bool:
    """Whether an answer has its usage or choices, a stream its end."""
    if body.get("stream"):
        ends = ("event: response.completed", "event: response.incomplete", "event: message_stop")
        return reply.text.endswith("data: [DONE]\n\n") or any(end in reply.text for end in ends)
    fields = reply.json()
    return (
        len(fields["choices"]) >= 1 if "choices" in fields else "input_tokens" in fields.get("usage", fields)
    )


@pytest.mark.parametrize(
    "cases", [BODIES, MESSAGES_BODIES, RESPONSES_BODIES], ids=["openai", "messages", "responses"]
)
@given(data=st.data())
@settings(max_examples=examples(80), suppress_health_check=SHARED_FIXTURES)
def test_any_body_is_answered_or_refused(served: RunningServer, cases: Any, data: st.DataObject) -> None:
    path, body = data.draw(cases)
    reply = served.http.post(path, content=json.dumps(body), headers={"Content-Type": "application/json"})
    if reply.status_code == 200:
        assert is_complete(body, reply), reply.text
        return
    envelope = reply.json()
    error = envelope["error"]
    assert error["message"]
    assert not path.startswith("/v1/messages") or envelope["type"] == "error"
    refusals = {400: "invalid_request_error", 404: "not_found_error"}
    assert error["type"] == refusals.get(reply.status_code), reply.text
