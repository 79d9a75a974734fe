"""EAGLE-3 heads: files, logits of drafted chains against a reference in plain torch, bits of their memory."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from foreword.errors import CheckpointError
from foreword.kernels.ops import MRopeSections
from foreword.kernels.reference.backend import ReferenceOps
from foreword.models.heads.eagle3 import Eagle3Config
from foreword.models.heads.head_loader import load_head, read_head_info
from foreword.models.interfaces import Precision
from foreword.models.model_loader import load_model
from foreword.weights.config_reader import ConfigReader, read_json
from tests.support.checkpoints import change_config, change_tensors, write_checkpoint
from tests.support.cpu_kernels import isas_under_test
from tests.support.head_runner import BACKENDS, DRAFT, HeadRunner, check_memory
from tests.support.heads import (
    AUX_LAYERS,
    ReferenceHead,
    add_vocab,
    head_config,
    head_tensors,
    write_gguf_head,
    write_head,
    write_random_head,
)
from tests.support.vision_checkpoints import write_vision_checkpoint

TEXT = [(37 * i * i + 11 * i) % 250 for i in range(70)]  # some blocks of the cache
SPECULATORS = {
    "architectures": ["Eagle3DraftModel"],
    "speculators_model_type": "eagle3",
    "speculators_version": "0.9.0",
    "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": "another"}},
    "auto_map": {"": "config.Eagle3SpeculatorConfig"},
    "embed_requires_grad": False,
    "target_hidden_size": None,
    "tie_word_embeddings": False,
    "eagle_aux_hidden_state_layer_ids": list(AUX_LAYERS),
    "torch_dtype": "float32",
}


@dataclass(frozen=True)
class Layout:
    """A head's files: how its config is written, and what it computes."""

    speculators: bool = False
    draft_size: int | None = 90  # None: the target's vocabulary
    own_embedding: bool = False
    own_lm_head: bool = True
    gguf: bool = False
    options: tuple[tuple[str, Any], ...] = ()


LAYOUTS = {
    "original": Layout(),
    "own embedding, whole vocabulary": Layout(draft_size=None, own_embedding=True),
    "GGUF": Layout(gguf=True),
    "GGUF, whole vocabulary": Layout(
        gguf=True, draft_size=None, own_embedding=True, options=(("norm_before_residual", True),)
    ),
    "GGUF, norm before fc": Layout(gguf=True, options=(("norm_before_fc", True),)),
    "borrowed head": Layout(draft_size=None, own_lm_head=False),
    "speculators": Layout(speculators=True),  # norm_before_residual is absent: true
    "speculators, qwen3": Layout(
        speculators=True, own_embedding=True, options=(("norm_before_residual", False), ("qk_norm", True))
    ),
    "speculators, norm before fc": Layout(speculators=True, options=(("norm_before_fc", True),)),
    "speculators, norm of each layer": Layout(
        speculators=True, options=(("fc_norm", True), ("norm_output", True))
    ),
}


@dataclass
class Bed:
    """A target, a head, and their reference."""

    model: Path
    path: Path
    reference: ReferenceHead


def make_bed(folder: Path, layout: Layout) -> Bed:
    model = write_checkpoint(folder / "model", "llama", seed=3)
    options = dict(layout.options)
    config = head_config(model)
    vocab_size = config["vocab_size"]
    if layout.draft_size:
        config["draft_vocab_size"] = layout.draft_size
    prefix = "layers.0." if layout.speculators else "midlayer."
    tensors = head_tensors(config, prefix=prefix, seed=5, **options)
    if layout.draft_size:
        add_vocab(tensors, vocab_size, layout.draft_size)
    weights = load_file(model / "model.safetensors")
    embedding, lm_head = weights["model.embed_tokens.weight"], weights["lm_head.weight"]
    if layout.own_embedding:
        embedding = embedding.flip(0).contiguous()
        tensors["embed_tokens.weight"] = embedding
    if layout.own_lm_head:
        lm_head = tensors["lm_head.weight"]
    else:
        del tensors["lm_head.weight"]
    if layout.gguf:
        norm_before_residual = options.get("norm_before_residual", False)
        path = write_gguf_head(folder / "head.gguf", config, tensors, norm_before_residual)
    else:
        path = write_head(folder / "head", written_config(config, layout, options), tensors)
    reference = ReferenceHead(
        config,
        tensors,
        embedding,
        lm_head,
        norm_before_residual=options.get("norm_before_residual", layout.speculators),
        norm_output=options.get("norm_output", False),
        prefix=prefix,
        options=options,
    )
    return Bed(model, path, reference)


