"""Speculation changes no token: the same requests under every setting of the engine, compared bit for bit.

Each run answers 16 requests, which cover every sampling parameter and n, under one combination of drafter,
concurrency, cache size, prefix cache and chunking. Token ids, logits hashes, logprobs, texts, finish reasons
and counts must equal those of the plain run: speculation off, one request at a time, ample cache, no prefix
cache.

Default: one crowded combination per drafter, for which four families take turns, the best kernels of this
machine. `--full`: every family under the crowded combination and some pairwise ones, which take turns; every
instruction set and the reference. `--full-product`: all combinations.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest
from gguf import GGMLQuantizationType
from prometheus_client.parser import text_string_to_metric_families

from foreword import LLM, RequestOutput, SamplingParams
from foreword.kernels.cpu.library import supported_isas
from tests.support import gemma4_checkpoints as gemma4
from tests.support.block_heads import train_block_head
from tests.support.budget import is_full
from tests.support.checkpoints import (
    FAMILIES,
    STATE_FAMILIES,
    write_checkpoint,
    write_drafter,
    write_related_drafter,
)
from tests.support.cpu_kernels import FORCED_ISA
from tests.support.gguf_files import write_gguf
from tests.support.heads import train_head
from tests.support.kernel_rows import RowDependentOps
from tests.support.quantized_checkpoints import write_quantized

HEADS = ("eagle3", "p-eagle", "dflash", "dspark")
RUNS_AS = {"p-eagle": "eagle3", "dspark": "dflash"}
MAX_MODEL_LEN = 127  # one below a block boundary
HEAD_STEPS = 40  # a head that is trained for longer knows all answers
QUICK_FAMILIES = ("llama", "gpt_oss", "deepseek_v3", "qwen3_5_text")
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {"gemma4-experts": ("gemma4_text", gemma4.EXPERTS)}

SETTINGS: dict[str, tuple[Any, ...]] = {
    "speculate": (
        "off",
        "ngram",
        "suffix",
        "text",
        "draft",
        "eagle3",
        "p-eagle",
        "dflash",
        "dspark",
        "replay 0",
        "replay 0.5",
        "replay 1",
        "suffix,draft",
        "text,suffix,draft",
        "suffix,tests.support.own_drafter:Moody",
        "auto",
    ),
    "draft_length": ("fixed", "adaptive"),
    "concurrent": (1, 16),
    "cache": ("ample", "small"),
    "prefix_caching": (False, True),
    "chunk": (512, 24),
    "num_speculative_tokens": (1, 4, 16),
}
PLAIN = {
    "speculate": "off",
    "draft_length": "fixed",
    "concurrent": 1,
    "cache": "ample",
    "prefix_caching": False,
    "chunk": 512,
    "num_speculative_tokens": 4,
}


def pairwise(settings: dict[str, tuple[Any, ...]]) -> list[dict[str, Any]]:
    """Few combinations that hold every pair of values of every two settings (greedy), in random order."""
    names = list(settings)
    missing = {
        ((a, x), (b, y))
        for a, b in itertools.combinations(names, 2)
        for x in settings[a]
        for y in settings[b]
    }
    everything = [dict(zip(names, values, strict=True)) for values in itertools.product(*settings.values())]
    chosen = []
    while missing:
        chosen.append(max(everything, key=lambda combination: len(missing & _pairs(combination))))
        missing -= _pairs(chosen[-1])
    random.Random(1).shuffle(chosen)
    return chosen


def _pairs(combination: dict[str, Any]) -> set[Any]:
    return set(itertools.combinations(combination.items(), 2))


PAIRS = pairwise(SETTINGS) if is_full() else []
CROWDED = PLAIN | {
    "speculate": "suffix,draft",
    "concurrent": 16,
    "cache": "small",
    "prefix_caching": True,
    "chunk": 24,
}
PRODUCT = [dict(zip(SETTINGS, values, strict=True)) for values in itertools.product(*SETTINGS.values())]


PAIRS_PER_FAMILY = 2
NUM_TURNS = len(QUICK_FAMILIES)
SHARES = 1 + PAIRS_PER_FAMILY if is_full() else len(SETTINGS["speculate"]) // NUM_TURNS


def combinations(turn: int, product: bool) -> list[dict[str, Any]]:
    """Settings under which a family is compared; `turn` is the family's number."""
    if product:
        return PRODUCT
    if is_full():
        places = range(PAIRS_PER_FAMILY * turn, PAIRS_PER_FAMILY * (turn + 1))
        return [CROWDED, *(PAIRS[place % len(PAIRS)] for place in places)]
    return [
        CROWDED | {"speculate": drafter, "draft_length": "adaptive" if drafter == "auto" else "fixed"}
        for drafter in SETTINGS["speculate"][turn::NUM_TURNS]
    ]


