"""The cost of masks: Foreword's path, llguidance alone, and XGrammar where it is installed.

    python -m benchmarks.grammar TOKENIZER_FOLDER [--rows 64] [--repeats 5] [--rates] [--hostile]

TOKENIZER_FOLDER holds a tokenizer.json, best of 150,000 tokens or more. One process, nothing else
running, no model. For each constraint a conforming text is followed token by token: a mask before each
token (one row), then `--rows` requests at positions spread over the text, each a token further in each
step. Each repeat follows the text anew; figures cover all of them but the first, in which lexers are cold
and caches fill (the column "cold" is its longest mask). `foreword` is prepare() and mask() as the engine
calls them; prepare() alone is in the column "asked". XGrammar gets the same bounded whitespace. --hostile
tries adversarial grammars, each in a process of its own. Prints a table and then one JSON line.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import multiprocessing
import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from llguidance import LLExecutor, LLMatcher

from benchmarks.script import print_json, run_script
from foreword.bench.tables import print_table
from foreword.core.batch import SampleRow
from foreword.core.params import SamplingParams
from foreword.core.request import Request, RequestState
from foreword.core.structured_output import StructuredOutput, Vocabulary
from foreword.errors import InvalidRequest
from foreword.grammar.compiler import CompiledGrammar
from foreword.grammar.manager import GrammarManager
from foreword.grammar.masks import compute_masks
from foreword.grammar.vocab import GrammarVocab
from foreword.tokenizer.tokenizer import Tokenizer

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "email": {"type": "string", "format": "email"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "role": {"enum": ["admin", "editor", "reader"]},
    },
    "required": ["name", "age", "email", "tags", "role"],
    "additionalProperties": False,
}
PERSON_VALUE = {
    "name": "Clara Meier",
    "age": 31,
    "email": "clara@example.com",
    "tags": ["red", "likes tea"],
    "role": "editor",
}
LARGE = {"type": "array", "items": {"anyOf": [{**PERSON, "title": str(n)} for n in range(3)]}}
WIDE = {
    "type": "object",
    "properties": {f"field_{n}": {"type": ["string", "null"], "maxLength": 40} for n in range(300)},
    "required": [f"field_{n}" for n in range(0, 300, 10)],
    "additionalProperties": False,
}
WIDE_VALUE = {f"field_{n}": f"value {n}" for n in range(0, 300, 10)}
OBJECT_VALUE = {
    "title": "A list of things",
    "items": [{"id": n, "text": "some words here", "ok": True} for n in range(6)],
}
GBNF = r"""root ::= "{" ws (pair ("," ws pair)*)? "}"
pair ::= string ":" ws value ws
value ::= root | string | number | "true" | "false" | "null" | "[" ws (value ws ("," ws value ws)*)? "]"
string ::= "\"" ([^"\\\x00-\x1f] | "\\" ["\\/bfnrt])* "\""
number ::= "-"? [0-9]+ ("." [0-9]+)?
ws ::= "" | " " | "\n" [ \t]{0,20}
"""


@dataclass(frozen=True, slots=True)
class Case:
    """A constraint and a text that conforms."""

    name: str
    structured: StructuredOutput
    text: str


CASES = (
    Case("schema", StructuredOutput("json_schema", json.dumps(PERSON)), json.dumps(PERSON_VALUE)),
    Case(
        "schema, indented",
        StructuredOutput("json_schema", json.dumps(PERSON)),
        json.dumps(PERSON_VALUE, indent=2),
    ),
    Case(
        "union of schemas", StructuredOutput("json_schema", json.dumps(LARGE)), json.dumps([PERSON_VALUE] * 4)
    ),
    Case("300 properties", StructuredOutput("json_schema", json.dumps(WIDE)), json.dumps(WIDE_VALUE)),
    Case("any object", StructuredOutput("json_object"), json.dumps(OBJECT_VALUE)),
    Case(
        "regex",
        StructuredOutput("regex", r"(\d{1,3}\.){3}\d{1,3} - [A-Z][a-z]{2,20}( [A-Za-z]+)*"),
        "192.168.0.17 - Meier went home",
    ),
    Case(
        "3,000 choices",
        StructuredOutput("choice", json.dumps([f"option number {n}" for n in range(3_000)])),
        "option number 1234",
    ),
    Case("GBNF of JSON", StructuredOutput("gbnf", GBNF), json.dumps(OBJECT_VALUE)),
)


class Engine(Protocol):
    """One way to masks. A matcher is whatever the engine makes of a compiled grammar."""

    name: str

    def compile(self, structured: StructuredOutput) -> Any: ...

    def matcher(self, compiled: Any) -> Any: ...

    def accept(self, matcher: Any, token_id: int) -> None: ...

    def masks(self, matchers: Sequence[Any]) -> float:
        """Compute them all; seconds of it that the caller cannot use otherwise, beyond waiting."""


class LlGuidance:
    """llguidance alone: one executor call."""

    name = "llguidance"

    def __init__(self, vocabulary: Vocabulary, vocab_size: int) -> None:
        self._tokens = GrammarVocab(vocabulary, vocab_size)
        self._executor = LLExecutor(1)
        self._masks = torch.zeros(256, self._tokens.num_mask_words, dtype=torch.int32)

    def compile(self, structured: StructuredOutput) -> CompiledGrammar:
        return CompiledGrammar(structured, self._tokens)

    def matcher(self, compiled: CompiledGrammar) -> LLMatcher:
        return compiled.new_matcher()

    def accept(self, matcher: LLMatcher, token_id: int) -> None:
        assert matcher.consume_token(token_id)

    def masks(self, matchers: Sequence[LLMatcher]) -> float:
        compute_masks(self._executor, [(matcher, ()) for matcher in matchers], self._masks[: len(matchers)])
        return 0.0


class ForewordMasks:
    """As in the engine: rows are prepared, then masks are requested."""

    name = "foreword"

    def __init__(self, vocabulary: Vocabulary, vocab_size: int) -> None:
        self._tokens = GrammarVocab(vocabulary, vocab_size)
        self._grammars = GrammarManager(vocab_size)
        self._grammars.set_vocabulary(vocabulary)
        self._eos = vocabulary.eos_ids

    def compile(self, structured: StructuredOutput) -> StructuredOutput:
        self.matcher(structured)
        return structured

    def matcher(self, compiled: StructuredOutput) -> RequestState:
        request = Request("r", (0,), SamplingParams(structured=compiled), 0, eos_token_ids=self._eos)
        return RequestState(request, 0, 1 << 20, self._grammars.compile(request).result())

    def accept(self, matcher: RequestState, token_id: int) -> None:
        matcher.append([token_id])

    def masks(self, matchers: Sequence[RequestState]) -> float:
        begin = time.perf_counter()
        self._grammars.start_masks([SampleRow(state) for state in matchers])
        asked = time.perf_counter() - begin
        for state in matchers:
            assert state.grammar is not None
            state.grammar.mask(())
        return asked


class XGrammar:
    """XGrammar with one thread."""

    name = "xgrammar"

    def __init__(self, vocabulary: Vocabulary, vocab_size: int) -> None:
        self._xgr = importlib.import_module("xgrammar")
        tokens = [*vocabulary.tokens, *[b""] * (vocab_size - len(vocabulary.tokens))]
        info = self._xgr.TokenizerInfo(tokens, vocab_size=vocab_size, stop_token_ids=list(vocabulary.eos_ids))
        self._compiler = self._xgr.GrammarCompiler(info, max_threads=1, cache_enabled=False)
        self._batch = self._xgr.BatchGrammarMatcher(max_threads=1)
        self._masks = self._xgr.allocate_token_bitmask(256, vocab_size)

    def compile(self, structured: StructuredOutput) -> Any:
        text, compiler = structured.text, self._compiler
        match structured.constraint_type:
            case "json_schema":
                return compiler.compile_json_schema(text, any_whitespace=True, max_whitespace_cnt=64)
            case "json_object":
                return compiler.compile_json_schema(
                    '{"type": "object"}', any_whitespace=True, max_whitespace_cnt=64
                )
            case "regex":
                return compiler.compile_regex(text)
            case "choice":
                return compiler.compile_grammar("root ::= " + " | ".join(map(json.dumps, json.loads(text))))
        return compiler.compile_grammar(text)

    def matcher(self, compiled: Any) -> Any:
        return self._xgr.GrammarMatcher(compiled)

    def accept(self, matcher: Any, token_id: int) -> None:
        assert matcher.accept_token(token_id)

    def masks(self, matchers: Sequence[Any]) -> float:
        if len(matchers) == 1:
            matchers[0].fill_next_token_bitmask(self._masks, 0)
        else:
            self._batch.batch_fill_next_token_bitmask(list(matchers), self._masks)
        return 0.0


@dataclass(frozen=True, slots=True)
class MaskTimings:
    """Microseconds of a mask over a text, or of a step of many rows; `asked` is the time of the caller."""

    times: tuple[float, ...]
    cold: float
    asked: float

    def row(self) -> list[str]:
        ordered = sorted(self.times)
        shown = (
            statistics.mean(ordered),
            ordered[len(ordered) // 2],
            ordered[int(len(ordered) * 0.99)],
            ordered[-1],
            self.cold,
            self.asked,
        )
        return [f"{value:.0f}" for value in shown]

    def numbers(self) -> dict[str, float]:
        names = ("mean", "p50", "p99", "max", "cold", "asked")
        return dict(zip(names, map(float, self.row()), strict=True))


def time_masks(engine: Engine, compiled: Any, ids: Sequence[int], rows: int, repeats: int) -> MaskTimings:
    """Time masks before every token of a text, for `rows` requests spread over it."""
    passes: list[list[float]] = []
    asked: list[float] = []
    for _ in range(repeats + 1):
        matchers = list(_spread_over_text(engine, compiled, ids, rows))
        times: list[float] = []
        for step in range(len(ids) if rows == 1 else min(len(ids), 16)):
            begin = time.perf_counter()
            asked.append(engine.masks([matcher for matcher, _ in matchers]) * 1e6)
            times.append((time.perf_counter() - begin) * 1e6)
            for index, (matcher, place) in enumerate(matchers):
                if place + step < len(ids):
                    engine.accept(matcher, ids[place + step])
                else:  # this request ends, another one begins
                    matchers[index] = (engine.matcher(compiled), -step - 1)
        passes.append(times)
    warm = [value for times in passes[1:] for value in times]
    return MaskTimings(tuple(warm), max(passes[0]), statistics.median(asked))


def _spread_over_text(
    engine: Engine, compiled: Any, ids: Sequence[int], rows: int
) -> Iterator[tuple[Any, int]]:
    for row in range(rows):
        place = row * len(ids) // rows
        matcher = engine.matcher(compiled)
        for token_id in ids[:place]:
            engine.accept(matcher, token_id)
        yield matcher, place


def measure(engine: Engine, case: Case, ids: Sequence[int], rows: int, repeats: int) -> dict[str, Any]:
    begin = time.perf_counter()
    try:
        compiled = engine.compile(case.structured)
    except Exception as error:
        return {"case": case.name, "engine": engine.name, "error": str(error)[:200]}
    compile_ms = (time.perf_counter() - begin) * 1e3
    one = time_masks(engine, compiled, ids, 1, repeats)
    many = time_masks(engine, compiled, ids, rows, repeats)
    return {
        "case": case.name,
        "engine": engine.name,
        "compile_ms": round(compile_ms, 2),
        "one": one,
        "many": many,
    }


def memory_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def forced_token_agreement(vocabulary: Vocabulary, tokenizer: Tokenizer) -> list[list[str]]:
    """Tokens forced by a grammar along a text, and those that the tokenizer would choose too."""
    grammars = GrammarManager(tokenizer.vocab_size)
    grammars.set_vocabulary(vocabulary)
    lines: list[list[str]] = []
    for case in CASES:
        request = Request(
            "r", (0,), SamplingParams(structured=case.structured), 0, eos_token_ids=vocabulary.eos_ids
        )
        grammar, ids = (
            grammars.compile(request).result(),
            tokenizer.encode(case.text, add_special_tokens=False),
        )
        drafted = accepted = place = 0
        while place < len(ids):
            forced = grammar.forced(8)
            right = next(
                (n for n, (a, b) in enumerate(zip(forced, ids[place:], strict=False)) if a != b),
                min(len(forced), len(ids) - place),
            )
            drafted, accepted = drafted + len(forced), accepted + right
            grammar.accept(ids[place : place + right + 1])
            place += right + 1
        lines.append([case.name, str(len(ids)), str(drafted), str(accepted)])
    grammars.close()
    return lines


ADVERSARIAL = {
    "left recursion": StructuredOutput("gbnf", 'root ::= root "a" | "a"'),
    "nothing but itself": StructuredOutput("gbnf", "root ::= root"),
    "brackets, 10,000 deep": StructuredOutput("gbnf", "root ::= " + "(" * 10_000 + '"a"' + ")" * 10_000),
    "rules that double, 25 deep": StructuredOutput(
        "gbnf", "\n".join(["root ::= r0", *(f"r{n} ::= r{n + 1} r{n + 1}" for n in range(25)), 'r25 ::= "a"'])
    ),
    "(a{1,100}){1,100} thrice": StructuredOutput("regex", "(((a{1,100}){1,100}){1,100}){1,100}"),
    "a{1,1000000}": StructuredOutput("regex", "a{1,1000000}"),
    "(a|b)*a(a|b){20}": StructuredOutput("regex", "(a|b)*a(a|b){20}"),
    "schema, 10,000 deep": StructuredOutput(
        "json_schema", '{"properties":{"a":' * 10_000 + "{}" + "}}" * 10_000
    ),
    "schema, 2,000 optional properties": StructuredOutput(
        "json_schema",
        json.dumps({"type": "object", "properties": {f"p{n}": {"type": "string"} for n in range(2_000)}}),
    ),
    "schema, circle of $ref": StructuredOutput(
        "json_schema",
        json.dumps({"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}),
    ),
    "10,000 values of an enum": StructuredOutput(
        "json_schema", json.dumps({"enum": [f"value {n}" for n in range(10_000)]})
    ),
}
ADVERSARIAL_TIMEOUT_S = 10.0


def run_adversarial(
    engine: Callable[[Vocabulary, int], Engine], name: str, vocabulary: Vocabulary, vocab_size: int
) -> str:
    """The end of a process that compiles the grammar and computes a mask."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(
        target=_compile_alone, args=(engine, name, vocabulary, vocab_size, theirs)
    )
    process.start()
    theirs.close()
    try:
        ours.recv()  # the vocabulary is read
        outcome = (
            str(ours.recv()) if ours.poll(ADVERSARIAL_TIMEOUT_S) else f"more than {ADVERSARIAL_TIMEOUT_S:g} s"
        )
    except EOFError:
        process.join()
        outcome = f"the process dies ({process.exitcode})"
    process.kill()
    process.join()
    return outcome


