"""Sampler rows of requests without an engine."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from foreword.core.batch import SampleRow, upload
from foreword.core.params import SamplingParams
from foreword.core.request import Request, RequestState
from foreword.core.structured_output import RequestGrammar, StructuredOutput
from foreword.kernels.ops import Ops
from foreword.sampling.logits_processors import LogitsProcessor

VOCAB_SIZE = 300
NEVER_SAMPLED = (297, 299)
EOS = 2
JSON = StructuredOutput("json_object")  # any constraint; the fake grammar decides


class EveryThirdGrammar:
    """A fake grammar: after n tokens of output and draft, ids congruent to n modulo 3 are legal.

    free  values of n without a constraint; over  n from which only EOS is legal
    """

    error: str | None = None

    def __init__(self, num_output: int, free: Sequence[int] = (), over: int = 1000) -> None:
        self._num_output = num_output
        self._free, self._over = free, over

    def accept(self, token_ids: Sequence[int]) -> None:
        self._num_output += len(token_ids)

    def num_legal(self, draft: Sequence[int]) -> int:
        return len(draft)

    def forced(self, max_tokens: int) -> tuple[int, ...]:
        return ()

    def mask(self, draft: tuple[int, ...]) -> Tensor | None:
        n = self._num_output + len(draft)
        if n in self._free:
            return None
        allowed = (EOS,) if self.must_end(draft) else range(n % 3, VOCAB_SIZE, 3)
        words = torch.zeros(-(-VOCAB_SIZE // 32), dtype=torch.int64)
        for token_id in allowed:
            words[token_id // 32] += 1 << token_id % 32
        return words.to(torch.int32)

    def is_open(self, draft: Sequence[int]) -> bool:
        return True

    def must_end(self, draft: tuple[int, ...]) -> bool:
        return self._num_output + len(draft) >= self._over


def make_state(
    output: Sequence[int] = (),
    prompt: Sequence[int] = (5, 6, 7, 6),
    seed: int = 11,
    bad_words_ids: tuple[tuple[int, ...], ...] = (),
    dry_breakers: tuple[tuple[int, ...], ...] = (),
    grammar: RequestGrammar | None = None,
    **params: object,
) -> RequestState:
    """The state of a request with some output."""
    request = Request(
        id="r",
        prompt_ids=tuple(prompt),
        params=SamplingParams(**params),  # type: ignore[arg-type]
        seed=seed,
        eos_token_ids=(EOS,),
        bad_words_ids=bad_words_ids,
        dry_breakers=dry_breakers,
    )
    state = RequestState(request, arrival=0, max_model_len=1000, grammar=grammar)
    state.append(output)
    return state


def make_row(draft: Sequence[int] = (), **state: object) -> SampleRow:
    return SampleRow(make_state(**state), tuple(draft))  # type: ignore[arg-type]


def apply(step: LogitsProcessor, ops: Ops, logits: Tensor, rows: Sequence[SampleRow]) -> None:
    """Run one processor, in place."""
    gathered = step.gather(rows, logits.shape[1])
    if gathered is not None:
        step.apply(ops, logits, *upload(gathered, logits.device))