def written_config(config: dict[str, Any], layout: Layout, options: dict[str, Any]) -> dict[str, Any]:
    if not layout.speculators:
        return config
    own = ("eagle_aux_hidden_state_layer_ids", "eagle_config", "architectures", "draft_vocab_size")
    layer = {key: value for key, value in config.items() if key not in own}
    if options.pop("qk_norm", False):
        layer |= {"model_type": "qwen3", "attention_bias": False}
        options["qk_norm"] = True
    written = {key: value for key, value in options.items() if key != "qk_norm"}
    size = {"draft_vocab_size": layout.draft_size or config["vocab_size"]}
    return {**SPECULATORS, **size, **written, "transformer_layer_config": layer}


def open_runner(bed: Bed, backend: str) -> HeadRunner:
    return HeadRunner(bed.model, bed.path, backend, TEXT)


@pytest.fixture(scope="module", params=LAYOUTS, ids=lambda name: name.replace(" ", "-"))
def bed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Bed:
    return make_bed(tmp_path_factory.mktemp("head"), LAYOUTS[request.param])


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Bed:
    return make_bed(tmp_path_factory.mktemp("original"), LAYOUTS["original"])


def aux_hidden_states_of(model: Path) -> Tensor:
    """[L, layers, H] of TEXT, by transformers."""
    target = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.inference_mode():
        states = target(torch.tensor([TEXT]), output_hidden_states=True).hidden_states
    return torch.stack([states[each][0] for each in AUX_LAYERS[:2]] + [last_output(target)], 1)


def last_output(target: Any) -> Tensor:
    """Output of the last layer before the norm, which is not among the hidden states."""
    outputs: list[Tensor] = []
    handle = target.model.norm.register_forward_pre_hook(lambda _, inputs: outputs.append(inputs[0][0]))
    with torch.inference_mode():
        target(torch.tensor([TEXT]))
    handle.remove()
    return outputs[0]


@pytest.mark.parametrize("backend", BACKENDS)
def test_chains_of_a_whole_text_equal_the_reference(bed: Bed, backend: str) -> None:
    runner = open_runner(bed, backend)
    hidden = bed.reference.fuse(aux_hidden_states_of(bed.model))
    done = 0
    for length in (2, 3, 8, 9, 33, len(TEXT)):
        runner.commit(done, length - 1)  # over slots of the draft before
        done = length - 1
        expected = bed.reference.chain(hidden[: length - 1], TEXT[:length], DRAFT)
        actual = runner.chain(length, DRAFT)
        for step, (logits, row) in enumerate(zip(expected, actual, strict=True)):
            ids = [bed.reference.target_id(index) for index in range(len(logits))]
            torch.testing.assert_close(row[ids], logits, rtol=1e-3, atol=1e-3, msg=f"{length}, {step}")
            others = torch.ones(len(row), dtype=torch.bool).index_fill_(0, torch.tensor(ids), False)
            assert row[others].isneginf().all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_memory_and_drafts_do_not_depend_on_how_the_text_was_computed(original: Bed, backend: str) -> None:
    check_memory([open_runner(original, backend) for _ in range(3)])


@pytest.mark.parametrize("isa", isas_under_test())
def test_draft_loop_equals_passes_one_by_one(original: Bed, isa: str) -> None:
    """The last block of the text is followed by scratch blocks."""
    runner = open_runner(original, isa)
    for length in (2, 8, 30, 64, len(TEXT)):
        runner.commit(0, length - 1)
        expected = runner.chain(length, DRAFT)
        tokens = runner.draft_in_loop(length, DRAFT)
        assert list(tokens.token_ids) == [int(row.argmax()) for row in expected]
        logprobs = [float(row.log_softmax(-1).max()) for row in expected]
        assert tokens.logprobs == pytest.approx(logprobs, abs=1e-4)


def test_first_token_is_never_seen(original: Bed) -> None:
    """No hidden state comes before it: whatever its slot holds, a draft is the same."""
    runner = open_runner(original, BACKENDS[-1])
    runner.commit(0, 20)
    before = runner.chain(21, DRAFT)
    (first,) = runner.slots(0, 1)
    for tensor in (runner.cache.layers[0].k, runner.cache.layers[0].v):
        tensor[first] = float("nan")
    runner.cache.hidden[0] = float("nan")  # what the first token reads
    assert all(map(torch.equal, runner.chain(21, DRAFT), before))


