"""Answers with calls, random and given, over a byte-level vocabulary with the markers of a chat format."""

from __future__ import annotations

import codecs
import random
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import replace

from foreword.chat_formats.chat_format import bind_format, write_calls
from foreword.chat_formats.events import ChatEvent, merge_events
from foreword.chat_formats.families import FORMATS
from foreword.chat_formats.parser import ChatParser
from foreword.chat_formats.tools import ReasoningOptions, Tool, ToolUse, WrittenCall
from foreword.core.params import SamplingParams
from foreword.core.request import Request
from foreword.core.structured_output import RequestGrammar, StructuredOutput, Vocabulary
from foreword.grammar.manager import GrammarManager
from foreword.grammar.tool_calls import ConstraintTask
from tests.support.grammar_walks import legal_ids
from tests.support.parsed_answers import ParsedAnswer, collect
from tests.support.waiting import WAIT_S

WORDS = ('{"', '": "', '", "', '"}', "}}", "\n\n", " the", "name", "</", "<function", '">', ">\n")
CLOSING = frozenset("\"}])'<>,=|\n")
FREE_CHARS = "the call {<["  # sampled where nothing is masked
NO_REASONING = ReasoningOptions(enabled=False)
WEATHER = Tool(
    "get_weather",
    parameters={
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer", "minimum": 0, "maximum": 20},
            "unit": {"enum": ["c", "f"]},
        },
        "required": ["city"],
    },
)
GET = Tool(
    "get",
    parameters={
        "type": "object",
        "properties": {
            "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 3},
            "deep": {"$ref": "#/$defs/P"},
            "on": {"type": "boolean"},
            "x": {"type": ["number", "null"]},
        },
        "required": ["deep", "on"],
        "$defs": {"P": {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}},
    },
)
TOOLS = (WEATHER, GET, Tool("now"))
CALL = WrittenCall("get_weather", {"city": "Rome", "days": 3}, "000000001")
OTHER_CALL = WrittenCall("now", {}, "000000002")


