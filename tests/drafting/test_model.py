"""The draft model: agrees with itself, forgets what was rejected, lives on little memory and a short context."""

from pathlib import Path

import pytest

from foreword import LLM, SamplingParams
from foreword.core.request import Request, RequestState
from foreword.drafting.base import Ask
from foreword.drafting.model import _Track
from foreword.errors import ConfigError
from tests.checkpoints import VOCAB_SIZE, write_checkpoint, write_drafter

PROMPTS = [{"prompt_token_ids": [40 + i, 41, 42, 43 + i]} for i in range(6)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("draft") / "model", "llama", seed=5)


def load(model: Path, drafter: Path | None, **options: object) -> LLM:
    defaults = {"max_model_len": 96, "kv_cache_memory": "2000tokens", "threads": 1}
    speculate = "draft" if drafter else "off"
    return LLM(str(model), speculate=speculate, draft_model=str(drafter) if drafter else None, **(defaults | options))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.0},
        {"temperature": 1.0, "seed": 3},
        {"temperature": 0.8, "top_p": 0.9, "repetition_penalty": 1.2, "seed": 9},
    ],
)
def test_a_drafter_equal_to_the_target_is_always_right(checkpoint: Path, params: dict[str, float]) -> None:
    """Same weights, same noise, same history: every drafted token is what the target samples."""
    llm = load(checkpoint, checkpoint)
    for output in llm.generate(PROMPTS, SamplingParams(max_tokens=30, ignore_eos=True, **params)):  # type: ignore[arg-type]
        assert output.metrics is not None
        assert output.metrics.draft_tokens_acceptance == 1.0
        assert output.metrics.verify_steps == 6  # 1 token from the prompt's step, then 5 a step


def test_a_rejected_guess_leaves_no_trace(checkpoint: Path, tmp_path: Path) -> None:
    """A drafter that is wrong now and then keeps its acceptance: its KV never holds a rejected token."""
    rounded = write_checkpoint(tmp_path / "rounded", "llama", seed=5, dtype="bfloat16")
    llm = load(checkpoint, rounded)
    params = SamplingParams(temperature=0, max_tokens=80, ignore_eos=True)
    outputs = llm.generate(PROMPTS, params)
    rates = [output.metrics.draft_tokens_acceptance for output in outputs if output.metrics]
    assert any(rate and rate < 1.0 for rate in rates), "the test needs rejections"
    assert sum(rate or 0 for rate in rates) / len(rates) > 0.5, "a drafter this close stays close to the end"
    assert [o.token_ids for o in outputs] == [o.token_ids for o in load(checkpoint, None).generate(PROMPTS, params)]


def test_a_shorter_context_drafts_as_far_as_it_reaches(checkpoint: Path, tmp_path: Path) -> None:
    short = write_checkpoint(tmp_path / "short", "llama", seed=5, max_position_embeddings=32)
    llm = load(checkpoint, short)
    params = SamplingParams(temperature=0, max_tokens=80, ignore_eos=True)
    outputs = llm.generate(PROMPTS, params)
    assert [o.token_ids for o in outputs] == [o.token_ids for o in load(checkpoint, None).generate(PROMPTS, params)]
    for output in outputs:
        assert output.metrics is not None and output.metrics.draft_tokens is not None
        assert 20 <= output.metrics.draft_tokens <= 32


def test_too_little_memory_for_all_costs_drafts_not_requests(checkpoint: Path) -> None:
    llm = load(checkpoint, checkpoint, kv_cache_memory="128tokens", max_model_len=96)
    outputs = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=80, ignore_eos=True))
    assert {len(output.token_ids) for output in outputs} == {80}
    llm.check()


def test_a_long_prompt_is_caught_up_in_chunks(checkpoint: Path) -> None:
    llm = load(checkpoint, checkpoint, max_num_batched_tokens=8, max_num_seqs=2)
    prompt = {"prompt_token_ids": [(7 * i) % 200 + 10 for i in range(60)]}
    (output,) = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=30, ignore_eos=True))
    assert output.metrics is not None and output.metrics.draft_tokens_acceptance == 1.0
    assert output.metrics.draft_tokens


def test_another_tokenizer_is_refused_by_its_first_difference(checkpoint: Path, tmp_path: Path) -> None:
    other = write_drafter(tmp_path / "other")
    text = (other / "tokenizer.json").read_text().replace("<|im_start|>", "<|im_begin|>")
    (other / "tokenizer.json").write_text(text)
    with pytest.raises(ConfigError, match="im_"):
        load(checkpoint, other)


def test_an_unfit_size_is_said(checkpoint: Path) -> None:
    assert any("1/1.0" in warning for warning in load(checkpoint, checkpoint).info.warnings)


def test_vocabularies_may_be_padded_differently(checkpoint: Path, tmp_path: Path) -> None:
    """Rows that stand for no token may be more or fewer; all tokens must be there."""
    for name, vocab_size in (("wider", VOCAB_SIZE + 16), ("narrower", 270)):
        other = write_checkpoint(tmp_path / name, "llama", seed=5, vocab_size=vocab_size)
        llm = load(checkpoint, other)
        params = SamplingParams(temperature=1.0, seed=1, max_tokens=30, ignore_eos=True)
        outputs = llm.generate(PROMPTS, params)
        assert [o.token_ids for o in outputs] == [o.token_ids for o in load(checkpoint, None).generate(PROMPTS, params)]
        assert sum(o.metrics.draft_tokens or 0 for o in outputs if o.metrics) > 0
        assert not llm.stats.drafter_errors


def test_a_vocabulary_that_lacks_tokens_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    other = write_checkpoint(tmp_path / "short", "llama", seed=5, vocab_size=268)
    with pytest.raises(ConfigError, match="has 268 ids; the model's tokens go up to id 269"):
        load(checkpoint, other)


def test_rejected_guesses_are_forgotten_and_the_last_token_is_computed_again() -> None:
    """KV of positions 3 and 4 was computed for guesses; the target said otherwise at 4."""
    state = RequestState(Request("a", (1, 2, 3), SamplingParams(), 0), 0, 100)
    track = _Track(computed=[1, 2, 3, 7, 8], checked=3)
    track.keep_common(Ask(state, run=(7, 9, 5)))
    assert (track.computed, track.checked) == ([1, 2, 3, 7], 4)
    track = _Track(computed=[1, 2, 3], checked=3)
    track.keep_common(Ask(state, run=()))
    assert track.computed == [1, 2]
