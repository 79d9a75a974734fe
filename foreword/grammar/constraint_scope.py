"""Where a constraint begins in an answer: after the reasoning, at a trigger; and the reasoning's budget."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple

from foreword.core.request import Request
from foreword.core.structured_output import ConstraintScope, Marker
from foreword.grammar.vocab import GrammarVocab

PROMPT_TAIL_TOKENS: Final = 4  # length of the template's text after an end sequence; user text is longer

MAX_BLANK_TOKENS: Final = 16  # whitespace before a text that opens the reasoning

Ids = tuple[int, ...]
Finder = Callable[[Ids], bool]  # whether a marker ends with the last of these tokens


def reasoning_ended_in_prompt(prompt_ids: Sequence[int], end_ids: Sequence[Sequence[int]]) -> bool:
    """Whether the chat template ends the reasoning: an end sequence is near the end of the prompt."""
    return any(
        _ends_with([end])(tuple(prompt_ids[:last]))
        for end in end_ids
        for last in range(max(len(prompt_ids) - PROMPT_TAIL_TOKENS, len(end)), len(prompt_ids) + 1)
    )


class ScopeState(NamedTuple):
    """After some tokens of an answer."""

    is_open: bool  # the constraint applies to what follows
    may_open: bool = False  # it will apply if the answer's first character is its opening
    in_reasoning: bool = False
    may_reason: bool = False  # reasoning may begin here
    num_reasoning: int = 0  # tokens of the reasoning so far
    tail: Ids = ()  # last tokens, which may belong to a marker


class ScopeTracker:
    """Follows one answer. Its state is a pure function of the answer's tokens, so drafts change nothing."""

    def __init__(
        self,
        scope: ConstraintScope,
        vocab: GrammarVocab,
        end_ids: Sequence[Sequence[int]] = (),
        stop_ids: Iterable[int] = (),
    ) -> None:
        """
        end_ids   end the reasoning instead of the scope's marker
        stop_ids  end the answer
        """
        self._scope = scope
        self._token_bytes = vocab.token_bytes
        self._closing_ids = tokenize_marker(scope.reasoning_end, vocab)
        closing = {token_id for end in (self._closing_ids, *end_ids) for token_id in end}
        must_follow = scope.constrains and not scope.trigger and not scope.opening
        self._stop_ids = tuple(i for i in stop_ids if i not in closing) if must_follow else ()
        self._is_begin = _marker_finder(scope.reasoning_begin, vocab)
        self._is_end = _ends_with(end_ids) if end_ids else _marker_finder(scope.reasoning_end, vocab)
        self._is_trigger = _marker_finder(scope.trigger, vocab)
        # A text opens the reasoning only at the start of the answer; a token does wherever text is free.
        self._begin_text = _text_of(scope.reasoning_begin).encode()
        markers = (scope.reasoning_begin, scope.reasoning_end, scope.trigger)
        self._num_kept = max(len("".join(map(str, marker)).encode()) for marker in markers) + MAX_BLANK_TOKENS
        self._num_kept = max(self._num_kept, *map(len, end_ids), 1)
        if scope.starts_in_reasoning:
            self.state = ScopeState(scope.holds_reasoning, in_reasoning=True)
        else:
            self.state = self._after_reasoning(may_reason=bool(scope.reasoning_begin))

    def begin_id(self, state: ScopeState) -> int | None:
        """The token that may open the reasoning where the constraint applies otherwise."""
        begin = self._scope.reasoning_begin
        if not state.may_reason or self._scope.holds_reasoning or not begin:
            return None
        return begin[0] if isinstance(begin[0], int) else None

    def accept(self, token_ids: Sequence[int]) -> int | None:
        """Number of these tokens before the constraint; None: it does not apply yet."""
        start, _, self.state = self.walk(token_ids)
        return start

    def walk(self, token_ids: Sequence[int]) -> tuple[int | None, int, ScopeState]:
        """The next tokens: `accept`'s number, how many of them the budget allows, the state after them."""
        state, num_allowed = self.state, len(token_ids)
        start = 0 if state.is_open else None
        for index, token_id in enumerate(token_ids):
            if state.is_open and not state.in_reasoning and not state.may_reason:
                break  # for good
            forced = self.forced_ids(state)
            if (forced and token_id != forced[0]) or token_id in self.blocked_ids(state):
                num_allowed = min(num_allowed, index)
            was_open, may_open, in_reasoning = state.is_open, state.may_open, state.in_reasoning
            state = self._advance(state, token_id)
            if state.is_open != was_open:
                # An opening is a part of the constrained text; markers are not.
                is_part = token_id == self._scope.early_begin if in_reasoning else may_open
                start = (index if is_part else index + 1) if state.is_open else None
        return start, num_allowed, state

    def forced_ids(self, state: ScopeState) -> Ids:
        """The rest of the marker that ends the reasoning, once the budget is spent."""
        budget = self._scope.max_reasoning_tokens
        if budget is None or not state.in_reasoning or state.num_reasoning < budget:
            return ()
        return self._closing_ids[state.num_reasoning - budget :]

    def blocked_ids(self, state: ScopeState) -> Ids:
        """Stop ids masked until the constrained text is complete."""
        return self._stop_ids if state.in_reasoning and not state.is_open else ()

    def _after_reasoning(self, may_reason: bool) -> ScopeState:
        scope = self._scope
        applies = scope.constrains and not scope.trigger
        return ScopeState(
            applies and not scope.opening, applies and bool(scope.opening), may_reason=may_reason
        )

    def _advance(self, state: ScopeState, token_id: int) -> ScopeState:
        scope, tail = self._scope, (*state.tail, token_id)[-self._num_kept :]
        if state.in_reasoning:
            if self._is_end(tail):
                is_free = bool(scope.trigger) or not scope.constrains
                return self._after_reasoning(may_reason=is_free and not self._begin_text)
            if (scope.is_trigger_in_reasoning and self._is_trigger(tail)) or token_id == scope.early_begin:
                return ScopeState(True)
            return state._replace(num_reasoning=state.num_reasoning + 1, tail=tail)
        if self._is_trigger(tail):
            return ScopeState(True)
        if state.may_open:
            state = self._open(state, token_id)
        begun = ScopeState(scope.holds_reasoning, in_reasoning=True)
        if not state.may_reason:
            return state._replace(tail=tail)
        if self._begin_text:
            answer = b"".join(self._token_bytes[i] for i in tail).lstrip()
            if answer.startswith(self._begin_text):
                return begun
            return state._replace(may_reason=self._begin_text.startswith(answer), tail=tail)
        if self._is_begin(tail):
            return begun
        return state._replace(may_reason=not state.is_open or scope.holds_reasoning, tail=tail)

    def _open(self, state: ScopeState, token_id: int) -> ScopeState:
        """Whether the answer's first character is the opening; a special token is no character."""
        text = self._token_bytes[token_id]
        if text and not text.strip():
            return state
        return state._replace(is_open=text.lstrip().startswith(self._scope.opening.encode()), may_open=False)


