"""Foreword, llama.cpp, OpenVINO GenAI, transformers and vLLM: the same weights, prompts and machine.

    python benchmarks/peers.py [--models qwen2.5-0.5b,llama-3.2-1b] [--groups bf16,q8_0,...] [--rounds 5]
    python benchmarks/peers.py --cpu-isa avx2         every engine held to AVX2
    python benchmarks/peers.py --contexts 8192,32768  only decoding after long prompts

The first run installs the other engines into an environment (--env) and writes random checkpoints in the
shapes of known models (--files): minutes, and some GB. Every answer has the requested length.

Regime: engines of one group (one precision) are loaded together, each in a process of its own, and
measured in turn, round after round, in rotated order; the memory's bandwidth and the rate of products on
registers are read at the start of each round. With --alone, one engine is in memory at a time: each round
starts each engine anew, from the page cache. A figure is the median over rounds, a ratio the median over
rounds of figures of the same round. No speculation, no prefix cache.

    decode     tokens/s of one request after a prompt of 32 tokens
    of read    bytes of the weights (of experts: those of one row) times decode, as a share of the bandwidth
               read in the same round; empty where a cache may hold the weights
    of peak    operations of the layers times the rate of the first prompt, as a share of a loop on registers
               with the instruction set's own multiply-adds
    512, 2048  tokens/s of a prompt until its first token
    x8, x16    tokens/s of so many requests together, 32 tokens each in and --tokens out: Foreword through
               its server over HTTP, OpenVINO and vLLM by continuous batching and llama.cpp by batches of one
               token each, all in process (llama-cpp-python's server answers one request at a time)
    rows       time of a step that verifies 4, 8 or 16 rows of one request over that of 1 row, with sampling
    outside    share of a decoding step outside the model's forward pass
    memory     peak resident memory of the process; "of limit": over weights + KV cache + 300 MB
    8192, ...  of --contexts: the prompt once, then tokens/s of one request after it; the prompt's KV stays
               (prefix cache, or a sequence of llama.cpp). KV cache: bfloat16 and int8 of Foreword, f16 and
               q8_0 of llama.cpp with flash attention, the defaults of the others

Checked with every figure: the tokens that were emitted, the prompt tokens that were computed, the requests
that ran at once, the rows that each step verified, the instruction set, and that Foreword's answers are the
same in every round and mode. A figure whose check fails is printed as "not measured", with the reason, and
the exit code is 1. Prints a table for each group and then one JSON line.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import random
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from peers_models import MODELS
from peers_setup import PeerEnvironment, make_environment, make_files, make_vllm
from peers_states import GGUF_MODELS
from peers_worker import Worker
from script import print_json, require_concurrency, run_script, track_progress

from foreword.bench.regime import VOID, RegimeError, checked_share, require, shared_cache_bytes
from foreword.bench.roofline import MemoryReader, product_rate
from foreword.bench.statistics import rotate
from foreword.bench.tables import print_table
from foreword.kernels.cpu.library import ISAS, supported_isas

HERE = Path(__file__).parent
FIXED_BYTES = 300_000_000  # of the memory that a process may use beside weights and KV cache
CONTEXT = 2304  # of the other engines, for each of the streams
KV_TOKENS = 4096  # of Foreword, for all streams together
MAX_STREAMS = 16
PROMPT = 32
ROWS_CONTEXT, ROW_COUNTS = 256, (1, 4, 8, 16)
READ_BYTES = 1 << 30
SHAPES = {**MODELS, **GGUF_MODELS}
CACHE_MARGIN = 2  # weights of this many times the largest cache come from memory


@dataclass(frozen=True, slots=True)
class PeerEngine:
    """An engine and its model file, "" for the checkpoint itself."""

    name: str
    script: str
    file: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_foreword(self) -> bool:
        return self.script in ("foreword", "served")


def _foreword_engines(file: str, **options: Any) -> tuple[PeerEngine, ...]:
    """Foreword in process, the same limited to AVX2 (left out with --cpu-isa), and through its server."""
    narrow = {**options, "cpu_isa": "avx2"}
    return (
        PeerEngine("foreword", "foreword", file, options),
        PeerEngine("foreword avx2", "foreword", file, narrow),
        PeerEngine("foreword served", "served", file, options),
    )


GROUPS: Mapping[str, tuple[PeerEngine, ...]] = {
    "bf16": (
        *_foreword_engines(""),
        PeerEngine("llama.cpp bf16", "llama_cpp", "bf16.gguf"),
        PeerEngine("openvino fp16", "openvino", "openvino-fp16"),
        PeerEngine("transformers bf16", "transformers"),
        PeerEngine("vllm bf16", "vllm"),
    ),
    "q8_0": (*_foreword_engines("q8_0.gguf"), PeerEngine("llama.cpp q8_0", "llama_cpp", "q8_0.gguf")),
    "q4_0": (*_foreword_engines("q4_0.gguf"), PeerEngine("llama.cpp q4_0", "llama_cpp", "q4_0.gguf")),
    "q4_k_m": (*_foreword_engines("q4_k_m.gguf"), PeerEngine("llama.cpp q4_k_m", "llama_cpp", "q4_k_m.gguf")),
    "mxfp4": (*_foreword_engines("mxfp4.gguf"), PeerEngine("llama.cpp mxfp4", "llama_cpp", "mxfp4.gguf")),
    "int8": (
        *_foreword_engines("", quantization="int8"),
        PeerEngine("openvino int8", "openvino", "openvino-int8"),
    ),
    "int4": (
        *_foreword_engines("", quantization="int4"),
        PeerEngine("openvino int4", "openvino", "openvino-int4"),
    ),
}


PRODUCTS = {"bf16": "bfloat16", "q8_0": "int8", "int8": "int8"}  # of a group's weights; "int4": all others


@dataclass(frozen=True, slots=True)
class PeerMeasure:
    """A figure of one round: its command, what its answer must show, and its value.

    Higher is better, except for `rows`. `check` raises RegimeError.
    """

    name: str
    command: str
    arguments: Mapping[str, Any]
    check: Callable[[Mapping[str, Any]], None]
    figure: Callable[[Mapping[str, Any]], Any]
    only_first: bool = False  # in the uncounted round alone


@dataclass(slots=True)
class LoadedEngine:
    """An engine and its figures by measure, one a round."""

    engine: PeerEngine
    start: Callable[[], Worker]
    load: Callable[[Worker], Mapping[str, Any]]
    worker: Worker | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)
    peak_bytes: int = 0  # of the process; set by close()
    rounds: dict[str, list[Any]] = field(default_factory=lambda: defaultdict(list))
    overheads: list[float] = field(default_factory=list)
    errors: dict[str, str] = field(default_factory=dict)  # by measure; its figures are void
    answers: dict[str, Any] = field(default_factory=dict)  # token ids of Foreword's first round, by measure

    def open(self) -> None:
        """Start it and load the model. Raises RuntimeError, and RegimeError for another instruction set."""
        self.worker = self.start()
        self.facts = self.load(self.worker)

    def close(self) -> None:
        """Idempotent."""
        if self.worker is None:
            return
        with contextlib.suppress(RuntimeError, OSError, IndexError):  # it has crashed
            served = self.engine.script == "served"
            self.peak_bytes = self.worker("peak") if served else self.worker.peak_bytes
        self.worker.close()
        self.worker = None

    def run(self, measure: PeerMeasure, is_counted: bool) -> None:
        """Raises RuntimeError and RegimeError."""
        assert self.worker is not None
        self.add(measure, self.worker(measure.command, **measure.arguments), is_counted)

    def add(self, measure: PeerMeasure, answer: Mapping[str, Any], is_counted: bool) -> None:
        """Count the figure of a round. Raises RegimeError."""
        measure.check(answer)
        if self.engine.is_foreword:
            first = self.answers.setdefault(measure.name, answer["ids"])
            require("every round has the same answers", answer["ids"] == first, True)
        if is_counted or measure.only_first:
            self.rounds[measure.name].append(measure.figure(answer))
            if "forward" in answer:
                self.overheads.append(1 - answer["forward"] / answer["seconds"])


@dataclass(slots=True)
class Ceilings:
    """Ceilings of the machine, read at the start of each round."""

    memory: MemoryReader
    dtype: str  # of PEAK_TYPES
    threads: int
    bandwidths: list[float] = field(default_factory=list)  # bytes/s, by round
    products: dict[str, float] = field(default_factory=dict)  # operations/s by instruction set, the best

    def read(self) -> None:
        self.bandwidths.append(max(self.memory.read_bandwidth() for _ in range(3)))
        for isa in self.products:
            rate = product_rate(isa, self.dtype, self.threads, 3) or 0.0
            self.products[isa] = max(rate, self.products[isa])


def main() -> int:
    args = _parse()
    environment = make_environment(args.env, args.cpu_isa)
    pythons = {"vllm": make_vllm(args.env)} if "bf16" in args.groups and args.only in "vllm bf16" else {}
    torch.set_num_threads(args.threads)
    results: dict[str, Any] = {}
    for model in args.models:
        make_files(environment, model, args.files / model)
        for group in args.groups:
            results.setdefault(model, {})[group] = _measure_group(environment, pythons, model, group, args)
    regime = {"rounds": args.rounds, "threads": args.threads, "tokens": args.tokens, "cpu_isa": args.cpu_isa}
    print_json({"bench": "peers", **regime, "models": results})
    errors = [
        f"{model}, {group}, {name}: {error}"
        for model, groups in results.items()
        for group, result in groups.items()
        for name, error in result["errors"].items()
    ]
    for line in errors:
        print(f"peers: {line}", file=sys.stderr)
    return 1 if errors else 0


def _parse() -> argparse.Namespace:
    names = _names
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--models", type=names(SHAPES), default=["qwen2.5-0.5b", "llama-3.2-1b"], metavar="LIST"
    )
    parser.add_argument("--groups", type=names(GROUPS), default=list(GROUPS), metavar="LIST")
    parser.add_argument(
        "--env", type=Path, default=Path("build/peers"), metavar="FOLDER", help="environment of the others"
    )
    parser.add_argument(
        "--files", type=Path, default=Path("build/peers-models"), metavar="FOLDER", help="checkpoints"
    )
    parser.add_argument(
        "--only", default="", metavar="TEXT", help="only engines with this in their name, and Foreword"
    )
    parser.add_argument("--alone", action="store_true", help="one engine in memory at a time")
    parser.add_argument("--rounds", type=int, default=5, metavar="N")
    parser.add_argument("--tokens", type=int, default=64, metavar="N", help="length of an answer")
    parser.add_argument(
        "--prompts", type=_lengths, default=[512, 2048], metavar="LIST", help="lengths of prompts"
    )
    parser.add_argument(
        "--contexts",
        type=_lengths,
        default=[],
        metavar="LIST",
        help="measure only decoding after prompts of these lengths, such as 8192,32768",
    )
    parser.add_argument(
        "--cpu-isa",
        default="auto",
        metavar="NAME",
        help="instruction set of all engines: auto, amx, avx512 or avx2 (OpenVINO's attention ignores it)",
    )
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), metavar="N")
    return parser.parse_args()


def _names(known: Mapping[str, Any]) -> Callable[[str], list[str]]:
    def parse(text: str) -> list[str]:
        names = text.split(",")
        unknown = [name for name in names if name not in known]
        if unknown:
            raise argparse.ArgumentTypeError(f"unknown: {', '.join(unknown)}; known: {', '.join(known)}")
        return names

    return parse


def _lengths(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


def _measure_group(
    environment: PeerEnvironment,
    pythons: Mapping[str, str],
    model: str,
    group: str,
    args: argparse.Namespace,
) -> dict[str, Any]:
    log = args.files / f"{model}-{group}.log"
    log.write_bytes(b"")
    folder = (args.files / model).resolve()
    ceilings = Ceilings(MemoryReader(READ_BYTES), PRODUCTS.get(group, "int4"), args.threads)
    loaded: dict[str, LoadedEngine] = {}
    errors: dict[str, str] = {}
    try:
        for engine in _engines(group, args):
            one = LoadedEngine(
                engine,
                functools.partial(_start, engine, environment, pythons, log),
                functools.partial(_load, engine, folder, args),
            )
            try:
                one.open()
                loaded[engine.name] = one
            except (RuntimeError, RegimeError) as error:
                errors[engine.name] = str(error)
            if args.alone or engine.name in errors:
                one.close()
        ceilings.products = dict.fromkeys((_isa(one, args) for one in loaded.values()), 0.0)
        measures = _measures(SHAPES[model].vocab, args)
        _measure(list(loaded.values()), measures, ceilings, args.rounds, args.alone)
        _compare_answers(loaded)
    finally:
        for one in loaded.values():
            one.close()
    figures = {name: _figures(one, model, args, ceilings, loaded) for name, one in loaded.items()}
    for name, one in loaded.items():
        errors |= {f"{name}, {measure}": error for measure, error in one.errors.items()}
    ratios = _ratios(loaded)
    _show(f"{model}, {group}", figures, ratios)
    return {
        "read_gb_s": statistics.median(ceilings.bandwidths) / 1e9,
        "peak_gop_s": {isa: rate / 1e9 for isa, rate in ceilings.products.items()},
        "engines": figures,
        "foreword_over": ratios,
        "errors": errors,
    }


def _engines(group: str, args: argparse.Namespace) -> Iterator[PeerEngine]:
    """Contenders of --only; with --contexts by KV cache type, with --cpu-isa all of one instruction set."""
    for engine in GROUPS[group]:
        if args.cpu_isa != "auto" and engine.options.get("cpu_isa", args.cpu_isa) != args.cpu_isa:
            continue
        if args.cpu_isa == "avx2" and engine.name.endswith(" avx2"):
            continue
        if not engine.is_foreword and args.only not in engine.name:
            continue
        if args.contexts:
            yield from _long_context_engines(engine)
        else:
            yield engine


def _long_context_engines(engine: PeerEngine) -> Iterator[PeerEngine]:
    """Engines that keep the KV of a prompt, by type of the KV cache."""
    if engine.name == "foreword":
        kept = {**engine.options, "prefix_caching": True}
        yield replace(engine, options=kept)
        yield replace(engine, name="foreword, int8 KV", options={**kept, "kv_cache_dtype": "int8"})
    elif engine.script == "llama_cpp":
        for kv_type in ("f16", "q8_0"):
            name = f"{engine.name}, {kv_type} KV"
            yield replace(engine, name=name, options={"kv_type": kv_type, "keep": True})
    elif engine.script in ("openvino", "vllm"):
        yield replace(engine, options={"prefix_caching": True})


def _start(engine: PeerEngine, environment: PeerEnvironment, pythons: Mapping[str, str], log: Path) -> Worker:
    script = HERE / f"peers_{engine.script}.py"
    if engine.is_foreword:
        return Worker(sys.executable, script, log)
    return Worker(pythons.get(engine.script, environment.python), script, log, environment.variables)


def _load(engine: PeerEngine, folder: Path, args: argparse.Namespace, worker: Worker) -> Mapping[str, Any]:
    """Load the model; returns facts. Raises RuntimeError, and RegimeError for another instruction set."""
    streams = len(args.contexts) or MAX_STREAMS
    needed = [length + args.tokens + 2 for length in args.contexts]
    common = {"path": str(folder / engine.file), "threads": args.threads, "streams": streams}
    if engine.is_foreword:
        tokens = sum(needed) + 64 * streams if needed else KV_TOKENS
        facts = worker("load", **common, tokens=tokens, options={"cpu_isa": args.cpu_isa, **engine.options})
    else:
        context = max(needed) + 62 if needed else CONTEXT
        more = {"cpu_isa": args.cpu_isa} if engine.script == "vllm" else {}
        facts = worker("load", **common, context=context, **engine.options, **more)
    isa = str(facts.get("backend", facts.get("isa", "")))
    if args.cpu_isa == "avx2":
        wide = [word for word in ("avx512", "amx", "AVX512 = 1", "AVX512", "_C.abi3") if word in isa]
        require("instruction sets beyond AVX2", wide, [])
    return facts


def _isa(one: LoadedEngine, args: argparse.Namespace) -> str:
    """That of Foreword's kernels; of the other engines, --cpu-isa or the best of the machine."""
    best = args.cpu_isa if args.cpu_isa != "auto" else max(supported_isas(), key=ISAS.index, default="")
    return str(one.facts.get("backend", best)).removeprefix("cpu-")


