"""LoRA adapters through the offline API: equal to merged weights, and exact in every company."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import gguf
import pytest

from foreword import LLM, LoRARequest, RequestOutput, SamplingParams
from foreword.errors import AdapterConflict, InvalidRequest, Unsupported
from tests.support.budget import is_full
from tests.support.checkpoints import (
    FAMILIES,
    MOE_FAMILIES,
    STATE_FAMILIES,
    write_checkpoint,
    write_related_drafter,
)
from tests.support.cpu_kernels import FORCED_ISA
from tests.support.gguf_files import write_gguf
from tests.support.images import png
from tests.support.lora_files import (
    ATTENTION,
    LINEAR,
    STATES,
    merge_adapter,
    write_adapter,
    write_gguf_adapter,
)
from tests.support.vision_checkpoints import IMAGE_TOKEN_ID, write_vision_checkpoint
from tests.test_exact import BLOCKWISE, CROWDED, PARAMS, PLAIN, SETTINGS, Family, acceptance
from tests.test_exact import answers as exact_answers

PROMPTS = ("the cat and the dog", "in the beginning", "a", "the end of another thing and the other")
# Fused, tied, normed; experts; layers with state
QUICK_FAMILIES = ("llama", "phi3", "gemma2", "qwen3", "mixtral", "gpt_oss", "lfm2", "qwen3_next")
OPTIONS = {"threads": 1, "max_model_len": 128, "kv_cache_memory": "4000tokens", "speculate": "off"}


def logprobs(outputs: list[RequestOutput]) -> list[float]:
    return [entry.logprob for output in outputs for entry in output.outputs[0].logprobs or ()]


@pytest.mark.parametrize("family", FAMILIES if is_full() else QUICK_FAMILIES)
def test_adapter_equals_merged_weights(family: str, tmp_path: Path) -> None:
    base = write_checkpoint(tmp_path / "base", family, seed=5)
    adapter = write_adapter(
        tmp_path / "adapter",
        base,
        strength=0.5,
        modules=(*ATTENTION, *STATES) if family in MOE_FAMILIES else LINEAR,  # experts have no adapters
        ranks={"o_proj": 7, "in_proj_z": 2, "in_proj_ba": 1},
        alpha_pattern={"down_proj": 3.0, "v_proj": 9.0},
        use_rslora=family == "qwen3",
    )
    merged = LLM(str(merge_adapter(tmp_path / "merged", base, adapter)), **OPTIONS)
    llm = LLM(str(base), lora_modules=f"tuned={adapter}", **OPTIONS)
    params = SamplingParams(temperature=0, max_tokens=12, logprobs=5)
    tuned, expected, plain = (
        llm.generate(PROMPTS, params, lora_request="tuned"),
        merged.generate(PROMPTS, params),
        llm.generate(PROMPTS, params),
    )
    assert [output.token_ids for output in tuned] == [output.token_ids for output in expected]
    assert [output.token_ids for output in tuned] != [output.token_ids for output in plain]
    tolerance = 1e-3 if family == "gemma" else 1e-4  # whose norms, and so logits, are large here
    assert logprobs(tuned) == pytest.approx(logprobs(expected), abs=tolerance)


# Rows of the base and of adapters of several ranks and targets, next to each other.
MIXED = [(None, "small", "large", "attention")[number * 7 % 5 % 4] for number in range(len(PARAMS))]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, str]:
    """A model, a draft model that often agrees with it, and adapters of the model."""
    path = tmp_path_factory.mktemp("lora")
    model = write_checkpoint(path / "model", "llama", seed=3, **BLOCKWISE)
    drafter = write_checkpoint(path / "drafter", "llama", seed=3, dtype="bfloat16", **BLOCKWISE)
    shapes: dict[str, dict[str, Any]] = {
        "small": {"rank": 3, "strength": 0.2},
        "large": {"rank": 16, "strength": 0.3, "seed": 1},
        "attention": {"rank": 8, "strength": 0.2, "seed": 2, "modules": ATTENTION},
    }
    adapters = {name: write_adapter(path / name, model, **options) for name, options in shapes.items()}
    return model, drafter, ",".join(f"{name}={adapter}" for name, adapter in adapters.items())


@pytest.fixture(scope="module")
def plain(pair: tuple[Path, Path, str]) -> list[dict[str, Any]]:
    """Answers of each request alone; adapters change them, and only those of their requests."""
    model, drafter, modules = pair
    _, answers = exact_answers(model, drafter, None, PLAIN, lora_modules=modules, lora_request=MIXED)
    _, base = exact_answers(model, drafter, None, PLAIN, lora_modules=modules)
    same = [index for index, answer in enumerate(base) if answer == answers[index]]
    assert same == [index for index, name in enumerate(MIXED) if name is None]
    return answers


@pytest.fixture(scope="module")
def heads(
    pair: tuple[Path, Path, str], plain: list[dict[str, Any]], tmp_path_factory: pytest.TempPathFactory
) -> Family:
    """They know the answers of the base, and read the hidden states of adapters too."""
    return Family(pair[0], pair[1], Path(), plain, tmp_path_factory.mktemp("lora"))


DRAFTERS = [name for name in SETTINGS["speculate"] if not name.startswith("replay")]


@pytest.mark.parametrize("speculate", DRAFTERS if is_full() else ("suffix,draft",))
def test_mixed_adapters_are_exact(
    pair: tuple[Path, Path, str], plain: list[dict[str, Any]], heads: Family, speculate: str
) -> None:
    """Crowded, preempted, chunked and with drafts: as each request alone without speculation."""
    model, drafter, modules = pair
    options = {"lora_modules": modules, "lora_request": MIXED, "head": heads.head(speculate)}
    llm, crowded = exact_answers(model, drafter, None, CROWDED | {"speculate": speculate}, **options)
    assert crowded == plain
    if speculate in ("suffix,draft", "eagle3"):
        assert 0.0 < acceptance(llm) < 1.0


@pytest.mark.parametrize("family", STATE_FAMILIES if is_full() else ("qwen3_next",))
def test_mixed_adapters_are_exact_beside_states(family: str, tmp_path: Path) -> None:
    """Adapters of the branches with state: a prefix of one adapter is not used by another."""
    model = write_checkpoint(tmp_path / "model", family, seed=6)
    drafter = write_related_drafter(tmp_path / "drafter", model)
    shapes: dict[str, dict[str, Any]] = {
        "small": {"rank": 3, "modules": STATES},
        "large": {"rank": 16, "seed": 1, "modules": (*STATES, *ATTENTION)},
        "attention": {"rank": 8, "seed": 2, "modules": ATTENTION},
    }
    adapters = {
        name: write_adapter(tmp_path / name, model, strength=0.3, **options)
        for name, options in shapes.items()
    }
    modules = ",".join(f"{name}={adapter}" for name, adapter in adapters.items())
    lora: dict[str, Any] = {"lora_modules": modules, "lora_request": MIXED}
    _, expected = exact_answers(model, drafter, None, PLAIN, **lora)
    _, base = exact_answers(model, drafter, None, PLAIN, lora_modules=modules)
    same = [index for index, answer in enumerate(base) if answer == expected[index]]
    assert same == [index for index, name in enumerate(MIXED) if name is None]
    _, crowded = exact_answers(model, drafter, None, CROWDED, **lora)
    assert crowded == expected


PRECISIONS: dict[str, dict[str, str]] = {
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"dtype": "bfloat16", "quantization": "int8"},
    "int4": {"dtype": "float32", "quantization": "int4"},
    "Q4_K": {},
}


@pytest.mark.parametrize(
    ("precision", "cpu_isa"),
    [*((name, FORCED_ISA) for name in PRECISIONS), ("int8", "reference")]
    if is_full()
    else [("Q4_K", FORCED_ISA)],
)
def test_mixed_adapters_on_quantized_bases(
    pair: tuple[Path, Path, str], precision: str, cpu_isa: str, tmp_path: Path
) -> None:
    model, drafter, modules = pair
    if precision == "Q4_K":
        model = write_gguf(model, tmp_path / "base.gguf", gguf.GGMLQuantizationType.Q4_K)
    lora: dict[str, Any] = {"lora_modules": modules, "lora_request": MIXED, "cpu_isa": cpu_isa}
    _, plain = exact_answers(model, drafter, None, PLAIN, **lora, **PRECISIONS[precision])
    _, crowded = exact_answers(model, drafter, None, CROWDED, **lora, **PRECISIONS[precision])
    assert crowded == plain


def test_adapter_of_a_float_base_fits_its_gguf(pair: tuple[Path, Path, str], tmp_path: Path) -> None:
    """Llama's converter permutes rows of q and k, of the base and of adapters: both give equal answers."""
    model, _, modules = pair
    folder = Path(modules.partition(",")[0].partition("=")[2])
    base = write_gguf(model, tmp_path / "base.gguf")
    heads = {"q_proj": BLOCKWISE["num_attention_heads"], "k_proj": BLOCKWISE["num_key_value_heads"]}
    adapter = write_gguf_adapter(tmp_path / "adapter.gguf", folder, "llama", heads)
    params = SamplingParams(temperature=0, max_tokens=20, logprobs=0)
    scores = []
    for checkpoint in (base, model):
        llm = LLM(str(checkpoint), lora_modules=f"peft={folder}", max_loras=2, test_mode=True, **OPTIONS)
        peft = llm.generate(PROMPTS, params, lora_request="peft")
        converted = llm.generate(PROMPTS, params, lora_request=LoRARequest("gguf", 1, str(adapter)))
        assert hashes(peft) == hashes(converted) != hashes(llm.generate(PROMPTS, params))
        scores.append(logprobs(peft))
    assert scores[0] == pytest.approx(scores[1], abs=1e-4)


