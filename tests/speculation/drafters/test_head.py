"""Trained heads in an engine: acceptance is what their construction says, alone and beside other requests."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from foreword.config.options import Config
from foreword.core.batch import Batch, HeadShape, KVShape, SampleRow
from foreword.core.images import PromptImage
from foreword.core.outputs import Draft, ErrorEvent
from foreword.core.params import SamplingParams
from foreword.core.request import Request, RequestState
from foreword.engine.engine import Engine
from foreword.errors import CheckpointError, ConfigError
from foreword.kernels.reference.backend import ReferenceOps
from foreword.kv_cache.storage import KVStorage
from foreword.models.heads.head_loader import read_head_info
from foreword.models.interfaces import KVCache, ParallelDraft
from foreword.planning.hardware import HardwareInfo
from foreword.planning.memory import kv_bytes_per_token, scratch_bytes
from foreword.sampling.sampler import Sampler
from foreword.speculation.drafters.eager_draft_loop import EagerDraftLoop
from foreword.speculation.drafters.head import HeadDrafter
from foreword.speculation.engine_drafter import DraftRequest
from foreword.weights.trained_heads import head_method
from tests.support.block_heads import greedy_tokens, read_reference, train_block_head
from tests.support.budget import some_of
from tests.support.checkpoints import change_config, change_tensors, write_checkpoint
from tests.support.engines import load_engine, make_request, run, tokens_of, verified_drafts
from tests.support.heads import (
    ReferenceHead,
    head_config,
    record_aux_hidden_states,
    train_head,
    write_random_head,
)

DRAFT_LEN = 3
NUM_TOKENS = 40
PROMPTS = [[(31 * n + 17 * i * i) % 250 for i in range(5 + 3 * n)] for n in range(6)]
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": NUM_TOKENS}
Drafts = list[tuple[int, int]]  # drafted and accepted tokens of each step


@dataclass(frozen=True)
class Trained:
    """A target, its greedy answers, and a head that knows half of them."""

    model: Path
    head: Path
    texts: list[list[int]]  # prompts with answers


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    path = tmp_path_factory.mktemp("head")
    model = write_checkpoint(path / "model", "llama", seed=5)
    events = run(load_engine(model, speculate="off"), requests())
    texts = [[*prompt, *tokens_of(events[str(n)])] for n, prompt in enumerate(PROMPTS)]
    return Trained(model, train_head(path / "head", model, texts[::2], steps=80), texts)


def requests(**params: Any) -> list[Any]:
    return [make_request(str(n), prompt, **(GREEDY | params)) for n, prompt in enumerate(PROMPTS)]


def engine_with(model: Path, head: Path, **options: Any) -> Engine:
    defaults = {"speculate": "eagle3", "num_speculative_tokens": DRAFT_LEN, "kv_cache_memory": "2000tokens"}
    return load_engine(model, draft_model=str(head), **(defaults | options))


def expected_drafts(trained: Trained, text: Sequence[int], num_prompt: int, shift: int = 0) -> Drafts:
    """Of a greedy answer, by the reference; with hidden states of `shift` positions earlier."""
    config, tensors = head_config(trained.model), load_file(trained.head / "model.safetensors")
    embedding = load_file(trained.model / "model.safetensors")["model.embed_tokens.weight"]
    reference = ReferenceHead(config, tensors, embedding, tensors["lm_head.weight"])
    hidden = shifted(reference.fuse(record_aux_hidden_states(trained.model, [text])[0]), shift)
    drafts, length = [], num_prompt + 1
    while (count := min(DRAFT_LEN, len(text) - length - 1)) > 0:
        chain = reference.chain(hidden[: length - 1], text[:length], count)
        draft = [int(logits.argmax()) for logits in chain]
        accepted = next((i for i in range(count) if draft[i] != text[length + i]), count)
        drafts.append((count, accepted))
        length += accepted + 1
    return drafts


def shifted(hidden: Tensor, shift: int) -> Tensor:
    return torch.cat((hidden[:1].expand(shift, -1), hidden[: len(hidden) - shift]))


def num_accepted(drafts: Drafts) -> int:
    return sum(accepted for _, accepted in drafts)


def test_acceptance_is_that_of_the_reference(trained: Trained) -> None:
    """Step by step, alone and in requests that run together; small blocks make drafts need scratch blocks."""
    expected = [
        expected_drafts(trained, text, len(prompt))
        for text, prompt in zip(trained.texts, PROMPTS, strict=True)
    ]
    for options in ({}, {"block_size": 4}):
        engine = engine_with(trained.model, trained.head, **options)
        together = run(engine, requests())
        alone = {request.id: run(engine, [request])[request.id] for request in requests()}
        for n, text in enumerate(trained.texts):
            for events in (together, alone):
                assert tokens_of(events[str(n)]) == text[len(PROMPTS[n]) :]
                assert verified_drafts(events[str(n)]) == expected[n]
    known, others = (sum(map(num_accepted, expected[first::2])) for first in (0, 1))
    assert known > 5 * others, "it knows every other text"


def test_hidden_states_of_other_positions_lower_acceptance(trained: Trained) -> None:
    text, num_prompt = trained.texts[0], len(PROMPTS[0])
    counts = [num_accepted(expected_drafts(trained, text, num_prompt, shift)) for shift in range(3)]
    assert counts[0] > 1.2 * counts[1] > 1.2 * counts[2]


def test_cached_prefix_and_preemption_cost_no_draft(trained: Trained) -> None:
    """A request whose prompt or whole text was computed before drafts as one that computed it itself."""
    text, num_prompt = trained.texts[4], len(PROMPTS[4])
    expected = expected_drafts(trained, text, num_prompt)
    engine = engine_with(trained.model, trained.head)
    for _ in range(2):
        events = run(engine, [make_request("again", PROMPTS[4], **GREEDY)])
        assert verified_drafts(events["again"]) == expected
    later = make_request("later", text[: num_prompt + 20], temperature=0.0, max_tokens=NUM_TOKENS - 20)
    events = run(engine, [later])
    assert events["later"][0].num_cached >= 16
    assert verified_drafts(events["later"]) == expected_drafts(trained, text, num_prompt + 20)


@pytest.mark.parametrize(
    "params", [{"repetition_penalty": 1.0001}, {"temperature": 1e-6, "top_k": 3}, {"logit_bias": {3: 0.01}}]
)
def test_penalties_draft_pass_by_pass(trained: Trained, params: dict[str, Any]) -> None:
    """What the native loop does not sample is drafted too; these parameters change no greedy token here."""
    events = run(engine_with(trained.model, trained.head), requests(**params))
    for n, text in enumerate(trained.texts):
        assert verified_drafts(events[str(n)]) == expected_drafts(trained, text, len(PROMPTS[n]))


def test_prompt_of_one_token_drafts_from_the_second_on(trained: Trained) -> None:
    events = run(engine_with(trained.model, trained.head), [make_request("one", [7], **GREEDY)])
    text = [7, *tokens_of(events["one"])]
    assert verified_drafts(events["one"]) == expected_drafts(trained, text, 1)


@pytest.mark.parametrize("draft_length", ["fixed", "adaptive"])
@pytest.mark.parametrize("cpu_isa", ["auto", "reference"])
def test_head_without_finite_logits_is_removed_with_one_line(
    trained: Trained,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    draft_length: str,
    cpu_isa: str,
) -> None:
    """It drafts once, and answers go on."""
    calls: list[int] = []
    propose = HeadDrafter.propose

    def counted(drafter: HeadDrafter, requests: Sequence[DraftRequest]) -> list[Draft | None]:
        calls.append(len(requests))
        return propose(drafter, requests)

    monkeypatch.setattr(HeadDrafter, "propose", counted)
    head = write_random_head(tmp_path / "head", trained.model)
    change_tensors(head, **{"lm_head.weight": lambda x: x * float("nan")})
    engine = engine_with(trained.model, head, draft_length=draft_length, cpu_isa=cpu_isa)
    run(engine, requests())
    events = run(engine, requests())
    assert all(not isinstance(event, ErrorEvent) for each in events.values() for event in each)
    assert [tokens_of(events[str(n)]) for n in range(6)] == [
        text[len(prompt) :] for text, prompt in zip(trained.texts, PROMPTS, strict=True)
    ]
    assert not any(verified_drafts(each) for each in events.values())
    assert len(calls) == 1 and engine.proposer.errors == {"eagle3": 1}
    (line,) = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert line.startswith("drafter eagle3 failed and is removed: its logits are not finite")
    engine.proposer.check()


def test_controller_measures_the_passes_of_the_head(trained: Trained) -> None:
    engine = engine_with(trained.model, trained.head, draft_length="adaptive", speculate="suffix,eagle3")
    timings = engine.proposer.timings
    assert timings is not None and set(timings.pass_seconds) == {"eagle3"}
    assert all(seconds > 0 for seconds in timings.pass_seconds["eagle3"].values())
    run(engine, requests())


@pytest.fixture(scope="module", params=some_of(["dspark", "dflash", "p-eagle"], 3))
def trained_block(
    request: pytest.FixtureRequest, trained: Trained, tmp_path_factory: pytest.TempPathFactory
) -> Trained:
    """A head that drafts in one pass, for the same target."""
    path = tmp_path_factory.mktemp("block") / "head"
    head = train_block_head(path, trained.model, trained.texts[::2], request.param)
    return Trained(trained.model, head, trained.texts)


def block_engine(trained: Trained, **options: Any) -> Engine:
    return engine_with(trained.model, trained.head, **({"speculate": head_method(trained.head)} | options))


def expected_blocks(trained: Trained, text: Sequence[int], num_prompt: int) -> Drafts:
    """As expected_drafts(), of a head that drafts in one pass: a block depends on its length."""
    reference = read_reference(trained.model, trained.head)
    layers = (1, 2) if "dflash_config" in reference.config else (0, 1, 2)
    (aux,) = record_aux_hidden_states(trained.model, [text], layers)
    blocks = [reference.blocks(aux, text, count) for count in range(1, DRAFT_LEN + 1)]
    drafts, length = [], num_prompt + 1
    while (count := min(DRAFT_LEN, len(text) - length - 1)) > 0:
        draft = greedy_tokens(reference, blocks[count - 1][length - 1], text[length - 1])
        accepted = next((i for i in range(count) if draft[i] != text[length + i]), count)
        drafts.append((count, accepted))
        length += accepted + 1
    return drafts


def test_acceptance_of_blocks_is_that_of_the_reference(trained_block: Trained) -> None:
    """As above; penalties are sampled outside of the native loop, and change no greedy token here."""
    expected = [
        expected_blocks(trained_block, text, len(prompt))
        for text, prompt in zip(trained_block.texts, PROMPTS, strict=True)
    ]
    for options, params in (
        ({}, {}),
        ({"block_size": 4}, {}),
        ({}, {"repetition_penalty": 1.0001}),
        ({"cpu_isa": "reference"}, {}),
    ):
        engine = block_engine(trained_block, **options)
        events = run(engine, requests(**params))
        for n, text in enumerate(trained_block.texts):
            assert tokens_of(events[str(n)]) == text[len(PROMPTS[n]) :]
            assert verified_drafts(events[str(n)]) == expected[n], (options, params)
    known, others = (sum(map(num_accepted, expected[first::2])) for first in (0, 1))
    assert known > 5 * others, "it knows every other text"


def test_controller_measures_passes_of_blocks_by_rows(trained_block: Trained) -> None:
    engine = block_engine(trained_block, draft_length="adaptive", max_num_seqs=2)
    (name,) = [drafter.name for drafter in engine.proposer.model_drafters]
    timings = engine.proposer.timings
    assert timings is not None and [*timings.one_pass] == [name]
    rows = timings.one_pass[name].max_rows
    kinds = json.loads((trained_block.head / "config.json").read_text())["architectures"]
    assert rows == DRAFT_LEN + (kinds == ["DFlashDraftModel"])
    assert max(timings.pass_seconds[name]) == 2 * rows
    run(engine, requests())


@pytest.mark.parametrize("trained_block", some_of(["p-eagle", "dflash"], 2), indirect=True)
def test_penalty_of_one_request_leaves_others_sampled_at_once(
    trained_block: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only its own tokens come one after the other."""
    engine = block_engine(trained_block, cpu_isa="reference")
    calls: list[int] = []
    sample_rows = EagerDraftLoop._sample_rows

    def counted(self: EagerDraftLoop, logits: Tensor, rows: Sequence[SampleRow]) -> list[tuple[int, float]]:
        calls.append(len(rows))
        return sample_rows(self, logits, rows)

    monkeypatch.setattr(EagerDraftLoop, "_sample_rows", counted)
    run(engine, requests())
    num_plain = len(calls)
    calls.clear()
    penalty = make_request("0", PROMPTS[0], **GREEDY, repetition_penalty=1.0001)
    events = run(engine, [penalty, *requests()[1:]])
    for n, text in enumerate(trained_block.texts):
        assert tokens_of(events[str(n)]) == text[len(PROMPTS[n]) :]
    assert sum(rows > 1 for rows in calls) <= num_plain < len(calls)