def _compile_alone(
    engine: Callable[[Vocabulary, int], Engine], name: str, vocabulary: Vocabulary, size: int, pipe: Any
) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))
    made = engine(vocabulary, size)
    pipe.send("ready")
    before, begin = memory_mb(), time.perf_counter()
    try:
        made.masks([made.matcher(made.compile(ADVERSARIAL[name]))])
        said = "taken"
    except InvalidRequest:
        said = "refused"
    except Exception as error:
        said = f"refused: {error!s:.60}"
    pipe.send(f"{time.perf_counter() - begin:.2f} s, {memory_mb() - before:.0f} MB, {' '.join(said.split())}")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tokenizer", type=Path)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--rates", action="store_true", help="also: how often forced tokens are the tokenizer's own"
    )
    parser.add_argument("--hostile", action="store_true", help="also adversarial grammars")
    options = parser.parse_args(arguments)
    tokenizer = Tokenizer.from_directory(options.tokenizer)
    vocabulary = tokenizer.vocabulary()
    engines: list[Callable[[Vocabulary, int], Engine]] = [LlGuidance, ForewordMasks]
    if importlib.util.find_spec("xgrammar") is not None:
        engines.append(XGrammar)
    results = _masks(engines, tokenizer, vocabulary, options)
    if options.rates:
        print_table(
            "Tokens that are forced",
            ("constraint", "tokens of the text", "forced", "right"),
            forced_token_agreement(vocabulary, tokenizer),
        )
    if options.hostile:
        names = [engine.name for engine in engines if engine is not ForewordMasks]  # type: ignore[attr-defined]
        table = [
            [
                name,
                *(
                    run_adversarial(engine, name, vocabulary, tokenizer.vocab_size)
                    for engine in engines
                    if engine is not ForewordMasks
                ),
            ]
            for name in ADVERSARIAL
        ]
        print_table("Hostile, each in a process of its own", ("constraint", *names), table)
    print_json({"vocabulary": tokenizer.vocab_size, "rows": options.rows, "results": results})
    return 0