def make_scope_tracker(request: Request, vocab: GrammarVocab, stop_ids: Iterable[int]) -> ScopeTracker:
    """For the constraint of a request: its scope, or its `after`."""
    structured, end_ids = request.params.structured, request.reasoning_end_ids
    assert structured is not None
    if structured.scope is not None:
        return ScopeTracker(structured.scope, vocab, stop_ids=stop_ids)
    is_reasoning = bool(end_ids) and not reasoning_ended_in_prompt(request.prompt_ids, end_ids)
    return ScopeTracker(ConstraintScope(starts_in_reasoning=is_reasoning), vocab, end_ids, stop_ids)


def _marker_finder(marker: Marker, vocab: GrammarVocab) -> Finder:
    text = _text_of(marker).encode()
    if not text:
        return _ends_with([tokenize_marker(marker, vocab)] if marker else [])

    def completes(token_ids: Ids) -> bool:
        """The last token may hold more than the end of the text."""
        pieces = [vocab.token_bytes[i] for i in token_ids]
        return text in b"".join(pieces) and text not in b"".join(pieces[:-1])

    return completes


def _ends_with(sequences: Iterable[Sequence[int]]) -> Finder:
    ends = tuple(map(tuple, sequences))
    return lambda token_ids: any(token_ids[-len(end) :] == end for end in ends)


def _text_of(marker: Marker) -> str:
    """The text of a marker without tokens, else an empty text."""
    texts = [piece for piece in marker if isinstance(piece, str)]
    return "".join(texts) if len(texts) == len(marker) else ""


def tokenize_marker(marker: Marker, vocab: GrammarVocab) -> Ids:
    """Ids of a marker, its texts most likely tokenized so."""
    ids: list[int] = []
    for piece in marker:
        if isinstance(piece, int):
            ids.append(piece)
        else:
            text = piece.encode()
            part = vocab.tokenize(text, len(text))
            assert b"".join(vocab.token_bytes[i] for i in part) == text, "the vocabulary lacks bytes"
            ids += part
    return tuple(ids)
