"""DFlash heads on random weights: logits equal the reference, for each layout that files have."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from foreword.core.batch import Chunk, build_batch
from foreword.core.params import SamplingParams
from foreword.core.request import Request, RequestState
from foreword.errors import CheckpointError
from foreword.kernels.ops import DraftJob, DraftLoop, DraftSamplingParams
from foreword.models.heads.head_loader import read_head_info
from foreword.sampling.sampler import Sampler
from foreword.speculation.drafters.head import HeadDrafter
from foreword.speculation.engine_drafter import DraftRequest
from tests.support.block_heads import (
    MARKOV_RANK,
    MASK_ID,
    BlockReference,
    ReferenceDFlash,
    ReferencePEagle,
    dflash_config,
    dflash_tensors,
    dspark_config,
    markov_tensors,
    p_eagle_config,
    p_eagle_tensors,
)
from tests.support.checkpoints import change_config, change_tensors, write_checkpoint
from tests.support.cpu_kernels import isas_under_test
from tests.support.gguf_files import finish
from tests.support.head_runner import BACKENDS, BLOCK_SIZE, HeadRunner, check_memory
from tests.support.head_runner import GREEDY as GREEDY_SAMPLING
from tests.support.heads import AUX_LAYERS, add_vocab, head_tensors, record_aux_hidden_states, write_head

COUNT = 7
DRAFT_SIZE = 90
TEXT = [(37 * i * i + 11 * i) % 250 for i in range(70)]  # some blocks of the cache
GREEDY = SamplingParams(temperature=0.0)
LENGTHS = (2, 3, 8, 9, 33, len(TEXT))
SWA = {"sliding_window": 12, "use_sliding_window": True}
SPECFORGE_KEYS = ("attention_mode", "confidence_head_alpha", "projector_type")
SPECULATORS = {
    "speculators_version": "0.9.0",
    "speculators_config": {
        "algorithm": "another",
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": COUNT}],
        "verifier": {"name_or_path": "another"},
    },
    "target_hidden_size": None,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}


@dataclass(frozen=True)
class Layout:
    """A head's files: changes of its config, and what it computes."""

    kind: str = "dflash"
    speculators: bool = False
    draft_size: int | None = None  # None: the target's vocabulary
    own_embedding: bool = False
    config: dict[str, Any] = field(default_factory=dict)
    own: dict[str, Any] = field(default_factory=dict)  # of dflash_config, or of speculators
    reference: dict[str, Any] = field(default_factory=dict)
    options: dict[str, bool] = field(default_factory=dict)  # of head_tensors()


SPECULATORS_DSPARK = Layout(
    "dspark",
    speculators=True,
    draft_size=DRAFT_SIZE,
    own={
        "block_size": COUNT,
        "sample_from_anchor": True,
        "markov_rank": MARKOV_RANK,
        "enable_confidence_head": True,
    },
    reference={"samples_anchor": True},
)
LAYOUTS = {
    "original": Layout(),
    "original, windows in some layers": Layout(
        config={**SWA, "layer_types": ["sliding_attention", "full_attention"]},
        reference={"windows": (12, None), "causal": (True, False)},
    ),
    "original, windows in all layers": Layout(
        own={"use_swa": True, "swa_window_size": 12, "causal": True, "output_multiplier": 0.5},
        reference={"windows": (12, 12), "causal": (True, True), "logit_scale": 0.5},
    ),
    "original, causal": Layout(
        config={"is_causal": True},
        own={"final_logit_softcapping": 3.0},
        reference={"causal": (True, True), "softcap": 3.0},
    ),
    "original, own embedding and vocabulary": Layout(
        draft_size=DRAFT_SIZE, own_embedding=True, config={"draft_vocab_size": DRAFT_SIZE}
    ),
    "speculators": Layout(speculators=True, draft_size=DRAFT_SIZE),
    "speculators, windows": Layout(
        speculators=True,
        config={**SWA, "layer_types": ["sliding_attention", "full_attention"]},
        own={"sliding_window_non_causal": True, "sample_from_anchor": True, "block_size": COUNT},
        reference={"windows": (12, None), "samples_anchor": True},
    ),
    "original, last token": Layout(
        config={"block_size": COUNT},
        own={"query_zero_predicts_next": True},
        reference={"samples_anchor": True},
    ),
    "DSpark": Layout("dspark", config={"block_size": COUNT}, reference={"samples_anchor": True}),
    "DSpark, masks": Layout("dspark", own={"sample_from_anchor": False}),
    "DSpark, speculators": SPECULATORS_DSPARK,
    "DSpark, gated": Layout(
        "dspark",
        config={"block_size": COUNT},
        own={"markov_head_type": "gated"},
        reference={"samples_anchor": True},
    ),
    "DSpark, rnn": replace(SPECULATORS_DSPARK, own=SPECULATORS_DSPARK.own | {"markov_head_type": "rnn"}),
    "DSpark, scaled": Layout(
        "dspark",
        config={"block_size": COUNT},
        own={
            "markov_head_type": "gated",
            "confidence_head_with_markov": False,
            "output_multiplier": 0.5,
        },
        reference={"samples_anchor": True, "logit_scale": 0.5},
    ),
    "DSpark, DeepSpec": Layout("dspark", own_embedding=True, reference={"samples_anchor": True}),
    "P-EAGLE": Layout("p-eagle", draft_size=DRAFT_SIZE, own={"pard_token": MASK_ID}),
    "P-EAGLE, layers": Layout(
        "p-eagle",
        own_embedding=True,
        config={"num_hidden_layers": 3},
        own={"parallel_drafting": True, "ptd_token_id": MASK_ID},
    ),
    "P-EAGLE, speculators": Layout(
        "p-eagle",
        speculators=True,
        draft_size=DRAFT_SIZE,
        config={"num_hidden_layers": 2},
        own={"fc_norm": True},
        options={"fc_norm": True, "qk_norm": True},
    ),
}

