"""Batches, acceptance along answers, and training: up to what the answers allow, also after a kill."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from foreword import LLM, SamplingParams
from foreword.config.options import Config
from foreword.errors import ConfigError
from foreword.training.answers import Answer, choose_draft_vocabulary
from foreword.training.eagle3 import Eagle3DraftModel, Eagle3Shape, write_head
from foreword.training.target import TargetModel
from foreword.training.trainer import (
    Acceptance,
    Progress,
    Trainer,
    TrainingOptions,
    count_accepted,
    plan_epoch,
    split_held_out,
)
from tests.support.checkpoints import VOCAB_SIZE, change_tensors, write_checkpoint

CYCLE = range(40, 48)  # the predictable model goes round these tokens
OPTIONS = TrainingOptions(
    epochs=12,
    batch_tokens=128,
    max_len=64,
    ttt_steps=3,
    loss_decay=0.8,
    learning_rate=1.0,
    dtype="float32",
    seed=0,
)


@given(st.lists(st.integers(2, 60), min_size=1, max_size=80), st.integers(2, 200), st.text(max_size=3))
def test_an_epoch_has_each_answer_once(lengths: list[int], batch_tokens: int, seed: str) -> None:
    batches = plan_epoch(lengths, batch_tokens, seed)
    assert sorted(index for batch in batches for index in batch) == list(range(len(lengths)))
    for batch in batches:
        assert len(batch) == 1 or len(batch) * max(lengths[index] for index in batch) <= batch_tokens
    assert batches == plan_epoch(lengths, batch_tokens, seed)


def test_epochs_differ() -> None:
    assert plan_epoch([5] * 50, 20, "0:0") != plan_epoch([5] * 50, 20, "0:1")


def test_held_out_answers_are_not_trained() -> None:
    answers = [Answer(np.array([index, 0], np.int32), 1) for index in range(100)]
    train, held_out = split_held_out(answers, seed=1)
    assert len(held_out) == 5
    assert {each.token_ids[0] for each in train} | {each.token_ids[0] for each in held_out} == set(range(100))
    assert len(train) == 95
    with pytest.raises(ConfigError, match="at least 2 answers"):
        split_held_out(answers[:1], seed=1)


@pytest.mark.parametrize(
    ("hits", "expected"),
    [
        # rows of an answer from row 2 to row 6; drafts of two tokens
        (["00000000", "11111111"], (5, [5, 0, 0])),  # the first token decides
        (["11111111", "00000000"], (5, [3, 3, 0])),
        (["11111111", "11111111"], (5, [2, 2, 2])),  # 3 tokens, then 2 of 3: the answer ends
        (["00100100", "00100000"], (5, [2, 2, 1])),
    ],
)
def test_acceptance_is_counted_as_speculative_decoding_does(
    hits: list[str], expected: tuple[int, list[int]]
) -> None:
    table = [torch.tensor([[mark == "1" for mark in line]]) for line in hits]
    if hits[0] == "11111111":  # the last token has no successor
        for index, line in enumerate(table):
            line[:, 7 - index :] = False
    assert count_accepted(table, [2], [8]) == expected


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose next token is a function of its last: it goes round CYCLE."""
    path = write_checkpoint(tmp_path_factory.mktemp("trainer") / "model", "llama", seed=5)
    generator = torch.Generator().manual_seed(0)
    embedding = torch.nn.functional.normalize(torch.randn(VOCAB_SIZE, 64, generator=generator))
    weight = torch.zeros(VOCAB_SIZE, 64)
    for token in CYCLE:
        weight[following(token)] = 4 * embedding[token]
    changed = {"model.embed_tokens.weight": embedding, "lm_head.weight": weight}
    changed["model.norm.weight"] = torch.ones(64)
    for index in range(2):
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            changed[f"model.layers.{index}.{name}.weight"] = torch.zeros_like
    change_tensors(path, **changed)
    return path


@pytest.fixture(scope="module")
def target(model: Path) -> TargetModel:
    return TargetModel(Config(model=str(model), threads=1, device="cpu"))


def following(token: int) -> int:
    return CYCLE[(token - CYCLE.start + 1) % len(CYCLE)]


def make_answers(count: int, is_predictable: bool = True, seed: int = 0) -> list[Answer]:
    """Prompts of the cycle, and 25 tokens: one of the target, then six steps of four tokens."""
    rng, answers = np.random.default_rng(seed), []
    for _ in range(count):
        ids = [int(rng.choice(CYCLE))]
        for _ in range(rng.integers(0, 5)):
            ids.append(following(ids[-1]))
        num_prompt = len(ids)
        for _ in range(25):
            ids.append(following(ids[-1]) if is_predictable else int(rng.choice(CYCLE)))
        answers.append(Answer(np.array(ids, np.int32), num_prompt))
    return answers


