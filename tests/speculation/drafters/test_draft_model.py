"""The draft model: acceptance, rejection, few blocks, and the window."""

import math
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from foreword import LLM, RequestOutput, SamplingParams
from foreword.core.batch import Batch
from foreword.core.outputs import Draft
from foreword.core.request import Request, RequestState
from foreword.errors import ConfigError
from foreword.kernels.cpu.library import supported_isas
from foreword.kernels.registry import select_backend
from foreword.kv_cache.block_pool import BlockPool
from foreword.kv_cache.storage import KVStorage
from foreword.models.interfaces import Precision
from foreword.models.model_loader import load_model
from foreword.sampling.sampler import Sampler
from foreword.speculation.drafters.draft_model import DraftState, ModelDrafter
from foreword.speculation.engine_drafter import DraftRequest
from tests.support.budget import examples
from tests.support.checkpoints import VOCAB_SIZE, write_checkpoint, write_drafter
from tests.support.fakes import extended

PROMPTS = [{"prompt_token_ids": [40 + i, 41, 42, 43 + i]} for i in range(6)]
LONG = SamplingParams(temperature=0, max_tokens=80, ignore_eos=True)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("draft") / "model", "llama", seed=5)


def load(model: Path, drafter: Path | None, **options: object) -> LLM:
    defaults = {"max_model_len": 96, "kv_cache_memory": "2000tokens", "threads": 1, "draft_length": "fixed"}
    speculate = "draft" if drafter else "off"
    return LLM(
        str(model), speculate=speculate, draft_model=str(drafter) if drafter else None, **(defaults | options)
    )  # type: ignore[arg-type]


def check_against_plain(llm: LLM, checkpoint: Path, params: SamplingParams) -> list[RequestOutput]:
    """The outputs, which equal those without a draft model."""
    outputs, plain = (one.generate(PROMPTS, params) for one in (llm, load(checkpoint, None)))
    assert [output.token_ids for output in outputs] == [output.token_ids for output in plain]
    llm.check()
    return outputs


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.0},
        {"temperature": 1.0, "seed": 3},
        {"temperature": 0.8, "top_p": 0.9, "repetition_penalty": 1.2, "seed": 9},
    ],
)
def test_draft_model_equal_to_target_is_always_accepted(checkpoint: Path, params: dict[str, float]) -> None:
    """Same weights, noise and history: every draft token is the target's sample."""
    llm = load(checkpoint, checkpoint)
    for output in llm.generate(PROMPTS, SamplingParams(max_tokens=30, ignore_eos=True, **params)):  # type: ignore[arg-type]
        assert output.metrics is not None
        assert output.metrics.draft_tokens_acceptance == 1.0
        assert output.metrics.verify_steps == 6  # 1 token from the prefill step, then 5 per step


def test_rejected_draft_changes_no_output(checkpoint: Path, tmp_path: Path) -> None:
    """Acceptance survives rejections: the KV cache never keeps a rejected token."""
    rounded = write_checkpoint(tmp_path / "rounded", "llama", seed=5, dtype="bfloat16")
    outputs = check_against_plain(load(checkpoint, rounded), checkpoint, LONG)
    rates = [output.metrics.draft_tokens_acceptance for output in outputs if output.metrics]
    assert any(rate and rate < 1.0 for rate in rates), "the test needs rejections"
    assert sum(rate or 0 for rate in rates) / len(rates) > 0.5, "acceptance must not decline"


def test_window_restarts_at_its_last_half(checkpoint: Path, tmp_path: Path) -> None:
    """Drafting continues to the end, and the output is unchanged."""
    short = write_checkpoint(tmp_path / "short", "llama", seed=5, max_position_embeddings=32)
    for output in check_against_plain(load(checkpoint, short), checkpoint, LONG):
        assert output.metrics is not None and output.metrics.draft_tokens is not None
        assert output.metrics.draft_tokens > 60


def test_few_blocks_cost_drafts_not_requests(checkpoint: Path) -> None:
    llm = load(checkpoint, checkpoint, kv_cache_memory="128tokens", max_model_len=96)
    outputs = llm.generate(PROMPTS, LONG)
    assert {len(output.token_ids) for output in outputs} == {80}
    llm.check()


