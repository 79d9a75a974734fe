"""Engines in this process: what a round counts, and that rounds find nothing of each other."""

from pathlib import Path

import pytest

from foreword.bench.speculate.local import LocalEngine, LocalTarget
from foreword.bench.speculate.types import ADAPTIVE, AUTO, OFF, SpecCase
from foreword.bench.speculate.workloads import Conversation
from foreword.config.options import Config
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


def test_what_a_round_counts(engine: LocalEngine) -> None:
    found = engine.run((TALK, NOISE), AUTO, 2, "a")
    assert [call.key for call in found.results] == [(0, 0), (0, 1), (0, 2), (1, 0)]
    assert [call.num_tokens for call in found.results] == [6, 6, 6, 9]
    for call in found.results:
        assert call.ttft_s is not None and 0 < call.ttft_s <= call.total_s < found.seconds
        assert 1 <= call.num_tokens - sum(count for _, count in call.gaps) <= call.num_tokens
    assert found.stages["forward"] > 0
    assert found.draft_stats["ngram"].num_drafted > 0
    assert found.num_tokens == 27


def test_a_later_turn_holds_all_before_it(engine: LocalEngine) -> None:
    calls = engine.run((TALK,), OFF, 1, "b").results
    texts = [engine.tokenizer.decode(call.prompt_ids, skip_special_tokens=False) for call in calls]
    answer = engine.tokenizer.decode([token for token in calls[0].output if isinstance(token, int)])
    assert TALK.turns[0] in texts[2] and TALK.turns[1] in texts[2] and answer in texts[2]


def test_a_conversation_ends_where_the_context_does(engine: LocalEngine) -> None:
    long = Conversation(("on and " * 20,) * 3, max_tokens=6, ignore_eos=True)
    assert 0 < len(engine.run((long,), OFF, 1, "c").results) < 3


def test_tenants_find_nothing_of_each_other(engine: LocalEngine) -> None:
    talk = (Conversation(TALK.turns[:1], max_tokens=4),)
    hits = []
    for tenant in ("d", "e", "e"):
        before = engine.stats.prefix_cache_hits_total
        engine.run(talk, OFF, 1, tenant)
        hits.append(engine.stats.prefix_cache_hits_total - before)
    assert hits[:2] == [0, 0]
    assert hits[2] > 0, "the same tenant again does find it"


def test_rounds_take_turns_and_each_has_a_tenant(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    target = LocalTarget({ADAPTIVE: config})
    order: list[str] = []
    tenants: set[str] = set()
    run = LocalEngine.run

    def watched(self: LocalEngine, *given: object) -> object:
        order.append(given[1].name)  # type: ignore[attr-defined]
        tenants.add(str(given[3]))
        return run(self, *given)  # type: ignore[arg-type]

    monkeypatch.setattr(LocalEngine, "run", watched)
    cell = SpecCase("talk", 1, lambda variant: (TALK, NOISE))
    pairs = [target.run_pairs(cell, (AUTO,), number)["auto"] for number in range(2)]
    assert order == ["off", "auto", "auto", "off"]
    assert len(tenants) == 4
    assert all(pair.has_equal_outputs for pair in pairs)


def test_the_ids_of_random_prompts_are_plain(engine: LocalEngine) -> None:
    assert not set(engine.tokenizer.eos_token_ids) & set(engine.plain_ids)
    assert max(engine.plain_ids) < engine.info.vocab_size


def test_preemptions_are_those_of_the_round(config: Config, tmp_path: Path) -> None:
    small = LocalEngine(Config(model=config.model, speculate="off", kv_cache_memory="80tokens"))
    many = tuple(Conversation(TALK.turns[:1], max_tokens=24, ignore_eos=True, seed=seed) for seed in range(4))
    first, second = (small.run(many, OFF, 4, tenant).preemptions for tenant in "ab")
    assert first == second > 0