def _measures(vocab: int, args: argparse.Namespace) -> list[PeerMeasure]:
    chance = random.Random(0)

    def ids(count: int) -> list[int]:
        return [chance.randrange(vocab - 1) for _ in range(count)]

    def rate(tokens: int) -> Callable[[Mapping[str, Any]], float]:
        return lambda answer: tokens / float(answer["seconds"])

    def emits(tokens: int) -> Callable[[Mapping[str, Any]], None]:
        return lambda answer: require("tokens emitted", len(answer["ids"]), tokens)

    def decode(name: str, length: int) -> PeerMeasure:
        asked = {"prompt": ids(length), "tokens": args.tokens}
        return PeerMeasure(name, "decode", asked, emits(args.tokens), rate(args.tokens))

    def prompt(length: int, only_first: bool = False, asked: Sequence[int] = ()) -> PeerMeasure:
        arguments = {"ids": asked or ids(length)}
        return PeerMeasure(f"prompt {length}", "prompt", arguments, _check_prompt, rate(length), only_first)

    if args.contexts:
        decodes = [decode(f"decode at {length}", length) for length in args.contexts]
        return [
            measure
            for length, each in zip(args.contexts, decodes, strict=True)
            for measure in (prompt(length, only_first=True, asked=each.arguments["prompt"]), each)
        ]
    measures = [decode("decode", PROMPT), *map(prompt, args.prompts)]
    for count in (8, MAX_STREAMS):
        asked = {"prompts": [ids(PROMPT) for _ in range(count)], "tokens": args.tokens}
        check = functools.partial(_check_streams, count, args.tokens)
        measures.append(PeerMeasure(f"x{count}", "streams", asked, check, rate(count * args.tokens)))
    steps = {"context": ROWS_CONTEXT, "counts": list(ROW_COUNTS), "steps": 16}
    return [*measures, PeerMeasure("rows", "rows", steps, _check_rows, _row_ratios)]


