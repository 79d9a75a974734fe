"""The report this project began with: no max_tokens, EOS ignored, the context limit at a block boundary.

Elsewhere it ended in `num_new_blocks > 0` or never. Here every answer ends with "length" exactly at the
limit, whatever drafts, and the next request is answered.
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
    """What plain decoding says up to well beyond every limit tested here."""
    llm = LLM(str(checkpoint), speculate="off", max_model_len=8 * BLOCK, threads=1)
    output = llm.generate({"prompt_token_ids": PROMPT}, SamplingParams(temperature=0, ignore_eos=True))[0]
    path = checkpoint.parent / "recording.jsonl"
    path.write_text(json.dumps({"prompt_token_ids": PROMPT, "token_ids": output.token_ids}))
    return path


@pytest.mark.parametrize("drafter", ["off", "ngram", "suffix", "draft", "replay"])
@pytest.mark.parametrize("off_by", [-1, 0, 1])
def test_every_answer_ends_at_the_limit(checkpoint: Path, recording: Path, drafter: str, off_by: int) -> None:
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
    for together in (1, 16):
        for drafted in range(1, 17):
            params = SamplingParams(
                temperature=0, ignore_eos=True, speculation=Speculation(max_tokens=drafted)
            )
            outputs = llm.generate([{"prompt_token_ids": PROMPT}] * together, params)
            assert {len(output.token_ids) for output in outputs} == {limit - len(PROMPT)}
            assert {output.finish_reason for output in outputs} == {"length"}
            assert len({output.token_ids for output in outputs}) == 1
            if drafter == "off":
                break
        llm.check()
    (after,) = llm.generate({"prompt_token_ids": PROMPT}, SamplingParams(temperature=0, max_tokens=3))
    assert after.text is not None and len(after.token_ids) <= 3
