"""The grammar of one request, as core/grammar.py describes it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from llguidance import LLExecutor, LLMatcher
from torch import Tensor

from foreword.core.request import Request
from foreword.grammar.compile import reason
from foreword.grammar.ends import Ends
from foreword.grammar.masks import MaskJob, Wanted, compute_masks
from foreword.grammar.reasoning import ReasoningWatch, ends_in_prompt
from foreword.grammar.tokens import Tokens

__all__ = ["Matcher"]


class Matcher:
    """Follows one output. Every mask is a function of the grammar and of the tokens before it.

    A mask is computed by the job of `prepare`, or where it is asked for; both ways yield the same bits. While a job is
    under way the automaton belongs to it: every method waits for it, or drops it, first.

    again  a matcher at the beginning of the grammar, built anew: requests share a lexer, and a lexer may fill up
    """

    __slots__ = (
        "_accepted",
        "_again",
        "_drafted",
        "_ended",
        "_ends",
        "_executor",
        "_job",
        "_llg",
        "_masks",
        "_tokens",
        "_watch",
        "error",
    )

    def __init__(
        self, request: Request, llg: LLMatcher, tokens: Tokens, executor: LLExecutor, again: Callable[[], LLMatcher]
    ) -> None:
        self.error: str | None = None
        self._llg = llg
        self._tokens = tokens
        self._executor = executor
        self._again = again
        self._ends = Ends(tokens, (*request.eos_token_ids, *(i for i in request.params.stop_token_ids if i in tokens.eos_ids)))
        ends = request.reasoning_end_ids
        self._watch = ReasoningWatch(ends) if ends and not ends_in_prompt(request.prompt_ids, ends) else None
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
                self._recover()

    def legal(self, draft: Sequence[int]) -> int:
        begin = self._begin(draft)
        if begin is None:
            return len(draft)
        if self._ended or self.error is not None:
            return begin
        self._settle()
        text, ends = self._ends.split(draft[begin:])
        valid = self._llg.validate_tokens(list(text)) if text else 0
        may_end = ends and valid == len(text) and self._behind(text).is_accepting()
        return begin + valid + may_end

    def forced(self, max_tokens: int) -> tuple[int, ...]:
        if self._watch is not None or self._ended or self.error is not None:
            return ()
        self._settle()
        text = self._llg.deep_copy().compute_ff_bytes()
        draft = self._tokens.cut(text, max_tokens)
        if len(draft) < max_tokens and self._ends.ids and self._behind(draft).is_stopped():
            return (*draft, self._ends.ids[0])
        return draft

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
        return self._ended or ends or self._behind(text).is_stopped()

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

    def _behind(self, text: Sequence[int]) -> LLMatcher:
        """The automaton behind output and text, both legal; it is stopped where only the end may follow."""
        copy = self._llg.deep_copy()
        copy.consume_tokens(list(text))
        return copy

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

        One row after the other is computed by an automaton of its own, so that a row has a mask if and only if it had one
        without the draft.
        """
        masks.zero_()
        for line in range(len(text) + 1):
            self._recover()
            row = masks[line : line + 1]
            if self.error is None:
                llg = self._behind(text[:line])
                compute_masks(self._executor, [(llg, ())], row)
                if not llg.is_error():
                    continue
                row.zero_()
                self._give_up(llg) if line == 0 else self._recover()
            return

    def _recover(self) -> None:
        """Begin anew with a fresh lexer and the same output; what fails again is an error."""
        self._llg = self._again()
        self._llg.consume_tokens(self._accepted)
        if self._llg.is_error():
            self._give_up(self._llg)

    def _give_up(self, llg: LLMatcher) -> None:
        self.error = reason(llg)
