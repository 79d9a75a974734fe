"""Random answers with calls of tools, over a byte-level vocabulary with the markers of a chat format."""

from __future__ import annotations

import codecs
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from foreword.chat_formats.chat_format import BoundFormat, bind_format
from foreword.chat_formats.events import ChatEvent, merge_events
from foreword.chat_formats.families import FORMATS
from foreword.chat_formats.parser import ChatParser
from foreword.chat_formats.tools import ToolUse
from foreword.core.params import SamplingParams
from foreword.core.request import Request
from foreword.core.structured_output import RequestGrammar, StructuredOutput, Vocabulary
from foreword.grammar.manager import GrammarManager
from tests.support.grammar_walks import legal_ids
from tests.support.waiting import WAIT_S

WORDS = ('{"', '": "', '", "', '"}', "}}", "\n\n", " the", "name", "</", "<function", '">', ">\n")
CLOSING = frozenset("\"}])'<>,=|\n")
FREE_CHARS = "the call {<["  # sampled where nothing is masked


@dataclass(frozen=True)
class ToolVocab:
    """The tokens: bytes, a few words, the markers of a format, EOS."""

    bound: BoundFormat
    vocabulary: Vocabulary

    @property
    def eos(self) -> int:
        return self.vocabulary.eos_ids[0]

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
        return b"".join(self.vocabulary.tokens[i] for i in token_ids if i != self.eos).decode(
            errors="replace"
        )


def tool_vocab(name: str, has_markers: bool = True, is_special: bool = False) -> ToolVocab:
    """has_markers  the markers of the format are one token each"""
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
    eos, markers = len(tokens), tuple(ids.values())
    special = (*markers, eos) if is_special else (eos,)
    bound = replace(bound, special_ids=frozenset(special))
    return ToolVocab(bound, Vocabulary((*tokens, b"<eos>"), special, (eos,), markers))


@contextmanager
def open_tool_grammars(vocab: ToolVocab) -> Iterator[GrammarManager]:
    grammars = GrammarManager(len(vocab.vocabulary.tokens), num_threads=1)
    grammars.set_vocabulary(vocab.vocabulary)
    try:
        yield grammars
    finally:
        grammars.close()


def begin_tools(
    grammars: GrammarManager, vocab: ToolVocab, structured: StructuredOutput, **fields: object
) -> RequestGrammar:
    params = SamplingParams(structured=structured)
    request = Request("r", (1, 2), params, 0, eos_token_ids=(vocab.eos,), **fields)  # type: ignore[arg-type]
    return grammars.compile(request).result(WAIT_S)


def accepts(grammars: GrammarManager, vocab: ToolVocab, structured: StructuredOutput, text: str) -> bool:
    """Whether a text is a complete answer."""
    draft = [*vocab.encode(text), vocab.eos]
    return begin_tools(grammars, vocab, structured).num_legal(draft) == len(draft)


def walk_tools(
    grammar: RequestGrammar, vocab: ToolVocab, draw: random.Random, max_tokens: int = 400, begin: str = ""
) -> list[int]:
    """A random answer up to EOS, or its first tokens; the longer it is, the more it closes."""
    answer = vocab.encode(begin)
    grammar.accept(answer)
    while len(answer) < max_tokens:
        mask = grammar.mask(())
        legal = [*FREE_CHARS.encode(), vocab.eos] if mask is None else legal_ids(mask)
        assert legal, f"no legal token after {vocab.decode(answer)!r}: {grammar.error}"
        if vocab.eos in legal and draw.random() < 0.3:
            token_id = vocab.eos
        else:
            share = len(answer) / max_tokens
            words = [i for i in legal if i >= 256 and i != vocab.eos]
            closing = [i for i in legal if i < 256 and chr(i) in CLOSING]
            names = [i for i in legal if i < 128 and (chr(i).isalnum() or chr(i) in " -_")]
            number = draw.random()
            pool = words if number < 0.2 + 0.4 * share else closing if number < 0.4 + 0.5 * share else names
            token_id = draw.choice(pool or legal)
        answer.append(token_id)
        if token_id == vocab.eos:
            break
        grammar.accept([token_id])
    return answer


def parse_tools(
    vocab: ToolVocab,
    use: ToolUse,
    answer: Sequence[int],
    in_reasoning: bool = False,
    drops_space: bool | None = None,
) -> tuple[ChatEvent, ...]:
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    parser = ChatParser(vocab.bound, use, in_reasoning, "call_{}".format, drops_space)
    events: list[ChatEvent] = []
    for token_id in answer:
        if token_id != vocab.eos:
            events += parser.feed(token_id, decoder.decode(vocab.vocabulary.tokens[token_id]))
    return merge_events([*events, *parser.flush(ended_by_model=True)])
