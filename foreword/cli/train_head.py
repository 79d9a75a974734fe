"""`foreword train-head MODEL DATA --output DIR`: train an EAGLE-3 head on the model's own answers.

DIR gets the head, in the format of the speculators library, and `training/` with answers, checkpoint and
log, from which the same command goes on.
"""

from __future__ import annotations

import argparse
import fcntl
import gc
import logging
import time
from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from pathlib import Path

import torch

from foreword.checkpoint import resolve_paths
from foreword.cli.configuration import engine_fields, read_config
from foreword.cli.flags import TRAIN_HEAD_FLAGS, flag
from foreword.cli.startup import startup_line
from foreword.cli.terminal import format_count, loading_bar, set_up_logging, stderr_console
from foreword.config.options import Config
from foreword.demo import DEFAULT_MODEL
from foreword.errors import ConfigError, Terminated
from foreword.llm import LLM
from foreword.models.heads.eagle3 import NUM_AUX_LAYERS
from foreword.planning.hardware import hardware_info, probe_hardware
from foreword.training.answers import (
    Answer,
    AnswerOptions,
    AnswersFile,
    answer_prompts,
    choose_draft_vocabulary,
    read_prompts,
)
from foreword.training.eagle3 import (
    DRAFT_TOKENS,
    Eagle3DraftModel,
    Eagle3Shape,
    default_aux_layers,
    default_sizes,
    write_head,
)
from foreword.training.target import TargetModel
from foreword.training.trainer import Acceptance, Progress, Trainer, TrainingOptions, split_held_out
from foreword.weights.config_reader import read_json

REPORT_S = 10.0  # between progress lines
EVALUATE_S = 180.0  # between checkpoints, with which acceptance is measured


def run(args: argparse.Namespace) -> int:
    config = read_config(args)
    set_up_logging(config.log_level, config.log_format)
    if config.log_level != "debug":
        logging.getLogger("foreword").setLevel("WARNING")  # not one line per request
    _check_numbers(args)
    data, folder = Path(args.data), Path(args.output)
    prompts = read_prompts(data)
    model, seed = str(config.model or DEFAULT_MODEL), config.seed or 0
    options = AnswerOptions.create(model, data, args.max_tokens, args.temperature, seed)
    log = _RunLog(folder / "training" / "log.txt")
    with _locked(folder / "training"):
        file = AnswersFile(folder / "training" / "answers.jsonl", options)
        if file.num_done < len(prompts):
            with loading_bar("loading") as progress:
                llm = LLM(on_progress=progress, **engine_fields(config))
            started, before = time.monotonic(), file.num_done
            reported = started
            for num_done in answer_prompts(llm, prompts, file, options, llm.info.resolved.max_num_seqs):
                if (now := time.monotonic()) - reported >= REPORT_S or num_done == len(prompts):
                    left_s = (now - started) / (num_done - before) * (len(prompts) - num_done)
                    log(f"answered {num_done} of {len(prompts)} prompts, {_format_duration(left_s)} left")
                    reported = now
            del llm
            gc.collect()
        for reason in file.skipped[:3]:
            log(f"skipped {reason}")
        if file.skipped:
            log(f"skipped {len(file.skipped)} of {len(prompts)} prompts in all")
        _train(args, replace(config, seed=seed), file, folder, log)
    return 0


