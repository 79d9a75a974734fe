"""A watchdog that pauses speculation while it loses time."""

from __future__ import annotations

WINDOW_STEPS = 16  # speculative steps that are evaluated together
STALE_STEPS = 128  # age of a baseline
MIN_PAUSE_STEPS = 16
MAX_PAUSE_STEPS = 1024
BASELINE_ALPHA = 0.25
MAX_LOSS_RATIO = 1.02  # a window that loses less is noise


class RegressionWatchdog:
    """Compares the time of speculative steps with the time of plain decoding for the same tokens.

    Plain steps in between are the baseline. A losing window counts only after a new baseline, because the
    machine itself may have slowed down. Pauses double while speculation keeps losing.
    """

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
        """There was no sample of plain decoding recently."""
        return self._baseline_age >= STALE_STEPS

    def record_sample(self) -> None:
        """A step in a row without proposing was measured."""
        self._baseline_age = 0

    def record_plain(self, ratio: float) -> None:
        """A step without drafts took `ratio` times its model seconds."""
        alpha = 1.0 if self.wants_baseline else BASELINE_ALPHA
        self._baseline_ratio += (ratio - self._baseline_ratio) * alpha
        self.wants_baseline = False
        self.pause_steps = max(self.pause_steps - 1, 0)

    def record_skipped(self, num_steps: int) -> None:
        """Plain steps that were not measured."""
        self.pause_steps = max(self.pause_steps - num_steps, 0)

    def record_speculative(self, actual_s: float, plain_cost: float) -> None:
        """A step with drafts took `actual_s`; plain decoding costs `plain_cost` model seconds."""
        self._baseline_age += 1
        self._actual_s += actual_s
        self._plain_s += plain_cost * self._baseline_ratio
        self._num_steps += 1
        if self._num_steps >= WINDOW_STEPS:
            self._evaluate_window()

    def _evaluate_window(self) -> None:
        if self._actual_s <= MAX_LOSS_RATIO * self._plain_s:
            self._next_pause_steps = MIN_PAUSE_STEPS
            self._is_suspicious = False
        elif not self._is_suspicious:
            self._is_suspicious = self.wants_baseline = True
        else:
            self.pause_steps = self._next_pause_steps
            self._next_pause_steps = min(2 * self._next_pause_steps, MAX_PAUSE_STEPS)
        self._reset_window()

    def _reset_window(self) -> None:
        self._actual_s = self._plain_s = 0.0
        self._num_steps = 0