def _masks(
    engines: Sequence[Callable[..., Engine]], tokenizer: Tokenizer, vocabulary: Vocabulary, options: Any
) -> list[Any]:
    before = memory_mb()
    made: list[Engine] = []
    for engine in engines:
        begin = time.perf_counter()
        made.append(engine(vocabulary, tokenizer.vocab_size))
        print(
            f"{made[-1].name}: {time.perf_counter() - begin:.2f} s, {memory_mb() - before:.0f} MB",
            file=sys.stderr,
        )
        before = memory_mb()
    results: list[dict[str, Any]] = []
    lines: list[list[str]] = []
    for case in CASES:
        ids = tokenizer.encode(case.text, add_special_tokens=False)
        for engine_made in made:
            found = measure(engine_made, case, ids, options.rows, options.repeats)
            if "error" in found:
                lines.append([case.name, engine_made.name, found["error"], *[""] * 12])
                results.append(found)
                continue
            lines.append(
                [
                    case.name,
                    engine_made.name,
                    f"{found['compile_ms']:.1f}",
                    *found["one"].row(),
                    *found["many"].row(),
                ]
            )
            results.append({**found, "one": found["one"].numbers(), "many": found["many"].numbers()})
    places = ("mean", "p50", "p99", "max", "cold", "asked")
    columns = (
        "constraint",
        "engine",
        "compile ms",
        *(f"1 row {p}" for p in places),
        *(f"{options.rows} rows {p}" for p in places),
    )
    print_table(f"Masks over {tokenizer.vocab_size:,} tokens, microseconds", columns, lines)
    return results


if __name__ == "__main__":
    sys.exit(run_script(main))
