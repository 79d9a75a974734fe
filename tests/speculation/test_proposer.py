"""The door to all drafters: order, limits, isolation."""

from collections.abc import Container, Iterator, Sequence

import pytest

from foreword.core.outputs import Draft, DraftingStats
from foreword.core.params import SamplingParams, Speculation
from foreword.core.request import Request, RequestState
from foreword.speculation.base import DraftRequest
from foreword.speculation.policy import FixedLength, PrefillLoad, Proposal
from foreword.speculation.proposer import Proposer
from tests.support.fakes import extended


class Scripted:
    """Says the same for every ask."""

    def __init__(self, name: str, guess: Sequence[int] | Exception) -> None:
        self.name = name
        self.guess = guess
        self.live: set[str] = set()
        self.asked: list[int] = []

    def start(self, state: RequestState) -> None:
        self.live.add(state.id)

    def finish(self, request_id: str, output: Sequence[int] = ()) -> None:
        self.live.remove(request_id)

    def check(self, live: Container[str]) -> None:
        assert all(request_id in live for request_id in self.live)

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft | None]:
        self.asked += [ask.max_tokens for ask in requests]
        if isinstance(self.guess, Exception):
            raise self.guess
        return [Draft(tuple(self.guess), self.name) if self.guess else None for _ in requests]


def state_of(
    name: str = "a", method: str = "auto", max_tokens: int | None = None, **params: object
) -> RequestState:
    speculation = Speculation(method, max_tokens)
    return RequestState(
        Request(name, (1, 2, 3), SamplingParams(speculation=speculation, **params), 0), 0, 100
    )  # type: ignore[arg-type]


def propose(drafting: Proposer, *states: RequestState) -> tuple[Draft | None, ...]:
    """Ask for requests that have just been started."""
    for state in states:
        drafting.start(state)
    drafts = drafting.propose(states)
    drafting.check()
    return drafts


def test_the_first_that_has_a_guess_drafts() -> None:
    silent, loud, late = Scripted("silent", ()), Scripted("loud", (4, 5)), Scripted("late", (6,))
    drafting = Proposer((silent, loud, late), 10, FixedLength(4))
    assert propose(drafting, state_of()) == (Draft((4, 5), "loud"),)


class Model(Scripted):
    """A drafter that runs a model."""

    def num_pending_rows(self, request: DraftRequest) -> int:
        return 3

    def pass_seconds(self, num_rows: int, num_sampled: int) -> float:
        return 0.1


def test_a_model_runs_only_where_nothing_else_has_a_guess() -> None:
    lookup, model = Scripted("lookup", (4,)), Model("model", (5, 6))
    drafting = Proposer((lookup,), 10, FixedLength(4), (model,))
    assert propose(drafting, state_of()) == (Draft((4,), "lookup"),)
    assert model.asked == []
    lookup.guess = ()
    assert drafting.propose([state_of()]) == (Draft((5, 6), "model"),)


class Scores(FixedLength):
    """Keeps what it is told."""

    def __init__(self) -> None:
        super().__init__(4)
        self.scored: list[tuple[str, tuple[int, ...], tuple[int, ...]]] = []

    def record_acceptance(self, state: RequestState, draft: Draft, output_ids: Sequence[int]) -> None:
        self.scored.append((draft.drafter, draft.token_ids, tuple(output_ids)))


def test_every_offer_is_scored_by_what_came_whether_it_was_verified_or_not() -> None:
    policy, state = Scores(), state_of()
    drafting = Proposer((Scripted("a", (4, 5)), Scripted("b", (6,))), 10, policy)
    propose(drafting, state)
    assert policy.scored == []
    drafting.propose([extended(state, (4, 8))])
    assert policy.scored == [("a", (4, 5), (4, 8)), ("b", (6,), (4, 8))]


class Broken(FixedLength):
    """Cannot decide."""

    def select(self, proposals: Sequence[Proposal], load: PrefillLoad) -> list[Draft | None]:
        raise RuntimeError("no")


def test_a_policy_that_fails_costs_the_drafts_of_the_step() -> None:
    drafting = Proposer((Scripted("a", (4, 5)),), 10, Broken(4))
    assert propose(drafting, state_of()) == (None,)
    assert drafting.errors == {"policy": 1}


class Rests(Scores):
    """Wants two steps without questions after each decision."""

    def __init__(self) -> None:
        super().__init__()
        self.rests: list[tuple[int, int]] = []

    def num_steps_to_skip(self) -> int:
        return 2

    def record_skipped(self, num_steps: int, num_requests: int) -> None:
        self.rests.append((num_steps, num_requests))


