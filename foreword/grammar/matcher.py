"""The grammar of one request: implements `core.structured_output.RequestGrammar` with llguidance."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from itertools import takewhile
from typing import Final

import torch
from llguidance import LLExecutor, LLMatcher
from torch import Tensor

from foreword.core.request import Request
from foreword.grammar import limits
from foreword.grammar.compiler import CompiledGrammar, Lexer, error_reason
from foreword.grammar.constraint_scope import make_scope_tracker, tokenize_marker
from foreword.grammar.jump_forward import JumpForward
from foreword.grammar.masks import MaskJob, MaskRequest, compute_masks
from foreword.grammar.vocab import GrammarVocab

TOO_COSTLY: Final = "lexer error: too many expressions constructed"  # llguidance's error


class Matcher:
    """Follows one output. A mask is a pure function of the grammar and the tokens before it; so is an error.

    The limits of a shared lexer only lead to a new one. The limit of a row is the cost of the lexer states of
    its tokens and its mask.

    `mask` takes its result from the job of `GrammarManager.start_masks`, or computes it; the bits are equal.
    A running job owns the llguidance matcher: every method waits for it, or cancels it, first.
    """

    def __init__(
        self, request: Request, compiled: CompiledGrammar, vocab: GrammarVocab, executor: LLExecutor
    ) -> None:
        self.error: str | None = None
        self._compiled = compiled
        self._lexer = compiled.lexer()
        self._llg = self._lexer.new_matcher()
        self._may_draft = True
        self._vocab = vocab
        self._executor = executor
        eos_stop_ids = [i for i in request.params.stop_token_ids if i in vocab.eos_ids]
        self._stop_tokens = StopTokens(vocab, (*request.eos_token_ids, *eos_stop_ids))
        self._scope = make_scope_tracker(request, vocab, self._stop_tokens.ids)
        self._jump_forward = JumpForward(vocab, compiled.kind)
        scope = request.params.structured.scope if request.params.structured is not None else None
        self._usual = () if scope is None else tokenize_marker(scope.usual, vocab)
        self._accepted: list[int] = []
        self._is_finished = False
        self._job: MaskJob | None = None
        self._masks: Tensor | None = None
        self._masked_draft: tuple[int, ...] = ()
        self.accept(request.resume_output_ids)

    def accept(self, token_ids: Sequence[int]) -> None:
        self._cancel_job()
        self._masks = None
        begin = self._scope.accept(token_ids)
        if begin is None:
            return
        token_ids = token_ids[begin:]
        if token_ids and not self._is_finished and self.error is None:
            text, self._is_finished = self._stop_tokens.split_at_stop(token_ids)
            self._accepted += text
            if text and not self._llg.consume_tokens(list(text)):
                self._rebuild()

    def num_legal(self, draft: Sequence[int]) -> int:
        begin, num_allowed, _ = self._scope.walk(draft)
        if begin is None:
            return num_allowed
        if self._is_finished or self.error is not None or not self._may_draft:
            return min(begin, num_allowed)
        self._cancel_job()
        text, ends = self._stop_tokens.split_at_stop(draft[begin:])
        known = self._stop_tokens.strip_foreign_eos(text)
        valid = self._llg.validate_tokens(known) if known else 0
        may_end = ends and valid == len(text) and self._peek_after(text, LLMatcher.is_accepting)
        return min(begin + valid + may_end, num_allowed)

    def forced(self, max_tokens: int) -> tuple[int, ...]:
        closing = self._scope.forced_ids(self._scope.state)
        if closing or not self._scope.state.is_open or self._is_finished or self.error is not None:
            return closing[:max_tokens]
        if not self._may_draft:
            return ()
        self._cancel_job()
        if self._usual and not self._accepted:
            return self._usual[: min(self._llg.validate_tokens(list(self._usual)), max_tokens)]
        draft, only_end = self._jump_forward.propose(self._llg, self._accepted, max_tokens)
        if self._llg.is_error():
            self._rebuild()
            return ()
        if only_end and self._stop_tokens.ids and len(draft) < max_tokens:
            return (*draft, self._stop_tokens.ids[0])
        return draft

    def mask(self, draft: tuple[int, ...]) -> Tensor | None:
        begin, _, state = self._scope.walk(draft)
        if closing := self._scope.forced_ids(state):
            return self._mask_of(closing[0])
        if begin is None:
            return self._mask_without(self._scope.blocked_ids(state))
        if self._is_finished:
            return None
        text, ends = self._stop_tokens.split_at_stop(draft[begin:])
        if ends:
            return None
        if self._job is not None:
            self._job.finish()
            self._job = None
        if self._masks is None or text != self._masked_draft[: len(text)]:
            masks = torch.empty(len(text) + 1, self._vocab.num_mask_words, dtype=torch.int32)
            if self.error is None:
                self._compute(text, masks)
            self._store_masks(text, masks)
        assert self._masks is not None
        mask = self._masks[len(text), : (self._vocab.vocab_size + 31) // 32]
        begin_id = self._scope.begin_id(state)
        return mask if begin_id is None or self.error is not None else mask | self._mask_of(begin_id)

    def is_open(self, draft: Sequence[int]) -> bool:
        return self._scope.walk(draft)[2].is_open

    def must_end(self, draft: tuple[int, ...]) -> bool:
        begin, _, state = self._scope.walk(draft)
        if begin is None or self.error is not None or self._scope.forced_ids(state):
            return False
        self._cancel_job()
        text, ends = self._stop_tokens.split_at_stop(draft[begin:])
        return self._is_finished or ends or self._peek_after(text, LLMatcher.is_stopped)

    def reset(self) -> None:
        self._cancel_job()
        self._masks = None  # their memory may be reused by now
        if self.error is None:
            self._rebuild()

    def mask_request(self, draft: tuple[int, ...]) -> MaskRequest | None:
        """The masks that this draft needs; None: none."""
        begin, _, _ = self._scope.walk(draft)
        if begin is None or self._is_finished or self.error is not None:
            return None
        text, _ = self._stop_tokens.split_at_stop(draft[begin:])
        return MaskRequest(self._llg, self._lexer, text, lambda masks: self._store_masks(text, masks))

    def use_job(self, job: MaskJob) -> None:
        """Take the next masks from this job."""
        self._job = job

    def _mask_of(self, token_id: int) -> Tensor:
        """The mask of a single id."""
        mask = torch.zeros((self._vocab.vocab_size + 31) // 32, dtype=torch.int32)
        word, bit = _word_and_bit(token_id)
        mask[word] = bit
        return mask

    def _mask_without(self, token_ids: Sequence[int]) -> Tensor | None:
        """The mask of all other ids; None if there are no ids."""
        if not token_ids:
            return None
        size = self._vocab.vocab_size
        mask = torch.full(((size + 31) // 32,), -1, dtype=torch.int32)
        if size % 32:
            mask[-1] = (1 << size % 32) - 1
        for token_id in token_ids:
            word, bit = _word_and_bit(token_id)
            mask[word] &= ~bit
        return mask

    def _cancel_job(self) -> None:
        """Take the llguidance matcher back from the job."""
        if self._job is not None:
            self._job.cancel()
            self._job = None

    def _peek_after(self, token_ids: Sequence[int], check: Callable[[LLMatcher], bool]) -> bool:
        """Result of `check` after the output and these legal tokens; the state is restored."""
        if not token_ids:
            return check(self._llg)
        result = self._llg.consume_tokens(list(token_ids)) and check(self._llg)
        if self._llg.is_error() or not self._llg.rollback(len(token_ids)):
            self._rebuild()
        return result

    def _compute(self, draft: tuple[int, ...], masks: Tensor) -> None:
        begin_s = time.perf_counter()
        compute_masks(self._executor, [(self._llg, draft)], masks)
        self._lexer.unread_s += time.perf_counter() - begin_s

    def _store_masks(self, draft: tuple[int, ...], masks: Tensor) -> None:
        """Check and keep the masks after each prefix of the draft: int32 [len(draft) + 1, W]."""
        if self.error is not None:
            masks.zero_()
        elif self._llg.is_error() or self._lexer.is_full(self._llg):
            self._recompute(draft, masks)
        self._stop_tokens.apply_to_masks(masks)
        self._masked_draft, self._masks = draft, masks

    def _recompute(self, draft: tuple[int, ...], masks: Tensor) -> None:
        """Compute masks again after an error, row by row: a row has a mask if and only if it has one alone.

        Masks after an error stay zero: no answer reaches their rows.
        """
        masks.zero_()
        num_decided = 0
        for row in range(len(draft) + 1):
            if row and not _holds(masks[row - 1], draft[row - 1]):
                break
            if row and self._extend(draft[row - 1], masks[row]):
                continue
            num_decided += 1
            if reason := self._decide(draft[:row], masks[row]):
                if row:
                    break
                self.error = reason
                return
        # Each row that needs a lexer of its own takes its time: further drafts would multiply it.
        self._may_draft = self._may_draft and num_decided < 2
        self._rebuild()

    def _extend(self, token_id: int, mask: Tensor) -> bool:
        """Compute the mask after one more token of the draft; returns whether the lexer suffices."""
        if not self._llg.consume_tokens([token_id]):
            return False
        self._compute((), mask[None])
        return not self._llg.is_error() and not self._lexer.is_full(self._llg)

    def _decide(self, draft: tuple[int, ...], mask: Tensor) -> str | None:
        """Compute the mask after a draft with a lexer of its own; returns why there is none."""
        lexer = self._compiled.replace(self._lexer)
        if self._move_to(lexer, draft):
            self._compute((), mask[None])
        if not self._llg.is_error() and lexer.read_cost(self._llg) <= limits.MAX_ROW_COST:
            return None
        mask.zero_()
        return self._reason() if self._llg.is_error() else TOO_COSTLY

    def _rebuild(self) -> None:
        """Replace the llguidance matcher by one at the same output, after an error; sets `error` on failure.

        A wrong draft may have caused the error, or a lexer that other requests filled.
        """
        if not self._lexer.error() and self._move_to(self._lexer, ()):
            return
        if not self._move_to(self._compiled.replace(self._lexer), ()):
            self.error = self._reason()

    def _reason(self) -> str:
        return self._lexer.error() or error_reason(self._llg)

    def _move_to(self, lexer: Lexer, draft: tuple[int, ...]) -> bool:
        """Use a matcher of this lexer after the output and a draft; returns whether it accepts them."""
        self._lexer, self._llg = lexer, lexer.new_matcher()
        begin_s = time.perf_counter()
        self._llg.consume_tokens([*self._accepted, *draft])
        lexer.unread_s += time.perf_counter() - begin_s
        return not self._llg.is_error()


class StopTokens:
    """The ids that end one request's output. llguidance knows only those of the vocabulary."""

    __slots__ = ("_end_id", "_extra_ids", "_foreign_eos_ids", "ids")

    def __init__(self, vocab: GrammarVocab, ids: Iterable[int]) -> None:
        self.ids = tuple(dict.fromkeys(i for i in ids if i < vocab.vocab_size))
        self._end_id = vocab.end_id
        self._extra_ids = tuple(i for i in self.ids if i not in vocab.eos_ids)
        self._foreign_eos_ids = tuple(i for i in vocab.eos_ids if i not in self.ids)

    def split_at_stop(self, token_ids: Sequence[int]) -> tuple[tuple[int, ...], bool]:
        """The tokens before the first stop token, and whether there is one."""
        for index, token_id in enumerate(token_ids):
            if token_id in self.ids:
                return tuple(token_ids[:index]), True
        return tuple(token_ids), False

    def strip_foreign_eos(self, token_ids: Sequence[int]) -> list[int]:
        """The tokens before the first EOS id of the vocabulary that does not stop this request."""
        return list(takewhile(lambda token_id: token_id not in self._foreign_eos_ids, token_ids))

    def apply_to_masks(self, masks: Tensor) -> None:
        """Make the request's stop ids legal exactly where the output may end; masks int32 [rows, W]."""
        if not self._extra_ids and not self._foreign_eos_ids:
            return
        word, bit = _word_and_bit(self._end_id)
        may_end = (masks[:, word] & bit) != 0
        for token_id in (*self._foreign_eos_ids, *self._extra_ids):
            word, bit = _word_and_bit(token_id)
            masks[:, word] &= ~bit
            if token_id in self._extra_ids:
                masks[:, word] |= may_end * bit


def _holds(mask: Tensor, token_id: int) -> bool:
    word, bit = _word_and_bit(token_id)
    return bool(mask[word] & bit)


def _word_and_bit(token_id: int) -> tuple[int, int]:
    """Index of an id's int32 word, and its bit as a signed int."""
    bit = 1 << token_id % 32
    return token_id // 32, bit - (1 << 32) if bit >> 31 else bit
