"""The door to all drafters: order, limits, isolation."""

from collections.abc import Sequence

import pytest

from foreword.core.draft import Draft
from foreword.core.params import SamplingParams, Speculation
from foreword.core.request import Request, RequestState
from foreword.drafting.base import Ask
from foreword.drafting.drafting import Drafting
from foreword.drafting.policy import FixedLength


class Scripted:
    """Says the same for every ask."""

    def __init__(self, name: str, guess: Sequence[int] | Exception) -> None:
        self.name = name
        self.guess = guess
        self.live: set[str] = set()
        self.asked: list[int] = []

    def start(self, state: RequestState) -> None:
        self.live.add(state.id)

    def finish(self, request_id: str) -> None:
        self.live.remove(request_id)

    def propose(self, asks: Sequence[Ask]) -> list[Draft | None]:
        self.asked += [ask.max_tokens for ask in asks]
        if isinstance(self.guess, Exception):
            raise self.guess
        return [Draft(tuple(self.guess), self.name) if self.guess else None for _ in asks]


def state_of(name: str = "a", method: str = "auto", max_tokens: int | None = None, **params: object) -> RequestState:
    speculation = Speculation(method, max_tokens)
    return RequestState(Request(name, (1, 2, 3), SamplingParams(speculation=speculation, **params), 0), 0, 100)  # type: ignore[arg-type]


def test_the_first_that_has_a_guess_drafts() -> None:
    silent, loud, never = Scripted("silent", ()), Scripted("loud", (4, 5)), Scripted("never", (6,))
    drafting = Drafting((silent, loud, never), 10, FixedLength(4))
    (draft,) = drafting.propose([Ask(state_of(), (7,))])
    assert draft == Draft((4, 5), "loud")
    assert never.asked == []


@pytest.mark.parametrize(
    ("guess", "legal"), [((3, -1, 4), (3,)), ((3, 10, 4), (3,)), ((10,), None), ((1, 2, 3, 4, 5), (1, 2, 3, 4))]
)
def test_drafts_are_checked_against_the_vocabulary_and_the_bound(guess: tuple[int, ...], legal: tuple[int, ...] | None) -> None:
    (draft,) = Drafting((Scripted("d", guess),), 10, FixedLength(4)).propose([Ask(state_of(), (7,))])
    assert (draft.token_ids if draft else None) == legal


def test_an_exception_drops_the_draft_and_is_counted(caplog: pytest.LogCaptureFixture) -> None:
    broken, sound = Scripted("broken", RuntimeError("no")), Scripted("sound", (4,))
    drafting = Drafting((broken, sound), 10, FixedLength(4))
    (draft,) = drafting.propose([Ask(state_of(), (7,))])
    assert draft == Draft((4,), "sound")
    assert drafting.errors == {"broken": 1}
    assert "broken failed" in caplog.text


def test_off_asks_nobody_and_a_name_asks_one() -> None:
    first, second = Scripted("first", (4,)), Scripted("second", (5,))
    drafting = Drafting((first, second), 10, FixedLength(4))
    off, named = state_of("off", "off"), state_of("named", "second")
    drafting.start(off)
    drafting.start(named)
    assert (first.live, second.live) == (set(), {"named"})
    assert drafting.propose([Ask(off, ()), None, Ask(named, ())]) == (None, None, Draft((5,), "second"))
    assert first.asked == []


def test_the_bound_is_the_least_of_server_request_and_room() -> None:
    drafter = Scripted("d", (4,) * 9)
    drafting = Drafting((drafter,), 10, FixedLength(6))
    drafting.propose(
        [Ask(state_of("a"), (7,)), Ask(state_of("b", max_tokens=2), (7,)), Ask(state_of("c", max_tokens=None), (7,))]
    )
    assert drafter.asked == [6, 2, 6]
    short = RequestState(Request("s", (1, 2, 3), SamplingParams(max_tokens=4), 0), 0, 100)
    drafting.propose([Ask(short, (7,)), Ask(short, (7, 7, 7))])
    assert drafter.asked[3:] == [2], "one token must be left for the target itself, and none is asked for in vain"