def _check_prompt(answer: Mapping[str, Any]) -> None:
    require("tokens emitted", len(answer["ids"]), 1)
    require("prompt tokens found in a cache", answer.get("cached", 0), 0)


def _check_streams(count: int, tokens: int, answer: Mapping[str, Any]) -> None:
    require("tokens emitted", [len(ids) for ids in answer["ids"]], [tokens] * count)
    require("requests at once", answer.get("at_once", count), count)
    if "spans" in answer:
        require_concurrency(answer["spans"], count)


def _check_rows(answer: Mapping[str, Any]) -> None:
    require("rows verified", answer["rows"], {str(count): [count] for count in ROW_COUNTS})
    for ids in answer.get("ids", ()):
        plain = answer["ids"][0]
        shorter = min(len(ids), len(plain))
        require("answers are equal with and without drafts", ids[:shorter] == plain[:shorter], True)


def _row_ratios(answer: Mapping[str, Any]) -> dict[int, float]:
    seconds = answer["seconds"]
    return {count: seconds[str(count)] / seconds["1"] for count in ROW_COUNTS[1:]}


def _supports(engine: PeerEngine, measure: PeerMeasure, is_counted: bool) -> bool:
    """A server is measured by streams alone, of which its engine gives the answers; two can verify rows."""
    if measure.only_first and is_counted:
        return False
    if measure.command == "streams":
        return engine.script != "foreword" or not is_counted
    if measure.command == "rows":
        return engine.script in ("foreword", "llama_cpp")
    return engine.script != "served"