def test_long_prompt_is_read_in_chunks(checkpoint: Path) -> None:
    llm = load(checkpoint, checkpoint, max_num_batched_tokens=8, max_num_seqs=2)
    prompt = {"prompt_token_ids": [(7 * i) % 200 + 10 for i in range(60)]}
    (output,) = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=30, ignore_eos=True))
    assert output.metrics is not None and output.metrics.draft_tokens_acceptance == 1.0
    assert output.metrics.draft_tokens


def test_other_tokenizer_is_refused_at_its_first_difference(checkpoint: Path, tmp_path: Path) -> None:
    other = write_drafter(tmp_path / "other")
    text = (other / "tokenizer.json").read_text().replace("<|im_start|>", "<|im_begin|>")
    (other / "tokenizer.json").write_text(text)
    with pytest.raises(ConfigError, match="im_"):
        load(checkpoint, other)


def test_unsuitable_draft_model_size_is_reported(checkpoint: Path) -> None:
    assert any(
        "1.0 times the model's parameters" in warning
        for warning in load(checkpoint, checkpoint).info.warnings
    )


def test_vocabularies_may_be_padded_differently(checkpoint: Path, tmp_path: Path) -> None:
    """Padding rows may differ, but all tokens must exist."""
    for name, vocab_size in (("wider", VOCAB_SIZE + 16), ("narrower", 270)):
        other = write_checkpoint(tmp_path / name, "llama", seed=5, vocab_size=vocab_size)
        llm = load(checkpoint, other)
        params = SamplingParams(temperature=1.0, seed=1, max_tokens=30, ignore_eos=True)
        outputs = check_against_plain(llm, checkpoint, params)
        assert sum(o.metrics.draft_tokens or 0 for o in outputs if o.metrics) > 0
        assert not llm.stats.drafter_errors


def test_smaller_vocabulary_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    other = write_checkpoint(tmp_path / "short", "llama", seed=5, vocab_size=268)
    with pytest.raises(ConfigError, match="has 268 ids; its tokenizer's go up to id 269"):
        load(checkpoint, other)


def state_of(prompt: Sequence[int], seed: int = 0, name: str = "a", **params: object) -> RequestState:
    return RequestState(Request(name, tuple(prompt), SamplingParams(**params), seed), 0, 4096)  # type: ignore[arg-type]


def test_rejection_recomputes_the_last_token() -> None:
    """KV of positions 3 and 4 belongs to draft tokens; the target differs at 4."""
    state = state_of((1, 2, 3))
    track = DraftState.from_state(state, VOCAB_SIZE)
    track.num_computed, track.draft_ids = 3, (7, 8)
    track.sync(DraftRequest(extended(state, (7, 9, 5))))
    assert (track.num_computed, track.draft_ids) == (4, ())
    track.num_computed = 6
    track.sync(DraftRequest(state))
    assert track.num_computed == 5


class Passes:
    """A forward pass without DraftLoop that counts the rows of its passes, without padding."""

    def __init__(self, forward: object) -> None:
        self.forward = forward
        self.rows: list[int] = []

    def __call__(self, batch: Batch) -> torch.Tensor:
        self.rows.append(batch.query_start_loc[-1])
        return self.forward(batch)  # type: ignore[operator,no-any-return]


def drafter_of(
    path: Path,
    *,
    max_len: int = 96,
    blocks: int = 100,
    max_rows: int = 256,
    isa: str = "auto",
    counted: list[Passes] | None = None,
) -> ModelDrafter:
    """`counted`: eager drafting, with its row counter added to the list."""
    ops = select_backend("cpu", isa=isa)
    model = load_model(path, ops, Precision.from_dtypes("float32"), "cpu", max_len)
    if counted is not None:
        compiled = model.compile_logits
        model.compile_logits = lambda kv: counted.append(Passes(compiled(kv))) or counted[-1]  # type: ignore
    kv = KVStorage(blocks, 4, model.cache_shapes, "float32", "cpu")
    return ModelDrafter(
        model, kv, Sampler(ops, model.vocab_size, [3]), BlockPool(blocks), 4, max_rows, max_len
    )


