"""The heartbeat page is readable by another process, and health checks tell hangs from load."""

from __future__ import annotations

import os
import signal
import time

from foreword.engine_client.heartbeat import (
    BUSY,
    IDLE,
    LOADING,
    MAX_CHECK_GAP_S,
    MAX_REQUESTS,
    NO_HEARTBEAT_S,
    EngineHealth,
    HangDetector,
    Heartbeat,
    HeartbeatPage,
    cpu_seconds,
)
from tests.support.waiting import wait_until

HANG_S = 10.0
CHECK_INTERVAL_S = 0.25


def test_new_page_is_blank() -> None:
    with HeartbeatPage.create() as page:
        assert page.read() == Heartbeat(0.0, LOADING, 0.0)
        assert page.busy_requests() == ()


def test_busy_requests_outlive_the_writer() -> None:
    with HeartbeatPage.create() as page:
        before = time.monotonic()
        pid = os.fork()
        if pid == 0:
            theirs = HeartbeatPage(os.dup(page.fd))
            theirs.set_busy()
            theirs.set_requests([5, 2, 1 << 40])
            theirs.set_plugin(2)
            os.kill(os.getpid(), signal.SIGKILL)
        os.waitpid(pid, 0)
        heartbeat = page.read()
        assert heartbeat.phase == BUSY and before <= heartbeat.busy_since_s <= time.monotonic()
        assert page.busy_requests() == (5, 2, 1 << 40)
        assert page.plugin == 2
        page.set_plugin(0)
        assert page.plugin == 0 and page.busy_requests() == (5, 2, 1 << 40)


def test_idle_engine_has_no_busy_requests() -> None:
    with HeartbeatPage.create() as page:
        page.set_busy((3,))
        assert page.busy_requests() == (3,) and page.read().phase == BUSY
        page.set_idle()
        assert page.busy_requests() == () and page.read().phase == IDLE


def test_endless_step_is_not_healthy_time() -> None:
    assert Heartbeat(heartbeat_s=100.0, phase=BUSY, busy_since_s=40.0).healthy_until_s == 40.0
    assert Heartbeat(heartbeat_s=100.0, phase=IDLE, busy_since_s=40.0).healthy_until_s == 100.0


def test_requests_beyond_the_page_are_not_recorded() -> None:
    with HeartbeatPage.create() as page:
        page.set_busy(range(MAX_REQUESTS + 7))
        assert page.busy_requests() == tuple(range(MAX_REQUESTS))


def test_heartbeat_goes_on() -> None:
    with HeartbeatPage.create() as page:
        page.start()
        first = page.read().heartbeat_s
        assert first > 0
        wait_until(lambda: page.read().heartbeat_s > first)


class SimulatedEngine:
    """An engine, its clock, and a detector that checks it four times a second."""

    def __init__(self, phase: int, has_cpu_time: bool = True) -> None:
        self.now_s = 1000.0
        self.heartbeat_s = self.busy_since_s = self.now_s
        self.phase = phase
        self.cpu: float | None = 7.0 if has_cpu_time else None
        self.detector = HangDetector(HANG_S, lambda: self.cpu)

    def run(self, seconds: float, beats: bool = True, load: float = 1.0, steps: bool = False) -> EngineHealth:
        """The health after `seconds`; load: CPU seconds per second; steps: a new step before each check."""
        health = EngineHealth()
        for _ in range(int(seconds / CHECK_INTERVAL_S)):
            self.now_s += CHECK_INTERVAL_S
            self.heartbeat_s = self.now_s if beats else self.heartbeat_s
            self.busy_since_s = self.now_s if steps else self.busy_since_s
            self.cpu = None if self.cpu is None else self.cpu + load * CHECK_INTERVAL_S
            heartbeat = Heartbeat(self.heartbeat_s, self.phase, self.busy_since_s)
            health = self.detector.check(self.now_s, heartbeat)
        return health


def test_engine_is_healthy_before_its_first_heartbeat() -> None:
    detector, blank = HangDetector(HANG_S, lambda: 0.0), Heartbeat(0.0, LOADING, 0.0)
    assert {detector.check(float(second), blank) for second in range(1000)} == {EngineHealth()}


def test_slow_load_is_healthy() -> None:
    engine = SimulatedEngine(LOADING)
    assert engine.run(1000.0, load=0.0) == EngineHealth()
    assert engine.run(HANG_S - 1, beats=False) == EngineHealth()
    assert engine.run(2, beats=False).hung


def test_idle_engine_is_healthy() -> None:
    assert SimulatedEngine(IDLE).run(1000.0, load=0.0) == EngineHealth()


def test_many_steps_are_healthy() -> None:
    assert SimulatedEngine(BUSY).run(1000.0, steps=True) == EngineHealth()


def test_stopped_engine_is_unresponsive_then_hung() -> None:
    for phase in (IDLE, BUSY):
        engine = SimulatedEngine(phase)
        engine.run(2.0)
        assert engine.run(NO_HEARTBEAT_S - 0.5, beats=False, load=0.0).ready
        health = engine.run(1.0, beats=False, load=0.0)
        assert not health.ready and not health.hung and "no heartbeat" in health.detail
        assert engine.run(HANG_S, beats=False, load=0.0).hung


def test_engine_that_resumes_in_time_is_healthy() -> None:
    engine = SimulatedEngine(IDLE)
    assert not engine.run(HANG_S - 1, beats=False).ready
    assert engine.run(CHECK_INTERVAL_S) == EngineHealth()


def test_long_step_hangs_at_the_timeout() -> None:
    engine = SimulatedEngine(BUSY)
    assert engine.run(HANG_S - 1) == EngineHealth()
    health = engine.run(2)
    assert health.hung and "step" in health.detail


def test_step_without_cpu_time_is_unresponsive() -> None:
    engine = SimulatedEngine(BUSY)
    engine.run(2.0, steps=True)
    health = engine.run(5.0, load=0.001)
    assert not health.ready and not health.hung and "no CPU time" in health.detail
    assert engine.run(1.0, load=1.0) == EngineHealth(), "only slow"


def test_unknown_cpu_time_leaves_only_the_timeout() -> None:
    engine = SimulatedEngine(BUSY, has_cpu_time=False)
    assert engine.run(HANG_S - 1) == EngineHealth()
    assert engine.run(2).hung


def test_stalled_detector_restarts_its_timers() -> None:
    engine = SimulatedEngine(BUSY)
    engine.run(1.0)
    engine.now_s += 100 * HANG_S  # client and engine were stopped
    assert engine.run(MAX_CHECK_GAP_S, beats=False, load=0.0) == EngineHealth()
    assert engine.run(HANG_S, beats=False, load=0.0).hung


def test_cpu_seconds_of_processes() -> None:
    before = cpu_seconds(os.getpid())
    sum(range(3_000_000))
    after = cpu_seconds(os.getpid())
    assert before is not None and after is not None and after > before
    assert cpu_seconds(1 << 30) is None