def _measure(
    loaded: Sequence[LoadedEngine],
    measures: Sequence[PeerMeasure],
    ceilings: Ceilings,
    rounds: int,
    alone: bool = False,
) -> None:
    """Fill in the rounds. An uncounted first call allocates."""
    plan = list((_schedule_alone if alone else _schedule)(loaded, measures, rounds + 1))
    last = -1
    running: LoadedEngine | None = None
    for round_, measure, one in track_progress(plan, "measuring", len(plan)):
        if round_ > last:
            last = round_
            ceilings.read()
        if measure.name in one.errors:
            continue
        try:
            if alone and one is not running:
                if running is not None:
                    running.close()
                running = one
                one.open()
                one.run(measure, is_counted=False)
            one.run(measure, round_ > 0)
        except (RuntimeError, RegimeError) as error:
            one.errors[measure.name] = str(error)
            one.rounds.pop(measure.name, None)
    del ceilings.bandwidths[0]


def _compare_answers(loaded: Mapping[str, LoadedEngine]) -> None:
    """Foreword's server must give the answers of its engine, or its figures are void."""
    if "foreword served" not in loaded:
        return
    engine, served = loaded["foreword"], loaded["foreword served"]
    for name, ids in served.answers.items():
        try:
            require("the server's answers equal the engine's", ids == engine.answers.get(name), True)
        except RegimeError as error:
            served.errors[name] = str(error)
            served.rounds.pop(name, None)