@pytest.mark.parametrize("max_model_len", range(2, 9))
def test_engine_starts_where_a_context_is_shorter_than_a_draft(
    trained_block: Trained, max_model_len: int
) -> None:
    adaptive = {"draft_length": "adaptive", "num_speculative_tokens": 32}
    engine = block_engine(trained_block, max_model_len=max_model_len, **adaptive)
    (drafter,) = engine.proposer.model_drafters
    assert drafter.one_pass is not None and drafter.one_pass.max_tokens <= max(max_model_len - 3, 1)
    if max_model_len > 3:
        prompt, num_tokens = PROMPTS[0][:2], max_model_len - 2
        events = run(engine, [make_request("a", prompt, temperature=0.0, max_tokens=num_tokens)])
        assert len(tokens_of(events["a"])) == num_tokens


@pytest.mark.parametrize("length", [1, 2])
def test_drafts_of_whole_scratch_blocks_have_all_tokens(trained_block: Trained, length: int) -> None:
    """DFlash has a row more than tokens, and its room is in the memory plan."""
    engine = block_engine(trained_block, block_size=length, num_speculative_tokens=length, max_num_seqs=6)
    (drafter,) = engine.proposer.model_drafters
    assert drafter.one_pass is not None and drafter.one_pass.max_tokens == length
    events = run(engine, requests())
    for n, text in enumerate(trained_block.texts):
        assert tokens_of(events[str(n)]) == text[len(PROMPTS[n]) :]
        assert max(drafted for drafted, _ in verified_drafts(events[str(n)])) == length
    info, cache = read_head_info(trained_block.head, trained_block.model), engine.model_runner.kv.head
    assert cache is not None
    config = Config(
        str(trained_block.model), block_size=length, num_speculative_tokens=length, max_num_seqs=6
    )
    hardware = HardwareInfo("cpu", cores=1, free_bytes=1 << 30, supports_bfloat16=True)
    planned = scratch_bytes(config, hardware, [info], "float32")
    num_slots = len(cache.layers[0].k) - (engine.info.resolved.num_blocks + 1) * length
    assert planned == num_slots * kv_bytes_per_token(info, "float32", "float32")