def test_while_the_policy_rests_nobody_is_asked_unless_a_request_begins() -> None:
    policy, drafter, state = Rests(), Scripted("a", (4,)), state_of()
    drafting = Proposer((drafter,), 10, policy)
    propose(drafting, state)
    resting = []
    for _ in range(3):
        drafting.propose([state])
        resting.append(drafting.is_skipping)
    assert resting == [True, True, False] and len(drafter.asked) == 2
    assert policy.rests == [(2, 2)]
    drafting.propose([state])
    drafting.start(state_of("new"))
    drafting.propose([state])
    assert not drafting.is_skipping
    assert policy.rests == [(2, 2), (1, 1)], "a rest that was cut short counts as long as it was"


def test_a_step_of_prompts_alone_is_told_to_the_policy_whatever_was_before() -> None:
    drafting = Proposer((Scripted("a", (4,)),), 10, Rests())
    off = state_of("off", "off")
    drafting.start(off)
    resting = []
    for states in ([], [off], [], [off]):
        drafting.propose(states)
        resting.append(drafting.is_skipping)
    assert resting == [False, True, False, True]


def test_a_fixed_length_counts_what_it_chose() -> None:
    """Short where the drafter had no more: the histogram counts the drafts that the other figures count."""
    drafter = Scripted("a", (4, 5, 6))
    drafting, state = Proposer((drafter,), 10, FixedLength(2)), state_of()
    drafting.start(state)
    drafting.propose([state])
    drafter.guess = (4,)
    drafting.propose([state])
    assert drafting.stats().draft_length_counts == {"a": {2: 1, 1: 1}}


def test_what_was_delivered_reaches_the_drafters() -> None:
    class Learns(Scripted):
        def finish(self, request_id: str, output: Sequence[int] = ()) -> None:
            super().finish(request_id)
            learnt.append(tuple(output))

    learnt: list[tuple[int, ...]] = []
    drafting = Proposer((Learns("a", (4,)),), 10, FixedLength(4))
    drafting.start(state_of())
    drafting.finish("a", (1, 2))
    assert learnt == [(1, 2)]


@pytest.mark.parametrize(
    ("guess", "legal"),
    [((3, -1, 4), (3,)), ((3, 10, 4), (3,)), ((10,), None), ((1, 2, 3, 4, 5), (1, 2, 3, 4))],
)
def test_drafts_are_checked_against_the_vocabulary_and_the_bound(
    guess: tuple[int, ...], legal: tuple[int, ...] | None
) -> None:
    (draft,) = propose(Proposer((Scripted("d", guess),), 10, FixedLength(4)), state_of())
    assert (draft.token_ids if draft else None) == legal


@pytest.mark.parametrize(("guess", "legal"), [((3, 7, 4), (3,)), ((7, 4), None), ((3, 4), (3, 4))])
def test_a_draft_ends_before_what_is_never_sampled(
    guess: tuple[int, ...], legal: tuple[int, ...] | None
) -> None:
    drafting = Proposer((Scripted("d", guess),), 10, FixedLength(4), (), frozenset({7}))
    (draft,) = propose(drafting, state_of())
    assert (draft.token_ids if draft else None) == legal


def test_a_model_that_waits_is_not_asked() -> None:
    class Waits(Model):
        def num_pending_rows(self, request: DraftRequest) -> int:
            return 0 if request.state.id == "a" else 3

    model = Waits("model", (4, 5))
    drafting = Proposer((), 10, FixedLength(4), (model,))
    assert propose(drafting, state_of("a"), state_of("b")) == (None, Draft((4, 5), "model"))
    assert model.asked == [4]


def test_a_model_that_cannot_see_a_request_is_not_asked_about_it_again() -> None:
    lookup, model = Scripted("lookup", ()), Model("model", (4, 5))
    drafting, states = Proposer((lookup,), 10, FixedLength(4), (model,)), [state_of("a"), state_of("b")]
    assert propose(drafting, *states) == (Draft((4, 5), "model"),) * 2
    drafting.disable_draft_model("a")
    assert drafting.propose(states) == (None, Draft((4, 5), "model"))
    assert (lookup.live, model.live, drafting.errors) == ({"a", "b"}, {"b"}, {"model": 1})
    for name in ("a", "b"):
        drafting.finish(name)
    drafting.check()


def test_an_exception_drops_the_draft_and_is_counted(caplog: pytest.LogCaptureFixture) -> None:
    broken, sound = Scripted("broken", RuntimeError("no")), Scripted("sound", (4,))
    drafting = Proposer((broken, sound), 10, FixedLength(4))
    (draft,) = propose(drafting, state_of())
    assert draft == Draft((4,), "sound")
    assert drafting.errors == {"broken": 1}
    assert "broken failed" in caplog.text


def test_what_fails_in_every_step_does_not_flood_the_log(caplog: pytest.LogCaptureFixture) -> None:
    drafting, state = Proposer((Scripted("broken", RuntimeError("no")),), 10, FixedLength(4)), state_of()
    drafting.start(state)
    for _ in range(100):
        drafting.propose([state])
    assert drafting.errors == {"broken": 100}
    assert len(caplog.records) == 7 and "64 times" in caplog.text


