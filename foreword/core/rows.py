"""What the sampler must know of one row of logits."""

from __future__ import annotations

from dataclasses import dataclass

from foreword.core.request import RequestState

__all__ = ["SampleRow"]


@dataclass(frozen=True, slots=True)
class SampleRow:
    """A row that samples the token after `state.tokens + draft`.

    draft  the drafted tokens before the row; its history is prompt, output and these
    """

    state: RequestState
    draft: tuple[int, ...] = ()

    @property
    def position(self) -> int:
        """Absolute index of the token that the row samples: the counter of its noise."""
        return len(self.state.tokens) + len(self.draft)
