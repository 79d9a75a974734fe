"""Chooses the replica of a request: load bounds the choice, then cached prefix blocks decide.

Pure bookkeeping: no processes, no clocks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from foreword.core.outputs import BlockUpdate

# A replica may have this much more load than the mean, for the sake of its cache.
MAX_LOAD_RATIO: Final = 1.25
LOAD_SLACK: Final = 2.0  # streams
TOKENS_PER_STREAM: Final = 256  # prompt tokens without KV that count as one more stream


class BlockIndex:
    """Hashes of the KV blocks that one replica has in its prefix cache, or is about to compute."""

    __slots__ = ("_cached", "_computing", "_sequence")

    def __init__(self) -> None:
        self._cached: set[bytes] = set()
        self._computing: Counter[bytes] = Counter()  # number of requests that compute a block
        self._sequence: int | None = None  # number of the newest update; None: a snapshot is missing

    def update(self, update: BlockUpdate) -> bool:
        """Apply an update. False if one before it is missing: the cache is unknown until a snapshot comes."""
        if update.is_snapshot:
            self._cached = set(update.added)
        elif self._sequence is not None and update.sequence == self._sequence + 1:
            self._cached.difference_update(update.removed)
            self._cached.update(update.added)
        else:
            self.clear()
            return False
        self._sequence = update.sequence
        return True

    def clear(self) -> None:
        """The cache is empty or unknown."""
        self._cached.clear()
        self._sequence = None

    def add_computing(self, digests: Iterable[bytes]) -> None:
        """A request that was sent to the replica computes these blocks."""
        self._computing.update(digests)

    def remove_computing(self, digests: Iterable[bytes]) -> None:
        """The request has computed them, or ended."""
        for digest in digests:
            self._computing[digest] -= 1
            if not self._computing[digest]:
                del self._computing[digest]

    def num_matched(self, digests: Sequence[bytes]) -> int:
        """Leading blocks of a prompt that the replica has or computes."""
        cached, computing = self._cached, self._computing
        for index, digest in enumerate(digests):
            if digest not in cached and digest not in computing:
                return index
        return len(digests)


@dataclass(frozen=True, slots=True)
class ReplicaLoad:
    """A replica that could take a request."""

    id: str
    num_streams: int
    num_prompt_tokens: int  # prompt tokens of its streams that are still to be computed
    num_matched: int = 0  # blocks of the request's prompt that it has
    chosen_at: int = 0  # number of the last choice of this replica

    @property
    def load(self) -> float:
        return self.num_streams + self.num_prompt_tokens / TOKENS_PER_STREAM


# Takes candidates, and the id of the replica that last served the request's tenant; returns an id.
RoutingPolicy = Callable[[Sequence[ReplicaLoad], str | None], str]


def choose(candidates: Sequence[ReplicaLoad], last_id: str | None = None) -> str:
    """The replica for a request; there is at least one candidate.

    Among those within the load bound, the one with most matched blocks; then the one that last served the
    request's tenant, `last_id`, whose outputs its suffix drafter knows; then the least loaded; then the one
    that was chosen longest ago.
    """
    bound = MAX_LOAD_RATIO * sum(each.load for each in candidates) / len(candidates) + LOAD_SLACK
    return min(
        (each for each in candidates if each.load <= bound),
        key=lambda each: (-each.num_matched, each.id != last_id, each.load, each.chosen_at),
    ).id