@pytest.mark.parametrize(("num_tokens", "rows"), [(1, [128]), (5, [252, 132]), (14, [255] * 3 + [195])])
def test_requests_are_split_into_passes_by_their_planned_rows(num_tokens: int, rows: list[int]) -> None:
    """64 requests; the head could draft 15 tokens each."""
    head, ops = ParallelHead(), ReferenceOps()
    num_blocks = 64 * 16
    kv = KVStorage(8, 1, [KVShape(1, 16)], "float32", head=HeadShape((), 16), num_draft_blocks=num_blocks)
    drafter = HeadDrafter(head, ops, kv, Sampler(ops, 32, []), 15, 64, 32)  # type: ignore[arg-type]
    drafts = drafter.propose([DraftRequest(make_state(), num_tokens)] * 64)
    assert head.num_rows == rows
    assert all(draft is not None and len(draft.token_ids) == num_tokens for draft in drafts)


def test_misfit_is_refused_before_the_target_is_loaded(trained: Trained, tmp_path: Path) -> None:
    head = write_random_head(tmp_path / "head", trained.model)
    change_config(head, target_hidden_size=32)
    (tmp_path / "model").mkdir()
    config = (trained.model / "config.json").read_text()
    (tmp_path / "model" / "config.json").write_text(config)  # a target without weights
    with pytest.raises(CheckpointError, match="hidden size 32, this one has 64"):
        engine_with(tmp_path / "model", head)


