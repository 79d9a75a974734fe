"""The model's own tokens are replayed for answers of the history, and only where nothing else changes."""

import json
from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foreword.chat_formats.parser import ChatParser
from foreword.chat_formats.tools import Tool, ToolUse
from foreword.core.outputs import TokenEvent
from foreword.core.params import SamplingParams
from foreword.core.request import Request
from foreword.tokenizer.answer_token_cache import AnswerTokenCache
from foreword.tokenizer.answer_token_cache import _conversation_digests as conversation_digests
from foreword.tokenizer.chat_processor import ChatInputProcessor, ChatTask
from foreword.tokenizer.output_processor import ChoiceOutput
from foreword.tokenizer.tokenizer import Tokenizer
from tests.support.tool_checkpoint import END_OF_TURN, write_tool_tokenizer

TOOLS = (
    Tool("read", "Read a file.", {"type": "object", "properties": {"path": {"type": "string"}}}),
    Tool("list", "List files.", {"type": "object", "properties": {}}),
)
READ = '{"name":"read",  "arguments":{"path":"a.py","lines":[1,2]}}'  # not as templates write it
LIST = '{"name": "list", "arguments": { }}'
CALL = f"<tool_call>{READ}</tool_call>"
CALLS = f"{CALL}\n\n<tool_call>{LIST}\n</tool_call>"
THOUGHT = "<think>\nHm.\n</think>\n\nYes."  # clients drop the reasoning
QUESTION = {"role": "user", "content": "What is in a.py?"}


class Chat:
    """A conversation with a model that writes what a test says."""

    def __init__(self, path: Path, family: str = "hermes", template: str | None = None) -> None:
        write_tool_tokenizer(path, family)
        self.tokenizer = Tokenizer.from_directory(path)
        if template is not None:
            self.tokenizer.chat_template = template
        self.processor = ChatInputProcessor(self.tokenizer, None, 0)
        assert self.processor.format is not None and self.processor.detection.is_proven
        self.numbers = count()
        self.messages: list[dict[str, Any]] = [QUESTION]
        self.written: list[int] = []  # prompt and answer of the last turn, without its end

    def render(
        self, messages: Sequence[Mapping[str, Any]] | None = None, salt: str = "", is_seeded: bool = False
    ) -> list[int]:
        task = ChatTask(messages or self.messages, tools=ToolUse(TOOLS))
        return self.processor.render(task, salt, is_seeded)[0]

    def render_anew(self, messages: Sequence[Mapping[str, Any]] | None = None, **kwargs: Any) -> list[int]:
        """The prompt of a processor that remembers no answer."""
        task = ChatTask(messages or self.messages, tools=ToolUse(TOOLS), template_kwargs=kwargs)
        return ChatInputProcessor(self.tokenizer, None, 0).render(task)[0]

    def answer(self, text: str, end: int = END_OF_TURN) -> dict[str, Any]:
        """Let the model answer; the message as a client sends it back, without the reasoning."""
        prompt = self.render()
        token_ids = [*self.tokenizer.encode(text, False), end]
        assert self.processor.format is not None
        parser = ChatParser(
            self.processor.format,
            ToolUse(TOOLS),
            self.processor.starts_in_reasoning(prompt),
            lambda index: f"call_{next(self.numbers)}_{index}",
        )
        params = SamplingParams(skip_special_tokens=False)
        output = ChoiceOutput(self.tokenizer, Request("a-0", tuple(prompt), params, seed=0), parser)
        output.feed(TokenEvent("a-0", 0, tuple(token_ids), finish_reason="stop", stop_id=end))
        self.processor.remember(output)
        self.written = prompt + token_ids[:-1]
        return to_message(output.events)

    def keeps_prefix(self, salt: str = "") -> bool:
        """Whether the next prompt begins with what the engine has computed."""
        return self.render(salt=salt)[: len(self.written)] == self.written


def to_message(events: Sequence[Any]) -> dict[str, Any]:
    calls: dict[int, dict[str, Any]] = {}
    content = ""
    for event in events:
        match type(event).__name__:
            case "ContentText":
                content += event.text
            case "CallStart":
                function = {"name": event.name, "arguments": ""}
                calls[event.index] = {"id": event.id, "type": "function", "function": function}
            case "CallArguments":
                calls[event.index]["function"]["arguments"] += event.text
    message: dict[str, Any] = {"role": "assistant", "content": content or None}
    return message | ({"tool_calls": list(calls.values())} if calls else {})


def results(message: Mapping[str, Any], text: str = "print(1)") -> list[dict[str, Any]]:
    return [{"role": "tool", "tool_call_id": call["id"], "content": text} for call in message["tool_calls"]]


def reserialized(message: Mapping[str, Any]) -> dict[str, Any]:
    """The message with arguments in another spacing and key order."""
    calls = json.loads(json.dumps(message["tool_calls"]))
    for call in calls:
        arguments = json.loads(call["function"]["arguments"])
        call["function"]["arguments"] = json.dumps(dict(reversed(arguments.items())), indent=1)
    return {**message, "tool_calls": calls}


