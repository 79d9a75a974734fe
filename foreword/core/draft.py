"""A guess, and what became of it."""

from __future__ import annotations

from dataclasses import dataclass

from foreword.core.events import TokenLogprob
from foreword.core.runaway import Repetition
from foreword.errors import ForewordError

__all__ = ["Draft", "StepOutput"]


@dataclass(frozen=True, slots=True)
class Draft:
    """A guessed continuation of one request.

    token_ids   guessed ids, first to be verified first
    drafter     name of the drafter, as in `--speculate`
    confidence  probability that the drafter gives each guess; empty if it has none
    """

    token_ids: tuple[int, ...]
    drafter: str
    confidence: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What a step yielded for one request, after the cut at EOS, stop ids and limits.

    token_ids      emitted tokens; empty if the step computed only part of what is known
    accepted       how many of the verified draft tokens were emitted
    logprobs       one per token if asked for
    prompt_logprobs  those of the prompt tokens that this step scored, if asked for
    hashes         one per token in test mode
    finish_reason  "stop", "length", "repetition", or None while the request goes on
    stop_id        the id that stopped it
    repeating      the pattern that the answer was found to repeat with these tokens, or None
    error          why the request ends after these tokens, or None
    """

    token_ids: tuple[int, ...] = ()
    num_accepted: int = 0
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    logits_hashes: tuple[int, ...] = ()
    finish_reason: str | None = None
    stop_id: int | None = None
    repetition: Repetition | None = None
    error: ForewordError | None = None

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None or self.error is not None
