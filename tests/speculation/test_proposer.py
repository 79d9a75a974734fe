"""The proposer: order, limits, and error isolation."""

from collections.abc import Container, Iterator, Sequence

import pytest

from foreword.core.outputs import Draft, DraftingStats
from foreword.core.params import SamplingParams, Speculation
from foreword.core.request import Request, RequestState
from foreword.speculation.draft_length.policy import FixedLength, PrefillLoad, Proposal
from foreword.speculation.engine_drafter import DraftRequest, EngineDrafter, NoFiniteLogits
from foreword.speculation.proposer import Proposer
from tests.support.fakes import extended


class Scripted(EngineDrafter):
    """Returns the same draft for every request."""

    def __init__(self, name: str, draft_ids: Sequence[int] | Exception) -> None:
        self.name = name
        self.draft_ids = draft_ids
        self.live: set[str] = set()
        self.asked: list[int] = []

    def start(self, state: RequestState) -> bool | None:
        self.live.add(state.id)
        return None

    def finish(self, request_id: str, output: Sequence[int] = ()) -> None:
        self.live.remove(request_id)

    def check(self, live: Container[str]) -> None:
        assert all(request_id in live for request_id in self.live)

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft | None]:
        self.asked += [request.max_draft_tokens for request in requests]
        if isinstance(self.draft_ids, Exception):
            raise self.draft_ids
        return [Draft(tuple(self.draft_ids), self.name) if self.draft_ids else None for _ in requests]


def state_of(
    name: str = "a", method: str = "auto", max_tokens: int | None = None, **params: object
) -> RequestState:
    speculation = Speculation(method, max_tokens)
    return RequestState(
        Request(name, (1, 2, 3), SamplingParams(speculation=speculation, **params), 0), 0, 100
    )  # type: ignore[arg-type]


def propose(proposer: Proposer, *states: RequestState) -> tuple[Draft | None, ...]:
    """Start the requests, and propose."""
    for state in states:
        proposer.start(state)
    drafts = proposer.propose(states)
    proposer.check()
    return drafts


def test_first_drafter_with_a_draft_wins() -> None:
    silent, loud, late = Scripted("silent", ()), Scripted("loud", (4, 5)), Scripted("late", (6,))
    proposer = Proposer((silent, loud, late), 10, FixedLength(4))
    assert propose(proposer, state_of()) == (Draft((4, 5), "loud"),)


class Fallback(Scripted):
    """Keeps the requests that it is asked for."""

    is_fallback = True

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft | None]:
        self.asked_ids = [request.state.id for request in requests]
        return super().propose(requests)


def test_fallback_is_asked_where_no_draft_is_long_and_likely_right() -> None:
    confidence = {"sure": (0.95,) * 8, "short": (0.95,) * 7, "unsure": (0.9,) * 8, "unknown": ()}
    suffix, fallback = Scripted("suffix", (4,) * 8), Fallback("fallback", ())

    def propose_scored(requests: Sequence[DraftRequest]) -> list[Draft | None]:
        scores = [confidence[request.state.id] for request in requests]
        return [Draft((4,) * max(len(each), 1), "suffix", each) for each in scores]

    suffix.propose = propose_scored  # type: ignore[method-assign]
    propose(Proposer((suffix, fallback), 10, FixedLength(32)), *map(state_of, confidence))
    assert fallback.asked_ids == ["short", "unsure", "unknown"]


class Model(Scripted):
    """A model-based drafter."""

    def num_pending_rows(self, request: DraftRequest) -> int:
        return 3

    def pass_seconds(self, num_rows: int, num_sampled: int) -> float:
        return 0.1


def test_model_runs_only_without_other_drafts() -> None:
    lookup, model = Scripted("lookup", (4,)), Model("model", (5, 6))
    proposer = Proposer((lookup,), 10, FixedLength(4), (model,))
    assert propose(proposer, state_of()) == (Draft((4,), "lookup"),)
    assert model.asked == []
    lookup.draft_ids = ()
    assert proposer.propose([state_of()]) == (Draft((5, 6), "model"),)


