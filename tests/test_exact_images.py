"""Speculation changes no token of an answer about images: tests/test_exact.py for every multimodal family.

Images have odd sizes and stand at the start, in the middle and at the end of prompts, twice, and in second
turns with a cached first turn. Drafters: lookup, text-only and multimodal draft models, erroneous recordings.
"""

from __future__ import annotations

import io
import json
import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from foreword import LLM, SamplingParams, StructuredOutput
from tests.support.budget import is_full
from tests.support.checkpoints import VOCAB_SIZE, change_config, write_checkpoint
from tests.support.heads import train_head
from tests.support.vision_checkpoints import IMAGE_TOKEN_ID, VISION_FAMILIES, write_vision_checkpoint
from tests.test_exact import acceptance, check_acceptance, differing, make_llm, outputs_of, pairwise

MAX_MODEL_LEN = 239  # one below a block boundary

SETTINGS: dict[str, tuple[Any, ...]] = {
    "family": tuple(VISION_FAMILIES),
    "speculate": (
        *("off", "ngram", "suffix", "text", "reads", "sees", "eagle3"),
        *("replay 0", "replay 0.3", "replay 1", "auto"),
    ),
    "draft_length": ("fixed", "adaptive"),
    "concurrent": (1, 7),
    "cache": ("ample", "small"),
    "prefix_caching": (False, True),
    "chunk": (512, 7),
    "image_cache_memory": ("64MiB", "0"),
    "num_speculative_tokens": (1, 4, 16),
}
PLAIN = {name: values[0] for name, values in SETTINGS.items()}
PAIRS = pairwise(SETTINGS) if is_full() else []
CROWDED = PLAIN | {"concurrent": 7, "cache": "small", "prefix_caching": True, "chunk": 7}
QUICK = [CROWDED | {"speculate": drafter} for drafter in ("suffix", "sees")]
SIZES = ((40, 30), (97, 13), (9, 71), (64, 64), (33, 50))  # (width, height)
TEXT = 0  # text in PROMPTS; images are numbered from 1
PROMPTS: tuple[tuple[int, ...], ...] = (
    (TEXT, 1, TEXT),
    (1, TEXT, 2, 3, TEXT),
    (TEXT, 4, TEXT, TEXT),
    (TEXT, 1, TEXT, TEXT, 5, TEXT),  # continues the first prompt
    (2, 2, TEXT, 2),
    (TEXT, TEXT),
    (TEXT, 1, TEXT),
    (3,),
    (TEXT, 5, 4, TEXT),
)
PARAMS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0, "logprobs": 3},
    {"temperature": 0.7, "top_p": 0.9, "repetition_penalty": 1.05, "n": 3},
    {
        "temperature": 0.0,
        "ignore_eos": True,
        "max_tokens": 99,
        "presence_penalty": 1.5,
        "frequency_penalty": 0.7,
    },
    {"temperature": 1.0, "logprobs": 0, "min_p": 0.05},
    {"temperature": 1.3, "top_k": 7, "prompt_logprobs": 1},
    {"temperature": 0.8, "n": 2, "ignore_eos": True, "max_tokens": 64},
    {"temperature": 0.9, "structured": StructuredOutput("regex", "(red|blue|green){2,9}[0-9]+(th|in)*z")},
    {"temperature": 0.6, "min_tokens": 9, "stop_token_ids": tuple(range(70, 90))},
    {"temperature": 0.0, "bad_words": ("e", "th"), "stop": ("a", "Q")},
)


