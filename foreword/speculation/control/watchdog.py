"""Who doubts what the controller believes: a watchdog that stops speculation where it loses, and a budget for trying."""

from __future__ import annotations

__all__ = ["ExplorationBudget", "RegressionWatchdog"]

WINDOW_STEPS = 16
STALE_STEPS = 256
MIN_PAUSE_STEPS = 16
MAX_PAUSE_STEPS = 1024
BASELINE_ALPHA = 0.25
MAX_LOSS_RATIO = 1.02  # of a window, below which it is noise
EXPLORATION_SHARE = 0.003
MAX_SAVED_STEPS = 6.0


class RegressionWatchdog:
    """Compares what speculated steps took with what plain decoding would have needed for their tokens.

    The measure of plain decoding are plain steps taken in between. A window that lost is only believed with a plain
    step beside it: the machine may have become slower as a whole. Rests double while speculation keeps losing.
    """

    __slots__ = (
        "_actual_s",
        "_baseline_age",
        "_baseline_ratio",
        "_is_suspicious",
        "_needed",
        "_next_pause_steps",
        "_num_steps",
        "pause_steps",
        "wants_baseline",
    )

    def __init__(self) -> None:
        self.pause_steps = 0
        self.wants_baseline = True
        self._next_pause_steps = MIN_PAUSE_STEPS
        self._baseline_ratio = 1.0
        self._baseline_age = 0
        self._is_suspicious = True
        self._reset_window()

    @property
    def is_baseline_stale(self) -> bool:
        """Nothing is known about plain steps of late."""
        return self._baseline_age >= STALE_STEPS

    def record_plain(self, ratio: float) -> None:
        """A step without drafts took `ratio` times its model seconds."""
        self._baseline_ratio += (ratio - self._baseline_ratio) * (
            1.0 if self.wants_baseline else BASELINE_ALPHA
        )
        self._baseline_age = 0
        self.wants_baseline = False
        self.pause_steps = max(self.pause_steps - 1, 0)

    def record_skipped(self, num_steps: int) -> None:
        """So many plain steps went by unmeasured."""
        self.pause_steps = max(self.pause_steps - num_steps, 0)

    def record_speculative(self, actual_s: float, plain_cost: float) -> None:
        """A step with drafts took `realised` seconds; plain decoding needs `needed` model seconds for what it emitted."""
        self._baseline_age += 1
        self._actual_s += actual_s
        self._needed += plain_cost * self._baseline_ratio
        self._num_steps += 1
        if self._num_steps >= WINDOW_STEPS:
            self._evaluate_window()

    def _evaluate_window(self) -> None:
        if self._actual_s <= MAX_LOSS_RATIO * self._needed:
            self._next_pause_steps = MIN_PAUSE_STEPS
            self._is_suspicious = False
        elif not self._is_suspicious:
            self._is_suspicious = self.wants_baseline = True
        else:
            self.pause_steps = self._next_pause_steps
            self._next_pause_steps = min(2 * self._next_pause_steps, MAX_PAUSE_STEPS)
        self._reset_window()

    def _reset_window(self) -> None:
        self._actual_s = self._needed = 0.0
        self._num_steps = 0


class ExplorationBudget:
    """A share of the time, saved up to be spent on steps and drafts whose only use is to learn. Seconds."""

    __slots__ = ("_saved", "spent")

    def __init__(self) -> None:
        self.spent = 0.0
        self._saved = 0.0

    def earn(self, seconds: float) -> None:
        """Time went by; what was not spent for long is lost."""
        self._saved = min(self._saved + EXPLORATION_SHARE * seconds, MAX_SAVED_STEPS * seconds)

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