class ToolCase:
    """A chat format over one vocabulary: bytes, a few words, the markers of the format, EOS."""

    def __init__(
        self, stack: ExitStack, name: str, has_markers: bool = True, is_special: bool = False
    ) -> None:
        """
        has_markers  the markers of the format are one token each
        is_special   they are special tokens
        """
        tokens = [*(bytes([i]) for i in range(256)), *(word.encode() for word in WORDS)]
        ids: dict[str, int] = {}

        def token_to_id(text: str) -> int | None:
            is_composed = any(token in text and token != text for token in FORMATS[name].inner_tokens)
            if is_composed or not has_markers:
                return None
            if text not in ids:
                ids[text] = len(tokens)
                tokens.append(text.encode())
            return ids[text]

        bound = bind_format(FORMATS[name], token_to_id)
        self.eos, markers = len(tokens), tuple(ids.values())
        special = (*markers, self.eos) if is_special else (self.eos,)
        self.bound = replace(bound, special_ids=frozenset(special))
        self.tokens = (*tokens, b"<eos>")
        assert self.bound.format.tools is not None
        self.calls = self.bound.format.tools
        self.reasoning = self.bound.format.reasoning
        self.grammars = stack.enter_context(closing(GrammarManager(len(self.tokens), num_threads=1)))
        self.grammars.set_vocabulary(Vocabulary(self.tokens, special, (self.eos,), markers))

    def encode(self, text: str) -> list[int]:
        """Bytes, and markers as their tokens."""
        ids: list[int] = []
        position = 0
        markers = sorted(self.bound.token_ids, key=len, reverse=True)
        while position < len(text):
            marker = next((m for m in markers if text.startswith(m, position)), None)
            ids += list(text[position].encode()) if marker is None else [self.bound.token_ids[marker]]
            position += 1 if marker is None else len(marker)
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        return b"".join(self.tokens[i] for i in token_ids if i != self.eos).decode(errors="replace")

    def written(self, *calls: WrittenCall) -> str:
        """Calls as the family's template writes them."""
        return write_calls(self.calls, calls)

    def constraint(
        self,
        use: ToolUse,
        reasoning: ReasoningOptions = NO_REASONING,
        in_reasoning: bool = False,
        response_format: StructuredOutput | None = None,
    ) -> StructuredOutput:
        made = ConstraintTask(self.bound, use, reasoning, in_reasoning, response_format).constrain()
        assert made.structured is not None
        return made.structured

    def request(self, structured: StructuredOutput, **fields: object) -> Request:
        params = SamplingParams(structured=structured)
        return Request("r", (1, 2), params, 0, eos_token_ids=(self.eos,), **fields)  # type: ignore[arg-type]

    def begin(self, structured: StructuredOutput, **fields: object) -> RequestGrammar:
        return self.grammars.compile(self.request(structured, **fields)).result(WAIT_S)

    def accepts(self, structured: StructuredOutput, text: str) -> bool:
        """Whether a text is a complete answer."""
        draft = [*self.encode(text), self.eos]
        return self.begin(structured).num_legal(draft) == len(draft)

    def walk(
        self, grammar: RequestGrammar, draw: random.Random, max_tokens: int = 400, begin: str = ""
    ) -> list[int]:
        """A random answer up to EOS, or its first tokens; the longer it is, the more it closes."""
        answer = self.encode(begin)
        grammar.accept(answer)
        while len(answer) < max_tokens:
            mask = grammar.mask(())
            legal = [*FREE_CHARS.encode(), self.eos] if mask is None else legal_ids(mask)
            assert legal, f"no legal token after {self.decode(answer)!r}: {grammar.error}"
            if self.eos in legal and draw.random() < 0.3:
                token_id = self.eos
            else:
                share = len(answer) / max_tokens
                words = [i for i in legal if i >= 256 and i != self.eos]
                closing_ids = [i for i in legal if i < 256 and chr(i) in CLOSING]
                names = [i for i in legal if i < 128 and (chr(i).isalnum() or chr(i) in " -_")]
                number = draw.random()
                pool = words if number < 0.2 + 0.4 * share else closing_ids
                token_id = draw.choice((pool if number < 0.4 + 0.5 * share else names) or legal)
            answer.append(token_id)
            if token_id == self.eos:
                break
            grammar.accept([token_id])
        return answer

    def events(
        self,
        use: ToolUse,
        answer: str | Sequence[int],
        in_reasoning: bool = False,
        drops_space: bool | None = None,
    ) -> tuple[ChatEvent, ...]:
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        parser = ChatParser(self.bound, use, in_reasoning, "call_{}".format, drops_space)
        events: list[ChatEvent] = []
        for token_id in self.encode(answer) if isinstance(answer, str) else answer:
            if token_id != self.eos:
                events += parser.feed(token_id, decoder.decode(self.tokens[token_id]))
        return merge_events([*events, *parser.flush(ended_by_model=True)])

    def parse(
        self, use: ToolUse, answer: str | Sequence[int], drops_space: bool | None = None
    ) -> ParsedAnswer:
        """The texts and calls of an answer; all calls must be complete."""
        return collect(self.events(use, answer, drops_space=drops_space))


class ToolCases:
    """Cases by format and vocabulary, each made once."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self._cases: dict[tuple[str, bool, bool], ToolCase] = {}

    def get(self, name: str, has_markers: bool = True, is_special: bool = False) -> ToolCase:
        key = (name, has_markers, is_special)
        if key not in self._cases:
            self._cases[key] = ToolCase(self._stack, *key)
        return self._cases[key]


def mask_ids(grammar: RequestGrammar, draft: tuple[int, ...] = ()) -> list[int] | None:
    mask = grammar.mask(draft)
    return None if mask is None else legal_ids(mask)