def make_trainer(
    target: TargetModel, checkpoint: Path, held_out: list[Answer], options: TrainingOptions = OPTIONS
) -> Trainer:
    answers = make_answers(40, seed=1)
    ids = torch.tensor(choose_draft_vocabulary(answers, VOCAB_SIZE, 32))
    shape = Eagle3Shape(64, 32, 2, 1, 16, VOCAB_SIZE, 32, 1e-6, 10000.0, 100, (0, 1, 2))
    torch.manual_seed(0)
    return Trainer(target, Eagle3DraftModel(shape, ids), answers, held_out, options, checkpoint)


def test_acceptance_rises_to_what_the_answers_allow(model: Path, target: TargetModel, tmp_path: Path) -> None:
    trainer = make_trainer(target, tmp_path / "head.safetensors", make_answers(5, seed=2))
    assert trainer.measure().length < 2
    lines: list[Progress] = []
    trainer.train(report_s=0, evaluate_s=1e9, on_progress=lines.append)
    assert [line.step for line in lines] == list(range(1, trainer.num_steps + 1))
    assert lines[-1].loss < lines[0].loss / 4
    assert lines[-1].left_s == 0
    assert trainer.measure() == lines[-1].acceptance == Acceptance(120, 30, (1.0, 1.0, 1.0))
    other = make_trainer(target, tmp_path / "other.safetensors", make_answers(20, is_predictable=False))
    other.head.load_state_dict(trainer.head.state_dict())
    assert 1 <= other.measure().length < 1.3, "nothing predicts random tokens"
    write_head(tmp_path, trainer.head, str(model), [], torch.float32)
    options = {"draft_length": "fixed", "num_speculative_tokens": 3, "threads": 1, "max_model_len": 64}
    llm = LLM(str(model), draft_model=str(tmp_path), speculate="eagle3", **options)
    for answer in make_answers(3, seed=2):
        ids = answer.token_ids.tolist()
        prompt = {"prompt_token_ids": ids[: answer.num_prompt]}
        (output,) = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=25))
        assert list(output.token_ids) == ids[answer.num_prompt :]
        assert output.metrics is not None and output.metrics.verify_steps == 6
        assert output.metrics.draft_tokens_acceptance == 1.0


def test_a_killed_run_goes_on_to_the_same_head(target: TargetModel, tmp_path: Path) -> None:
    held_out = make_answers(3, seed=2)

    def clock() -> Callable[[], float]:
        return iter(map(float, range(10_000))).__next__

    options = replace(OPTIONS, epochs=3)
    whole = make_trainer(target, tmp_path / "whole.safetensors", held_out, options)
    whole.train(0, 4, lambda progress: None, clock())

    measured = []

    def kill(progress: Progress) -> None:
        if progress.acceptance is not None:
            measured.append(progress.step)
        elif measured:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make_trainer(target, tmp_path / "head.safetensors", held_out, options).train(0, 4, kill, clock())
    (tmp_path / "head.partial").write_bytes(b"torn")
    again = make_trainer(target, tmp_path / "head.safetensors", held_out, options)
    assert [again.step] == measured, "the last checkpoint was before the kill"
    again.train(0, 4, lambda progress: None, clock())
    assert again.step == whole.step == whole.num_steps
    torch.testing.assert_close(again.head.state_dict(), whole.head.state_dict(), rtol=1e-3, atol=1e-3)


def test_checkpoints_of_other_options_are_refused(target: TargetModel, tmp_path: Path) -> None:
    path, held_out = tmp_path / "head.safetensors", make_answers(2)
    make_trainer(target, path, held_out).save()
    with pytest.raises(ConfigError, match="was made with epochs 12: choose another --output"):
        make_trainer(target, path, held_out, replace(OPTIONS, epochs=13))
    path.write_bytes(b"torn")
    with pytest.raises(ConfigError, match="no checkpoint of training"):
        make_trainer(target, path, held_out)


def test_a_run_that_cannot_go_on_says_why(target: TargetModel, tmp_path: Path) -> None:
    trainer = make_trainer(target, tmp_path / "nowhere" / "head.safetensors", make_answers(2))
    with pytest.raises(ConfigError, match=r"cannot be written: .*; the same command goes on"):
        trainer.save()
    with torch.no_grad():
        trainer.head.fc.weight[0, 0] = float("inf")
    with pytest.raises(ConfigError, match="the loss is not finite at step 1: try a smaller --learning-rate"):
        trainer.train(0, 1e9, lambda progress: None)