def prompts() -> list[list[int]]:
    """Sixteen prompts with repetitions and shared prefixes; some longer than a chunk."""
    chance = random.Random(7)
    common = [chance.randrange(3, 250) for _ in range(40)]
    texts = []
    for number in range(16):
        own = [chance.randrange(3, 250) for _ in range(chance.randint(2, 9))]
        texts.append(common[: (number % 4) * 13] + own * chance.randint(1, 4))
    return texts


# Checkpoints whose answers vary, and `ngram` sometimes predicts them; 1 elsewhere.
SEEDS = {
    "glm4_moe_lite": 2,
    "granitemoeshared": 2,
    "lfm2": 11,
    "qwen3_next": 3,
    "gemma4_text": 2,
    "gemma4_unified_text": 2,
    "mixtral": 2,
    "olmoe": 3,
    "qwen3_5_text": 6,
    "apertus": 6,
    "cohere2": 2,
    "nemotron": 4,
    "nemotron_h": 3,
    "phi": 16,
    "stablelm": 2,
}
PARAMS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0, "logprobs": 3},
    {"temperature": 0.0, "ignore_eos": True, "max_tokens": None},
    {"temperature": 1.0, "logprobs": 0},
    {"temperature": 0.7, "top_k": 7, "n": 3},
    {"temperature": 1.3, "top_p": 0.8, "logprobs": 5},
    {"temperature": 1.0, "min_p": 0.05},
    {"temperature": 0.0, "presence_penalty": 1.5, "frequency_penalty": 0.7},
    {"temperature": 0.9, "repetition_penalty": 1.3, "top_p": 0.9, "n": 2},
    {"temperature": 0.0, "repetition_penalty": 1.2, "prompt_logprobs": 2},
    {"temperature": 1.0, "logit_bias": {65: 4.0, 66: -100.0}},
    {"temperature": 0.8, "allowed_token_ids": tuple(range(40, 140))},
    {"temperature": 1.0, "bad_words": ("e", "th"), "prompt_logprobs": 0, "logprobs": 1},
    {"temperature": 0.6, "min_tokens": 12, "stop_token_ids": (70, 71, 72, 73, 74, 75, 76, 77)},
    {"temperature": 1.0, "stop": ("a", "Q"), "include_stop_str_in_output": True},
    {"temperature": 0.9, "stop": ("e", "x", "1"), "min_tokens": 3, "logprobs": 2},
    {"temperature": 0.0, "max_tokens": 5, "frequency_penalty": -0.8},
)


def requests() -> tuple[list[dict[str, list[int]]], list[SamplingParams]]:
    ids = [{"prompt_token_ids": prompt} for prompt in prompts()]
    return ids, [
        SamplingParams(**{"max_tokens": 40, "seed": 100 * i, **params}) for i, params in enumerate(PARAMS)
    ]