DSPARK = [name for name, layout in LAYOUTS.items() if layout.kind == "dspark"]
INDEPENDENT = [name for name in LAYOUTS if name not in DSPARK]  # tokens that do not read those before


@dataclass
class Bed:
    """A target, a head, and their reference."""

    model: Path
    path: Path
    reference: BlockReference

    @property
    def rows(self) -> int:
        """Of a draft of COUNT tokens."""
        anchored = isinstance(self.reference, ReferencePEagle) or self.reference.samples_anchor
        return COUNT + (not anchored)


def make_bed(folder: Path, layout: Layout) -> Bed:
    model = write_checkpoint(folder / "model", "llama", seed=3)
    weights = load_file(model / "model.safetensors")
    embedding, lm_head = weights["model.embed_tokens.weight"], weights["lm_head.weight"]
    is_dflash = layout.kind in ("dflash", "dspark")
    make_config = {"dflash": dflash_config, "dspark": dspark_config, "p-eagle": p_eagle_config}[layout.kind]
    config = make_config(model, **layout.config)
    if is_dflash:
        tensors = dflash_tensors(config, seed=5)
        if layout.kind == "dspark":
            sizes = config["vocab_size"], layout.draft_size or config["vocab_size"], config["hidden_size"]
            tensors |= markov_tensors(
                *sizes,
                seed=5,
                kind=layout.own.get("markov_head_type", "vanilla"),
                confidence_reads_token=layout.own.get("confidence_head_with_markov", True),
            )
    else:
        prefix = {"prefix": "layers.0."} if layout.speculators else {}
        tensors = p_eagle_tensors(config, seed=5, **layout.options, **prefix)
    if layout.draft_size:
        add_vocab(tensors, config["vocab_size"], layout.draft_size)
        sizes = {**config, "draft_vocab_size": layout.draft_size}
        tensors["lm_head.weight"] = lm_head = head_tensors(sizes, seed=6)["lm_head.weight"]
    elif "lm_head.weight" in tensors:
        lm_head = tensors["lm_head.weight"]
    if layout.own_embedding:
        tensors["embed_tokens.weight"] = embedding = embedding.flip(0).contiguous()
    path = write_head(folder / "head", written_config(config, layout), tensors)
    if is_dflash:
        return Bed(model, path, ReferenceDFlash(config, tensors, embedding, lm_head, **layout.reference))
    options = {"options": layout.options, "later": [*range(1, config["num_hidden_layers"])]}
    if layout.speculators:
        options["prefix"] = "layers.0."
    return Bed(model, path, ReferencePEagle(config, tensors, embedding, lm_head, **options))


