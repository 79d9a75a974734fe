"""The model of recorded answers: rows are computed, and the recorded token takes the sampled one's place."""

import itertools
from dataclasses import replace

import pytest

from foreword.bench.agent.checkpoint import write_checkpoint
from foreword.bench.agent.engine import AgentEngine, AgentSession
from foreword.bench.agent.workload import AgentScript, AgentStep
from foreword.bench.measurement import AUTO, OFF, BenchRepetition, Mode
from foreword.chat_formats.events import CallStart
from foreword.chat_formats.tools import ReasoningOptions
from foreword.config.options import Config
from foreword.core.outputs import TokenEvent
from foreword.core.params import SamplingParams, Speculation
from foreword.grammar.tool_calls import ConstraintTask
from foreword.tokenizer.input_processor import make_requests
from tests.support.budget import some_of

TEXTS = [
    "I read the file and then I read the tests of the file.\n",
    '{"name": "read", "arguments": {"path": "a.py"}}',
]
STEPS = tuple(
    AgentStep(
        f"I read the file number {n}.",
        "read_file",
        {"path": "a.py", "offset": n, "limit": 2},
        f"{n}\tthe text",
    )
    for n in range(4)
)
ARGUMENTS = '{"path": "src/of/a/long/path.py", "offset": 17, "limit": 93}'
SCRIPT = AgentScript("You read files.", "Read the file.", STEPS, "I have read the file.")


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> AgentEngine:
    folder = write_checkpoint(tmp_path_factory.mktemp("agent"), TEXTS * 50)
    config = Config(
        model=str(folder),
        overlap=False,
        kv_cache_memory="8000tokens",
        max_model_len=4000,
        draft_length="fixed",
        num_speculative_tokens=4,
    )
    return AgentEngine(config, recorded=True)


def answer(engine: AgentEngine, session: AgentSession, mode: Mode) -> BenchRepetition:
    engine.use_answers([session])
    engine.sampler.with_hashes = True
    return engine.run([session], mode, 1, mode.name)


@pytest.mark.parametrize("drafter", some_of(("suffix", "text"), 2))
def test_answers_are_the_recorded_ones_and_logits_are_exact(engine: AgentEngine, drafter: str) -> None:
    session = engine.make_session(SCRIPT, 1)
    off = answer(engine, session, OFF)
    assert off.outputs == session.answers and off.num_drafted == 0
    on = answer(engine, session, Mode(drafter, speculation=Speculation(drafter)))
    assert on.outputs == session.answers and on.num_drafted > on.draft_stats[drafter].num_accepted > 0
    for plain, other in zip(off.results, on.results, strict=True):
        assert plain.logits_hashes == other.logits_hashes and len(set(plain.logits_hashes)) > 1
        assert plain.events == other.events


def test_calls_are_parsed_and_prompts_grow_by_the_result(engine: AgentEngine) -> None:
    session = engine.make_session(SCRIPT, 2)
    results = answer(engine, session, AUTO).results
    names = [event.name for result in results for event in result.events if isinstance(event, CallStart)]
    assert names == ["read_file"] * len(STEPS)
    block = engine.info.resolved.block_size
    for before, result in itertools.pairwise(results):
        known = (*before.prompt_ids, *before.output)
        assert result.prompt_ids[: len(known)] == known, "a replayed answer has other tokens"
        assert result.num_cached >= len(known) - block


def drafted_tokens(engine: AgentEngine, seed: int, tenant: str, constrained: bool) -> int:
    """Accepted draft tokens of an answer with a call of a few dozen tokens, after a prompt without it."""
    text = f'{seed}<tool_call>\n{{"name": "read_file", "arguments": {ARGUMENTS}}}\n</tool_call>'
    (end,) = engine.tokenizer.eos_token_ids
    answer = (*engine.tokenizer.encode(text, add_special_tokens=False), end)
    engine.use_answers([AgentSession(("task",), seed=seed, answers=(answer,))])
    assert engine.format is not None
    constraint = ConstraintTask(engine.format, engine.use, ReasoningOptions(), False, None).constrain()
    params = SamplingParams(
        temperature=0.0,
        max_tokens=len(answer),
        seed=seed,
        speculation=Speculation("suffix"),
        structured=constraint.structured if constrained else None,
    )
    prompt = engine.tokenizer.encode("the file", add_special_tokens=False)
    (request,) = make_requests(prompt, params, engine.tokenizer, f"{tenant}{seed}", 4000)
    engine.client.submit(replace(request, cache_salt=tenant))
    token_ids: list[int] = []
    num_accepted = 0
    while not engine.client.idle:
        for event in engine.client.step().events:
            assert isinstance(event, TokenEvent)
            token_ids += event.token_ids
            num_accepted += event.draft.num_accepted if event.draft else 0
    assert tuple(token_ids) == answer
    return num_accepted


@pytest.mark.parametrize("constrained", [False, True])
def test_repeated_call_is_drafted_for_its_tenant_only(engine: AgentEngine, constrained: bool) -> None:
    """The second request has the call neither in its prompt nor, until then, in its answer."""
    tenants = [f"{name}{constrained}" for name in ("a", "b")]
    first = drafted_tokens(engine, 101, tenants[0], constrained)
    assert drafted_tokens(engine, 102, tenants[0], constrained) > first + 10
    assert drafted_tokens(engine, 103, tenants[1], constrained) == first
