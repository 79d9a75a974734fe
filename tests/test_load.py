"""Hundreds of requests on a much too small cache: all tokens are as without load."""

import random
from pathlib import Path
from typing import Any

from foreword import LLM, SamplingParams
from tests.support.checkpoints import write_checkpoint

NUM_REQUESTS = 300


def requests() -> tuple[list[dict[str, list[int]]], list[SamplingParams]]:
    """Short and long prompts, some with a common prefix; greedy and sampled; the first 64 are long."""
    chance = random.Random(11)
    common = [chance.randrange(3, 250) for _ in range(48)]
    prompts, params = [], []
    for number in range(NUM_REQUESTS):
        own = [chance.randrange(3, 250) for _ in range(chance.randint(4, 18))]
        prompts.append(
            {
                "prompt_token_ids": common[: chance.choice((0, 0, 20, 48)) if number >= 64 else 0]
                + own * chance.randint(1, 4)
            }
        )
        length = 120 if number < 64 else chance.choice((2, 5, 9, 14, 40))
        params.append(SamplingParams(temperature=chance.choice((0.0, 1.0)), seed=number, max_tokens=length))
    return prompts, params


def answers(path: Path, **options: Any) -> tuple[LLM, list[tuple[int, ...]]]:
    llm = LLM(str(path), max_model_len=240, threads=1, **options)
    outputs = llm.generate(*requests())
    llm.check()
    return llm, [output.token_ids for output in outputs]


def test_hundreds_of_requests_on_a_small_cache(tmp_path: Path) -> None:
    """64 at once in 4,000 tokens of cache with speculation, against one at a time without."""
    path = write_checkpoint(tmp_path / "model", "llama", seed=5)
    _, alone = answers(path, max_num_seqs=1, speculate="off", prefix_caching=False)
    for draft_length in ("fixed", "adaptive"):
        small = {"kv_cache_memory": "4000tokens", "max_num_batched_tokens": 128}
        llm, crowded = answers(path, max_num_seqs=64, draft_length=draft_length, **small)
        assert len(crowded) == NUM_REQUESTS
        assert crowded == alone
        assert llm.stats.preemptions_total > 0, "the cache is not too small"
        assert llm.stats.prefix_cache_hits_total > 0
