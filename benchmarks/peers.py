"""Foreword, llama.cpp, OpenVINO GenAI and transformers: the same weights and prompts on the same machine.

    python benchmarks/peers.py [--models qwen2.5-0.5b,llama-3.2-1b] [--groups bf16,q8_0,...] [--rounds 5]

The first run installs the other engines into an environment (--env) and writes random checkpoints in the
shapes of known models (--files): minutes, and some GB. Every answer has the requested length.

Regime: engines of one group (one precision) are loaded together, each in a process of its own, and
measured in turn, round after round, in rotated order; torch reads the memory at the start of each round.
A figure is the median over rounds, a ratio the median over rounds of figures of the same round. No
speculation, no prefix cache.

    decode     tokens/s of one request after a prompt of 32 tokens
    of read    bytes of the weights times decode, as a share of the bandwidth read in the same round
    of peak    operations of the layers times the rate of the first prompt, as a share of torch's best product
               in the run (int8 where weights are quantized, else bfloat16)
    512, 2048  tokens/s of a prompt until its first token
    x8, x16    tokens/s of so many requests together, 32 tokens each in and --tokens out: Foreword through its
               server over HTTP, OpenVINO by continuous batching and llama.cpp by batches of one token each,
               both in process (llama-cpp-python's server answers one request at a time)
    rows       time of a step that verifies 4, 8 or 16 rows of one request over that of 1 row, with sampling
    outside    share of a decoding step outside the model's forward pass
    memory     peak resident memory of the process; "of limit": over weights + KV cache + 300 MB

Prints a table for each group and then one JSON line.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from peers_models import MODELS
from peers_setup import make_environment, make_files
from peers_worker import Worker

from foreword.bench.common import print_table, rotate
from foreword.bench.roofline import ONEDNN_ISA, MemoryReader, matmul_rate
from foreword.bench.session import print_json
from foreword.cli.terminal import track_progress

HERE = Path(__file__).parent
FIXED_BYTES = 300_000_000  # of the memory that a process may use beside weights and KV cache
CONTEXT = 2304  # of llama.cpp and OpenVINO, for each of the streams
KV_TOKENS = 4096  # of Foreword, for all streams together
MAX_STREAMS = 16
PROMPT = 32
ROWS_CONTEXT, ROW_COUNTS = 256, (1, 4, 8, 16)
READ_BYTES = 1 << 30


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
    """Foreword in process, the same limited to AVX2, and through its server."""
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
    ),
    "q8_0": (*_foreword_engines("q8_0.gguf"), PeerEngine("llama.cpp q8_0", "llama_cpp", "q8_0.gguf")),
    "q4_0": (*_foreword_engines("q4_0.gguf"), PeerEngine("llama.cpp q4_0", "llama_cpp", "q4_0.gguf")),
    "q4_k_m": (*_foreword_engines("q4_k_m.gguf"), PeerEngine("llama.cpp q4_k_m", "llama_cpp", "q4_k_m.gguf")),
    "int8": (
        *_foreword_engines("", quantization="int8"),
        PeerEngine("openvino int8", "openvino", "openvino-int8"),
    ),
    "int4": (
        *_foreword_engines("", quantization="int4"),
        PeerEngine("openvino int4", "openvino", "openvino-int4"),
    ),
}


@dataclass(frozen=True, slots=True)
class PeerMeasure:
    """A figure of one round: its command and its value. Higher is better, except for `rows`."""

    name: str
    command: str
    arguments: Mapping[str, Any]
    figure: Callable[[Any], Any]


@dataclass(slots=True)
class LoadedEngine:
    """A running engine and its figures by measure, one a round."""

    engine: PeerEngine
    worker: Worker
    facts: Mapping[str, Any]
    rounds: dict[str, list[Any]] = field(default_factory=lambda: defaultdict(list))
    overheads: list[float] = field(default_factory=list)


def main() -> int:
    args = _parse()
    python = make_environment(args.env)
    if args.cpu_isa in ONEDNN_ISA:
        os.environ["ONEDNN_MAX_CPU_ISA"] = ONEDNN_ISA[args.cpu_isa]
    torch.set_num_threads(args.threads)
    results: dict[str, Any] = {}
    peaks = {kind: matmul_rate(kind, 2048, args.rounds) for kind in ("bfloat16", "int8")}
    for model in args.models:
        make_files(python, model, args.files / model)
        for group in args.groups:
            peak = peaks["bfloat16" if group == "bf16" else "int8"]
            results.setdefault(model, {})[group] = _measure_group(python, model, group, args, peak)
    regime = {"rounds": args.rounds, "threads": args.threads, "tokens": args.tokens, "cpu_isa": args.cpu_isa}
    print_json(
        {
            "bench": "peers",
            **regime,
            "peak_gop_s": {kind: rate / 1e9 for kind, rate in peaks.items()},
            "models": results,
        }
    )
    return 0


def _parse() -> argparse.Namespace:
    names = _names
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--models", type=names(MODELS), default=["qwen2.5-0.5b", "llama-3.2-1b"], metavar="LIST"
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
    parser.add_argument("--rounds", type=int, default=5, metavar="N")
    parser.add_argument("--tokens", type=int, default=64, metavar="N", help="length of an answer")
    parser.add_argument(
        "--prompts", type=_lengths, default=[512, 2048], metavar="LIST", help="lengths of prompts"
    )
    parser.add_argument(
        "--cpu-isa",
        default="auto",
        metavar="NAME",
        help="of Foreword; what oneDNN can, it is held to as well",
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
    python: str, model: str, group: str, args: argparse.Namespace, peak: float
) -> dict[str, Any]:
    engines = [engine for engine in GROUPS[group] if engine.is_foreword or args.only in engine.name]
    log = args.files / f"{model}-{group}.log"
    log.write_bytes(b"")
    folder = (args.files / model).resolve()
    loaded = {engine.name: _load(engine, python, folder, log, args) for engine in engines}
    try:
        bandwidths = _measure(
            list(loaded.values()), _measures(MODELS[model].vocab, args), MemoryReader(READ_BYTES), args.rounds
        )
        figures = {name: _figures(one, bandwidths, loaded["foreword"].facts) for name, one in loaded.items()}
    finally:
        for one in loaded.values():
            one.worker.close()
    for of in figures.values():
        if (rate := of.get(f"prompt {args.prompts[0]}")) is not None:
            of["of_peak"] = 2 * MODELS[model].layer_weights() * rate / peak
    ratios = _ratios(loaded)
    _show(f"{model}, {group}", figures, ratios)
    return {"read_gb_s": statistics.median(bandwidths) / 1e9, "engines": figures, "foreword_over": ratios}


def _load(engine: PeerEngine, python: str, folder: Path, log: Path, args: argparse.Namespace) -> LoadedEngine:
    worker = Worker(sys.executable if engine.is_foreword else python, HERE / f"peers_{engine.script}.py", log)
    common = {"path": str(folder / engine.file), "threads": args.threads, "streams": MAX_STREAMS}
    more = (
        {"tokens": KV_TOKENS, "options": {"cpu_isa": args.cpu_isa, **engine.options}}
        if engine.is_foreword
        else {"context": CONTEXT}
    )
    return LoadedEngine(engine, worker, worker("load", **common, **more))


def _measures(vocab: int, args: argparse.Namespace) -> list[PeerMeasure]:
    chance = random.Random(0)

    def ids(count: int) -> list[int]:
        return [chance.randrange(vocab - 1) for _ in range(count)]

    def rate(tokens: int) -> Callable[[Any], float]:
        return lambda answer: tokens / float(answer["seconds"])

    found = [
        PeerMeasure("decode", "decode", {"prompt": ids(PROMPT), "tokens": args.tokens}, rate(args.tokens))
    ]
    found += [
        PeerMeasure(f"prompt {length}", "prompt", {"ids": ids(length)}, rate(length))
        for length in args.prompts
    ]
    for count in (8, MAX_STREAMS):
        prompts = [ids(PROMPT) for _ in range(count)]
        found.append(
            PeerMeasure(
                f"x{count}", "streams", {"prompts": prompts, "tokens": args.tokens}, rate(count * args.tokens)
            )
        )
    asked = {"context": ROWS_CONTEXT, "counts": list(ROW_COUNTS), "steps": 16}
    return [
        *found,
        PeerMeasure(
            "rows", "rows", asked, lambda answer: {n: answer[str(n)] / answer["1"] for n in ROW_COUNTS[1:]}
        ),
    ]


def _supports(engine: PeerEngine, measure: PeerMeasure) -> bool:
    """A server is measured by streams alone; only two engines can verify rows."""
    if measure.command == "streams":
        return engine.script != "foreword"
    if measure.command == "rows":
        return engine.script in ("foreword", "llama_cpp")
    return engine.script != "served"


def _measure(
    loaded: Sequence[LoadedEngine], measures: Sequence[PeerMeasure], memory: MemoryReader, rounds: int
) -> list[float]:
    """Fill in the rounds; returns the bandwidth of each. An uncounted first call allocates."""
    bandwidths = []
    plan = list(_schedule(loaded, measures, rounds + 1))
    for round_, measure, one in track_progress(plan, "measuring", len(plan)):
        if len(bandwidths) == round_:
            bandwidths.append(max(memory.read_bandwidth() for _ in range(3)))
        answer = one.worker(measure.command, **measure.arguments)
        if round_ > 0:
            one.rounds[measure.name].append(measure.figure(answer))
            if "forward" in answer:
                one.overheads.append(1 - answer["forward"] / answer["seconds"])
    return bandwidths[1:]


def _schedule(
    loaded: Sequence[LoadedEngine], measures: Sequence[PeerMeasure], rounds: int
) -> Iterator[tuple[int, PeerMeasure, LoadedEngine]]:
    by_name = {one.engine.name: one for one in loaded}
    for round_ in range(rounds):
        for measure in measures:
            for name in rotate(list(by_name), round_):
                if _supports(by_name[name].engine, measure):
                    yield round_, measure, by_name[name]


def _figures(one: LoadedEngine, bandwidths: Sequence[float], facts: Mapping[str, Any]) -> dict[str, Any]:
    """Medians; `facts` are those of Foreword for the same weights."""
    served = one.engine.script == "served"
    figures: dict[str, Any] = {
        **one.facts,
        "peak_bytes": one.worker("peak") if served else one.worker.peak_bytes,
    }
    if one.engine.is_foreword:
        figures["of_limit"] = figures["peak_bytes"] / (
            facts["weight_bytes"] + facts["kv_bytes"] + FIXED_BYTES
        )
    for name, values in one.rounds.items():
        figures[name] = _medians(values) if name == "rows" else statistics.median(values)
    if "decode" in one.rounds:
        shares = (
            rate * facts["weight_bytes"] / read
            for rate, read in zip(one.rounds["decode"], bandwidths, strict=True)
        )
        figures["of_read"] = statistics.median(shares)
    if one.overheads:
        figures["outside_forward"] = statistics.median(one.overheads)
    return figures


def _medians(values: Sequence[Mapping[int, float]]) -> dict[int, float]:
    return {count: statistics.median(value[count] for value in values) for count in values[0]}


def _ratios(loaded: Mapping[str, LoadedEngine]) -> dict[str, dict[str, float]]:
    """Foreword over each other engine, by measure: medians over rounds."""
    result: dict[str, dict[str, float]] = {}
    for name, other in loaded.items():
        if other.engine.is_foreword:
            continue
        for measure, values in other.rounds.items():
            ours = loaded["foreword served" if measure.startswith("x") else "foreword"].rounds.get(measure)
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
    rows = [(name, *(_number(one.get(speed), "{:.1f}") for speed in speeds)) for name, one in figures.items()]
    rows += [
        (f"foreword / {name}", *(_number(of.get(speed), "{:.2f}x") for speed in speeds))
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
    yield _number(one.get("of_read"), "{:.0%}")
    yield _number(one.get("of_peak"), "{:.0%}")
    for count in counts:
        yield _number(one.get("rows", {}).get(count), "{:.2f}x")
    yield _number(one.get("outside_forward"), "{:.1%}")
    yield f"{one['peak_bytes'] / 1e6:.0f}"
    yield _number(one.get("of_limit"), "{:.2f}")


def _number(value: float | None, text: str) -> str:
    return "" if value is None else text.format(value)


if __name__ == "__main__":
    sys.exit(main())