def picture(number: int) -> bytes:
    """A file of coarse noise."""
    width, height = SIZES[number % len(SIZES)]
    noise = np.random.default_rng(number).integers(
        0, 256, (max(height // 6, 1), max(width // 6, 1), 3), np.uint8
    )
    file = io.BytesIO()
    Image.fromarray(noise).resize((width, height), Image.Resampling.NEAREST).save(file, "PNG")
    return file.getvalue()


def prompt(parts: tuple[int, ...]) -> dict[str, Any]:
    """Texts repeat themselves, and the first of two prompts are alike."""
    ids: list[int] = []
    for place, part in enumerate(parts):
        chance = random.Random(place)
        own = [chance.randrange(3, 250) for _ in range(chance.randint(3, 7))]
        ids += [IMAGE_TOKEN_ID] if part else own * chance.randint(2, 3)
    return {"prompt_token_ids": ids, "images": [picture(part) for part in parts if part]}


def requests() -> tuple[list[dict[str, Any]], list[SamplingParams]]:
    params = [
        SamplingParams(**{"max_tokens": 24, "seed": 100 * i, **params}) for i, params in enumerate(PARAMS)
    ]
    return [prompt(parts) for parts in PROMPTS], params


@dataclass(frozen=True)
class Models:
    """A checkpoint that sees, its drafters, what it answers without them, and that as a recording."""

    model: Path
    reads: Path
    sees: Path
    recording: Path
    head: Path
    plain: list[dict[str, Any]]

    def drafter(self, method: str) -> Path | None:
        paths = {"reads": self.reads, "sees": self.sees, "auto": self.sees, "eagle3": self.head}
        return paths.get(method)


def load(models: Models, combination: dict[str, Any]) -> LLM:
    method = combination["speculate"]
    drafts = {"speculate": "draft"} if method in ("reads", "sees") else {}
    return make_llm(
        models.model,
        models.drafter(method),
        models.recording,
        combination | drafts,
        image_cache_memory=combination["image_cache_memory"],
        kv_cache_memory=f"{MAX_MODEL_LEN + 1}tokens" if combination["cache"] == "small" else "8000tokens",
        max_model_len=MAX_MODEL_LEN,
        threads=1,
    )


def make_models(name: str, path: Path) -> Models:
    family = VISION_FAMILIES[name]
    model = write_vision_checkpoint(path / "model", name, seed=1)
    reads = write_checkpoint(
        path / "reads", family.text, seed=1, vocab_size=family.text_options.get("vocab_size", VOCAB_SIZE)
    )
    sees = write_vision_checkpoint(
        path / "sees", name, seed=1, dtype="bfloat16"
    )  # rounded: agrees often, not always
    recording = path / "recording.jsonl"
    models = Models(model, reads, sees, recording, path / "head", [])
    outputs = load(models, PLAIN).generate(*requests())
    lines = [
        {"prompt_token_ids": output.prompt_token_ids, "seed": choice.seed, "token_ids": choice.token_ids}
        for output in outputs
        for choice in output.outputs
    ]
    recording.write_text("".join(json.dumps(line) + "\n" for line in lines))
    texts = [[*line["prompt_token_ids"], *line["token_ids"]] for line in lines]
    train_head(models.head, model, texts, steps=60)
    if name == "qwen2_5_vl":  # as such heads are published
        half = json.loads((models.head / "config.json").read_text())["head_dim"] // 2
        sections = [half - 2 * (half // 3), half // 3, half // 3]
        change_config(models.head, rope_scaling={"type": "mrope", "mrope_section": sections})
    return replace(models, plain=outputs_of(outputs))


class Made(dict[str, Models]):
    """Models by family, made when they are wanted first."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path

    def __missing__(self, family: str) -> Models:
        self[family] = make_models(family, self._path / family)
        return self[family]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return Made(tmp_path_factory.mktemp("seeing"))


@pytest.mark.parametrize(
    "combination", PAIRS if is_full() else QUICK, ids=lambda each: "-".join(map(str, each.values()))
)
def test_equal_under_every_setting(made: Made, combination: dict[str, Any]) -> None:
    models = made[combination["family"]]
    llm = load(models, combination)
    found = llm.generate(*requests())
    assert differing(models.plain, outputs_of(found)) == [], "these requests differ from plain decoding"
    if combination["prefix_caching"]:
        assert differing(models.plain, outputs_of(llm.generate(*requests()))) == [], (
            "with what is known of the first time"
        )
    llm.check()
    assert not llm.stats.drafter_errors and not llm.stats.faults
    if combination["cache"] == "small" and combination["concurrent"] > 1:
        assert llm.stats.preemptions_total > 0, "the cache was meant to be too small"
    check_acceptance(combination, acceptance(llm))
