"""Speculation changes no token: random models, formats, adapters and settings, compared bit for bit.

Each seed is a small checkpoint of a random family and shape in a random format, with adapters or without, and
two runs of the requests of tests/test_exact.py: plain decoding, and a random setting.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from gguf import GGMLQuantizationType

from foreword.kernels.cpu.library import supported_isas
from foreword.kernels.quantization import QUANT_BLOCKS
from tests.support.block_heads import train_block_head
from tests.support.budget import examples, some_of
from tests.support.checkpoints import (
    DELTA_NET_FAMILIES,
    FAMILIES,
    LATENT_FAMILIES,
    MAMBA2_FAMILIES,
    MOE_FAMILIES,
    STATE_FAMILIES,
    write_checkpoint,
    write_related_drafter,
)
from tests.support.gguf_files import NO_GGUF_FAMILIES, write_gguf
from tests.support.heads import write_random_head
from tests.support.lora_files import ATTENTION, LINEAR, STATES, write_adapter
from tests.support.mtp_checkpoints import MTP_FAMILIES, mtp_gguf_keys, write_mtp_checkpoint
from tests.support.quantized_checkpoints import FORMATS, write_quantized
from tests.test_exact import HEADS, PARAMS, PLAIN, SETTINGS, answers

# `replay` needs a recording, and automatic lengths may draft nothing.
SPECULATE = tuple(name for name in SETTINGS["speculate"] if not name.startswith("replay"))
PRECISIONS: tuple[dict[str, str], ...] = (
    {"dtype": "float32"},
    {"dtype": "bfloat16"},
    {"dtype": "bfloat16", "quantization": "int8"},
    {"dtype": "float32", "quantization": "int4"},
    {"dtype": "bfloat16", "kv_cache_dtype": "int8"},
)


def random_shape(chance: random.Random, family: str, multiple: int) -> dict[str, Any]:
    """Options of config.json; sizes of matrices are multiples of `multiple`."""
    sizes = [multiple * count for count in (1, 2, 3, 5) if 32 <= multiple * count <= 512]
    shape: dict[str, Any] = {
        "hidden_size": max(64, chance.choice(sizes)),
        "intermediate_size": chance.choice(sizes),
        **({} if family in LATENT_FAMILIES else {"head_dim": 16}),
        "num_attention_heads": 16 if multiple > 64 else chance.choice((2, 4, 6)),
    }
    if family in DELTA_NET_FAMILIES:
        shape["linear_value_head_dim"] = max(32, multiple // 4)  # there are four heads
    if family.startswith("gemma4"):
        shape["global_head_dim"] = 32
        shape |= {"hidden_size_per_layer_input": multiple} if family == "gemma4_text" else {}
    if family in MAMBA2_FAMILIES:
        shape["mamba_n_heads"] = shape["hidden_size"] // 8
        shape["mamba_d_ssm"] = 2 * shape["hidden_size"] if family == "falcon_h1" else ...
    if family in LATENT_FAMILIES:
        shape |= {"num_key_value_heads": shape["num_attention_heads"], "v_head_dim": 16}
        shape |= {"q_lora_rank": 64} if FAMILIES[family]["q_lora_rank"] else {}
    if family == "lfm2":
        shape["block_multiple_of"] = multiple
    if family in MOE_FAMILIES:
        known = FAMILIES[family]
        for key in ("moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size"):
            shape |= {key: chance.choice(sizes)} if key in known else {}
        count = chance.choice((1, 2, 5, 16))
        keys = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
        key = next(key for key in keys if known.get(key, ...) is not ...)
        top_k_key = next(key for key in ("moe_topk", "moe_k", "num_experts_per_tok") if key in known)
        top_k = chance.randint(1, count)
        count, top_k = (max(count, 2), 2) if family == "phimoe" else (count, top_k)
        shape |= {key: count, top_k_key: top_k}
        shape |= {"n_group": 1, "topk_group": 1} if "n_group" in known else {}
    return {key: value for key, value in shape.items() if FAMILIES[family].get(key) is not ...}


def random_model(
    chance: random.Random, path: Path, mtp: bool = False
) -> tuple[Path, Path, str, dict[str, Any]]:
    """A model, a draft model that often agrees, the plain checkpoint's family, and options of the engine.

    mtp: a family with an MTP head in its checkpoints, and such a head
    """
    names = MTP_FAMILIES if mtp else FAMILIES
    family = chance.choice([name for name in names if name != "nemotron_h"])  # its sizes have other names
    has_gguf = family not in (*NO_GGUF_FAMILIES, *LATENT_FAMILIES)  # tests/weights/test_gguf_latent.py
    kinds = ("plain", "quantized", *(("gguf",) if has_gguf else ()))
    kind = chance.choice(kinds)
    block = chance.choice(list(QUANT_BLOCKS))
    multiple = QUANT_BLOCKS[block].num_values if kind == "gguf" else 32
    shape = random_shape(chance, family, multiple)
    seed = chance.randrange(1 << 20)
    model = (write_mtp_checkpoint if mtp else write_checkpoint)(path / "model", family, seed, **shape)
    if family in STATE_FAMILIES:
        drafter = write_related_drafter(path / "drafter", model)
    else:
        drafter = write_checkpoint(path / "drafter", family, seed, "bfloat16", **shape)
    options: dict[str, Any] = {"threads": chance.randint(1, 2), "cpu_isa": chance.choice(supported_isas())}
    if kind == "plain":
        return model, drafter, family, options | chance.choice(PRECISIONS)
    options["dtype"] = chance.choice(("float32", "bfloat16"))
    if kind == "gguf":
        keys = mtp_gguf_keys(model) if mtp else {}
        file = write_gguf(model, path / "model.gguf", GGMLQuantizationType[block.upper()], **keys)
        return file, drafter, family, options
    formats = [name for name in FORMATS if "act-order" not in name or family not in MOE_FAMILIES]
    write_quantized(model, path / "quantized", chance.choice(formats))
    return path / "quantized", drafter, family, options


def random_adapters(chance: random.Random, family: str, path: Path) -> dict[str, Any]:
    """Options of answers(): up to three adapters, and that of each request."""
    modules = (*ATTENTION, *STATES) if family in MOE_FAMILIES else LINEAR
    names = [
        write_adapter(
            path / f"adapter{number}",
            path / "model",
            seed=number,
            rank=chance.choice((1, 3, 8, 16)),
            modules=chance.choice((modules, ATTENTION, ("v_proj", "o_proj"))),
            strength=0.3,
        )
        for number in range(chance.randint(0, 3))
    ]
    if not names or family in ("falcon_h1", "phi3"):  # GGUF files have scaled or fused projections
        return {}
    return {
        "lora_modules": ",".join(f"{name.name}={name}" for name in names),
        "lora_request": [chance.choice((None, *(name.name for name in names))) for _ in PARAMS],
    }


@pytest.mark.parametrize("seed", some_of(range(examples(40)), 2))
def test_random_setting_equals_plain_decoding(seed: int, tmp_path: Path) -> None:
    chance = random.Random(seed)
    model, drafter, family, options = random_model(chance, tmp_path)
    lora = random_adapters(chance, family, tmp_path)
    setting = {name: chance.choice(values) for name, values in SETTINGS.items()}
    setting |= {"speculate": chance.choice(SPECULATE)}
    _, plain = answers(model, drafter, None, PLAIN, **options, **lora)
    kind = next((name for name in HEADS if name in setting["speculate"]), "eagle3")
    if kind == "eagle3":
        head = write_random_head(tmp_path / "head", tmp_path / "model")
    else:  # untrained
        head = train_block_head(tmp_path / "head", tmp_path / "model", [], kind, steps=0)
    other = {**options, "threads": 3 - options["threads"], "head": head}
    _, actual = answers(model, drafter, None, setting, **other, **lora)
    assert actual == plain, (family, model, options, lora, setting)
