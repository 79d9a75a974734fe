"""What an engine notes is read by another process, also after its end."""

from __future__ import annotations

import os
import signal
import time

from foreword.engine_client.heartbeat import BUSY, IDLE, LOADING, MAX_REQUESTS, Heartbeat, HeartbeatPage


def test_a_blank_board_says_that_nothing_is_there_yet() -> None:
    with HeartbeatPage.create() as board:
        assert board.read() == Heartbeat(0.0, LOADING, 0.0, 0)
        assert board.busy_requests() == ()


def test_whom_it_works_for_outlives_the_writer() -> None:
    with HeartbeatPage.create() as board:
        before = time.monotonic()
        pid = os.fork()
        if pid == 0:
            theirs = HeartbeatPage(os.dup(board.fd))
            theirs.begin_step()
            theirs.set_requests([5, 2, 1 << 40])
            os.kill(os.getpid(), signal.SIGKILL)
        os.waitpid(pid, 0)
        glance = board.read()
        assert (glance.phase, glance.num_steps) == (
            BUSY,
            1,
        ) and before <= glance.busy_since_s <= time.monotonic()
        assert board.busy_requests() == (5, 2, 1 << 40)


def test_who_rests_works_for_nobody() -> None:
    with HeartbeatPage.create() as board:
        board.set_busy((3,))
        assert board.busy_requests() == (3,) and board.read().phase == BUSY
        board.set_idle()
        assert board.busy_requests() == () and board.read().phase == IDLE


def test_work_without_end_is_no_life() -> None:
    assert Heartbeat(heartbeat_s=100.0, phase=BUSY, busy_since_s=40.0, num_steps=7).healthy_until_s == 40.0
    assert Heartbeat(heartbeat_s=100.0, phase=IDLE, busy_since_s=40.0, num_steps=7).healthy_until_s == 100.0


def test_more_than_fit_are_not_noted() -> None:
    with HeartbeatPage.create() as board:
        board.set_busy(range(MAX_REQUESTS + 7))
        assert board.busy_requests() == tuple(range(MAX_REQUESTS))


def test_signs_of_life_go_on_until_the_end() -> None:
    with HeartbeatPage.create() as board:
        board.start()
        first = board.read().heartbeat_s
        assert first > 0
        deadline = time.monotonic() + 20
        while board.read().heartbeat_s == first:
            assert time.monotonic() < deadline
            time.sleep(0.01)
