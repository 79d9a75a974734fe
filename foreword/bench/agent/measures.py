"""The parser's time for a token, and the time until the grammar of many tools is ready."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from random import Random
from typing import Any

from foreword.bench.agent.engine import AgentEngine
from foreword.bench.agent.workload import Sources
from foreword.chat_formats.chat_format import BoundFormat
from foreword.chat_formats.parser import ChatParser
from foreword.chat_formats.tools import ReasoningOptions, Tool, ToolUse
from foreword.core.params import SamplingParams
from foreword.grammar.tool_calls import tool_constraint
from foreword.tokenizer.input_processor import make_requests

PARSED_CHARACTERS = (5_000, 50_000, 500_000)  # lengths of a call's argument
NUM_TOOLS, NUM_PARAMETERS = 100, 3
TYPES: Sequence[dict[str, Any]] = (
    {"type": "string"},
    {"type": "integer", "minimum": 0},
    {"type": "boolean"},
    {"type": "array", "items": {"type": "string"}},
    {"enum": ["fast", "exact", "auto"]},
    {
        "type": "object",
        "properties": {"path": {"type": "string"}, "line": {"type": "integer"}},
        "required": ["path"],
    },
)


def measure_parser(engine: AgentEngine, bound: BoundFormat, sources: Sources) -> dict[str, dict[str, float]]:
    """Microseconds of a token, in answers with one call that writes a file, by characters of the file."""
    source, costs = "\n".join(sources.texts.values()), {}
    for size in PARSED_CHARACTERS:
        arguments = json.dumps({"path": "a.py", "content": source[:size]}, ensure_ascii=False)
        answer = f'I write it.\n<tool_call>\n{{"name": "write", "arguments": {arguments}}}\n</tool_call>'
        token_ids = engine.tokenizer.encode(answer, add_special_tokens=False)
        decode = engine.tokenizer.decode
        tokens = [(token_id, decode([token_id])) for token_id in token_ids]
        parser = ChatParser(bound, engine.use, False, "call_{}".format)
        started = time.perf_counter()
        for token_id, text in tokens:
            parser.feed(token_id, text)
        parser.flush(ended_by_model=True)
        seconds = time.perf_counter() - started
        assert parser.num_calls == 1, "the call was not parsed"
        costs[str(size)] = {"tokens": len(tokens), "us_per_token": seconds / len(tokens) * 1e6}
    return costs


def measure_grammar(engine: AgentEngine, bound: BoundFormat, sources: Sources) -> dict[str, float]:
    """Milliseconds until the grammar of NUM_TOOLS tools can mask, for their first turn and for the next."""
    tools = _make_tools(sources)
    texts = [json.dumps([tool.name, tool.description, tool.parameters]) for tool in tools]
    figures: dict[str, float] = {"tools": len(tools), "bytes": sum(map(len, texts))}
    grammars = engine.client._engine.grammars
    grammars.set_vocabulary(engine.tokenizer.vocabulary())
    _compile(engine, bound, tools[:1])  # threads have started
    for name in ("first_turn_ms", "next_turn_ms"):
        figures[name] = _compile(engine, bound, tools) * 1e3
    return figures


def _compile(engine: AgentEngine, bound: BoundFormat, tools: tuple[Tool, ...]) -> float:
    """Seconds."""
    started = time.perf_counter()
    constraint = tool_constraint(bound, ToolUse(tools), ReasoningOptions(), False, None)
    (request,) = make_requests(
        (0,), SamplingParams(structured=constraint.structured), engine.tokenizer, "grammar", engine.max_len
    )
    engine.client._engine.grammars.compile(request).result()
    return time.perf_counter() - started


def _make_tools(sources: Sources) -> tuple[Tool, ...]:
    """NUM_TOOLS tools of three described parameters, about 55 KB together."""
    rng, tools = Random(0), []
    for number in range(NUM_TOOLS):
        properties = {
            f"{rng.choice(('path', 'text', 'mode', 'limit', 'options'))}_{index}": {
                **rng.choice(TYPES),
                "description": rng.choice(sources.sentences),
            }
            for index in range(NUM_PARAMETERS)
        }
        schema = {"type": "object", "properties": properties, "required": list(properties)}
        tools.append(Tool(f"tool_{number}", rng.choice(sources.sentences), schema))
    return tuple(tools)