def _schedule(
    loaded: Sequence[LoadedEngine], measures: Sequence[PeerMeasure], rounds: int
) -> Iterator[tuple[int, PeerMeasure, LoadedEngine]]:
    by_name = {one.engine.name: one for one in loaded}
    for round_ in range(rounds):
        for measure in measures:
            for name in rotate(list(by_name), round_):
                if _supports(by_name[name].engine, measure, round_ > 0):
                    yield round_, measure, by_name[name]


def _schedule_alone(
    loaded: Sequence[LoadedEngine], measures: Sequence[PeerMeasure], rounds: int
) -> Iterator[tuple[int, PeerMeasure, LoadedEngine]]:
    """All measures of an engine, then those of the next one."""
    for round_ in range(rounds):
        for one in rotate(list(loaded), round_):
            for measure in measures:
                if _supports(one.engine, measure, round_ > 0):
                    yield round_, measure, one


def _figures(
    one: LoadedEngine,
    model: str,
    args: argparse.Namespace,
    ceilings: Ceilings,
    loaded: Mapping[str, LoadedEngine],
) -> dict[str, Any]:
    """Medians, and shares of the ceilings; None where a check failed."""
    facts = loaded["foreword"].facts  # of the same weights
    figures: dict[str, Any] = {**one.facts, "peak_bytes": one.peak_bytes, **dict.fromkeys(one.errors)}
    if one.engine.is_foreword and not args.contexts:
        figures["of_limit"] = figures["peak_bytes"] / (
            facts["weight_bytes"] + facts["kv_bytes"] + FIXED_BYTES
        )
    for name, values in one.rounds.items():
        figures[name] = _medians(values) if name == "rows" else statistics.median(values)
    shares: dict[str, float] = {}
    if "decode" in one.rounds and facts["weight_bytes"] > CACHE_MARGIN * shared_cache_bytes():
        pairs = zip(one.rounds["decode"], ceilings.bandwidths, strict=True)
        read_bytes = GGUF_MODELS[model].read_bytes() if model in GGUF_MODELS else facts["weight_bytes"]
        shares["of_read"] = statistics.median(rate * read_bytes / read for rate, read in pairs)
    product = ceilings.products[_isa(one, args)]
    if not args.contexts and product and (rate := figures.get(f"prompt {args.prompts[0]}")):
        shares["of_peak"] = 2 * SHAPES[model].layer_weights() * rate / product
    for name, share in shares.items():
        try:
            figures[name] = checked_share(share, 1.0)
        except RegimeError as error:
            figures[name], one.errors[name] = None, str(error)
    if one.overheads:
        figures["outside_forward"] = statistics.median(one.overheads)
    return figures