def hashes(outputs: list[RequestOutput]) -> list[tuple[int, ...]]:
    return [output.outputs[0].logits_hashes for output in outputs]


def test_images_and_adapters_are_exact(tmp_path: Path) -> None:
    """Prompts with images run uncompiled, and mix with adapters and text."""
    model = write_vision_checkpoint(tmp_path / "model", seed=2)
    adapters = {
        name: write_adapter(tmp_path / name, model, seed=seed, strength=0.3, modules=ATTENTION)
        for seed, name in enumerate(("one", "two"))
    }
    modules = ",".join(f"{name}={path}" for name, path in adapters.items())
    llm = LLM(str(model), lora_modules=modules, test_mode=True, **OPTIONS)
    prompts: list[Any] = [
        {"prompt_token_ids": [5, IMAGE_TOKEN_ID, 9, 7], "images": [png("red", (60, 40))]},
        {"prompt_token_ids": [5, 9, 7]},
    ] * 3
    names = [None, "one", "two", None, "one", "two"]
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    together = hashes(llm.generate(prompts, params, lora_request=names))
    alone = [
        hashes(llm.generate(prompt, params, lora_request=name))[0]
        for prompt, name in zip(prompts, names, strict=True)
    ]
    assert together == alone
    assert len(set(together)) == len(together), "images, texts and adapters all differ"