MISFITS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "hidden size": ({"target_hidden_size": 96}, {}, "hidden size 96, this one has 64"),
    "vocabulary": ({"vocab_size": 300}, {}, "300 tokens, this one has 272"),
    "layers": ({"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}, {}, "the model has 2"),
    "nested layers": (
        {
            "eagle_aux_hidden_state_layer_ids": ...,
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]},
        },
        {},
        "reads layers 1, 2, 3, the model has 2",
    ),
    "default layers": (
        {"eagle_aux_hidden_state_layer_ids": ...},
        {},
        "reads layers 2, 1, -1, the model has 2",
    ),
    "d2t": ({}, {"d2t": None}, "lacks the tensor `d2t`"),
    "size of d2t": ({}, {"d2t": lambda x: x[:-1].clone()}, "`d2t` is \\[89\\], not \\[90\\]"),
    "ids in d2t": ({}, {"d2t": lambda x: x + 200}, "outside of the model's vocabulary of 272"),
    "same ids in d2t": ({}, {"d2t": lambda x: x * 0 - torch.arange(90)}, "two of its tokens"),
    "number of layers": ({"eagle_aux_hidden_state_layer_ids": [1]}, {}, "list of 3 layers"),
    "layers twice": (
        {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 0, 1]}},
        {},
        "`eagle_aux_hidden_state_layer_ids` = .* is not supported",
    ),
    "windows of Llama": ({"use_sliding_window": True}, {}, "`use_sliding_window` = true is not supported"),
    "several steps": ({"eagle_config": {"parallel_draft_step": 4}}, {}, "`parallel_draft_step` must be 1"),
    "P-EAGLE": ({"architectures": ["PEagleDraftModel"]}, {}, "needs the id of its mask token"),
    "option": ({"parallel_drafting": True}, {}, "needs the id of its mask token"),
    "layers of the head": ({"num_hidden_layers": 2}, {}, "layers.1.input_layernorm.weight` .* is missing"),
    "type of the layer": ({"model_type": "gemma2"}, {}, "must be one of llama, mistral, phi3, qwen2, qwen3"),
    "layers before": ({"eagle_config": {"use_aux_hidden_state": False}}, {}, "must be true"),
    "sections of M-RoPE": (
        {"rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}},
        {},
        "`mrope_section` has 64 angles, and a head has 8",
    ),
    "missing tensor": ({}, {"midlayer.hidden_norm.weight": None}, "hidden_norm"),
    "another tensor": ({}, {"mask_hidden": torch.zeros(1, 192)}, "unexpected tensors: mask_hidden"),
}


def test_head_that_does_not_fit_is_refused_by_name_before_the_target_is_loaded(tmp_path: Path) -> None:
    bed = make_bed(tmp_path, LAYOUTS["original"])
    assert read_head_info(bed.path, bed.model).architecture == "eagle3"
    for config, tensors, message in MISFITS.values():
        head = shutil.copytree(bed.path, tmp_path / "changed", dirs_exist_ok=True)
        change_config(head, **config)
        change_tensors(head, **tensors)
        with pytest.raises(CheckpointError, match=message):
            read_head_info(head, bed.model)


def test_mask_token_without_parallel_drafting_has_no_effect(tmp_path: Path) -> None:
    bed = make_bed(tmp_path, LAYOUTS["original"])
    change_config(bed.path, parallel_drafting=False, pard_token=5)
    info = read_head_info(bed.path, bed.model)
    assert info.architecture == "eagle3" and info.draft_tokens_per_pass == 1


# As SpecForge and ModelOpt write them beside the layer's own options
COPIED: dict[str, dict[str, Any]] = {
    "Qwen 3": {"max_window_layers": 36, "sliding_window": None, "use_sliding_window": False},
    "Qwen 2.5": {"max_window_layers": 24, "sliding_window": 131072, "use_sliding_window": False},
    "Mistral": {"model_type": "mistral", "sliding_window": 4096, "use_sliding_window": False},
    "layers alone": {"max_window_layers": 36},
    "Gemma 3": {"target_model_type": "gemma3_text", "sliding_window": 512, "use_sliding_window": False},
    "Qwen 3 Next": {"decoder_sparse_step": 1},
    "Phi 4": {"model_type": "phi3"},
    "Qwen 2.5 VL": {
        "target_model_type": "qwen2_5_vl",
        "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
    },
    "ModelOpt": {
        "eagle_config": {
            "use_aux_hidden_state": True,
            "use_input_layernorm_in_first_layer": True,
            "use_last_layernorm": True,
            "use_mtp_layernorm": False,
            "next_layer_regular": True,
            "parallel_draft_step": 1,
            "parallel_draft_heads_num_layers": 1,
        }
    },
}