def _medians(values: Sequence[Mapping[int, float]]) -> dict[int, float]:
    return {count: statistics.median(value[count] for value in values) for count in values[0]}


def _ratios(loaded: Mapping[str, LoadedEngine]) -> dict[str, dict[str, float]]:
    """Foreword over each other engine, by measure: medians over rounds; int8 KV over q8_0 KV."""
    result: dict[str, dict[str, float]] = {}
    for name, other in loaded.items():
        if other.engine.is_foreword:
            continue
        for measure, values in other.rounds.items():
            served, int8 = measure.startswith("x"), name.endswith("q8_0 KV")
            mine = "foreword served" if served else "foreword, int8 KV" if int8 else "foreword"
            ours = loaded[mine].rounds.get(measure) if mine in loaded else None
            if measure != "rows" and ours:
                pairs = zip(ours, values, strict=True)
                result.setdefault(name, {})[measure] = statistics.median(mine / its for mine, its in pairs)
    return result


def _show(
    title: str, figures: Mapping[str, Mapping[str, Any]], ratios: Mapping[str, Mapping[str, float]]
) -> None:
    speeds = list(
        dict.fromkeys(
            name for one in figures.values() for name in one if name.startswith(("decode", "prompt", "x"))
        )
    )
    short = [name.removeprefix("prompt ") for name in speeds]
    rows = [(name, *(_cell(one, speed, "{:.1f}") for speed in speeds)) for name, one in figures.items()]
    rows += [
        (f"foreword / {name}", *(_cell(of, speed, "{:.2f}x") for speed in speeds))
        for name, of in ratios.items()
    ]
    print_table(f"{title}: tokens/s", ("engine", *short), rows)
    counts = ROW_COUNTS[1:]
    columns = (
        "engine",
        "of read",
        "of peak",
        *(f"{count} rows" for count in counts),
        "outside",
        "MB",
        "of limit",
    )
    more = [(name, *_shares(one, counts)) for name, one in figures.items()]
    print_table(f"{title}: shares, steps of several rows over one, memory", columns, more)


def _shares(one: Mapping[str, Any], counts: Sequence[int]) -> Iterator[str]:
    yield _cell(one, "of_read", "{:.0%}")
    yield _cell(one, "of_peak", "{:.0%}")
    for count in counts:
        rows = one.get("rows", {})
        yield VOID if rows is None else _cell(rows, count, "{:.2f}x")
    yield _cell(one, "outside_forward", "{:.1%}")
    yield f"{one['peak_bytes'] / 1e6:.0f}"
    yield _cell(one, "of_limit", "{:.2f}")


def _cell(figures: Mapping[Any, Any], name: object, text: str) -> str:
    """Empty where it was not asked for, and VOID where a check failed."""
    return "" if name not in figures else VOID if figures[name] is None else text.format(figures[name])


if __name__ == "__main__":
    sys.exit(run_script(main))