class _RunLog:
    """Lines on stderr, and in a log with the time."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __call__(self, text: str) -> None:
        startup_line.end()
        stderr_console().print(text, markup=False)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Raises ConfigError if the folder cannot be made, or while another process trains in it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / "lock").open("w")
    except OSError as error:
        raise ConfigError(f"--output {folder.parent}: {error.strerror or error}", "output") from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"--output {folder.parent} is in use by another run", "output") from None
        yield


def _train(args: argparse.Namespace, config: Config, file: AnswersFile, folder: Path, log: _RunLog) -> None:
    with loading_bar("loading the model for training") as progress:
        target = TargetModel(resolve_paths(config), lambda done, total: progress("weights", done, total))
    torch.set_num_threads(target.threads)
    options = TrainingOptions(
        epochs=args.epochs,
        batch_tokens=args.batch_tokens,
        max_len=min(args.max_length, target.max_len),
        ttt_steps=args.ttt_steps,
        loss_decay=args.loss_decay,
        learning_rate=args.learning_rate,
        dtype=_training_dtype(args.train_dtype, target.device),
        seed=config.seed or 0,
    )
    vocab_size = target.model.vocab_size
    answers, held_out = split_held_out(file.answers(options.max_len, vocab_size), options.seed)
    draft_ids = choose_draft_vocabulary(answers, vocab_size, args.draft_vocab_size)
    torch.manual_seed(options.seed)
    head = Eagle3DraftModel(_head_shape(args, target, len(draft_ids)), torch.tensor(draft_ids))
    trainer = Trainer(
        target,
        head.to(target.device),
        answers,
        held_out,
        options,
        folder / "training" / "checkpoint.safetensors",
    )
    num_values = sum(value.numel() for value in head.parameters())
    log(
        f"training a head of {format_count(num_values)} parameters on {len(answers)} answers "
        f"({format_count(sum(len(each.token_ids) for each in answers))} tokens with prompts), "
        f"{len(held_out)} held out; step {trainer.step} of {trainer.num_steps}, {options.dtype}"
    )
    covered = _share_covered(held_out, set(draft_ids))
    log(f"draft vocabulary: {len(draft_ids)} of {vocab_size} tokens, {covered:.1%} of the held-out answers")
    name = str(config.model or DEFAULT_MODEL)
    target_names = name, _architectures(resolve_paths(config))
    dtype = getattr(torch, args.head_dtype)
    try:
        trainer.train(REPORT_S, EVALUATE_S, lambda progress: log(_progress_line(progress)))
    except (KeyboardInterrupt, Terminated):
        _write(folder, head, target_names, dtype)
        steps = f"stopped at step {trainer.step} of {trainer.num_steps}"
        log(f"{steps}: {folder} has the head as it is; the same command goes on from the last checkpoint")
        raise
    size = _write(folder, head, target_names, dtype)
    log(f"{folder}: EAGLE-3 head for {name}, {size / 1e6:.1f} MB; held out: {_describe(trainer.measure())}")
    log(f"foreword serve {name} --draft-model {folder}")


def _write(
    folder: Path, head: Eagle3DraftModel, target_names: tuple[str, Sequence[str]], dtype: torch.dtype
) -> int:
    """Write the head and return the bytes of its weights. target_names: as in write_head()"""
    try:
        write_head(folder, head, *target_names, dtype)
        return (folder / "model.safetensors").stat().st_size
    except OSError as error:
        problem = f"{folder}: {error.strerror or error}; the same command goes on"
        raise ConfigError(problem, "output") from None


def _head_shape(args: argparse.Namespace, target: TargetModel, draft_vocab_size: int) -> Eagle3Shape:
    """Raises ConfigError for flags that do not fit together or the target."""
    config = target.model.config
    num_layers, sizes = len(config.layer_types), default_sizes(config)
    given = {
        "intermediate_size": args.intermediate_size,
        "num_heads": args.num_attention_heads,
        "num_kv_heads": args.num_key_value_heads,
    }
    sizes |= {name: value for name, value in given.items() if value is not None}
    if sizes["num_heads"] % sizes["num_kv_heads"]:
        raise ConfigError(
            f"--num-key-value-heads {sizes['num_kv_heads']} must divide the number of attention heads, "
            f"{sizes['num_heads']}",
            "num_key_value_heads",
        )
    layers = default_aux_layers(num_layers)
    if args.aux_layers is not None:
        layers = _parse_layers(args.aux_layers, num_layers)
    return Eagle3Shape(
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        draft_vocab_size=draft_vocab_size,
        eps=config.eps,
        rope_theta=config.layer_types[-1].rope.theta,
        context_length=config.context_length,
        aux_layers=layers,
        **sizes,
    )


def _parse_layers(text: str, num_layers: int) -> tuple[int, ...]:
    try:
        layers = tuple(int(part) for part in text.split(","))
    except ValueError:
        layers = ()
    count = NUM_AUX_LAYERS
    if len(set(layers)) < count or len(layers) > count or not all(0 <= each <= num_layers for each in layers):
        raise ConfigError(
            f"--aux-layers must be {count} different numbers from 0 to {num_layers}, got {text!r:.80}",
            "aux_layers",
        )
    return layers


def _check_numbers(args: argparse.Namespace) -> None:
    """Raises ConfigError."""
    for name, kind, _, _, allowed in chain.from_iterable(TRAIN_HEAD_FLAGS.values()):
        value = getattr(args, name)
        if kind is not str and value is not None and not allowed[0] <= value <= allowed[1]:
            limits = f"between {allowed[0]:g} and {allowed[1]:g}"
            raise ConfigError(f"{flag(name)} must be {limits}, got {value:g}", name)


def _training_dtype(asked: str, device: str) -> str:
    """auto is bfloat16 where it is not slower than float32."""
    if asked != "auto":
        return asked
    if device != "cpu":
        return "bfloat16"
    return "bfloat16" if hardware_info(probe_hardware("cpu")).supports_bfloat16 else "float32"


def _share_covered(answers: Sequence[Answer], draft_ids: Container[int]) -> float:
    tokens = [token for answer in answers for token in answer.token_ids[answer.num_prompt :].tolist()]
    return sum(token in draft_ids for token in tokens) / len(tokens)


def _architectures(config: Config) -> Sequence[str]:
    """The names in the checkpoint's config.json; none of a GGUF file."""
    file = Path(str(config.model)) / "config.json"
    return read_json(file).get("architectures") or () if file.is_file() else ()


def _progress_line(progress: Progress) -> str:
    line = (
        f"step {progress.step} of {progress.num_steps}: loss {progress.loss:.4f}, "
        f"{progress.tokens_per_s:.0f} tokens/s, {_format_duration(progress.left_s)} left"
    )
    return line if progress.acceptance is None else f"{line}; held out: {_describe(progress.acceptance)}"


def _describe(acceptance: Acceptance) -> str:
    shares = ", ".join(f"{share:.0%}" for share in acceptance.accepted)
    return f"accept length {acceptance.length:.2f} of {1 + DRAFT_TOKENS} (drafts accepted: {shares})"


def _format_duration(seconds: float) -> str:
    """90 -> "1.5 min"."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.1f} min" if seconds < 3600 else f"{seconds / 3600:.1f} h"