def test_options_of_trainers_without_effect(tmp_path: Path) -> None:
    bed = make_bed(tmp_path, LAYOUTS["original"])
    expected = read_head_info(bed.path, bed.model)
    for name, options in COPIED.items():
        head = shutil.copytree(bed.path, tmp_path / "changed", dirs_exist_ok=True)
        change_config(head, **options)
        assert read_head_info(head, bed.model) == expected, name


def test_mrope_of_a_head_applies_beside_a_target_with_mrope(tmp_path: Path) -> None:
    """Heads of Qwen2.5-VL were refused."""
    bed = make_bed(tmp_path, LAYOUTS["original"])
    change_config(bed.path, rope_scaling=COPIED["Qwen 2.5 VL"]["rope_scaling"])
    config = Eagle3Config.read(ConfigReader(read_json(bed.path / "config.json"), "config.json"))
    assert config.layer.layer_types[0].rope.mrope_sections == MRopeSections((2, 3, 3))
    assert not HeadRunner(bed.model, bed.path, "reference", TEXT).target.head.uses_mrope
    model = write_vision_checkpoint(tmp_path / "sees", "qwen2_5_vl", seed=1)
    head = write_random_head(tmp_path / "another", model)
    change_config(head, rope_scaling=COPIED["Qwen 2.5 VL"]["rope_scaling"])
    ops, precision = ReferenceOps(), Precision.from_dtypes("float32")
    target = load_model(model, ops, precision, "cpu", 128)
    assert load_head(head, target, ops, precision, "cpu", 128).uses_mrope


def test_layer_ids_name_inputs_outside_of_eagle_config_and_outputs_in_it(tmp_path: Path) -> None:
    path = make_bed(tmp_path, LAYOUTS["original"]).path

    def read() -> tuple[int, ...] | None:
        return Eagle3Config.read(ConfigReader(read_json(path / "config.json"), "config.json")).aux_layers

    assert read() == AUX_LAYERS == (0, 1, 2)
    key = "eagle_aux_hidden_state_layer_ids"
    change_config(path, **{key: ..., "eagle_config": {key: [1, 11, 21]}})
    assert read() == (2, 12, 22)


def test_borrowed_embedding_needs_the_hidden_size_of_the_target(tmp_path: Path) -> None:
    bed = make_bed(tmp_path, LAYOUTS["original"])
    config = {**json.loads((bed.path / "config.json").read_text()), "hidden_size": 32, "head_dim": 8}
    tensors = head_tensors({**config, "target_hidden_size": 64})
    add_vocab(tensors, config["vocab_size"], config["draft_vocab_size"])
    write_head(bed.path, {**config, "target_hidden_size": 64}, tensors)
    with pytest.raises(CheckpointError, match="has no embed_tokens, and its hidden size 32"):
        read_head_info(bed.path, bed.model)
    tensors["embed_tokens.weight"] = torch.randn(config["vocab_size"], 32)
    write_head(bed.path, {**config, "target_hidden_size": 64}, tensors)
    info = read_head_info(bed.path, bed.model)
    assert info.parameters == sum(x.numel() for name, x in tensors.items() if name not in ("d2t", "t2d"))
    assert info.hidden_values_per_token == 32
    open_runner(bed, BACKENDS[-1]).commit(0, 9)


def test_older_gguf_files_name_the_layers_by_another_key(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "model", "llama")
    config = head_config(model)
    files = [
        write_gguf_head(tmp_path / f"{key}.gguf", config, head_tensors(config), layers_key=key)
        for key in ("target_layers", "extract_layers")
    ]
    assert read_head_info(files[0], model) == read_head_info(files[1], model)


def test_error_names_the_key_of_a_gguf_file(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "model", "llama")
    config = head_config(model)
    keys = {"attention.head_count": 3}
    file = write_gguf_head(tmp_path / "head.gguf", config, head_tensors(config), **keys)
    with pytest.raises(CheckpointError, match=r"`eagle3\.attention\.key_length` makes 48 rows"):
        read_head_info(file, model)
    file = write_gguf_head(tmp_path / "head.gguf", config, head_tensors(config), layers_key="layers")
    with pytest.raises(CheckpointError, match=r"`eagle3\.layers` = \[0, 1, 2\] is not supported"):
        read_head_info(file, model)