def propose(drafter: ModelDrafter, *draft_requests: DraftRequest) -> list[Draft | None]:
    """Start new requests, and propose."""
    for query in draft_requests:
        if query.state.id not in drafter._states:
            drafter.start(query.state)
    drafts = drafter.propose(draft_requests)
    drafter.check({query.state.id for query in draft_requests} | set(drafter._states))
    return drafts


@st.composite
def answers(draw: st.DrawFn) -> tuple[RequestState, list[int], int, float]:
    """A request, the accepted part of each draft, and the requested lengths."""
    params = {
        "temperature": draw(st.sampled_from([0.0, 1.0, 0.6])),
        "top_p": draw(st.sampled_from([1.0, 0.8])),
        "frequency_penalty": draw(st.sampled_from([0.0, 0.0, 0.5])),
    }
    name, seed = str(draw(st.uuids())), draw(st.integers(0, 2**64 - 1))
    state = state_of(draw(st.lists(st.integers(0, 255), min_size=1, max_size=40)), seed, name, **params)
    accepted = draw(st.lists(st.integers(0, 9), min_size=5, max_size=5))
    return state, accepted, draw(st.integers(1, 8)), draw(st.sampled_from([0.0, 0.3, 0.9]))


@pytest.fixture(scope="module")
def pair(checkpoint: Path) -> tuple[ModelDrafter, ModelDrafter]:
    """With outgrown windows, few blocks and chunked prompts."""
    options = {"max_len": 32, "blocks": 30, "max_rows": 40}
    return drafter_of(checkpoint, **options), drafter_of(checkpoint, **options, counted=[])  # type: ignore[arg-type]


@pytest.mark.skipif(not supported_isas(), reason="the native library is not built")
@given(requests=st.lists(answers(), min_size=1, max_size=5))
@settings(max_examples=examples(40))
def test_draft_loop_equals_eager_loop(
    pair: tuple[ModelDrafter, ModelDrafter], requests: list[tuple[RequestState, list[int], int, float]]
) -> None:
    """Step by step with the same accepted parts; the computed tokens must match too."""
    for step in range(5):
        draft_requests = [
            DraftRequest(extended(state, (step,)), max_tokens, worth)
            for state, _, max_tokens, worth in requests
        ]
        drafts, others = (propose(drafter, *draft_requests) for drafter in pair)
        assert drafts == others
        for (state, accepted, _, _), draft in zip(requests, drafts, strict=True):
            state.append(draft.token_ids[: accepted[step]] if draft else ())
    for drafter in pair:
        for state, *_ in requests:
            drafter.finish(state.id)
        drafter.check(())
        assert drafter._pool.num_used == 0


@pytest.mark.parametrize("counted", [None, []])
def test_drafting_stops_below_min_prob(checkpoint: Path, counted: list[Passes] | None) -> None:
    drafter = drafter_of(checkpoint, counted=counted)
    state = state_of(range(20, 40), temperature=0.8)
    (draft,) = propose(drafter, DraftRequest(state, 8))
    assert draft is not None and len(draft.token_ids) == len(draft.confidence) == 8
    products = [math.prod(draft.confidence[: i + 1]) for i in range(8)]
    assert all(0 < product < 1 for product in products)
    (short,) = propose(drafter, DraftRequest(state, 8, min_prob=products[3] * 1.001))
    assert short == Draft(draft.token_ids[:4], "draft", draft.confidence[:4])


def test_finished_draft_costs_no_row(checkpoint: Path) -> None:
    counted: list[Passes] = []
    drafter = drafter_of(checkpoint, counted=counted)
    states = [state_of((40 + i, 41), name=f"{i}") for i in range(3)]
    propose(drafter, *(DraftRequest(state, length) for state, length in zip(states, (1, 3, 6), strict=True)))
    assert counted[0].rows == [6, 2, 2, 1, 1, 1]


