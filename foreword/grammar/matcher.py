"""The grammar of one request, as core/grammar.py describes it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import torch
from llguidance import LLExecutor, LLMatcher
from torch import Tensor

from foreword.core.request import Request
from foreword.grammar.compile import reason
from foreword.grammar.compiled import Compiled
from foreword.grammar.ends import Ends
from foreword.grammar.forced import Forced
from foreword.grammar.masks import MaskJob, Wanted, compute_masks
from foreword.grammar.reasoning import ReasoningWatch, ends_in_prompt
from foreword.grammar.tokens import Tokens

__all__ = ["Matcher"]

FULL_LEXER: Final = "lexer error"


class Matcher:
    """Follows one output. Every mask is a function of the grammar and of the tokens before it.

    A mask is computed by the job of `prepare`, or where it is asked for; both ways yield the same bits. While a job is
    under way the automaton belongs to it: every method waits for it, or drops it, first.
    """

    __slots__ = (
        "_accepted",
        "_compiled",
        "_drafted",
        "_ended",
        "_ends",
        "_executor",
        "_forced",
        "_job",
        "_llg",
        "_masks",
        "_tokens",
        "_watch",
        "error",
    )

    def __init__(self, request: Request, compiled: Compiled, tokens: Tokens, executor: LLExecutor) -> None:
        self.error: str | None = None
        self._compiled = compiled
        self._llg = compiled.matcher()
        self._tokens = tokens
        self._executor = executor
        self._ends = Ends(tokens, (*request.eos_token_ids, *(i for i in request.params.stop_token_ids if i in tokens.eos_ids)))
        ends = request.reasoning_end_ids
        self._watch = ReasoningWatch(ends) if ends and not ends_in_prompt(request.prompt_ids, ends) else None
        self._forced = Forced(tokens, compiled.kind)
        self._accepted: list[int] = []
        self._ended = False
        self._job: MaskJob | None = None
        self._masks: Tensor | None = None
        self._drafted: tuple[int, ...] = ()
        self.accept(request.delivered_ids)

    def accept(self, token_ids: Sequence[int]) -> None:
        self._settle()
        if self._watch is not None:
            begin = self._watch.find(token_ids)
            if begin is None:
                self._watch.accept(token_ids)
                return
            self._watch = None
            token_ids = token_ids[begin:]
        if token_ids and not self._ended and self.error is None:
            text, self._ended = self._ends.split(token_ids)
            self._accepted += text
            self._masks = None
            if text and not self._llg.consume_tokens(list(text)):
                self._revive()

    def legal(self, draft: Sequence[int]) -> int:
        begin = self._begin(draft)
        if begin is None:
            return len(draft)
        if self._ended or self.error is not None:
            return begin
        self._settle()
        text, ends = self._ends.split(draft[begin:])
        known = self._ends.known(text)
        valid = self._llg.validate_tokens(known) if known else 0
        may_end = ends and valid == len(text) and self._behind(text, LLMatcher.is_accepting)
        return begin + valid + may_end

    def forced(self, max_tokens: int) -> tuple[int, ...]:
        if self._watch is not None or self._ended or self.error is not None:
            return ()
        self._settle()
        draft, only_end = self._forced.after(self._llg, self._accepted, max_tokens)
        if self._llg.is_error():
            self._revive()
            return ()
        return (*draft, self._ends.ids[0]) if only_end and self._ends.ids and len(draft) < max_tokens else draft

    def mask(self, draft: tuple[int, ...]) -> Tensor | None:
        begin = self._begin(draft)
        if begin is None or self._ended:
            return None
        text, ends = self._ends.split(draft[begin:])
        if ends:
            return None
        if self._job is not None:
            self._job.finish()
            self._job = None
        if self._masks is None or text != self._drafted[: len(text)]:
            masks = torch.empty(len(text) + 1, self._tokens.num_words, dtype=torch.int32)
            if self.error is None:
                compute_masks(self._executor, [(self._llg, text)], masks)
            self._deliver(text, masks)
        assert self._masks is not None
        return self._masks[len(text), : (self._tokens.vocab_size + 31) // 32]

    def only_end(self, draft: tuple[int, ...]) -> bool:
        begin = self._begin(draft)
        if begin is None or self.error is not None:
            return False
        self._settle()
        text, ends = self._ends.split(draft[begin:])
        return self._ended or ends or self._behind(text, LLMatcher.is_stopped)

    def renew(self) -> None:
        self._settle()
        self._masks = None  # others may have been given its memory
        if self.error is None:
            self._revive()

    def wanted(self, draft: tuple[int, ...]) -> Wanted | None:
        """The masks that this draft will need; None: nothing to compute."""
        begin = self._begin(draft)
        if begin is None or self._ended or self.error is not None:
            return None
        text, _ = self._ends.split(draft[begin:])
        return Wanted(self._llg, text, lambda masks: self._deliver(text, masks))

    def follow(self, job: MaskJob) -> None:
        """The job will deliver this grammar's masks."""
        self._job = job

    def _begin(self, draft: Sequence[int]) -> int | None:
        """Where in a draft the constraint begins; None: the reasoning goes on behind it."""
        return 0 if self._watch is None else self._watch.find(draft)

    def _settle(self) -> None:
        """Take the automaton back from the job."""
        if self._job is not None:
            self._job.drop()
            self._job = None

    def _behind(self, text: Sequence[int], look: Callable[[LLMatcher], bool]) -> bool:
        """What `look` sees behind output and text, both legal. The automaton is stopped where only the end may follow."""
        if not text:
            return look(self._llg)
        seen = self._llg.consume_tokens(list(text)) and look(self._llg)
        if self._llg.is_error() or not self._llg.rollback(len(text)):
            self._revive()
        return seen

    def _deliver(self, text: tuple[int, ...], masks: Tensor) -> None:
        """Keep the masks behind every prefix of `text`, once they are right: int32 [len(text) + 1, W]."""
        if self.error is not None:
            masks.zero_()
        elif self._llg.is_error():
            self._recompute(text, masks)
        self._ends.mark(masks)
        self._drafted, self._masks = text, masks

    def _recompute(self, text: tuple[int, ...], masks: Tensor) -> None:
        """The automaton gave up somewhere along `text`, perhaps behind tokens that the model never meant.

        Row by row with another automaton, so that a row has a mask if and only if it had one without the draft.
        """
        masks.zero_()
        for _ in range(2):  # the first may meet a lexer that is nearly full
            self._revive()
            if self.error is not None or self._fill(text, masks):
                return
            if masks[0].any():
                self._revive()
                return
        self.error = reason(self._llg)

    def _fill(self, text: tuple[int, ...], masks: Tensor) -> bool:
        """Masks as far as they can be computed, and zero beyond; False: the automaton gave up."""
        for line in range(len(text) + 1):
            compute_masks(self._executor, [(self._llg, ())], masks[line : line + 1])
            if self._llg.is_error():
                masks[line].zero_()
                return False
            if line < len(text) and not self._llg.consume_tokens([text[line]]):
                return False
        return not text or self._llg.rollback(len(text))

    def _revive(self) -> None:
        """Replace an automaton that gave up by one that has seen the same output; an error if there is none.

        Perhaps it gave up because of what was tried behind the output; or the lexer is full, perhaps of what others had put
        there, which tokens that cannot be read may be the first to show.
        """
        full = FULL_LEXER in reason(self._llg)
        if not full and self._replace(self._compiled.matcher()):
            return
        llg = self._compiled.renewed()
        if llg is None or not self._replace(llg):
            self.error = reason(self._llg)

    def _replace(self, llg: LLMatcher) -> bool:
        """Whether the other automaton can read the output."""
        self._llg = llg
        llg.consume_tokens(self._accepted)
        return not llg.is_error()
