"""Who is left alone for a while: asking for drafts takes time, which is lost where none comes of it that pays."""

from __future__ import annotations

import math

from foreword.drafting.control.frame import Tracked

__all__ = ["Naps"]

PATIENCE = 4  # asks without a draft that pays before a request is left alone for a while
IMPATIENCE = 7  # as if so many had been in vain already, where no request's guesses come true at present
ASKING_SHARE = 0.004  # of the time may go into asking in vain; where it takes less, nobody is left alone


class Naps:
    """Spells are powers of two and end where such a number divides the round: requests wake together, so that a model can draft
    for all of them in the same passes.

    asking  what asking in vain takes, as a share of a step
    """

    def __init__(self) -> None:
        self.asking = 0.0

    def start(self, request: Tracked, typical: float) -> None:
        """A request begins, where this share of the others' guesses comes true at present."""
        request.missed = round((1.0 - typical) * IMPATIENCE)

    def asked_in_vain(self, share: float) -> None:
        """Of a step, asking without a draft took this share."""
        self.asking += (share - self.asking) / 16 if self.asking else share

    def miss(self, request: Tracked, now: int, longest: int) -> None:
        """No draft in the round `now`; a request that has had none for long sleeps for growing spells, if asking costs."""
        request.missed += 1
        if request.missed > PATIENCE and longest:
            spell = self.spell(request.missed - PATIENCE, longest)
            request.wakes = (now // spell + 1) * spell

    def spell(self, times: int, longest: int) -> int:
        """Rounds to leave alone what was in vain so many times: a power of two, the longer the more asking costs."""
        most = min(1 << min(times, 10), longest, math.ceil(self.asking / ASKING_SHARE))
        return 1 << max(most - 1, 0).bit_length()