def test_pending_rows_are_computed_by_the_first_pass(checkpoint: Path) -> None:
    """First the prompt, then the emitted tokens after the accepted ones; at least 1."""
    counted: list[Passes] = []
    drafter = drafter_of(checkpoint, counted=counted)
    for accepted, pending_rows in ((4, 2), (2, 1), (0, 1)):
        state = extended(state_of(range(10, 30)), (1,))
        drafter.start(state)
        assert drafter.num_pending_rows(DraftRequest(state, 4)) == 21
        (draft,) = propose(drafter, DraftRequest(state, 4))
        assert draft is not None
        query = DraftRequest(extended(state, (*draft.token_ids[:accepted], 7)), 4)
        assert drafter.num_pending_rows(query) == drafter.num_pending_rows(query) == pending_rows, (
            "num_pending_rows() must not change the state"
        )
        before = len(counted[0].rows)
        drafts = propose(drafter, query)
        assert counted[0].rows[before] == pending_rows and drafts[0] is not None
        drafter.finish(state.id)


def test_skipped_request_catches_up_in_one_pass(checkpoint: Path) -> None:
    drafter = drafter_of(checkpoint)
    state = state_of(range(10, 20))
    propose(drafter, DraftRequest(state, 4))
    state.append(range(30, 60))
    assert drafter.num_pending_rows(DraftRequest(state)) == 30
    (late,) = propose(drafter, DraftRequest(state, 4))
    fresh = state_of([*range(10, 20), *range(30, 60)], name="fresh")
    assert late == propose(drafter, DraftRequest(fresh, 4))[0], (
        "drafts must equal those of an uninterrupted request"
    )


def test_prompt_above_the_window_is_read_from_its_last_half(checkpoint: Path) -> None:
    """Drafts equal those of the window's text alone, with the noise of its real positions."""
    drafter = drafter_of(checkpoint, max_len=16)
    text = [(7 * i) % 200 + 10 for i in range(100)]
    long, short = state_of(text, temperature=0), state_of(text[-8:], name="short", temperature=0)
    drafter.start(long)
    assert drafter.num_pending_rows(DraftRequest(long, 4)) == 8
    drafts = propose(drafter, DraftRequest(long, 4), DraftRequest(short, 4))
    assert drafts[0] == drafts[1] is not None
    sampled, moved = state_of(text, seed=5, name="sampled"), state_of(text[-8:], seed=5, name="moved")
    drafts = propose(drafter, DraftRequest(sampled, 8), DraftRequest(moved, 8))
    assert drafts[0] != drafts[1], "noise must use positions in the complete text"


def test_window_moves_only_when_full(checkpoint: Path) -> None:
    drafter = drafter_of(checkpoint, max_len=16)
    state = state_of(range(10, 20))
    lengths = []
    for _ in range(20):
        (draft,) = propose(drafter, DraftRequest(state, 4))
        assert draft is not None
        lengths.append(len(draft.token_ids))
        state.append((50,))
    assert lengths == [4] * 4 + [3, 2, 1] + ([4] * 5 + [4, 3, 2, 1])[:9] + [4] * 4


def test_fewest_pending_rows_go_first(checkpoint: Path) -> None:
    """A long prompt uses only the rows that other requests leave."""
    drafter = drafter_of(checkpoint, max_rows=8)
    long, short = state_of(range(10, 40), name="long"), state_of(range(10, 13), name="short")
    drafts = propose(drafter, DraftRequest(long, 4), DraftRequest(short, 4))
    assert drafts[0] is None and drafts[1] is not None
    assert drafter.num_pending_rows(DraftRequest(long, 4)) == 25


def test_least_recently_used_request_is_evicted(checkpoint: Path) -> None:
    """Blocks of 4 tokens: each request needs 3, and there are 8."""
    drafter = drafter_of(checkpoint, blocks=8)
    old, late, new = (DraftRequest(state_of(range(i, i + 9), name=f"{i}"), 4) for i in (10, 20, 30))
    for query in (old, late, new):
        assert propose(drafter, query) != [None]
    assert [drafter.num_pending_rows(query) for query in (old, late, new)] == [9, 1, 1]
    assert propose(drafter, old) == propose(drafter_of(checkpoint), old), "an evicted request must catch up"
    assert [drafter.num_pending_rows(query) for query in (old, late, new)] == [1, 9, 1]


