"""The model of recorded answers: rows are computed, and the recorded token takes the sampled one's place."""

import itertools

import pytest

from foreword.bench.agent.engine import AgentEngine, AgentSession
from foreword.bench.agent.model import write_checkpoint
from foreword.bench.agent.workload import AgentScript, AgentStep
from foreword.bench.speculate.types import AUTO, OFF, BenchRepetition, Mode
from foreword.config.options import Config
from foreword.core.params import Speculation
from foreword.formats.events import CallStart

TEXTS = [
    "I read the file and then I read the tests of the file.\n",
    '{"name": "read", "arguments": {"path": "a.py"}}',
]
STEPS = tuple(
    AgentStep(
        f"I read the file number {n}.", "read", {"path": "a.py", "offset": n, "limit": 2}, f"{n}\tthe text"
    )
    for n in range(4)
)
SCRIPT = AgentScript("You read files.", "Read the file.", STEPS, "I have read the file.")


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> AgentEngine:
    folder = write_checkpoint(tmp_path_factory.mktemp("agent"), TEXTS * 50)
    config = Config(model=str(folder), overlap=False, kv_cache_memory="8000tokens", max_model_len=4000)
    return AgentEngine(config, recorded=True)


def answer(engine: AgentEngine, session: AgentSession, mode: Mode) -> BenchRepetition:
    engine.use_answers([session])
    engine.sampler.with_hashes = True
    return engine.run([session], mode, 1, mode.name)


def test_answers_are_the_recorded_ones_and_logits_are_exact(engine: AgentEngine) -> None:
    session = engine.make_session(SCRIPT, 1, 10)
    off = answer(engine, session, OFF)
    assert off.outputs == session.answers and off.num_drafted == 0
    on = answer(engine, session, Mode("suffix", speculation=Speculation("suffix")))
    assert on.outputs == session.answers and on.num_drafted > 0
    for plain, other in zip(off.results, on.results, strict=True):
        assert plain.logits_hashes == other.logits_hashes and len(set(plain.logits_hashes)) > 1
        assert plain.events == other.events


def test_calls_are_parsed_and_prompts_grow_by_the_result(engine: AgentEngine) -> None:
    session = engine.make_session(SCRIPT, 2, 10)
    results = answer(engine, session, AUTO).results
    names = [event.name for result in results for event in result.events if isinstance(event, CallStart)]
    assert names == ["read"] * len(STEPS)
    block = engine.info.resolved.block_size
    for before, result in itertools.pairwise(results):
        known = (*before.prompt_ids, *before.output)
        assert result.prompt_ids[: len(known)] == known, "a replayed answer has other tokens"
        assert result.num_cached >= len(known) - block