def written_config(config: dict[str, Any], layout: Layout) -> dict[str, Any]:
    if config["architectures"] == ["DSparkDraftModel"] and layout.own_embedding:
        return deepspec_config(config)
    if not layout.speculators:
        if layout.kind in ("dflash", "dspark"):
            return {**config, "dflash_config": {**config["dflash_config"], **layout.own}}
        return {key: value for key, value in config.items() if key != "pard_token"} | {
            **layout.own,
            "draft_vocab_size": layout.draft_size,
        }
    own = ("eagle_config", "dflash_config", "architectures", "block_size", "num_target_layers", "pard_token")
    own += ("eagle_aux_hidden_state_layer_ids",)
    layer = {key: value for key, value in config.items() if key not in own}
    size = {"draft_vocab_size": layout.draft_size or config["vocab_size"], "mask_token_id": MASK_ID}
    if layout.kind in ("dflash", "dspark"):
        aux = {"aux_hidden_state_layer_ids": list(AUX_LAYERS[1:]), "block_size": COUNT + 1}
        kind = {"architectures": ["DFlashDraftModel"], "speculators_model_type": layout.kind, **aux}
    else:
        layer |= {"model_type": "qwen3", "attention_bias": False}
        aux = {"eagle_aux_hidden_state_layer_ids": list(AUX_LAYERS), "embed_requires_grad": True}
        kind = {"architectures": ["PEagleDraftModel"], "speculators_model_type": "peagle", **aux}
    return {**SPECULATORS, **kind, **size, **layout.own, "transformer_layer_config": layer}


def deepspec_config(config: dict[str, Any]) -> dict[str, Any]:
    """All options beside those of the layers; the last token's row drafts too."""
    own = {key: value for key, value in config["dflash_config"].items() if key not in SPECFORGE_KEYS}
    outer = {key: value for key, value in config.items() if key not in ("dflash_config", "auto_map")}
    options = {"block_size": COUNT, "verification_block_size": COUNT, "num_anchors": 512}
    return {**outer, **own, **options, "architectures": ["Qwen3DSparkModel"]}


