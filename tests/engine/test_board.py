"""What an engine notes is read by another process, also after its end."""

from __future__ import annotations

import os
import signal
import time

from foreword.engine.board import CAPACITY, IDLE, LOADING, WORKING, Board, Glance


def test_a_blank_board_says_that_nothing_is_there_yet() -> None:
    with Board.create() as board:
        assert board.glance() == Glance(0.0, LOADING, 0.0, 0)
        assert board.working_for() == ()


def test_whom_it_works_for_outlives_the_writer() -> None:
    with Board.create() as board:
        before = time.monotonic()
        pid = os.fork()
        if pid == 0:
            theirs = Board(os.dup(board.fd))
            theirs.step()
            theirs.note([5, 2, 1 << 40])
            os.kill(os.getpid(), signal.SIGKILL)
        os.waitpid(pid, 0)
        glance = board.glance()
        assert (glance.phase, glance.steps) == (WORKING, 1) and before <= glance.since_s <= time.monotonic()
        assert board.working_for() == (5, 2, 1 << 40)


def test_who_rests_works_for_nobody() -> None:
    with Board.create() as board:
        board.work((3,))
        assert board.working_for() == (3,) and board.glance().phase == WORKING
        board.rest()
        assert board.working_for() == () and board.glance().phase == IDLE


def test_work_without_end_is_no_life() -> None:
    assert Glance(sign_of_life_s=100.0, phase=WORKING, since_s=40.0, steps=7).well_until_s == 40.0
    assert Glance(sign_of_life_s=100.0, phase=IDLE, since_s=40.0, steps=7).well_until_s == 100.0


def test_more_than_fit_are_not_noted() -> None:
    with Board.create() as board:
        board.work(range(CAPACITY + 7))
        assert board.working_for() == tuple(range(CAPACITY))


def test_signs_of_life_go_on_until_the_end() -> None:
    with Board.create() as board:
        board.beat()
        first = board.glance().sign_of_life_s
        assert first > 0
        deadline = time.monotonic() + 20
        while board.glance().sign_of_life_s == first:
            assert time.monotonic() < deadline
            time.sleep(0.01)
