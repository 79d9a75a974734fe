"""When an engine is unwell, and when it only has much to do. The clock is a number."""

from __future__ import annotations

import os

from foreword.engine_client.heartbeat import (
    BUSY,
    IDLE,
    LOADING,
    MAX_CHECK_GAP_S,
    NO_HEARTBEAT_S,
    EngineHealth,
    HangDetector,
    Heartbeat,
    cpu_seconds,
)

HANG_S = 10.0
LOOK_S = 0.25


class Scene:
    """An engine, the clock, and who looks at it four times a second."""

    def __init__(self, phase: int, knows_cpu: bool = True) -> None:
        self.now_s = 1000.0
        self.alive_s = self.since_s = self.now_s
        self.phase = phase
        self.cpu: float | None = 7.0 if knows_cpu else None
        self.watch = HangDetector(HANG_S, lambda: self.cpu)

    def passes(
        self, seconds: float, lives: bool = True, computes: float = 1.0, steps: bool = False
    ) -> EngineHealth:
        """What is found after so long; `computes`: CPU seconds a second."""
        finding = EngineHealth()
        for _ in range(int(seconds / LOOK_S)):
            self.now_s += LOOK_S
            self.alive_s = self.now_s if lives else self.alive_s
            self.since_s = self.now_s if steps else self.since_s
            self.cpu = None if self.cpu is None else self.cpu + computes * LOOK_S
            finding = self.watch.check(self.now_s, Heartbeat(self.alive_s, self.phase, self.since_s, 0))
        return finding


def test_before_the_first_sign_of_life_nothing_is_known() -> None:
    watch = HangDetector(HANG_S, lambda: 0.0)
    assert {watch.check(float(second), Heartbeat(0.0, LOADING, 0.0, 0)) for second in range(1000)} == {
        EngineHealth()
    }


def test_a_slow_load_never_alarms() -> None:
    scene = Scene(LOADING)
    assert scene.passes(1000.0, computes=0.0) == EngineHealth()
    assert scene.passes(HANG_S - 1, lives=False) == EngineHealth()
    assert scene.passes(2, lives=False).hung


def test_idleness_is_no_hang() -> None:
    assert Scene(IDLE).passes(1000.0, computes=0.0) == EngineHealth()


def test_many_steps_are_no_hang() -> None:
    assert Scene(BUSY).passes(1000.0, steps=True) == EngineHealth()


def test_a_stopped_engine_is_unresponsive_within_five_seconds_and_then_hangs() -> None:
    for phase in (IDLE, BUSY):
        scene = Scene(phase)
        scene.passes(2.0)
        assert scene.passes(NO_HEARTBEAT_S - 0.5, lives=False, computes=0.0).ready
        finding = scene.passes(1.0, lives=False, computes=0.0)
        assert not finding.ready and not finding.hung and "sign of life" in finding.detail
        assert scene.passes(HANG_S, lives=False, computes=0.0).hung


def test_one_that_goes_on_in_time_is_well_again() -> None:
    scene = Scene(IDLE)
    assert not scene.passes(HANG_S - 1, lives=False).ready
    assert scene.passes(LOOK_S) == EngineHealth()


def test_a_long_step_is_a_hang_only_at_the_limit() -> None:
    scene = Scene(BUSY)
    assert scene.passes(HANG_S - 1) == EngineHealth()
    finding = scene.passes(2)
    assert finding.hung and "step" in finding.detail


def test_a_step_that_computes_nothing_is_noticed_early() -> None:
    scene = Scene(BUSY)
    scene.passes(2.0, steps=True)
    finding = scene.passes(5.0, computes=0.001)
    assert not finding.ready and not finding.hung and "computes nothing" in finding.detail
    assert scene.passes(1.0, computes=1.0) == EngineHealth(), "it was slow, that is all"


def test_where_cpu_time_says_nothing_only_the_limit_counts() -> None:
    scene = Scene(BUSY, knows_cpu=False)
    assert scene.passes(HANG_S - 1) == EngineHealth()
    assert scene.passes(2).hung


def test_a_watch_that_slept_blames_nobody() -> None:
    scene = Scene(BUSY)
    scene.passes(1.0)
    scene.now_s += 100 * HANG_S  # both were stopped
    assert scene.passes(MAX_CHECK_GAP_S, lives=False, computes=0.0) == EngineHealth()
    assert scene.passes(HANG_S, lives=False, computes=0.0).hung, "but it does not come back"


def test_cpu_time_of_processes() -> None:
    before = cpu_seconds(os.getpid())
    sum(range(3_000_000))
    after = cpu_seconds(os.getpid())
    assert before is not None and after is not None and after > before
    assert cpu_seconds(1 << 30) is None