@pytest.mark.parametrize("family", ["hermes", "hermes-thinking", "qwen3-coder", "mistral-v3"])
def test_loop_keeps_its_prefix(tmp_path: Path, family: str) -> None:
    """Every step's prompt begins with the tokens of all before, whatever the client changed in the form."""
    chat = Chat(tmp_path, family)
    texts = {
        "hermes": [CALL, f"<think>\nHm.\n</think>\n\n{CALLS}", f"Now\n{CALL}"],
        "hermes-thinking": [f"Hm.\n</think>\n\n{CALL}", f"Well.</think>{CALLS}"],
        "qwen3-coder": ["<tool_call><function=read><parameter=path>x</parameter></function></tool_call>"] * 2,
        "mistral-v3": [f'[TOOL_CALLS][{READ[:-1]},"id":"abcdefgh{i}"}}]' for i in range(3)],
    }  # fmt: skip
    for text in texts[family]:
        message = chat.answer(text)
        assert message["tool_calls"]
        chat.messages += [reserialized(message), *results(message)]
        assert chat.keeps_prefix()
        plain = chat.render_anew()
        assert plain[: len(chat.written)] != chat.written, "the test would pass without a replay"
        tail = chat.tokenizer.decode(chat.render()[len(chat.written) :], skip_special_tokens=False)
        assert tail == chat.tokenizer.decode(plain, skip_special_tokens=False)[-len(tail) :]


def test_text_in_other_tokens_is_replayed(tmp_path: Path) -> None:
    chat = Chat(tmp_path)
    text = chat.tokenizer.encode("Hello", False)
    assert len(text) > 1
    chat.messages += [chat.answer("Hello"), {"role": "user", "content": "And?"}]
    assert chat.keeps_prefix()


def test_answer_is_replayed_only_if_it_is_the_same(tmp_path: Path) -> None:
    chat = Chat(tmp_path)
    message = chat.answer(CALL)
    history = [*chat.messages, message, *results(message)]

    def changed(index: int, **fields: Any) -> list[dict[str, Any]]:
        return [*history[:index], {**history[index], **fields}, *history[index + 1 :]]

    call = message["tool_calls"][0]
    others = {
        "arguments": changed(
            1, tool_calls=[{**call, "function": {"name": "read", "arguments": '{"path": ""}'}}]
        ),
        "name": changed(1, tool_calls=[{**call, "function": {**call["function"], "name": "list"}}]),
        "content": changed(1, content="Wait."),
        "question": changed(0, content="What else?"),
        "reasoning": changed(1, reasoning_content="Hm."),
    }
    assert chat.render(history)[: len(chat.written)] == chat.written
    for name, other in others.items():
        assert chat.render(other) == chat.render_anew(other), name
    assert chat.render(history, salt="of another key") == chat.render_anew(history)


def test_prompt_of_a_seeded_request_is_a_function_of_the_request(tmp_path: Path) -> None:
    """Whatever was answered before: nothing is replayed."""
    chat = Chat(tmp_path)
    chat.messages += [chat.answer(THOUGHT), {"role": "user", "content": "And?"}]
    plain = chat.render_anew()
    assert chat.render() != plain
    assert chat.render(is_seeded=True) == plain


def test_answer_of_another_conversation_displaces_none(tmp_path: Path) -> None:
    chat = Chat(tmp_path)
    chat.messages += [chat.answer(THOUGHT), {"role": "user", "content": "And?"}]
    expected = chat.render()
    assert chat.keeps_prefix()
    history, written = chat.messages, chat.written
    for question in ("Say it.", "What is in b.py?"):
        chat.messages = [{"role": "user", "content": question}]
        message = chat.answer(THOUGHT)
        chat.messages += [message, history[-1]]
        assert chat.keeps_prefix()
    chat.messages, chat.written = history, written
    assert chat.render() == expected and chat.keeps_prefix()


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner, max_size=3),
)


@given(values, values)
def test_digests_of_conversations_are_equal_where_their_json_is(first: Any, second: Any) -> None:
    """Written value by value: in one call, json.dumps() silenced the server for 0.9 s of a 4 MB object."""
    contents = [first or "", second or ""]
    digests = [conversation_digests([{"role": "user", "content": content}], ())[-1] for content in contents]
    written = [json.dumps(content, sort_keys=True) for content in contents]
    assert (digests[0] == digests[1]) == (written[0] == written[1])


@given(values)
def test_digest_does_not_know_the_order_of_fields(value: Any) -> None:
    def reverse(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: reverse(item) for name, item in reversed(value.items())}
        return [reverse(item) for item in value] if isinstance(value, list) else value

    first, second = ([{"role": "user", "content": content}] for content in (value, reverse(value)))
    assert conversation_digests(first, ()) == conversation_digests(second, ())


