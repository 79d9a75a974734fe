"""Who doubts what the controller believes: a watchdog that stops speculation where it loses, and a budget for trying."""

from __future__ import annotations

__all__ = ["Budget", "Watchdog"]

WINDOW = 16
STALE = 256
SHORTEST_REST = 16
LONGEST_REST = 1024
ANCHOR_RATE = 0.25
LOSS = 1.02  # of a window, below which it is noise
SHARE = 0.003
SAVED_STEPS = 6.0


class Watchdog:
    """Compares what speculated steps took with what plain decoding would have needed for their tokens.

    The measure of plain decoding are plain steps taken in between. A window that lost is only believed with a plain
    step beside it: the machine may have become slower as a whole. Rests double while speculation keeps losing.
    """

    __slots__ = ("_age", "_anchor", "_needed", "_realised", "_rest", "_steps", "_suspicious", "resting", "wants_plain")

    def __init__(self) -> None:
        self.resting = 0
        self.wants_plain = True
        self._rest = SHORTEST_REST
        self._anchor = 1.0
        self._age = 0
        self._suspicious = True
        self._restart()

    @property
    def stale(self) -> bool:
        """Nothing is known about plain steps of late."""
        return self._age >= STALE

    def plain(self, ratio: float) -> None:
        """A step without drafts took `ratio` times its model seconds."""
        self._anchor += (ratio - self._anchor) * (1.0 if self.wants_plain else ANCHOR_RATE)
        self._age = 0
        self.wants_plain = False
        self.resting = max(self.resting - 1, 0)

    def rested(self, steps: int) -> None:
        """So many plain steps went by unmeasured."""
        self.resting = max(self.resting - steps, 0)

    def speculated(self, realised: float, needed: float) -> None:
        """A step with drafts took `realised` seconds; plain decoding needs `needed` model seconds for what it emitted."""
        self._age += 1
        self._realised += realised
        self._needed += needed * self._anchor
        self._steps += 1
        if self._steps >= WINDOW:
            self._judge()

    def _judge(self) -> None:
        if self._realised <= LOSS * self._needed:
            self._rest = SHORTEST_REST
            self._suspicious = False
        elif not self._suspicious:
            self._suspicious = self.wants_plain = True
        else:
            self.resting = self._rest
            self._rest = min(2 * self._rest, LONGEST_REST)
        self._restart()

    def _restart(self) -> None:
        self._realised = self._needed = 0.0
        self._steps = 0


class Budget:
    """A share of the time, saved up to be spent on steps and drafts whose only use is to learn. Seconds."""

    __slots__ = ("_saved", "spent")

    def __init__(self) -> None:
        self.spent = 0.0
        self._saved = 0.0

    def earn(self, seconds: float) -> None:
        """Time went by; what was not spent for long is lost."""
        self._saved = min(self._saved + SHARE * seconds, SAVED_STEPS * seconds)

    def take(self, seconds: float) -> bool:
        """Spend so much if there is."""
        if seconds > self._saved:
            return False
        self._saved -= seconds
        self.spent += seconds
        return True

    def refund(self, seconds: float) -> None:
        """It paid after all."""
        self._saved += seconds
        self.spent = max(self.spent - seconds, 0.0)