class Scores(FixedLength):
    """Records the scores."""

    def __init__(self) -> None:
        super().__init__(4)
        self.scored: list[tuple[str, tuple[int, ...], tuple[int, ...]]] = []

    def record_acceptance(self, state: RequestState, draft: Draft, output_ids: Sequence[int]) -> None:
        self.scored.append((draft.drafter, draft.token_ids, tuple(output_ids)))


def test_all_proposals_are_scored_verified_or_not() -> None:
    policy, state = Scores(), state_of()
    proposer = Proposer((Scripted("a", (4, 5)), Scripted("b", (6,))), 10, policy)
    propose(proposer, state)
    assert policy.scored == []
    proposer.propose([extended(state, (4, 8))])
    assert policy.scored == [("a", (4, 5), (4, 8)), ("b", (6,), (4, 8))]


class Rests(Scores):
    """Skips two steps after each decision."""

    def __init__(self) -> None:
        super().__init__()
        self.rests: list[tuple[int, int]] = []

    def num_steps_to_skip(self) -> int:
        return 2

    def record_skipped(self, num_steps: int, num_requests: int) -> None:
        self.rests.append((num_steps, num_requests))


def test_skipping_ends_when_a_request_begins() -> None:
    policy, drafter, state = Rests(), Scripted("a", (4,)), state_of()
    proposer = Proposer((drafter,), 10, policy)
    propose(proposer, state)
    resting = []
    for _ in range(3):
        proposer.propose([state])
        resting.append(proposer.is_skipping)
    assert resting == [True, True, False] and len(drafter.asked) == 2
    assert policy.rests == [(2, 2)]
    proposer.propose([state])
    proposer.start(state_of("new"))
    proposer.propose([state])
    assert not proposer.is_skipping
    assert policy.rests == [(2, 2), (1, 1)], "an interrupted skip counts its actual steps"


