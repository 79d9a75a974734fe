"""`foreword check MODEL [--draft-model D]`: can it be served here, and does the draft model belong to it?

Nothing is loaded: config.json or the head of a GGUF file, and the tokenizers, are read. Exit code 1 if something is in the way.
"""

from __future__ import annotations

import argparse
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from foreword.cli.options import ENGINE_GROUPS, add_config_options, read_config
from foreword.cli.terminal import bytes_text, count_text
from foreword.config import Config
from foreword.engine.load import FIT_DRAFTER, this_machine
from foreword.errors import ForewordError
from foreword.estimate import kv_bytes_per_token
from foreword.kernels.registry import why_not_native
from foreword.media.processor import read_processor
from foreword.models.loader import read_facts
from foreword.prepare import check_drafter, directories, read_vocabulary
from foreword.resolve import ModelFacts, Resolved, resolve
from foreword.text.tokenizer import Tokenizer

__all__ = ["Finding", "add_arguments", "findings", "run"]

PICTURES = ((640, 480), (1920, 1080), (1080, 1920))  # width and height of examples: what they cost is told


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report; `ok` None is a warning, not in the way."""

    ok: bool | None
    text: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", metavar="MODEL", default=argparse.SUPPRESS, help="directory, GGUF file or hub id")
    add_config_options(parser, ENGINE_GROUPS, more=("log_level",))


def run(args: argparse.Namespace) -> int:
    config = directories(read_config(args))
    console = Console(highlight=False, soft_wrap=True)
    marks = {True: "[green]ok  [/green]", False: "[red]no  [/red]", None: "[yellow]note[/yellow]"}
    passed = True
    for finding in findings(config):
        passed = passed and finding.ok is not False
        console.print(marks[finding.ok], end=" ")
        console.print(finding.text, markup=False)
    return 0 if passed else 1


def findings(config: Config) -> Iterator[Finding]:
    """Everything that can be said without loading, in order; stops where the rest depends on what failed."""
    target = yield from _facts("model", Path(str(config.model)), config.gguf_dequantize)
    drafter = None
    if config.draft_model is not None:
        drafter = yield from _facts("draft model", Path(config.draft_model), config.gguf_dequantize)
    if target is None or (drafter is None and config.draft_model is not None):
        return
    yield from _tokenizers(config)
    if target.image_token_id is not None:
        yield _pictures(config, target)
    if drafter is not None:
        yield _ratio(target, drafter)
    yield from _fit(config, target, drafter)


def _facts(what: str, path: Path, gguf_dequantize: bool) -> Generator[Finding, None, ModelFacts | None]:
    try:
        facts = read_facts(path, gguf_dequantize)
    except ForewordError as error:
        yield Finding(False, f"{what}: {error}")
        return None
    size = count_text(facts.parameters)
    yield Finding(True, f"{what}: {facts.architecture}, {size} parameters in {facts.dtype}, context {facts.context} tokens")
    return facts


def _tokenizers(config: Config) -> Iterator[Finding]:
    try:
        tokenizer, rows = read_vocabulary(Path(str(config.model)))
    except ForewordError as error:
        yield Finding(False, f"tokenizer: {error}")
        return
    unused = len(tokenizer.unused_ids(rows))
    yield Finding(
        tokenizer.vocab_size <= rows, f"tokenizer: {tokenizer.vocab_size} ids, {rows} rows in the model, {unused} without a token"
    )
    if tokenizer.chat_template is None:
        yield Finding(None, "tokenizer: no chat template; /v1/completions works, chat does not")
    if config.draft_model:
        yield _drafter(tokenizer, config)


def _drafter(tokenizer: Tokenizer, config: Config) -> Finding:
    try:
        check_drafter(tokenizer, read_processor(Path(str(config.model))), Path(str(config.draft_model)))
    except ForewordError as error:
        return Finding(False, f"draft model: {error}")
    return Finding(True, "draft tokenizer: the same, token by token")


def _pictures(config: Config, target: ModelFacts) -> Finding:
    try:
        processor = read_processor(Path(str(config.model)))
    except ForewordError as error:
        return Finding(False, f"pictures: {error}")
    assert processor is not None, "a tower without somebody who prepares its pictures"
    costs = (f"{width} x {height} is {processor.layout(height, width).num_tokens} tokens" for width, height in PICTURES)
    return Finding(True, f"pictures: {count_text(target.tower_parameters)} parameters see them; {', '.join(costs)}")


def _ratio(target: ModelFacts, drafter: ModelFacts) -> Finding:
    ratio = target.parameters / drafter.parameters
    fits = FIT_DRAFTER[0] <= ratio <= FIT_DRAFTER[1]
    return Finding(
        True if fits else None, f"draft size: 1/{ratio:.1f} of the model; 1/{FIT_DRAFTER[0]} to 1/{FIT_DRAFTER[1]} usually pays"
    )


def _fit(config: Config, target: ModelFacts, drafter: ModelFacts | None) -> Iterator[Finding]:
    try:
        hardware = this_machine(config)
        chosen = resolve(config, hardware, target, drafter)
    except ForewordError as error:
        yield Finding(False, f"memory: {error}")
        return
    for note in (*chosen.notes, *filter(None, [why_not_native(chosen.device)])):
        yield Finding(None, f"device: {note}")
    yield Finding(
        True,
        f"memory: weights {bytes_text(chosen.weight_bytes)} in {chosen.weight_format}, {bytes_text(hardware.free_bytes)} free",
    )
    if chosen.memory is not None:
        yield Finding(True, f"{hardware.gpu}: {chosen.memory}")
        if chosen.memory.for_kv < chosen.kv_bytes:
            yield Finding(None, "by this estimate it does not fit; whether it does is measured when it is loaded")
    yield _cache(chosen, target, drafter)
    whole = chosen.max_model_len >= target.context
    yield Finding(True if whole else None, f"context: {chosen.max_model_len} of {target.context} tokens")


def _cache(chosen: Resolved, target: ModelFacts, drafter: ModelFacts | None) -> Finding:
    models = [target] if drafter is None else [target, drafter]
    per_token = bytes_text(sum(kv_bytes_per_token(facts, chosen.kv_cache_dtype) for facts in models))
    tokens = chosen.num_blocks * chosen.block_size
    return Finding(
        True, f"KV cache: {per_token} a token in {chosen.kv_cache_dtype}, {bytes_text(chosen.kv_bytes)} for {tokens} tokens"
    )