def test_few_blocks_leave_drafts_for_some(checkpoint: Path) -> None:
    """No request is evicted in a step that serves it; the same requests continue until one ends."""
    drafter, ample = drafter_of(checkpoint, blocks=13), drafter_of(checkpoint)
    states = [state_of(range(i, i + 9), name=f"{i}") for i in (10, 20, 30, 40)]
    served = []
    for step in range(14):
        draft_requests = [DraftRequest(extended(state, (step,)), 4) for state in states]
        drafts, wanted = propose(drafter, *draft_requests), propose(ample, *draft_requests)
        served.append([draft is not None for draft in drafts])
        for draft, full in zip(drafts, wanted, strict=True):
            assert full is not None
            assert draft is None or draft.token_ids == full.token_ids[: len(draft.token_ids)]
    counts = [sum(step) for step in served]
    assert counts[0] == 4 and counts[-1] == 2 and counts == sorted(counts, reverse=True)
    assert all(
        before or not now for one, two in pairwise(served) for before, now in zip(one, two, strict=True)
    )
    gone = states.pop(served[-1].index(True))
    drafter.finish(gone.id)
    assert (
        sum(
            draft is not None
            for draft in propose(drafter, *(DraftRequest(extended(state, (1,)), 4) for state in states))
        )
        == 2
    )


def test_timing_changes_no_state(checkpoint: Path) -> None:
    for drafter in (drafter_of(checkpoint, max_len=32), drafter_of(checkpoint, max_len=32, counted=[])):
        state = state_of(range(10, 20))
        before = propose(drafter, DraftRequest(state, 4))
        for rows, sampled in ((1, 1), (5, 5), (40, 1), (100, 3), (7, 0)):
            assert 0 < drafter.pass_seconds(rows, sampled) < 10
        assert propose(drafter, DraftRequest(state, 4)) == before
        assert set(drafter._states) == {"a"} and drafter._pool.num_used == 4


def test_timed_model_can_draft_eagerly(checkpoint: Path) -> None:
    """Buffers of a timed pass are rewritten by later calls."""
    drafter = drafter_of(checkpoint)
    drafter.pass_seconds(2, 2)
    (draft,) = propose(drafter, DraftRequest(state_of(range(10, 20), presence_penalty=1.0), 4))
    assert draft is not None


def test_nan_draft_model_is_timed_and_removed_with_one_line(
    checkpoint: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    broken = write_checkpoint(tmp_path / "broken", "llama", seed=5)
    weights = load_file(broken / "model.safetensors")
    weights["model.norm.weight"] *= torch.nan
    save_file(weights, broken / "model.safetensors")
    assert 0 < drafter_of(broken).pass_seconds(9, 9) < 10
    llm = load(checkpoint, broken)
    check_against_plain(llm, checkpoint, LONG)
    assert llm.stats.drafter_errors == {"draft": 1}
    assert caplog.text.count("drafter draft failed and is removed: its logits are not finite") == 1


@pytest.mark.parametrize("max_len", [2, 3, 4, 5])
def test_timing_works_in_the_shortest_windows(checkpoint: Path, max_len: int) -> None:
    """No position exceeds the model's context."""
    for drafter in (
        drafter_of(checkpoint, max_len=max_len),
        drafter_of(checkpoint, max_len=max_len, counted=[]),
    ):
        for rows, sampled in ((1, 1), (9, 2), (9, 9)):
            assert 0 < drafter.pass_seconds(rows, sampled) < 10


def test_pass_seconds_is_the_time_of_one_pass(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = drafter_of(checkpoint)
    clock = iter((0.0, 8.0, 10.0, 18.0))
    monkeypatch.setattr("foreword.speculation.drafters.draft_model.time.perf_counter", lambda: next(clock))
    assert drafter.pass_seconds(3, 1) == 8.0
    assert drafter.pass_seconds(3, 3) == 2.0, "8 s for a draft of 4 tokens"


def test_target_only_token_is_read_as_id_zero(checkpoint: Path) -> None:
    drafter = drafter_of(checkpoint)
    drafts = propose(
        drafter, *(DraftRequest(state_of((10, odd, 11), name=f"{odd}"), 4) for odd in (VOCAB_SIZE + 5, 0))
    )
    assert drafts[0] == drafts[1] is not None