class Runner(HeadRunner):
    """Drafts are blocks in one pass."""

    def __init__(self, bed: Bed, backend: str) -> None:
        super().__init__(bed.model, bed.path, backend, TEXT, num_scratch=4)
        self.bed, self.head = bed, self.target.head

    def job(self, length: int) -> DraftJob:
        """A draft of COUNT tokens after TEXT[:length], of which the target has computed all but one."""
        parallel = self.head.parallel
        assert parallel is not None
        token_ids = [TEXT[length - 1], *[parallel.mask_token_id] * (self.bed.rows - 1)]
        blocks = [*self.blocks[: -(-length // BLOCK_SIZE)], *self.scratch[:2]]
        slot = self.cache.mask_slot if parallel.reads_mask_state else None
        options = {"in_one_pass": True, "mask_slot": slot}
        return DraftJob(token_ids, length - 1, blocks, length, COUNT, -1e9, GREEDY_SAMPLING, **options)

    def block(self, length: int) -> Tensor:
        """Logits [COUNT, V] of the draft."""
        job = self.job(length)
        output = self.run([Chunk(job.token_ids, length - 1, job.block_table, COUNT)], job.mask_slot)
        markov = self.head.parallel.markov if self.head.parallel else None
        return output if markov is None else markov.logits(output)

    def chain(self, length: int, count: int) -> list[Tensor]:
        return list(self.block(length)[:count])

    def run(self, chunks: Sequence[Chunk], mask_slot: int | None = None) -> Tensor:
        options = {"with_request_index": True, "with_prev_slots": True}
        batch = build_batch(chunks, BLOCK_SIZE, self.ops.row_tile, "cpu", **options)
        if mask_slot is not None:
            assert batch.prev_slots is not None
            batch.prev_slots[1:] = mask_slot
        with torch.inference_mode():
            return self.draft(batch).clone()


@pytest.fixture(scope="module", params=LAYOUTS, ids=lambda name: name.replace(" ", "-"))
def bed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Bed:
    return make_bed(tmp_path_factory.mktemp("head"), LAYOUTS[request.param])


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Bed:
    return make_bed(tmp_path_factory.mktemp("original"), LAYOUTS["original"])


@pytest.mark.parametrize("backend", BACKENDS)
def test_blocks_of_a_whole_text_equal_the_reference(bed: Bed, backend: str) -> None:
    runner = Runner(bed, backend)
    aux_layers = AUX_LAYERS[1:] if isinstance(bed.reference, ReferenceDFlash) else AUX_LAYERS
    assert runner.head.aux_layers == aux_layers
    (aux,) = record_aux_hidden_states(bed.model, [TEXT], aux_layers)
    expected, done = bed.reference.blocks(aux, TEXT, COUNT), 0
    for length in LENGTHS:
        runner.commit(done, length - 1)  # over slots of the draft before
        done = length - 1
        actual, logits = runner.block(length), expected[length - 1]
        ids = [bed.reference.target_id(index) for index in range(logits.shape[1])]
        torch.testing.assert_close(actual[:, ids], logits, rtol=1e-3, atol=1e-3, msg=f"after {length}")
        others = torch.ones(actual.shape[1], dtype=torch.bool).index_fill_(0, torch.tensor(ids), False)
        assert actual[:, others].isneginf().all()


@pytest.mark.parametrize("bed", INDEPENDENT, indirect=True)
@pytest.mark.parametrize("isa", isas_under_test())
def test_draft_loop_equals_a_pass_and_its_samples(bed: Bed, isa: str) -> None:
    """Two requests at once, one of which ends its draft early."""
    runner, whole, part = Runner(bed, isa), len(TEXT), 3 * BLOCK_SIZE + 1
    draft, logits, logprobs = runner.draft, {}, {}
    assert isinstance(draft, DraftLoop)
    for length in (part, whole):
        runner.commit(0, whole - 1)  # over the slots of drafts
        logits[length] = runner.block(length)
        logprobs[length] = logits[length].log_softmax(-1).amax(-1).tolist()
    jobs = [runner.job(whole), runner.job(part)]
    jobs[1].block_table = [*runner.blocks[:3], *runner.scratch[2:]]  # not over slots that the other reads
    jobs[1].min_logprob_sum = (sum(logprobs[part][:2]) + sum(logprobs[part][:3])) / 2
    drafts = draft.draft(jobs, BLOCK_SIZE, torch.empty(0, dtype=torch.int64))
    for length, tokens, count in zip((whole, part), drafts, (COUNT, 3), strict=True):
        assert list(tokens.token_ids) == logits[length].argmax(-1)[:count].tolist()
        assert tokens.logprobs == pytest.approx(logprobs[length][:count], abs=1e-4)


@pytest.mark.parametrize("bed", DSPARK, indirect=True)
@pytest.mark.parametrize("backend", BACKENDS)
def test_tokens_and_confidences_of_dspark_depend_on_the_ones_before(bed: Bed, backend: str) -> None:
    """Two requests with drafts of different lengths."""
    runner = Runner(bed, backend)
    ops, head, reference = runner.ops, runner.head, bed.reference
    assert isinstance(reference, ReferenceDFlash)
    drafter = HeadDrafter(head, ops, runner.kv, Sampler(ops, 272, []), COUNT, 128, 272)
    (aux,) = record_aux_hidden_states(bed.model, [TEXT], AUX_LAYERS[1:])
    expected, states = reference.blocks(aux, TEXT, COUNT), reference.states(aux, TEXT, COUNT)
    runner.commit(0, len(TEXT) - 1)
    requests = []
    for length, count in ((33, COUNT), (len(TEXT), 4)):
        state = RequestState(Request(f"{length}", tuple(TEXT[:length]), GREEDY, seed=0), 0, 128)
        state.num_computed = length - 1
        state.blocks.extend(runner.blocks[: -(-length // BLOCK_SIZE)])
        requests.append(DraftRequest(state, count))
    last = requests[0].num_tokens - 1
    plain = [reference.target_id(index) for index in expected[last].argmax(-1).tolist()]
    drafts = drafter.propose(requests)
    assert drafts[0] is not None
    token_ids, confidences = reference.draft(expected[last], states[last], TEXT[last])
    assert list(drafts[0].token_ids) == token_ids != plain
    assert drafts[0].confidence == pytest.approx(confidences, abs=1e-4)
    assert drafts[1] is not None and len(drafts[1].token_ids) == 4
    alone = drafter.propose(requests[1:])[0]
    assert alone is not None and alone.token_ids == drafts[1].token_ids
    assert alone.confidence == pytest.approx(drafts[1].confidence)
    swapped = drafter.propose(requests[::-1])[1]  # the other one ends before it
    assert swapped is not None and list(swapped.token_ids) == token_ids


def test_draft_ends_where_the_confidence_head_says_so(tmp_path: Path) -> None:
    """NaN in its weights is no confidence at all."""
    bed = make_bed(tmp_path, LAYOUTS["DSpark"])
    change_tensors(bed.path, **{"confidence_head.proj.bias": torch.tensor([torch.nan])})
    runner = Runner(bed, "reference")
    ops = runner.ops
    drafter = HeadDrafter(runner.head, ops, runner.kv, Sampler(ops, 272, []), COUNT, 128, 272)
    runner.commit(0, len(TEXT) - 1)
    state = RequestState(Request("a", tuple(TEXT), GREEDY, seed=0), 0, 128)
    state.num_computed = len(TEXT) - 1
    state.blocks.extend(runner.blocks[: -(-len(TEXT) // BLOCK_SIZE)])
    (draft,) = drafter.propose([DraftRequest(state, COUNT, min_prob=0.01)])
    assert draft is not None and len(draft.token_ids) == 1 and draft.confidence == (0.0,)


@pytest.mark.parametrize("isa", isas_under_test())
def test_noise_of_a_row_is_that_of_its_token(original: Bed, isa: str) -> None:
    """The target samples token `position` with the same noise, so that more of a block is accepted."""
    runner, length = Runner(original, isa), 30
    runner.commit(0, length - 1)
    job, logits = runner.job(length), runner.block(length)
    job.sampling = DraftSamplingParams(seed=7, greedy=False, temperature=9.0, top_k=0, top_p=1.0, min_p=0.0)
    (tokens,) = runner.draft.draft([job], BLOCK_SIZE, torch.empty(0, dtype=torch.int64))
    runner.ops.apply_temperature(logits, torch.full((COUNT,), 9.0))
    seeds, positions = torch.full((COUNT,), 7), torch.arange(length, length + COUNT)
    expected = runner.ops.sample(logits, seeds, positions, torch.zeros(COUNT, dtype=torch.bool))
    assert list(tokens.token_ids) == expected.tolist() != logits.argmax(-1).tolist()


@pytest.mark.parametrize("backend", BACKENDS)
def test_memory_and_drafts_do_not_depend_on_how_the_text_was_computed(original: Bed, backend: str) -> None:
    check_memory([Runner(original, backend) for _ in range(3)])


def test_gguf_file_is_refused_by_name(original: Bed, tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "head.gguf", "dflash")
    finish(writer)
    with pytest.raises(CheckpointError, match="a DFlash head in GGUF: only safetensors are read"):
        read_head_info(tmp_path / "head.gguf", original.model)


def test_requests_of_a_pass_do_not_see_each_other(original: Bed) -> None:
    runner = Runner(original, BACKENDS[-1])
    runner.commit(0, len(TEXT) - 1)
    alone = runner.block(len(TEXT))
    job, other = runner.job(len(TEXT)), runner.job(len(TEXT))
    chunks = [
        Chunk([5, MASK_ID, MASK_ID], 2, [runner.scratch[3]], 1),
        Chunk(job.token_ids, len(TEXT) - 1, other.block_table, COUNT),
    ]
    assert torch.equal(runner.run(chunks)[1:], alone)


MISFITS: dict[str, tuple[str, dict[str, Any], dict[str, Any], str]] = {
    "hidden size": ("original", {"target_hidden_size": 96}, {}, "hidden size 96, this one has 64"),
    "vocabulary": ("original", {"vocab_size": 300}, {}, "300 tokens, this one has 272"),
    "layers of the target": (
        "original",
        {"num_target_layers": 36},
        {},
        "a model of 36 layers, this one has 2",
    ),
    "layers": ("speculators", {"aux_hidden_state_layer_ids": [1, 3]}, {}, "layers 1, 3, the model has 2"),
    "no layers": ("speculators", {"aux_hidden_state_layer_ids": []}, {}, "must be a list of layers"),
    "no options": ("original", {"dflash_config": ...}, {}, "`dflash_config` is missing"),
    "no mask": ("speculators", {"mask_token_id": ...}, {}, "`mask_token_id` is missing"),
    "no mask, P-EAGLE": (
        "P-EAGLE, speculators",
        {"mask_token_id": ...},
        {},
        "needs the id of its mask token",
    ),
    "mask": ("speculators", {"mask_token_id": 272}, {}, "has mask token 272, its model 272 tokens"),
    "mask, P-EAGLE": ("P-EAGLE", {"pard_token": 300}, {}, "has mask token 300, its model 272 tokens"),
    "masks' state": ("P-EAGLE", {}, {"mask_hidden": None}, "`mask_hidden` .* is missing"),
    "d2t": ("speculators", {}, {"d2t": None}, "lacks the tensor `d2t`"),
    "same ids in d2t": ("speculators", {}, {"d2t": lambda x: x * 0 - torch.arange(90)}, "two of its tokens"),
    "tensor": ("original", {}, {"layers.1.self_attn.k_norm.weight": None}, "layers.1.self_attn.k_norm"),
    "another tensor": ("original", {}, {"markov_w1.weight": torch.zeros(3, 3)}, "unexpected tensors: markov"),
    "type of the layers": ("original", {"model_type": "llama"}, {}, '`model_type` must be "qwen3"'),
    "option": ("original", {"new_option": 3}, {}, "`new_option` = 3 is not supported"),
    "sinks": ("original", {"add_swa_attention_sink_bias": True}, {}, "attention_sink_bias` must be false"),
    "architectures": (
        "speculators",
        {"architectures": 5},
        {},
        "`architectures` must be a list of names here, got 5",
    ),
    "types of layers": (
        "original, windows in all layers",
        {"layer_types": 5},
        {},
        "`layer_types` must be a list of names here, got 5",
    ),
    "methods of speculators": (
        "P-EAGLE, speculators",
        {"speculators_config": "x"},
        {},
        "`speculators_config` must be an object here",
    ),
    "list of methods": (
        "P-EAGLE, speculators",
        {"speculators_config": ["a"]},
        {},
        "`speculators_config` must be an object here",
    ),
    "object of methods": (
        "P-EAGLE, speculators",
        {"speculators_config": {"proposal_methods": {"a": 1}}},
        {},
        "speculators_config: `proposal_methods` must be a list of objects here",
    ),
    "names of methods": (
        "P-EAGLE, speculators",
        {"speculators_config": {"proposal_methods": ["x"]}},
        {},
        "speculators_config: `proposal_methods` must be a list of objects here",
    ),
    "DFlash2": ("original", {"architectures": ["DFlash2DraftModel"]}, {}, "a candidate selector"),
    "Markov head": ("DSpark", {}, {"markov_head.markov_w2.weight": None}, "markov_w2.weight` .* is missing"),
    "Markov head of DFlash": (
        "DSpark",
        {"architectures": ["DFlashDraftModel"]},
        {},
        '`attention_mode` = "gqa" is not supported',
    ),
    "type of the Markov head": (
        "DSpark, speculators",
        {"markov_head_type": "lstm"},
        {},
        "`markov_head_type` must be one of vanilla, gated, rnn, got 'lstm'",
    ),
    "hidden states": (
        "DSpark, DeepSpec",
        {"proposal_hidden_offset": 1},
        {},
        "`proposal_hidden_offset` must be 0",
    ),
}


def test_head_that_does_not_fit_is_refused_by_name_before_the_target_is_loaded(tmp_path: Path) -> None:
    layouts = {layout for layout, *_ in MISFITS.values()}
    beds = {layout: make_bed(tmp_path / layout, LAYOUTS[layout]) for layout in layouts}
    for bed in beds.values():
        info = read_head_info(bed.path, bed.model)
        assert info.is_head and info.draft_tokens_per_pass in (COUNT, 8)
    for layout, config, tensors, message in MISFITS.values():
        head = shutil.copytree(beds[layout].path, tmp_path / "changed", dirs_exist_ok=True)
        change_config(head, **config)
        change_tensors(head, **tensors)
        with pytest.raises(CheckpointError, match=message):
            read_head_info(head, beds[layout].model)
