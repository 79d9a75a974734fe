"""Requests without max_tokens and with EOS ignored end at the context limit, which is at a block boundary.

Every request ends with "length" exactly at the limit for any drafter, and the next request is answered.
"""

import json
from pathlib import Path

import pytest

from foreword import LLM, SamplingParams, Speculation
from tests.support.checkpoints import write_checkpoint

BLOCK = 8
PROMPT = [40, 41, 42, 43, 40, 41, 42, 43, 40]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("limits") / "model", "llama", seed=5)


@pytest.fixture(scope="module")
def recording(checkpoint: Path) -> Path:
    """A recording of plain decoding, longer than every tested limit."""
    llm = LLM(str(checkpoint), speculate="off", max_model_len=8 * BLOCK, threads=1)
    output = llm.generate({"prompt_token_ids": PROMPT}, SamplingParams(temperature=0, ignore_eos=True))[0]
    path = checkpoint.parent / "recording.jsonl"
    path.write_text(json.dumps({"prompt_token_ids": PROMPT, "token_ids": output.token_ids}))
    return path


@pytest.mark.parametrize("drafter", ["off", "ngram", "suffix", "draft", "replay"])
@pytest.mark.parametrize("off_by", [-1, 0, 1])
def test_every_request_ends_at_the_limit(
    checkpoint: Path, recording: Path, drafter: str, off_by: int
) -> None:
    limit = 3 * BLOCK + off_by
    llm = LLM(
        str(checkpoint),
        speculate=drafter,
        draft_model=str(checkpoint) if drafter == "draft" else None,
        replay_file=str(recording) if drafter == "replay" else None,
        replay_error_rate=0.1 if drafter == "replay" else 0.0,
        num_speculative_tokens=16,
        draft_length="fixed",
        max_model_len=limit,
        block_size=BLOCK,
        kv_cache_memory=f"{2 * (limit + BLOCK)}tokens",
        max_num_seqs=16,
        threads=1,
    )
    asked = [
        SamplingParams(temperature=0, ignore_eos=True, speculation=Speculation(max_draft_tokens=drafted))
        for drafted in ((1,) if drafter == "off" else range(1, 17))
    ]
    alone = [llm.generate({"prompt_token_ids": PROMPT}, params)[0] for params in asked]
    together = llm.generate([{"prompt_token_ids": PROMPT}] * 16, asked * (16 // len(asked)))
    llm.check()
    for output in (*alone, *together):
        assert len(output.token_ids) == limit - len(PROMPT)
        assert output.finish_reason == "length"
        assert output.token_ids == alone[0].token_ids
    (after,) = llm.generate({"prompt_token_ids": PROMPT}, SamplingParams(temperature=0, max_tokens=3))
    assert after.text is not None and len(after.token_ids) <= 3