@dataclass(frozen=True)
class Family:
    """A checkpoint, its plain answers, and these as a recording for the replay drafter."""

    model: Path
    drafter: Path
    recording: Path
    plain: list[dict[str, Any]]
    heads: Path  # folder of trained heads
    turn: int = 0  # among the families of this run

    def head(self, method: str) -> Path | None:
        """The trained head that a setting of `speculate` needs, made once."""
        kind = next((name for name in HEADS if name in method), None)
        if kind is None or (self.heads / kind).exists():
            return kind and self.heads / kind
        texts = [[*line["prompt_token_ids"], *line["token_ids"]] for line in recorded(self.plain)]
        if kind == "eagle3":
            return train_head(self.heads / kind, self.model, texts, steps=HEAD_STEPS)
        return train_block_head(self.heads / kind, self.model, texts[::2], kind, steps=HEAD_STEPS)


def fingerprint(output: RequestOutput) -> dict[str, Any]:
    """Every part of an answer that speculation, batching and caching must not change. Ids of calls may."""
    choices = [
        (
            *(c.token_ids, c.logits_hashes, c.text, c.finish_reason, c.stop_reason, c.seed, c.logprobs),
            *(c.reasoning, [(call.name, call.arguments) for call in c.tool_calls]),
        )
        for c in output.outputs
    ]
    return {
        "choices": choices,
        "prompt_logprobs": output.prompt_logprobs,
        "lengths": [len(c.token_ids) for c in output.outputs],
    }


def outputs_of(outputs: Iterable[RequestOutput]) -> list[dict[str, Any]]:
    return [fingerprint(output) for output in outputs]


def make_llm(
    model: Path, drafter: Path | None, recording: Path | None, combination: dict[str, Any], **options: Any
) -> LLM:
    """An engine with the settings of a combination; `options` have the size of its cache."""
    method, _, error_rate = combination["speculate"].partition(" ")
    return LLM(
        str(model),
        speculate=",".join(RUNS_AS.get(name, name) for name in method.split(",")),
        draft_length=combination["draft_length"],
        draft_model=None if drafter is None else str(drafter),
        replay_file=str(recording) if method == "replay" else None,
        replay_error_rate=float(error_rate or 0),
        num_speculative_tokens=combination["num_speculative_tokens"],
        max_num_seqs=combination["concurrent"],
        max_num_batched_tokens=combination["chunk"],
        prefix_caching=combination["prefix_caching"],
        test_mode=True,
        **options,
    )


def answers(
    model: Path,
    drafter: Path,
    recording: Path | None,
    combination: dict[str, Any],
    *,
    lora_request: Sequence[str | None] | None = None,
    threads: int = 1,
    head: Path | None = None,
    **options: Any,
) -> tuple[LLM, list[dict[str, Any]]]:
    method = combination["speculate"]
    small = combination["cache"] == "small"
    draft_model = drafter if "draft" in method or method == "auto" else None
    llm = make_llm(
        model,
        head if any(kind in method for kind in HEADS) else draft_model,
        recording,
        combination,
        kv_cache_memory="240tokens" if small else "8000tokens",
        max_model_len=MAX_MODEL_LEN,
        threads=threads,
        **options,
    )
    outputs = llm.generate(*requests(), lora_request=lora_request)
    llm.check()
    if "suffix" in method or "text" in method or method == "auto":
        again = llm.generate(*requests(), lora_request=lora_request)
        assert outputs_of(again) == outputs_of(outputs), "with a corpus of finished outputs"
    if small and combination["concurrent"] > 1:
        assert llm.stats.preemptions_total > 0, "the small cache must cause preemptions"
    return llm, outputs_of(outputs)


@pytest.fixture(
    scope="module",
    params=enumerate((*FAMILIES, *VARIANTS) if is_full() else QUICK_FAMILIES),
    ids=itemgetter(1),
)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Family:
    turn, name = request.param
    family, overrides = VARIANTS.get(name, (name, {}))
    return replace(make_family(family, tmp_path_factory.mktemp(name), **overrides), turn=turn)