def test_answer_that_no_token_ended_is_not_replayed(tmp_path: Path) -> None:
    chat = Chat(tmp_path)
    message = chat.answer(CALL, end=chat.tokenizer.encode("!", False)[0])
    chat.messages += [message, *results(message)]
    assert not chat.keeps_prefix()


def test_reasoning_that_the_template_drops_stays_dropped(tmp_path: Path) -> None:
    """After a new question, Qwen's templates drop the reasoning of earlier turns."""
    write_tool_tokenizer(tmp_path)
    source = Tokenizer.from_directory(tmp_path).chat_template
    assert source is not None
    source = source.replace(
        "if message.reasoning_content", "if message.reasoning_content and drops is not defined"
    )
    chat = Chat(tmp_path, template=source)
    message = chat.answer(f"<think>\nHm.\n</think>\n\n{CALL}")
    chat.messages += [message, *results(message)]
    assert chat.keeps_prefix()
    dropping = {"options": {"drops": True}}
    task = ChatTask(chat.messages, tools=ToolUse(TOOLS), template_kwargs=dropping)
    ids = chat.processor.render(task)[0]
    assert ids == chat.render_anew(**dropping) and "Hm." not in chat.tokenizer.decode(ids)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("in messages %}", "in messages[-1:] %}"),  # the last message alone
        ("in messages %}", "in messages + messages %}"),
        ("{%- if message.tool_calls %}", "{%- if message.tool_calls %}Note."),  # a text in the turn
    ],
)
def test_template_that_moves_the_answer_is_rendered_plainly(tmp_path: Path, old: str, new: str) -> None:
    chat = Chat(tmp_path)
    message = chat.answer(CALL)
    chat.messages += [message, *results(message)]
    source = chat.tokenizer.chat_template
    assert source is not None
    assert old in source
    chat.processor.template.source = source.replace(old, new)
    plain = chat.tokenizer.encode(chat.processor.template.render(chat.messages, tools=TOOLS), False)
    assert chat.render() == plain


class ScannedText(str):
    """A text that counts the characters that its searches read."""

    num_read = 0

    def __getitem__(self, place: Any) -> "ScannedText":
        return ScannedText(super().__getitem__(place))

    def count(self, *args: Any) -> int:
        ScannedText.num_read += len(self)
        return super().count(*args)

    def find(self, part: str, start: int = 0) -> int:  # type: ignore[override]
        at = super().find(part, start)
        ScannedText.num_read += (len(self) if at < 0 else at) - start
        return at

    def replace(self, *args: Any) -> "ScannedText":
        ScannedText.num_read += len(self)
        return ScannedText(super().replace(*args))


def test_text_is_read_once_for_all_answers(tmp_path: Path) -> None:
    """A history may have thousands of them."""
    chat = Chat(tmp_path)
    for _ in range(20):
        message = chat.answer(CALL)
        chat.messages += [message, *results(message)]
    replay = chat.processor._replay
    assert replay is not None
    texts: list[str] = []

    def render(messages: Sequence[Mapping[str, Any]]) -> str:
        texts.append(chat.processor.template.render(messages, tools=TOOLS))
        return ScannedText(texts[-1])

    ScannedText.num_read = 0
    ids = replay.encode(chat.messages, TOOLS, "", render)
    assert ids == chat.render() and ids[: len(chat.written)] == chat.written
    (text,) = texts
    assert ScannedText.num_read < 2 * len(text)


def test_placeholder_in_the_history_is_a_text(tmp_path: Path) -> None:
    """It is kept as written, and an answer whose place it hides is rendered plainly."""
    chat = Chat(tmp_path)
    message = chat.answer(CALL)
    chat.messages += [message, *results(message, "fwname7x0x fwcontent7x")]
    assert chat.keeps_prefix()
    assert "fwname7x0x fwcontent7x" in chat.tokenizer.decode(chat.render())
    history = [*chat.messages[:2], *results(message, "fwarguments1x0x")]
    assert chat.render(history) == chat.render_anew(history)


def test_bytes_are_bounded(tmp_path: Path) -> None:
    """The oldest answers are dropped, and one that is too large is not kept."""
    chat = Chat(tmp_path)
    assert chat.processor.format is not None
    replay = AnswerTokenCache(chat.tokenizer, chat.processor.format, max_bytes=8000)
    chat.processor._replay = replay
    for number in range(12):
        chat.messages = [{"role": "user", "content": str(number)}]
        message = chat.answer(CALL.replace("a.py", f"{number}.py"))
        chat.messages += [message, *results(message)]
        assert chat.keeps_prefix() and replay._num_bytes <= 8000
    assert 2 < len(replay._answers) < 12
    assert replay._num_bytes == sum(answer.num_bytes for answer in replay._answers.values())
    chat.messages = [QUESTION]
    message = chat.answer(CALL.replace("a.py", "a" * 8000))
    chat.messages += [message, *results(message)]
    assert not chat.keeps_prefix()
