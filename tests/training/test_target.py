"""Hidden states and probabilities of the target equal those of transformers."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from foreword.config.options import Config
from foreword.errors import ConfigError
from foreword.training.answers import Answer
from foreword.training.target import TargetModel
from tests.support.checkpoints import write_checkpoint

DRAFT_IDS = torch.tensor([3, 50, 200, 271])


def test_hidden_states_and_probabilities_are_those_of_the_model(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "model", "llama", seed=5, num_hidden_layers=3)
    target = TargetModel(Config(model=str(path), threads=1, device="cpu"))
    model = LlamaForCausalLM.from_pretrained(path)
    streams: list[torch.Tensor] = []
    for module in (*model.model.layers, model.model.norm):
        module.register_forward_pre_hook(lambda _, x: streams.append(x[0][0]))
    rng = np.random.default_rng(0)
    answers = [
        Answer(rng.integers(0, 256, length).astype(np.int32), first)
        for length, first in ((9, 3), (40, 1), (2, 1))
    ]
    batch = target.compute(answers, (1, 3), DRAFT_IDS)
    row = 0
    for index, answer in enumerate(answers):
        length, ids = len(answer.token_ids), torch.from_numpy(answer.token_ids).long()
        assert batch.token_ids[index, :length].tolist() == ids.tolist()
        assert not batch.token_ids[index, length:].any() and not batch.aux_hidden_states[index, length:].any()
        streams.clear()
        with torch.no_grad():
            log_probs = model(ids[None]).logits[0].log_softmax(-1)[:, DRAFT_IDS]
        torch.testing.assert_close(batch.embeddings[index, :length], streams[0])
        expected = torch.cat([streams[1], streams[3]], dim=1)
        torch.testing.assert_close(batch.aux_hidden_states[index, :length], expected, rtol=1e-4, atol=1e-4)
        learned = range(answer.num_prompt - 1, length - 1)  # rows whose next token is of the answer
        assert batch.learned_index[index].tolist() == [
            row + learned.index(p) if p in learned else -1 for p in range(40)
        ]
        torch.testing.assert_close(
            batch.log_probs[row : row + len(learned)], log_probs[list(learned)], rtol=1e-3, atol=1e-3
        )
        row += len(learned)
    assert row == len(batch.log_probs)


def test_models_with_states_are_refused(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "model", "qwen3_next")
    with pytest.raises(ConfigError, match="layers with state"):
        TargetModel(replace(Config(), model=str(path), device="cpu"))