def make_family(name: str, path: Path, **overrides: Any) -> Family:
    model = write_checkpoint(path / "model", name, seed=SEEDS.get(name, 1), **overrides)
    if name in STATE_FAMILIES:  # such a model cannot draft: a Llama that agrees now and then
        drafter = write_related_drafter(path / "drafter", model)
    else:  # rounded: agrees often, not always
        drafter = write_checkpoint(
            path / "drafter", name, seed=SEEDS.get(name, 1), dtype="bfloat16", **overrides
        )
    _, plain = answers(model, drafter, None, PLAIN)
    recording = path / "recording.jsonl"
    recording.write_text("".join(json.dumps(line) + "\n" for line in recorded(plain)))
    return Family(model, drafter, recording, plain, path / "heads")


def recorded(plain: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for prompt, answer in zip(prompts(), plain, strict=True):
        for token_ids, _, _, _, _, seed, *_ in answer["choices"]:
            yield {"prompt_token_ids": prompt, "seed": seed, "token_ids": token_ids}


def acceptance(llm: LLM) -> float:
    """Accepted share of all drafted tokens so far; 0 if there were none."""
    samples = {
        metric.name: metric.samples
        for metric in text_string_to_metric_families(llm.render_metrics().decode())
    }
    drafted, accepted = (
        sum(
            sample.value
            for sample in samples.get(f"foreword_spec_{kind}_tokens", ())
            if sample.name.endswith("_total")
        )
        for kind in ("draft", "accepted")
    )
    return accepted / drafted if drafted else 0.0


def differing(plain: list[dict[str, Any]], actual: list[dict[str, Any]]) -> list[int]:
    """Numbers of the requests whose answers differ."""
    return [i for i, (a, b) in enumerate(zip(plain, actual, strict=True)) if a != b]


def test_outputs_vary(family: Family) -> None:
    """A model that repeats one token would prove nothing."""
    greedy = [family.plain[i]["choices"][0][0] for i in (0, 1)]
    assert all(len(set(token_ids)) > len(token_ids) // 4 for token_ids in greedy), greedy
    reasons = {choice[3] for answer in family.plain for choice in answer["choices"]}
    assert reasons == {"stop", "length"}


@pytest.mark.parametrize("share", range(SHARES))
def test_equal_under_every_setting(family: Family, share: int, pytestconfig: pytest.Config) -> None:
    for combination in combinations(family.turn, pytestconfig.getoption("--full-product"))[share::SHARES]:
        check_combination(family, combination)


def check_combination(family: Family, combination: dict[str, Any]) -> None:
    models = family.model, family.drafter, family.recording
    llm, actual = answers(*models, combination, head=family.head(combination["speculate"]))
    assert differing(family.plain, actual) == [], f"these requests differ from plain decoding: {combination}"
    check_acceptance(combination, acceptance(llm))


def check_acceptance(combination: dict[str, Any], accepted: float) -> None:
    if combination["draft_length"] == "adaptive":
        return  # the controller may decide that no draft pays
    if combination["speculate"] == "replay 0":
        assert accepted == 1.0, "the recording holds the plain answers"
    elif combination["speculate"] == "replay 1":
        assert accepted == 0.0
    elif combination["speculate"] in ("ngram", "text"):
        assert accepted < 1.0, (
            "random models repeat few texts, some of them none; the demo's model does below"
        )
    elif combination["speculate"] == "draft":
        assert accepted > 0.0  # that drafts are rejected too is asserted by check_crowded()
    elif combination["speculate"] != "off":
        assert 0.0 < accepted < 1.0, "a comparison without accepted and rejected drafts would prove little"


def test_equal_with_predictions(family: Family) -> None:
    """Predict the answer itself, mostly right, and another request's answer, mostly wrong."""
    draft_length = SETTINGS["draft_length"][family.turn % 2]
    prompts_, params = requests()
    llm = LLM(
        str(family.model),
        speculate="prediction",
        draft_length=draft_length,
        max_model_len=MAX_MODEL_LEN,
        threads=1,
        test_mode=True,
    )
    for shift in (0, 1):
        texts = [
            family.plain[(i + shift) % len(family.plain)]["choices"][0][2][:40] or "?"
            for i in range(len(params))
        ]
        predicted = [replace(p, prediction=text) for p, text in zip(params, texts, strict=True)]
        assert differing(family.plain, outputs_of(llm.generate(prompts_, predicted))) == []
    llm.check()
    assert draft_length == "adaptive" or 0.0 < acceptance(llm) < 1.0


CODE = """\
def mean(values):
    total = 0
    for value in values:
        total += value
    return total / len(values)
"""
NUMBERED = "".join(f"{number:6d}\t{line}\n" for number, line in enumerate(CODE.splitlines(), 1))
COUNTED = "one two three four five six seven eight nine ten\n"


def test_equal_where_answers_copy_text() -> None:
    """The demo's model repeats code and words, with errors: their drafts are accepted and rejected."""
    texts = [CODE + "\n" + CODE[:40], NUMBERED + "\n" + CODE[:40], COUNTED * 2 + COUNTED[:8], CODE * 2]
    prompts_, params = [texts[number % 4] for number in range(len(PARAMS))], requests()[1]

    def run(speculate: str, **options: Any) -> tuple[LLM, list[dict[str, Any]]]:
        llm = LLM(speculate=speculate, max_model_len=255, threads=1, test_mode=True, **options)
        outputs = llm.generate(prompts_, params)
        llm.check()
        return llm, outputs_of(outputs)

    crowded = {"max_num_seqs": 16, "max_num_batched_tokens": 24, "kv_cache_memory": "400tokens"}
    _, plain = run("off", max_num_seqs=1, prefix_caching=False)
    for speculate in ("text", "ngram"):
        llm, actual = run(speculate, draft_length="fixed", **crowded)
        assert differing(plain, actual) == []
        assert 0.0 < acceptance(llm) < 1.0, speculate


PRECISIONS: dict[str, dict[str, str]] = {
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"dtype": "bfloat16", "quantization": "int8"},
    "int4": {"dtype": "bfloat16", "quantization": "int4"},
    "int8 KV": {"dtype": "bfloat16", "kv_cache_dtype": "int8"},
    "float16": {"dtype": "float16"},
    "int8 in float32": {"dtype": "float32", "quantization": "int8"},
}
BLOCKS = ("Q4_K", "Q8_0", "IQ4_XS", "MXFP4", "Q2_K", "Q3_K", "Q5_1")
# Quantized checkpoints: each kind of matrix.
CHECKPOINT_KINDS = ("awq", "fp8-block", "gptq-act-order", "gptq-8-bit", "int-quantized", "fp8-tensor")
REFERENCE = ("int8 KV", "Q4_K")  # torch is slow: a few precisions are enough
# Wide enough for every GGUF block, and for more than one partial sum of a product.
BLOCKWISE = {"hidden_size": 256, "intermediate_size": 768, "num_attention_heads": 8, "num_key_value_heads": 2}


def check_crowded(model: Path, drafter: Path, **options: Any) -> None:
    """The crowded setting equals plain decoding, with accepted and rejected drafts."""
    _, plain = answers(model, drafter, None, PLAIN, **options)
    llm, actual = answers(model, drafter, None, CROWDED, **options)
    assert actual == plain
    assert 0.0 < acceptance(llm) < 1.0


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    path = tmp_path_factory.mktemp("pair")
    model = write_checkpoint(path / "model", "llama", seed=3, **BLOCKWISE)
    return model, write_checkpoint(path / "drafter", "llama", seed=3, dtype="bfloat16", **BLOCKWISE)


def with_backends(precisions: Sequence[str], num_quick: int) -> list[tuple[str, str]]:
    """By default the first precisions with the best instruction set of this machine.

    In full all of them with the sets of this machine, which take turns, and some with the reference. Tests of
    the kernels compare rows of every type under every set.
    """
    if not is_full():
        return [(precision, FORCED_ISA) for precision in precisions[:num_quick]]
    isas = itertools.cycle(reversed(supported_isas()))
    in_turn = list(zip(precisions, isas, strict=False))
    return in_turn + [(name, "reference") for name in precisions if name in REFERENCE]


@pytest.mark.parametrize(("precision", "backend"), with_backends(list(PRECISIONS), 2))
def test_equal_in_low_precision(pair: tuple[Path, Path], precision: str, backend: str) -> None:
    """Coarser types have more ties and rounding boundaries; every instruction set has its own kernels."""
    check_crowded(*pair, cpu_isa=backend, **PRECISIONS[precision])


@pytest.mark.parametrize(("kind", "backend"), with_backends(BLOCKS, 2))
def test_equal_with_gguf_quantized_weights(
    pair: tuple[Path, Path], tmp_path: Path, kind: str, backend: str
) -> None:
    model, drafter = (
        write_gguf(path, tmp_path / f"{path.name}.gguf", GGMLQuantizationType[kind]) for path in pair
    )
    check_crowded(model, drafter, cpu_isa=backend, dtype="bfloat16")


@pytest.mark.parametrize(("kind", "backend"), with_backends(CHECKPOINT_KINDS, 1))
def test_equal_with_quantized_checkpoints(
    pair: tuple[Path, Path], tmp_path: Path, kind: str, backend: str
) -> None:
    """The drafter is the plain checkpoint: it agrees often, not always."""
    write_quantized(pair[0], tmp_path / "model", kind)
    check_crowded(tmp_path / "model", pair[1], cpu_isa=backend, dtype="bfloat16")


def long_requests() -> tuple[list[dict[str, list[int]]], list[SamplingParams]]:
    """Prompts and answers that span several attention tiles."""
    chance = random.Random(9)
    texts = [
        [chance.randrange(3, 250) for _ in range(chance.randint(20, 60))] * chance.randint(3, 8)
        for _ in range(8)
    ]
    params = [
        SamplingParams(temperature=t, seed=i, max_tokens=60, ignore_eos=True, logprobs=1)
        for i, t in enumerate((0.0, 1.0) * 4)
    ]
    return [{"prompt_token_ids": text} for text in texts], params


@pytest.mark.full
@pytest.mark.parametrize("name", ["llama", "mistral"])
@pytest.mark.parametrize("speculate", ["ngram", "suffix", "draft"])
def test_equal_beyond_one_tile_of_attention(tmp_path: Path, name: str, speculate: str) -> None:
    window = {"sliding_window": 300} if name == "mistral" else {}
    path = write_checkpoint(tmp_path / "model", name, seed=1, **window)

    def run(**options: Any) -> list[dict[str, Any]]:
        llm = LLM(str(path), threads=1, test_mode=True, max_model_len=512, draft_length="fixed", **options)
        return [fingerprint(output) for output in llm.generate(*long_requests())]

    plain = run(speculate="off", max_num_seqs=1, prefix_caching=False, max_num_batched_tokens=512)
    crowded = run(
        speculate=speculate,
        draft_model=str(path) if speculate == "draft" else None,
        max_num_seqs=8,
        max_num_batched_tokens=96,
        kv_cache_memory="1500tokens",
    )
    assert crowded == plain


def test_negative_control_row_dependent_products_are_caught(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Products that depend on the number of rows: the same comparison finds a difference."""
    monkeypatch.setattr("foreword.engine.loader.select_backend", lambda *_, **__: RowDependentOps())
    model = write_checkpoint(tmp_path / "model", "llama", seed=3)
    drafter = write_drafter(tmp_path / "drafter", seed=4)
    crowded = PLAIN | {"speculate": "ngram", "concurrent": 16, "chunk": 24}
    _, plain = answers(model, drafter, None, PLAIN, dtype="bfloat16")
    _, actual = answers(model, drafter, None, crowded, dtype="bfloat16")
    assert any(a["choices"] != b["choices"] for a, b in zip(plain, actual, strict=True))