def test_prefix_cache_shares_no_block_between_adapters(pair: tuple[Path, Path, str]) -> None:
    model, _, modules = pair
    options = OPTIONS | {"kv_cache_memory": "2000tokens"}
    llm = LLM(str(model), lora_modules=modules, test_mode=True, **options)
    fresh = LLM(str(model), lora_modules=modules, test_mode=True, prefix_caching=False, **options)
    prompt = {"prompt_token_ids": [random.Random(1).randrange(3, 250) for _ in range(70)]}
    params = SamplingParams(temperature=0, max_tokens=4)
    for expected_hits, names in ((0, (None, "small", "large")), (64, ("large", None, "small"))):
        for name in names:
            before = llm.stats.prefix_cache_hits_total
            answer = hashes(llm.generate(prompt, params, lora_request=name))
            assert llm.stats.prefix_cache_hits_total - before == expected_hits, name
            assert answer == hashes(fresh.generate(prompt, params, lora_request=name))


def test_adapters_of_paths_take_turns_in_the_slots(pair: tuple[Path, Path, str]) -> None:
    model, _, modules = pair
    paths = [item.partition("=")[2] for item in modules.split(",")]
    llm = LLM(str(model), enable_lora=True, max_loras=2, test_mode=True, **OPTIONS)
    params = SamplingParams(temperature=0, max_tokens=6)
    requests = [LoRARequest(f"number {index}", index, path) for index, path in enumerate(paths)]

    def run() -> list[Any]:
        return [hashes(llm.generate("the cat", params, lora_request=request)) for request in requests]

    first = run()
    assert first == run() == run()
    assert len({str(answer) for answer in first}) == 3
    with pytest.raises(AdapterConflict, match="max-loras 2"):
        llm.generate(["a"] * 3, params, lora_request=requests)
    assert hashes(llm.generate(["the cat"] * 2, params, lora_request=requests[1:])) == [
        answer[0] for answer in first[1:]
    ]
    with pytest.raises(InvalidRequest, match="no adapter is named 'x'; loaded: "):
        llm.generate("a", params, lora_request="x")
    with pytest.raises(InvalidRequest, match="2 prompts, but 1 of lora_request"):
        llm.generate(["a", "b"], params, lora_request=requests[:1])


def test_copy_of_an_adapter_leaves_with_it(pair: tuple[Path, Path, str], tmp_path: Path) -> None:
    """Two paths with the same content are one adapter in one slot."""
    model, _, modules = pair
    first, second = (Path(item.partition("=")[2]) for item in modules.split(",")[:2])
    copy = tmp_path / "copy"
    shutil.copytree(first, copy)
    llm = LLM(str(model), enable_lora=True, max_loras=1, test_mode=True, **OPTIONS)
    params = SamplingParams(temperature=0, max_tokens=6)

    def run(path: Path) -> Any:
        return hashes(llm.generate("the cat", params, lora_request=LoRARequest(path.name, 1, str(path))))

    expected = run(first)
    assert run(copy) == expected != run(second)
    assert run(copy) == expected


def test_lora_is_off_by_default(pair: tuple[Path, Path, str]) -> None:
    model, _, modules = pair
    llm = LLM(str(model), **OPTIONS)
    with pytest.raises(Unsupported, match="LoRA is off: --enable-lora"):
        llm.generate("a", lora_request=LoRARequest("x", 1, modules.split("=")[1].split(",")[0]))


def test_room_for_adapters_changes_no_bit_of_the_base(pair: tuple[Path, Path, str]) -> None:
    model, _, modules = pair
    params = SamplingParams(max_tokens=12, seed=1)
    answers = [
        hashes(LLM(str(model), test_mode=True, **options, **OPTIONS).generate(PROMPTS, params))
        for options in ({}, {"enable_lora": True}, {"lora_modules": modules})
    ]
    assert answers[0] == answers[1] == answers[2]