@pytest.mark.parametrize("speculate", ["draft,eagle3", "eagle3"])
def test_head_needs_a_checkpoint_of_its_own(trained: Trained, speculate: str) -> None:
    message = "exclude each other" if "," in speculate else "needs --draft-model"
    draft_model = str(trained.head) if "," in speculate else None
    with pytest.raises(ConfigError, match=message):
        load_engine(trained.model, speculate=speculate, draft_model=draft_model)


class ParallelHead:
    """A Head like DFlash's that only keeps the rows of its passes."""

    method, uses_mrope, has_fixed_position = "dflash", False, False
    parallel = ParallelDraft(7, 15, samples_last_token=False, reads_mask_state=False)

    def __init__(self) -> None:
        self.num_rows: list[int] = []

    def compile_draft(self, kv_cache: KVCache) -> Callable[[Batch], Tensor]:
        def draft(batch: Batch) -> Tensor:
            self.num_rows.append(batch.query_start_loc[-1])
            return torch.zeros(len(batch.sample_rows), 32)

        return draft


def make_state() -> RequestState:
    """A request whose prompt is computed but for its last token."""
    state = RequestState(Request("a", (5, 5), SamplingParams(), seed=0), 0, 64)
    state.num_computed = 1
    state.blocks.append(1)
    return state


