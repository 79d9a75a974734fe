"""A watchdog that pauses speculation while it loses time, and budgets for exploration and for plug-ins."""

from __future__ import annotations

WINDOW_STEPS = 16  # speculative steps that are evaluated together
STALE_STEPS = 128  # age of a baseline
MIN_PAUSE_STEPS = 16
MAX_PAUSE_STEPS = 1024
BASELINE_ALPHA = 0.25
MAX_LOSS_RATIO = 1.02  # of a window; less is noise
EXPLORATION_SHARE = 0.003  # of the time
MAX_SAVED_STEPS = 6.0  # most that the exploration budget can hold
FIRST_SAVED_STEPS = 8.0  # plain steps that it begins with, to check the calibration
TRIAL_STEPS = 5.0  # plain steps that a plug-in may take before its drafts have saved any
MAX_SAVED_CALLS = 16.0  # calls that savings can pay for in advance: enough for a few bad drafts in a row
CALL_COST_ALPHA = 1 / 8


class RegressionWatchdog:
    """Compares the time of speculative steps with the time of plain decoding for the same tokens.

    Plain steps in between are the baseline. A losing window counts only after a new baseline, because the
    machine itself may have slowed down. Pauses double while speculation keeps losing.
    """

    __slots__ = (
        "_actual_s",
        "_baseline_age",
        "_baseline_ratio",
        "_is_suspicious",
        "_next_pause_steps",
        "_num_steps",
        "_plain_s",
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
        """There was no plain step recently."""
        return self._baseline_age >= STALE_STEPS

    def record_plain(self, ratio: float) -> None:
        """A step without drafts took `ratio` times its model seconds."""
        alpha = 1.0 if self.wants_baseline else BASELINE_ALPHA
        self._baseline_ratio += (ratio - self._baseline_ratio) * alpha
        self._baseline_age = 0
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


class ExplorationBudget:
    """Seconds that may be spent on steps and drafts made only to learn: a share of the time, saved up."""

    __slots__ = ("_saved", "spent")

    def __init__(self, step_seconds: float = 0.0) -> None:
        """step_seconds  of a plain step"""
        self.spent = 0.0
        self._saved = FIRST_SAVED_STEPS * step_seconds

    def earn(self, seconds: float) -> None:
        """Time passed; a long unspent budget is capped."""
        saved = min(self._saved + EXPLORATION_SHARE * seconds, MAX_SAVED_STEPS * seconds)
        self._saved = max(self._saved, saved)

    def take(self, seconds: float) -> bool:
        """Spend from the budget if it suffices."""
        if seconds > self._saved:
            return False
        self._saved -= seconds
        self.spent += seconds
        return True

    def refund(self, seconds: float) -> None:
        """Return the cost of an exploration that paid."""
        self._saved += seconds
        self.spent = max(self.spent - seconds, 0.0)


class DrafterAccount:
    """Time that a plugged-in drafter may take, in model seconds: it may spend what it earns.

    It earns the time that its drafts save, and EXPLORATION_SHARE of all time. So a drafter that does not pay
    takes that share at most, after a trial of TRIAL_STEPS.
    """

    __slots__ = ("_balance", "_call_cost", "_trial_cost")

    def __init__(self, plain_cost: float) -> None:
        self._balance = self._trial_cost = TRIAL_STEPS * plain_cost
        self._call_cost = 0.0  # mean of recent calls

    @property
    def can_afford_call(self) -> bool:
        """Whether it has saved up for a call, or as much as a trial takes."""
        return self._balance >= min(self._call_cost, self._trial_cost)

    def charge(self, cost: float) -> None:
        """The drafter was called."""
        self._balance -= cost
        self._call_cost += (cost - self._call_cost) * (CALL_COST_ALPHA if self._call_cost else 1.0)

    def earn(self, saved: float, elapsed: float, plain_cost: float) -> None:
        """Its drafts saved `saved`, which may be negative, while `elapsed` passed."""
        self._trial_cost = TRIAL_STEPS * plain_cost
        if self._balance < self._trial_cost:
            self._balance = min(self._balance + EXPLORATION_SHARE * elapsed, self._trial_cost)
        self._balance = min(self._balance + saved, max(self._trial_cost, MAX_SAVED_CALLS * self._call_cost))