def test_off_asks_nobody_and_a_name_asks_one() -> None:
    first, second = Scripted("first", (4,)), Scripted("second", (5,))
    drafting = Proposer((first, second), 10, FixedLength(4))
    off, named = state_of("off", "off"), state_of("named", "second")
    drafting.start(off)
    drafting.start(named)
    assert (first.live, second.live) == (set(), {"named"})
    assert drafting.propose([off, named]) == (None, Draft((5,), "second"))
    assert first.asked == []


class Books(FixedLength):
    """Knows who began and is not over, and cannot say what it decided."""

    def __init__(self) -> None:
        super().__init__(4)
        self.live: set[str] = set()

    def start(self, state: RequestState) -> None:
        self.live.add(state.id)

    def finish(self, request_id: str) -> None:
        self.live.remove(request_id)

    def stats(self) -> DraftingStats:
        raise RuntimeError("no")


def test_the_policy_decides_only_about_requests_that_may_draft() -> None:
    """The controller knows the others by the steps that serve them; who never asks would be missing in its next step."""
    policy = Books()
    drafting = Proposer((Scripted("d", (4,)),), 10, policy)
    drafting.start(state_of("off", "off"))
    drafting.start(state_of("on"))
    assert policy.live == {"on"}
    drafting.finish("off")
    drafting.finish("on")
    assert not policy.live and not drafting.errors


def test_a_policy_that_cannot_say_what_it_decided_costs_nothing() -> None:
    drafting = Proposer((Scripted("d", (4,)),), 10, Books())
    assert drafting.stats() == DraftingStats()
    assert drafting.errors == {"policy": 1}


class Lost(Model):
    """Does not know how far behind it is."""

    def num_pending_rows(self, request: DraftRequest) -> int:
        raise RuntimeError("no")


def test_a_model_that_fails_spoils_no_other_drafts() -> None:
    drafting = Proposer((Scripted("lookup", (4,)),), 10, FixedLength(4), (Lost("model", (5,)),))
    assert propose(drafting, state_of()) == (Draft((4,), "lookup"),)
    assert drafting.errors == {"model": 1}


def test_the_bound_is_the_least_of_server_request_and_room() -> None:
    drafter = Scripted("d", (4,) * 9)
    drafting = Proposer((drafter,), 10, FixedLength(6))
    propose(drafting, *(state for state in (state_of("a"), state_of("b", max_tokens=2), state_of("c"))))
    assert drafter.asked == [6, 2, 6]
    short = RequestState(Request("s", (1, 2, 3), SamplingParams(max_tokens=4), 0), 0, 100)
    propose(drafting, short)
    drafting.propose([extended(short, (7, 7, 7))])
    assert drafter.asked[3:] == [3], (
        "one token must be left for the target itself, and none is asked for in vain"
    )


class Odd(Scripted):
    """Answers with something that is no list of drafts."""

    def __init__(self, answer: object) -> None:
        super().__init__("odd", (4,))
        self.answer = answer

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft | None]:
        if callable(self.answer):
            return self.answer()  # type: ignore[no-any-return]
        return self.answer  # type: ignore[return-value]


def _raising() -> Iterator[Draft]:
    yield Draft((4,), "odd")
    raise RuntimeError("no")


@pytest.mark.parametrize(
    "answer",
    [[(4, 5)], 7, None, [], [Draft((4,), "a"), Draft((4,), "b")], _raising, [Draft("ab", "odd")]],  # type: ignore[arg-type]
)
def test_nonsense_is_dropped(answer: object) -> None:
    odd, sound = Odd(answer), Scripted("sound", (5,))
    drafting = Proposer((odd, sound), 10, FixedLength(4))
    assert propose(drafting, state_of()) == (Draft((5,), "sound"),)


def test_a_draft_bears_its_drafters_name() -> None:
    drafting = Proposer((Odd([Draft((4,), "somebody else")]),), 10, FixedLength(4))
    assert propose(drafting, state_of()) == (Draft((4,), "odd"),)


class Picky(Scripted):
    """Cannot start the request "bad", and would fall over it."""

    def start(self, state: RequestState) -> None:
        if state.id == "bad":
            raise RuntimeError("no")
        super().start(state)

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft | None]:
        assert all(ask.state.id in self.live for ask in requests)
        return super().propose(requests)


def test_a_request_that_could_not_be_started_spoils_nobody_elses_drafts() -> None:
    drafting = Proposer((Picky("picky", (4,)),), 10, FixedLength(4))
    assert propose(drafting, state_of("bad"), state_of("good")) == (None, Draft((4,), "picky"))
    assert drafting.errors == {"picky": 1}
    drafting.finish("bad")
    drafting.finish("good")
    drafting.check()