@pytest.mark.parametrize("num_steps", [2, 3, 4, 9])
def test_last_of_several_skipped_steps_is_a_cost_sample(
    num_steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By then the caches are those of plain decoding."""
    monkeypatch.setattr(Rests, "num_steps_to_skip", lambda policy: num_steps)
    proposer, state = Proposer((Scripted("a", (4,)),), 10, Rests()), state_of()
    propose(proposer, state)
    samples = []
    for _ in range(num_steps + 1):
        proposer.propose([state])
        samples.append(proposer.should_sample_cost)
    assert samples == [*[False] * (num_steps - 1), num_steps > 3, False]


def test_steps_of_requests_that_never_draft_are_no_cost_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """The request whose steps were skipped has ended; another one goes on alone."""
    monkeypatch.setattr(Rests, "num_steps_to_skip", lambda policy: 9)
    proposer, state = Proposer((Scripted("a", (4,)),), 10, Rests()), state_of()
    other = state_of("other", max_tokens=0)
    propose(proposer, state)
    proposer.start(other)
    for _ in range(5):
        proposer.propose([state, other])
    proposer.finish(state.id)
    samples = 0
    for _ in range(30):
        proposer.propose([other])
        samples += proposer.should_sample_cost
    assert samples == 1


def test_skipping_outlasts_a_request_that_waits() -> None:
    class Waits(Rests):
        def start(self, state: RequestState) -> int:
            super().start(state)
            return 1

    policy, state = Waits(), state_of()
    proposer = Proposer((Scripted("a", (4,)),), 10, policy)
    propose(proposer, state)
    proposer.start(state_of("new"))
    resting = []
    for _ in range(2):
        proposer.propose([state])
        resting.append(proposer.is_skipping)
    assert resting == [True, False], "one of the two steps: the new request waits no longer"


def test_request_without_draft_tokens_is_one_without_speculation() -> None:
    """So its steps can overlap with the host: none waits for a proposal."""
    drafter, state = Scripted("a", (4,)), state_of(max_tokens=0)
    proposer = Proposer((drafter,), 10, Rests())
    assert propose(proposer, state) == (None,)
    assert proposer.is_skipping and proposer.fixed_draft_len([state], 1000) == 0
    assert not drafter.live
    proposer.finish(state.id)


def test_prefill_steps_are_not_skipped_steps() -> None:
    proposer = Proposer((Scripted("a", (4,)),), 10, Rests())
    off = state_of("off", "off")
    proposer.start(off)
    resting = []
    for states in ([], [off], [], [off]):
        proposer.propose(states)
        resting.append(proposer.is_skipping)
    assert resting == [False, True, False, True]


def test_fixed_length_counts_its_drafts() -> None:
    """Including short drafts: the histogram must agree with the other metrics."""
    drafter = Scripted("a", (4, 5, 6))
    proposer, state = Proposer((drafter,), 10, FixedLength(2)), state_of()
    proposer.start(state)
    proposer.propose([state])
    drafter.draft_ids = (4,)
    proposer.propose([state])
    assert proposer.stats().draft_length_counts == {"a": {2: 1, 1: 1}}


def test_finish_passes_the_output_to_drafters() -> None:
    class Learns(Scripted):
        def finish(self, request_id: str, output: Sequence[int] = ()) -> None:
            super().finish(request_id)
            learned.append(tuple(output))

    learned: list[tuple[int, ...]] = []
    proposer = Proposer((Learns("a", (4,)),), 10, FixedLength(4))
    proposer.start(state_of())
    proposer.finish("a", (1, 2))
    assert learned == [(1, 2)]


@pytest.mark.parametrize(
    ("draft_ids", "legal"),
    [
        ((3, -1, 4), (3,)),
        ((3, 10, 4), (3,)),
        ((10,), None),
        ((1, 2, 3, 4, 5), (1, 2, 3, 4)),
        ((3, 7, 4), (3,)),
        ((7, 4), None),
        ((3, 4), (3, 4)),
    ],
)
def test_drafts_are_cut_at_the_bound_and_ids_that_are_never_sampled(
    draft_ids: tuple[int, ...], legal: tuple[int, ...] | None
) -> None:
    """The vocabulary has 10 ids, of which 7 is never sampled."""
    proposer = Proposer((Scripted("d", draft_ids),), 10, FixedLength(4), (), frozenset({7}))
    (draft,) = propose(proposer, state_of())
    assert (draft.token_ids if draft else None) == legal


def test_model_with_nothing_computable_is_not_called() -> None:
    class Waits(Model):
        def num_pending_rows(self, request: DraftRequest) -> int:
            return 0 if request.state.id == "a" else 3

    model = Waits("model", (4, 5))
    proposer = Proposer((), 10, FixedLength(4), (model,))
    assert propose(proposer, state_of("a"), state_of("b")) == (None, Draft((4, 5), "model"))
    assert model.asked == [4]


def test_disabled_draft_model_is_not_called_again() -> None:
    lookup, model = Scripted("lookup", ()), Model("model", (4, 5))
    proposer, states = Proposer((lookup,), 10, FixedLength(4), (model,)), [state_of("a"), state_of("b")]
    assert propose(proposer, *states) == (Draft((4, 5), "model"),) * 2
    proposer.disable_draft_model("a")
    assert proposer.propose(states) == (None, Draft((4, 5), "model"))
    assert (lookup.live, model.live, proposer.errors) == ({"a", "b"}, {"b"}, {"model": 1})
    for name in ("a", "b"):
        proposer.finish(name)
    proposer.check()


class Broken(Model):
    """A model without finite logits for some requests."""

    broken_ids: tuple[str, ...] = ()

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft | None]:
        drafts = super().propose(requests)
        if lost := [request.state.id for request in requests if request.state.id in self.broken_ids]:
            raise NoFiniteLogits(lost)
        return drafts


@pytest.mark.parametrize("draft_ids", [(), (9,)])
def test_model_that_never_had_finite_logits_is_removed(
    caplog: pytest.LogCaptureFixture, draft_ids: tuple[int, ...]
) -> None:
    """For all requests, with one line; other drafts of the step go on."""
    lookup, model = Scripted("lookup", draft_ids), Broken("model", (4, 5))
    model.broken_ids = ("a",)
    policy = Asks(4)
    proposer, states = Proposer((lookup,), 10, policy, (model,)), [state_of("a"), state_of("b")]
    for _ in range(3):
        drafts = propose(proposer, *states) if not model.asked else proposer.propose(states)
        assert drafts == ((Draft((9,), "lookup") if draft_ids else None),) * 2
    proposer.start(state_of("c"))
    assert (lookup.live, model.live) == ({"a", "b", "c"}, set())
    assert model.asked == [4, 4] and proposer.errors == {"model": 1}
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == [
        "drafter model failed and is removed"
    ]
    for name in ("a", "b", "c"):
        proposer.finish(name)
    proposer.check()


def test_model_that_has_drafted_goes_on_for_requests_with_finite_logits() -> None:
    model = Broken("model", (4, 5))
    proposer, states = Proposer((), 10, FixedLength(4), (model,)), [state_of("a"), state_of("b")]
    assert propose(proposer, *states) == (Draft((4, 5), "model"),) * 2
    model.broken_ids = ("a",)
    assert proposer.propose(states) == (None, None)
    for _ in range(3):
        assert proposer.propose(states) == (None, Draft((4, 5), "model"))
    assert (model.live, proposer.errors) == ({"b"}, {"model": 1})


def test_empty_draft_of_a_model_is_scored() -> None:
    """No token was legal; a lookup without a draft cost next to nothing."""
    policy, model = Scores(), Model("model", ())
    model.propose = lambda requests: [Draft((), "model"), None]  # type: ignore[method-assign]
    proposer = Proposer((Scripted("lookup", ()),), 10, policy, (model,))
    assert propose(proposer, state_of("a"), state_of("b")) == (None, None)
    assert policy.scored == [("model", (), ())]


class Asks(FixedLength):
    """Runs models for all requests."""

    def plan_draft_model(
        self, proposals: Sequence[Proposal], load: PrefillLoad, drafter: str, pending_rows: Sequence[int]
    ) -> list[tuple[int, float]]:
        return [(proposal.request.max_draft_tokens, 0.0) for proposal in proposals]


def test_policy_forgets_a_request_without_drafters() -> None:
    finished: list[str] = []

    class Records(FixedLength):
        def finish(self, request_id: str) -> None:
            finished.append(request_id)

    proposer = Proposer((), 10, Records(4), (Model("model", (4, 5)),))
    propose(proposer, state_of())
    proposer.disable_draft_model("a")
    proposer.finish("a")
    assert finished == ["a"]


def test_drafter_exception_drops_the_draft_and_is_counted(caplog: pytest.LogCaptureFixture) -> None:
    """Repeated errors do not flood the log."""
    broken, sound = Scripted("broken", RuntimeError("no")), Scripted("sound", (4,))
    proposer, state = Proposer((broken, sound), 10, FixedLength(4)), state_of()
    proposer.start(state)
    for _ in range(100):
        assert proposer.propose([state]) == (Draft((4,), "sound"),)
    assert proposer.errors == {"broken": 100}
    assert len(caplog.records) == 7 and "broken failed, 64 times" in caplog.text


def test_method_selects_the_drafters() -> None:
    first, second = Scripted("first", (4,)), Scripted("second", (5,))
    proposer = Proposer((first, second), 10, FixedLength(4))
    off, named = state_of("off", "off"), state_of("named", "second")
    proposer.start(off)
    proposer.start(named)
    assert (first.live, second.live) == (set(), {"named"})
    assert proposer.propose([off, named]) == (None, Draft((5,), "second"))
    assert first.asked == []


def test_drafter_that_refuses_a_request_is_not_asked_for_it() -> None:
    """Its start() returns False: neither propose() nor finish() follows."""
    choosy, other = Choosy("choosy", (4,)), Scripted("other", (5,))
    proposer = Proposer((choosy, other), 10, FixedLength(4))
    assert propose(proposer, state_of("a"), state_of("wanted")) == (
        Draft((5,), "other"),
        Draft((4,), "choosy"),
    )
    assert len(choosy.asked) == 1 and len(other.asked) == 2
    for name in ("a", "wanted"):
        proposer.finish(name)
    assert choosy.live == other.live == set() and not proposer.errors


class Choosy(Scripted):
    """Drafts for one request only."""

    def start(self, state: RequestState) -> bool:
        if state.id == "wanted":
            super().start(state)
        return state.id == "wanted"


class Faulty(FixedLength):
    """Records live requests; select() and stats() fail."""

    def __init__(self) -> None:
        super().__init__(4)
        self.live: set[str] = set()

    def start(self, state: RequestState) -> None:
        self.live.add(state.id)

    def finish(self, request_id: str) -> None:
        self.live.remove(request_id)

    def select(self, proposals: Sequence[Proposal], load: PrefillLoad) -> list[Draft | None]:
        raise RuntimeError("no")

    def stats(self) -> DraftingStats:
        raise RuntimeError("no")


def test_policy_sees_only_speculative_requests() -> None:
    """The controller learns of other requests from recorded steps."""
    policy = Faulty()
    proposer = Proposer((Scripted("d", (4,)),), 10, policy)
    proposer.start(state_of("off", "off"))
    proposer.start(state_of("on"))
    assert policy.live == {"on"}
    proposer.finish("off")
    proposer.finish("on")
    assert not policy.live and not proposer.errors


def test_policy_error_costs_only_the_drafts() -> None:
    proposer = Proposer((Scripted("d", (4,)),), 10, Faulty())
    assert propose(proposer, state_of()) == (None,) and proposer.errors == {"policy": 1}
    assert proposer.stats() == DraftingStats() and proposer.errors == {"policy": 2}


class Lost(Model):
    """num_pending_rows() fails."""

    def num_pending_rows(self, request: DraftRequest) -> int:
        raise RuntimeError("no")


def test_model_error_keeps_other_drafts() -> None:
    proposer = Proposer((Scripted("lookup", (4,)),), 10, FixedLength(4), (Lost("model", (5,)),))
    assert propose(proposer, state_of()) == (Draft((4,), "lookup"),)
    assert proposer.errors == {"model": 1}


def test_bound_is_the_minimum_of_server_request_and_room() -> None:
    drafter = Scripted("d", (4,) * 9)
    proposer = Proposer((drafter,), 10, FixedLength(6))
    propose(proposer, *(state for state in (state_of("a"), state_of("b", max_tokens=2), state_of("c"))))
    assert drafter.asked == [6, 2, 6]
    short = RequestState(Request("s", (1, 2, 3), SamplingParams(max_tokens=4), 0), 0, 100)
    propose(proposer, short)
    proposer.propose([extended(short, (7, 7, 7))])
    assert drafter.asked[3:] == [3], (
        "one token must be left for the target, and no draft of length 0 is requested"
    )


class Odd(Scripted):
    """Returns an invalid result."""

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
def test_invalid_results_are_dropped(answer: object) -> None:
    odd, sound = Odd(answer), Scripted("sound", (5,))
    proposer = Proposer((odd, sound), 10, FixedLength(4))
    assert propose(proposer, state_of()) == (Draft((5,), "sound"),)


def test_draft_gets_the_drafters_name() -> None:
    proposer = Proposer((Odd([Draft((4,), "another")]),), 10, FixedLength(4))
    assert propose(proposer, state_of()) == (Draft((4,), "odd"),)


class Picky(Scripted):
    """Fails to start the request "bad"."""

    def start(self, state: RequestState) -> None:
        if state.id == "bad":
            raise RuntimeError("no")
        super().start(state)

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft | None]:
        assert all(request.state.id in self.live for request in requests)
        return super().propose(requests)


def test_failed_start_keeps_drafts_of_others() -> None:
    proposer = Proposer((Picky("picky", (4,)),), 10, FixedLength(4))
    assert propose(proposer, state_of("bad"), state_of("good")) == (None, Draft((4,), "picky"))
    assert proposer.errors == {"picky": 1}
    proposer.finish("bad")
    proposer.finish("good")
    proposer.check()
