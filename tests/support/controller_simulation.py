"""A simulated engine: roofline machines, drafters with known acceptance, and a simulated clock.

Each output token is 1; a draft token is right if it is 1 and wrong if it is 0. A seed fixes which positions
of an output are drafted correctly, so policies are compared on the same drafts.

`python -m tests.support.controller_simulation` prints the tables of docs/lab/controller.md.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from itertools import count

from foreword.core.outputs import Draft
from foreword.core.params import SamplingParams, Speculation
from foreword.core.request import Request, RequestState
from foreword.speculation.draft_length.controller import DraftLengthController
from foreword.speculation.draft_length.cost_model import Calibration, PassCost
from foreword.speculation.draft_length.policy import FixedLength, Policy, PrefillLoad, RequestStep, StepRecord
from foreword.speculation.engine_drafter import DraftRequest, EngineDrafter
from foreword.speculation.proposer import Proposer

ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 1024, 2048)
STEP = 0.01  # seconds of a step of one row


@dataclass(frozen=True)
class SimulatedMachine:
    """A roofline: step time is constant up to `ridge_rows`, then proportional to the rows."""

    name: str
    ridge_rows: int
    speed: Callable[[float], float] = lambda now: 1.0  # at a time; 1 as calibrated
    noise: float = 0.0  # relative deviation of a step
    cold: float = 0.0  # share by which a step takes longer after proposing, which leaves cold caches

    def seconds(self, rows: int) -> float:
        return STEP * max(rows / self.ridge_rows, 1.0)

    def calibration(self) -> Calibration:
        seconds = {rows: self.seconds(rows) for rows in ROWS}
        return Calibration(seconds, seconds)


def swinging_bandwidth(now: float) -> float:
    """Bandwidth that halves and recovers every 200 steps of the calibrated speed."""
    return 0.5 if int(now / (100 * STEP)) % 2 else 1.0


@dataclass(frozen=True)
class SimulatedOutput:
    """One output to generate."""

    num_tokens: int
    acceptance: Callable[[int], float]  # P(draft token right) by output index
    has_confidence: bool = False  # drafts state this probability
    draft_share: float = 1.0  # of the positions with a draft
    num_prompt_tokens: int = 8
    speculates: bool = True


def constant_acceptance(chance: float) -> Callable[[int], float]:
    return lambda index: chance


def mixed_acceptance(
    seed: int, good: float = 0.97, bad: float = 0.15, share: float = 0.5
) -> Callable[[int], float]:
    """Easy and hard positions, about a dozen of one kind in a row."""

    def chance(index: int) -> float:
        return good if random.Random(seed * 7919 + index // 12).random() < share else bad

    return chance


@dataclass
class DraftablePositions:
    """The positions of one output that a drafter drafts, and drafts correctly."""

    right: list[bool]
    chance: list[float]
    offered: list[bool]

    @classmethod
    def sample(cls, text: SimulatedOutput, seed: int) -> DraftablePositions:
        rng = random.Random(seed)
        chance = [text.acceptance(index) for index in range(text.num_tokens + 64)]
        return cls(
            [rng.random() < p for p in chance], chance, [rng.random() < text.draft_share for _ in chance]
        )


class SimulatedHostDrafter(EngineDrafter):
    """A lookup drafter: each request costs `seconds`."""

    def __init__(self, name: str, server: SimulatedServer, seconds: float) -> None:
        self.name = name
        self.server = server
        self.seconds = seconds

    def start(self, state: RequestState) -> None: ...

    def finish(self, request_id: str, output: Sequence[int] = ()) -> None: ...

    def check(self, live: Container[str]) -> None: ...

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft | None]:
        self.server.now += self.seconds * len(requests)
        return [self._propose(request) for request in requests]

    def _propose(self, request: DraftRequest) -> Draft | None:
        state = request.state
        text, positions = self.server.texts[state.id], self.server.positions[self.name, state.id]
        start = state.num_output
        if not positions.offered[start]:
            return None
        part = slice(start, start + request.max_draft_tokens)
        confidence = tuple(positions.chance[part]) if text.has_confidence else ()
        return Draft(tuple(map(int, positions.right[part])), self.name, confidence)


class SimulatedModelDrafter(SimulatedHostDrafter):
    """A draft model whose pass costs `share` of a step of as many rows."""

    def __init__(self, name: str, server: SimulatedServer, share: float) -> None:
        super().__init__(name, server, 0.0)
        self.share = share
        self.computed: dict[str, int] = {}

    def finish(self, request_id: str, output: Sequence[int] = ()) -> None:
        self.computed.pop(request_id, None)

    def num_pending_rows(self, request: DraftRequest) -> int:
        return max(request.num_tokens - self.computed.get(request.state.id, 0), 1)

    def pass_seconds(self, num_rows: int, num_sampled: int) -> float:
        return self.share * self.server.machine.seconds(num_rows)

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft | None]:
        self._pass(sum(map(self.num_pending_rows, requests)))
        drafts = [self._propose(request) for request in requests]
        kept = [self._truncated(request, draft) for request, draft in zip(requests, drafts, strict=True)]
        for length in range(1, max(len(draft.token_ids) for draft in kept)):
            self._pass(sum(len(draft.token_ids) > length for draft in kept))
        for request in requests:
            self.computed[request.state.id] = request.num_tokens
        return list(kept)

    def _pass(self, rows: int) -> None:
        self.server.now += self.share * self.server.machine.seconds(rows) * self.server.slowdown()

    def _truncated(self, request: DraftRequest, draft: Draft | None) -> Draft:
        assert draft is not None
        product = 1.0
        for index, confidence in enumerate(draft.confidence):
            product *= confidence
            if product < request.min_prob:
                return Draft(draft.token_ids[: index + 1], draft.drafter, draft.confidence[: index + 1])
        return draft


@dataclass
class SimulationResult:
    """Result of a run."""

    seconds: float = 0.0
    tokens: int = 0
    latencies: dict[int, float] = field(default_factory=dict)  # seconds by index of the output
    rows: int = 0
    emitted: int = 0
    steps: list[tuple[float, int, int]] = field(default_factory=list)

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds

    @property
    def efficiency(self) -> float:
        """Emitted tokens per verified row, over requests with drafts."""
        return self.emitted / self.rows if self.rows else 1.0


class SimulatedServer:
    """A machine that generates outputs, `concurrency` at once; the next begins when one ends."""

    def __init__(
        self,
        machine: SimulatedMachine,
        texts: Sequence[SimulatedOutput],
        concurrency: int,
        asking: float = 0.0,
        share: float = 0.0,
    ) -> None:
        self.machine = machine
        self.outputs = list(texts)
        self.concurrency = concurrency
        self.now = 0.0
        self.texts: dict[str, SimulatedOutput] = {}
        self.positions: dict[tuple[str, str], DraftablePositions] = {}
        self.hosts: list[EngineDrafter] = [SimulatedHostDrafter("suffix", self, asking * STEP / concurrency)]
        self.models = [SimulatedModelDrafter("draft", self, share)] if share else []
        self._rng = random.Random(5)

    def slowdown(self) -> float:
        return 1.0 / self.machine.speed(self.now)

    def passes(self) -> dict[str, PassCost]:
        return {
            model.name: PassCost.from_seconds({rows: model.pass_seconds(rows, rows) for rows in ROWS})
            for model in self.models
        }

    def run(self, policy: Policy | None, hosts: bool = True) -> SimulationResult:
        """Generate all outputs; policy None: speculation is off."""
        names = [*self.hosts] if hosts else []
        proposer = Proposer(names, 2, policy, self.models, clock=lambda: self.now) if policy else None
        outcome = SimulationResult()
        live: dict[str, tuple[RequestState, float]] = {}
        waiting = count()
        while live or len(outcome.latencies) < len(self.outputs):
            while len(live) < self.concurrency and (index := next(waiting)) < len(self.outputs):
                self._start(index, live, proposer)
            self._step(live, proposer, outcome)
        outcome.seconds = self.now
        return outcome

    def _start(
        self, index: int, live: dict[str, tuple[RequestState, float]], proposer: Proposer | None
    ) -> None:
        text, name = self.outputs[index], str(index)
        self.texts[name] = text
        self.positions["suffix", name] = DraftablePositions.sample(text, index)
        self.positions["draft", name] = DraftablePositions.sample(text, index + 10_000)
        speculation = Speculation(method="auto" if text.speculates else "off")
        params = SamplingParams(temperature=0.0, max_tokens=text.num_tokens, speculation=speculation)
        state = RequestState(Request(name, (1,) * text.num_prompt_tokens, params, 0), index, 1 << 20)
        live[name] = state, self.now
        if proposer:
            proposer.start(state)

    def _step(
        self,
        live: dict[str, tuple[RequestState, float]],
        proposer: Proposer | None,
        outcome: SimulationResult,
    ) -> None:
        begin = self.now
        states = [state for state, _ in live.values()]
        self._draft(states, proposer)
        drafted = self.now
        runs = [_run(state) for state in states]
        rows = sum(state.num_uncomputed + len(state.draft) for state in states)
        is_cold = proposer is not None and not proposer.is_skipping
        variation = (1 + self.machine.noise * self._rng.gauss(0, 1)) * (1 + self.machine.cold * is_cold)
        self.now += self.machine.seconds(rows) * self.slowdown() * variation
        served = tuple(
            RequestStep(s, s.num_uncomputed, len(s.draft), True, len(run), len(s.tokens))
            for s, run in zip(states, runs, strict=True)
        )
        self._count(outcome, served)
        record = StepRecord(served, {"forward": self.now - drafted, "draft": drafted - begin})
        if proposer and not proposer.is_skipping:
            proposer.record_step(record)
        elif proposer and proposer.should_sample_cost:
            proposer.record_plain_step(record)
        for state, run in zip(states, runs, strict=True):
            state.num_computed = len(state.tokens) + len(run) - 1
            state.append(run)
            state.set_draft((), "")
            if len(state.tokens) == state.max_len:
                outcome.latencies[int(state.id)] = self.now - live.pop(state.id)[1]
                if proposer:
                    proposer.finish(state.id)
        outcome.steps.append((self.now - begin, sum(map(len, runs)), rows))

    def _draft(self, states: Sequence[RequestState], proposer: Proposer | None) -> None:
        """Propose for decoding requests."""
        if proposer is None:
            return
        ready = [state for state in states if state.num_uncomputed == 1]
        prompts = [state.num_uncomputed for state in states if state.num_uncomputed > 1]
        for state, draft in zip(
            ready, proposer.propose(ready, PrefillLoad(sum(prompts), sum(prompts))), strict=True
        ):
            if draft:
                state.set_draft(draft.token_ids, draft.drafter)
        assert not proposer.errors, proposer.errors

    def _count(self, outcome: SimulationResult, served: Sequence[RequestStep]) -> None:
        outcome.tokens += sum(one.num_emitted for one in served)
        drafted = [one for one in served if one.num_draft_tokens]
        outcome.rows += sum(one.num_draft_tokens + 1 for one in drafted)
        outcome.emitted += sum(one.num_emitted for one in drafted)


def _run(state: RequestState) -> tuple[int, ...]:
    """Tokens that a step emits: the correct draft tokens and one more, within the limit."""
    wrong = state.draft.index(0) if 0 in state.draft else len(state.draft)
    return (1,) * min(wrong + 1, state.max_len - len(state.tokens))


GPU, CPU, SMALL_CPU = (
    SimulatedMachine("ridge at 96", 96),
    SimulatedMachine("ridge at 14", 14),
    SimulatedMachine("ridge at 4", 4),
)
NOISY = [
    SimulatedMachine(f"{m.name}, swinging", m.ridge_rows, swinging_bandwidth, 0.05)
    for m in (GPU, CPU, SMALL_CPU)
]
LENGTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)


class SimulationCase:
    """One machine and workload: without drafts, adaptive, and with fixed lengths."""

    def __init__(
        self,
        machine: SimulatedMachine,
        texts: Sequence[SimulatedOutput],
        concurrency: int,
        asking: float = 0.01,
        share: float = 0.0,
    ):
        self._parts = machine, texts, concurrency, asking, share
        self.off = self._new_server().run(None)
        server = self._new_server()
        self.controller = DraftLengthController(machine.calibration(), 32, server.passes())
        self.hosts = not share
        self.auto = server.run(self.controller, self.hosts)

    def _new_server(self) -> SimulatedServer:
        return SimulatedServer(*self._parts)

    @property
    def gain(self) -> float:
        return self.auto.rate / self.off.rate

    def best_fixed(self, lengths: Sequence[int] = LENGTHS) -> float:
        """The best gain of any fixed length, or of no drafts."""
        rates = [self._new_server().run(FixedLength(length), self.hosts).rate for length in lengths]
        return max([*rates, self.off.rate]) / self.off.rate

    @property
    def slowest(self) -> float:
        """The lowest speedup of any request."""
        return min(self.off.latencies[i] / self.auto.latencies[i] for i in self.off.latencies)

    @property
    def exploring(self) -> float:
        return self.controller.stats().exploring_seconds / self.auto.seconds

    def row(self, name: str) -> str:
        """One line of a table."""
        machine, _, concurrency, _, _ = self._parts
        gain, best = self.gain, self.best_fixed()
        ratios = f"{gain:.2f} | {best:.2f} | {gain / best:.2f} | {self.slowest:.2f}"
        shares = f"{self.auto.efficiency:.0%} | {self.exploring:.2%}"
        return f"| {machine.name} | {concurrency} | {name} | {ratios} | {shares} |"


def tables() -> None:
    """Print the grid: free drafts, then those of a draft model."""
    columns = (
        "| machine | at once | {} | auto | best fixed | of best | slowest request | efficiency | exploring |"
    )
    title = columns + "\n" + 9 * "|---" + "|"
    print(title.format("acceptance"))
    for machine in (GPU, CPU, SMALL_CPU, *NOISY):
        for concurrency in (1, 4, 16, 64):
            count = concurrency * max(2, 6 // concurrency)
            for name, texts in _kinds_of_texts(count).items():
                print(SimulationCase(machine, texts, concurrency).row(name), flush=True)
    print("\n" + title.format("pass cost; acceptance"))
    for machine in (GPU, CPU):
        for concurrency in (1, 4, 16):
            for share in (0.05, 0.15, 0.4):
                for chance in (0.0, 0.6, 0.8, 0.95):
                    texts = [SimulatedOutput(300, constant_acceptance(chance), num_prompt_tokens=64)] * (
                        concurrency * max(2, 6 // concurrency)
                    )
                    print(
                        SimulationCase(machine, texts, concurrency, 0.0, share).row(
                            f"{share:.0%}; {chance:.0%}"
                        ),
                        flush=True,
                    )


def _kinds_of_texts(count: int) -> dict[str, list[SimulatedOutput]]:
    return {
        "0 %": [SimulatedOutput(300, constant_acceptance(0.0))] * count,
        "30 %": [SimulatedOutput(300, constant_acceptance(0.3))] * count,
        "60 %": [SimulatedOutput(300, constant_acceptance(0.6))] * count,
        "90 %": [SimulatedOutput(300, constant_acceptance(0.9))] * count,
        "95 or 2 %, by request": [
            SimulatedOutput(300, constant_acceptance(0.95 if i % 2 else 0.02)) for i in range(count)
        ],
        "97 or 15 %, by position": [SimulatedOutput(300, mixed_acceptance(i)) for i in range(count)],
        "the same, with confidence": [
            SimulatedOutput(300, mixed_acceptance(i), has_confidence=True) for i in range(count)
        ],
    }


if __name__ == "__main__":
    tables()