class MRopeHead:
    """A Head that only keeps the positions of its draft rows."""

    method, uses_mrope, has_fixed_position, parallel = "eagle3", True, False, None

    def __init__(self) -> None:
        self.positions: list[list[int]] = []

    def compile_draft(self, kv_cache: KVCache) -> Callable[[Batch], Tensor]:
        def draft(batch: Batch) -> Tensor:
            assert batch.mrope_positions is not None
            self.positions += batch.mrope_positions[batch.sample_rows].tolist()
            return torch.zeros(len(batch.sample_rows), 32)

        return draft


def test_pass_by_pass_drafts_behind_images_have_mrope_positions() -> None:
    """An image of 12 tokens in 3 x 4 takes 4 positions, so text behind it is 8 before its index."""
    head: Any = MRopeHead()
    kv = KVStorage(8, 4, [KVShape(1, 16)], "float32", head=HeadShape((), 16), num_draft_blocks=2)
    ops = ReferenceOps()
    drafter = HeadDrafter(head, ops, kv, Sampler(ops, 32, []), DRAFT_LEN, 64, 32)
    image = PromptImage(bytes(16), 12, (1, 3, 4), (8, 8), (1, 3, 8, 8), None, start=1)
    request = Request("a", [5] * 15, SamplingParams(), seed=0, images=(image,))
    state = RequestState(request, 0, 64)
    state.num_computed = 14
    state.blocks.extend([1, 2, 3, 4])
    (draft,) = drafter.propose([DraftRequest(state, DRAFT_LEN)])
    assert draft is not None and len(draft.token_ids) == DRAFT_LEN
    assert head.positions == [[14 - 8 + i] * 3 for i in range(DRAFT_LEN)]
