"""Engines in this process: counts of a round, and isolation between rounds."""

from dataclasses import replace

import pytest

from foreword.bench.engine import LocalEngine, LocalTarget
from foreword.bench.measurement import ADAPTIVE, AUTO, FIXED, OFF, BenchCase, Mode
from foreword.bench.regime import RegimeError
from foreword.bench.workloads import Conversation
from foreword.config.options import Config
from foreword.core.outputs import StepReport
from foreword.core.params import Speculation
from tests.support.checkpoints import write_checkpoint

TALK = Conversation(
    ("the thing in the thing in the thing in the thing", "and on and on", "and the end"),
    max_tokens=6,
    ignore_eos=True,
)
NOISE = Conversation(
    prompt_ids=tuple(range(10, 50)), max_tokens=9, temperature=100.0, ignore_eos=True, seed=5
)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    model = write_checkpoint(tmp_path_factory.mktemp("speculate") / "tiny")
    return Config(
        model=str(model),
        speculate="ngram",
        draft_length="fixed",
        kv_cache_memory="3000tokens",
        max_model_len=256,
    )


@pytest.fixture(scope="module")
def engine(config: Config) -> LocalEngine:
    return LocalEngine(config)


def test_failed_round_leaves_no_request(engine: LocalEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> StepReport:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(engine, "step", fail)
        with pytest.raises(RuntimeError):
            engine.run((TALK, NOISE), OFF, 2, "failed")
    engine.step()
    assert engine.client.idle


def test_run_counts_tokens_times_and_drafts(engine: LocalEngine) -> None:
    repetition = engine.run((TALK, NOISE), AUTO, 2, "a")
    assert [result.key for result in repetition.results] == [(0, 0), (0, 1), (0, 2), (1, 0)]
    assert [result.num_tokens for result in repetition.results] == [6, 6, 6, 9]
    for result in repetition.results:
        assert result.ttft_s is not None and 0 < result.ttft_s <= result.total_s < repetition.seconds
        assert 1 <= result.num_tokens - sum(count for _, count in result.gaps) <= result.num_tokens
    assert repetition.stages["forward"] > 0
    assert repetition.draft_stats["ngram"].num_drafted > 0
    assert repetition.num_tokens == 27


def test_round_is_checked_against_its_claims(engine: LocalEngine) -> None:
    case = BenchCase("replay talk", 2, lambda variant: (TALK, NOISE))
    drafted = engine.run((TALK, NOISE), AUTO, 2, "claims")
    fixed = Mode("fixed 1", FIXED, Speculation(max_draft_tokens=1))
    drafted.check(case, fixed)
    with pytest.raises(RegimeError, match="tokens of the longest verified draft: 1, not 7"):
        drafted.check(case, Mode("fixed 8", FIXED, Speculation(max_draft_tokens=8)))
    with pytest.raises(RegimeError, match="off: draft tokens verified"):
        drafted.check(case, OFF)
    with pytest.raises(RegimeError, match="longest verified draft: 0, not 1"):
        replace(drafted, draft_stats={}).check(case, fixed)
    with pytest.raises(RegimeError, match="requests at once: 2, not 3"):
        drafted.check(replace(case, concurrency=3), AUTO)
    drafted.results[0].num_tokens -= 1
    with pytest.raises(RegimeError, match="tokens of an answer: 5, not 6"):
        drafted.check(case, AUTO)


def test_later_turn_contains_the_history(engine: LocalEngine) -> None:
    results = engine.run((TALK,), OFF, 1, "b").results
    texts = [engine.tokenizer.decode(result.prompt_ids, skip_special_tokens=False) for result in results]
    answer = engine.tokenizer.decode([token for token in results[0].output if isinstance(token, int)])
    assert TALK.turns[0] in texts[2] and TALK.turns[1] in texts[2] and answer in texts[2]


def test_conversation_ends_at_the_context_limit(engine: LocalEngine) -> None:
    long = Conversation(("on and " * 20,) * 3, max_tokens=6, ignore_eos=True)
    assert 0 < len(engine.run((long,), OFF, 1, "c").results) < 3


def test_cache_salts_do_not_share_kv(engine: LocalEngine) -> None:
    talk = (Conversation(TALK.turns[:1], max_tokens=4),)
    hits = []
    for salt in ("d", "e", "e"):
        before = engine.stats.prefix_cache_hits_total
        engine.run(talk, OFF, 1, salt)
        hits.append(engine.stats.prefix_cache_hits_total - before)
    assert hits[:2] == [0, 0]
    assert hits[2] > 0, "the same salt again hits"


def test_rounds_alternate_with_salts_of_their_own(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    target = LocalTarget({ADAPTIVE: config})
    order: list[str] = []
    salts: set[str] = set()
    run = LocalEngine.run

    def record_run(self: LocalEngine, *args: object) -> object:
        order.append(args[1].name)  # type: ignore[attr-defined]
        salts.add(str(args[3]))
        return run(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(LocalEngine, "run", record_run)
    case = BenchCase("talk", 1, lambda variant: (TALK, NOISE))
    pairs = [target.run_pairs(case, (AUTO,), number)["auto"] for number in range(2)]
    assert order == ["off", "auto", "auto", "off"]
    assert len(salts) == 4
    assert all(pair.has_equal_outputs for pair in pairs)
