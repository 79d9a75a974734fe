"""Answers that must conform: JSON schemas of many kinds, answered with speculation on and off.

    python -m benchmarks.structured [--model FOLDER] [--schemas 300] [--tokens 1500] [--temperature 0.7]

The schemas are those of tests/support/json_schema_cases.py, made from their numbers; all of a kind are asked at once. DRY keeps a model as small
as the bundled one from repeating itself within a text for ever, which no schema forbids. An answer has finished if it ended
by itself within --tokens; it conforms if jsonschema says so, formats included. Prints a table and then one JSON line; ends
with 1 if fewer than 95 % finish, if one that has finished does not conform, or if a token differs between on and off.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from jsonschema import Draft202012Validator, ValidationError

from foreword import LLM, RequestOutput, SamplingParams, Speculation, StructuredOutput
from foreword.bench.common import print_json, print_table
from tests.support.json_schema_cases import SAMPLING, make_schema, schema_prompt

MIN_CONFORMING = 0.95


@dataclass(frozen=True, slots=True)
class StructuredTally:
    """Of all answers: those that ended by themselves, those of them that conform, and what they cost."""

    speculation: str
    asked: int
    finished: int
    conforming: int
    tokens: int
    seconds: float


def main(arguments: Sequence[str] | None = None) -> int:
    args = _arguments(arguments)
    llm = LLM(args.model)
    schemas = [make_schema(number) for number in range(args.schemas)]
    answers, tallies = [], []
    for method in ("auto", "off"):
        _ask(llm, schemas, method, 1, args.temperature)  # grammars are compiled
        began = time.perf_counter()
        answers.append(_ask(llm, schemas, method, args.tokens, args.temperature))
        tallies.append(_tally(method, schemas, answers[-1], time.perf_counter() - began))
    same = sum(on.outputs[0].token_ids == off.outputs[0].token_ids for on, off in zip(*answers, strict=True))
    _show(tallies, same)
    well = all(
        tally.finished >= MIN_CONFORMING * tally.asked and tally.conforming == tally.finished
        for tally in tallies
    )
    return 0 if well and same == len(schemas) else 1


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default=None, help="checkpoint (default: the bundled demo)")
    parser.add_argument("--schemas", type=int, default=300)
    parser.add_argument("--tokens", type=int, default=1500)
    parser.add_argument("--temperature", type=float, default=0.7)
    return parser.parse_args(arguments)


def _ask(
    llm: LLM, schemas: Sequence[dict[str, Any]], method: str, tokens: int, temperature: float
) -> list[RequestOutput]:
    params = [
        SamplingParams(
            max_tokens=tokens,
            temperature=temperature,
            seed=number,
            structured=StructuredOutput.json_schema(schema),
            speculation=Speculation(method),
            **SAMPLING,
        )
        for number, schema in enumerate(schemas)
    ]
    return llm.chat(
        [[{"role": "user", "content": schema_prompt(schema)}] for schema in schemas],
        params,
        progress=sys.stderr.isatty(),
    )


def _tally(
    method: str, schemas: Sequence[dict[str, Any]], outputs: Sequence[RequestOutput], seconds: float
) -> StructuredTally:
    finished = [
        (schema, output.text)
        for schema, output in zip(schemas, outputs, strict=True)
        if output.finish_reason == "stop"
    ]
    tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    conforming = sum(conforms(schema, text) for schema, text in finished)
    return StructuredTally(method, len(schemas), len(finished), conforming, tokens, seconds)


def conforms(schema: dict[str, Any], text: str) -> bool:
    try:
        Draft202012Validator(schema, format_checker=Draft202012Validator.FORMAT_CHECKER).validate(
            json.loads(text)
        )
        return True
    except (ValueError, ValidationError) as error:
        print(f"{schema['title']}: {text!r:.400}: {error!s:.400}", file=sys.stderr)
        return False


def _show(tallies: Sequence[StructuredTally], same: int) -> None:
    head = ("speculation", "asked", "finished", "conforming", "tokens", "seconds")
    print_table(
        "Answers to schemas",
        head,
        [
            [f"{value:.4g}" if isinstance(value, float) else str(value) for value in asdict(t).values()]
            for t in tallies
        ],
    )
    print(f"answers that are the same, token by token, with speculation on and off: {same}")
    print_json({"bench": "structured", "same": same, "tallies": [asdict(tally) for tally in tallies]})


if __name__ == "__main__":
    sys.exit(main())
