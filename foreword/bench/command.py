"""`foreword bench latency|throughput|serve|speculate|agent|kernels|gpu`: what speculation and kernels gain.

Each prints tables, and one JSON line where stdout is no terminal. Tokens/s vary with the machine's load, so
every figure comes with a ratio to plain decoding, or a share of a ceiling, from the same run.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
from collections.abc import Iterable
from typing import Any

from foreword.bench.gpu.config import SECTIONS
from foreword.bench.prompts import add_prompt_options
from foreword.bench.regime import require_native_kernels
from foreword.bench.shapes import PARTS, SHAPES, WEIGHT_FORMATS
from foreword.cli.flags import ENGINE_GROUPS, GROUPS, add_config_options
from foreword.cli.startup import startup_line
from foreword.errors import ConfigError

MODULES = {
    "latency": "foreword.bench.latency",
    "throughput": "foreword.bench.throughput",
    "serve": "foreword.bench.serve",
    "speculate": "foreword.bench.speculate.command",
    "agent": "foreword.bench.agent.command",
    "kernels": "foreword.bench.kernels",
    "gpu": "foreword.bench.gpu.command",
}
DEFAULT_WEIGHT_FORMATS = "bfloat16,int8,int4,q8_0,q4_0,q4_k,q6_k"
INSTALL_PLOT = "pip install 'foreword[bench]'"
DEFAULT_ROWS = "1,2,4,8,16,64,512"
ISAS = ("auto", "amx", "avx512", "avx2-vnni", "avx2", "neon", "portable", "reference")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    kinds = parser.add_subparsers(dest="bench", metavar="KIND", required=True)
    latency = kinds.add_parser("latency", help="one request at a time, by prompt; step overhead; start-up")
    _add_number(latency, "--rounds", 3, "counted rounds")
    latency.add_argument("--skip-startup", action="store_true", help="do not measure the start of a server")
    throughput = kinds.add_parser("throughput", help="many requests at once, in this process")
    serve = kinds.add_parser("serve", help="many clients against a server")
    serve.add_argument(
        "--base-url", "--url", metavar="URL", help="measure this server instead of starting one"
    )
    for sub in (throughput, serve):
        _add_number(sub, "--num-requests", 64, "requests a round")
        _add_number(sub, "--concurrency", 16, "of these at once")
        _add_number(sub, "--rounds", 3, "counted rounds of each mode")
        help_ = "every request has a seed (default: 0.8)"
        sub.add_argument("--temperature", type=float, default=0.8, metavar="X", help=help_)
    for sub in (latency, throughput, serve):
        _add_number(sub, "--max-tokens", 96, "longest answer")
        add_prompt_options(sub, "those of the demo")
        _add_json_option(sub)
        add_config_options(sub, GROUPS if sub is serve else ENGINE_GROUPS, more=("log_level",))
        sub.set_defaults(run=run)
    _add_speculate(kinds.add_parser("speculate", help="speculation on and off, by category and load"))
    _add_agent(
        kinds.add_parser("agent", help="tool loops with a growing context: session time, cached prompts")
    )
    _add_kernels(kinds.add_parser("kernels", help="the CPU's operations against bandwidth and product rate"))
    _add_gpu(kinds.add_parser("gpu", help="an NVIDIA GPU: bits, kernels and steps, within nine minutes"))


def _add_number(parser: argparse.ArgumentParser, flag: str, default: int, help_: str) -> None:
    help_ = f"{help_} (default: {default})"
    parser.add_argument(flag, type=_positive, default=default, metavar="N", help=help_)


def _add_json_option(parser: argparse.ArgumentParser) -> None:
    help_ = "write the result to a file, or with - to stdout, where the tables go to stderr"
    parser.add_argument("--json", metavar="FILE", help=help_)


def _positive(text: str) -> int:
    if not text.isascii() or not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"must be a whole number from 1 on, got {text!r}")
    return int(text)


def _plot_file(text: str) -> str:
    """Refuse at once what would fail after the measurement."""
    if importlib.util.find_spec("matplotlib") is None:
        raise argparse.ArgumentTypeError(f"needs matplotlib: {INSTALL_PLOT}")
    return text


def parse_names(name: str, text: str, known: Iterable[str]) -> tuple[str, ...]:
    """Words of a list, in the order of `known`. Raises ConfigError."""
    words, names = [word.strip() for word in text.split(",")], tuple(known)
    unknown = [word for word in words if word not in names]
    if unknown:
        raise ConfigError(f"--{name}: {unknown[0]!r} is none of {', '.join(names)}", name)
    return tuple(word for word in names if word in words)


def parse_numbers(name: str, text: str) -> list[int]:
    """Whole numbers from 1 on, sorted, each once. Raises ConfigError."""
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and int(word) for word in words):
        raise ConfigError(f"--{name} must be whole numbers from 1 on joined by commas, got {text!r}", name)
    return sorted({int(word) for word in words})


def _add_gpu(parser: argparse.ArgumentParser) -> None:
    add: Any = parser.add_argument
    add("--quick", action="store_true", help="half the time: fewer rounds and requests")
    add("--out", metavar="FILE", help="write the findings as JSON, again while jobs run")
    add("--only", metavar="LIST", help=f"of {', '.join(SECTIONS)} (default: all)")
    help_ = "cpu rehearses: all of the code on tiny shapes, no figures"
    add("--device", default="cuda", choices=("cuda", "cpu"), help=help_)
    parser.set_defaults(run=run)


def _add_speculate(parser: argparse.ArgumentParser) -> None:
    """Defaults that --quick makes smaller are None here; the command fills them in."""
    add: Any = parser.add_argument
    add("--categories", metavar="LIST", help="categories of prompts, joined by commas (default: all)")
    help_ = "requests at once (default: 1,4,16,64, as --max-num-seqs allows)"
    add("--concurrency", metavar="LIST", help=help_)
    help_ = "modes compared with off (default: each drafter that runs, auto, all of --fixed)"
    add("--modes", metavar="LIST", help=help_)
    add("--fixed", metavar="LIST", help="also fixed draft lengths, such as 1,2,4,8,16; loads a second engine")
    add("--plain", action="store_true", help="also an engine that was started without speculation")
    add("--rounds", type=_positive, metavar="N", help="pairs of rounds that count (default: 7)")
    help_ = "requests of a round, if more than run at once (default: 4, or each prompt of --prompts)"
    add("--requests", type=_positive, metavar="N", help=help_)
    add("--max-tokens", type=_positive, metavar="N", help="longest ordinary answer (default: 128)")
    _add_number(parser, "--context", 2048, "tokens that a prompt and its answer may fill")
    help_ = "also a cell whose KV cache is too small (default: yes, with --quick no)"
    add("--full-cache", action=argparse.BooleanOptionalAction, default=None, help=help_)
    help_ = "draft recorded answers with these acceptance rates, such as 0,0.3,0.6,0.9"
    add("--replay-acceptance", metavar="LIST", help=help_)
    add("--base-url", "--url", metavar="URL", help="measure this server, which must be idle otherwise")
    add(
        "--quick",
        action="store_true",
        help="half a minute for the demo: auto alone, few categories, 5 rounds, small answers",
    )
    help_ = f"plot the ratios as PNG; needs matplotlib ({INSTALL_PLOT})"
    add("--plot", type=_plot_file, metavar="FILE", help=help_)
    add_prompt_options(parser, "the generated categories")
    _add_json_option(parser)
    add_config_options(parser, ENGINE_GROUPS, more=("api_key", "log_level"))
    parser.set_defaults(run=run)


def _add_agent(parser: argparse.ArgumentParser) -> None:
    add: Any = parser.add_argument
    help_ = "tokens of the last prompt of a session, by session in turn (default: 2048,8192,30720)"
    add("--contexts", default="2048,8192,30720", metavar="LIST", help=help_)
    add("--concurrency", default="1,4,16", metavar="LIST", help="sessions at once (default: 1,4,16)")
    help_ = "modes compared with off, of suffix, text and auto (default: suffix,auto)"
    add("--modes", default="suffix,auto", metavar="LIST", help=help_)
    add(
        "--set", default="tuning", choices=("tuning", "held-out"), help="styles of sessions (default: tuning)"
    )
    help_ = "size of the random weights, without --model (default: 27m)"
    add("--shape", default="27m", choices=("27m", *SHAPES), help=help_)
    help_ = "no engine: count what drafters find in the known answers"
    add("--offline", action="store_true", help=help_)
    help_ = "with --offline: cost of a further row in steps of one row (default: 0.05)"
    add("--row-cost", type=float, default=0.05, metavar="X", help=help_)
    _add_number(parser, "--rounds", 3, "counted rounds of each mode")
    _add_json_option(parser)
    add_config_options(parser, ENGINE_GROUPS, more=("log_level",))
    parser.set_defaults(run=run)


def _add_kernels(parser: argparse.ArgumentParser) -> None:
    add: Any = parser.add_argument
    help_ = f"{', '.join(SHAPES)}, or one matrix NxK (default: qwen2.5-0.5b)"
    add("--shape", default="qwen2.5-0.5b", metavar="NAME", help=help_)
    help_ = f"of {', '.join(WEIGHT_FORMATS)} (default: {DEFAULT_WEIGHT_FORMATS})"
    add("--kinds", default=DEFAULT_WEIGHT_FORMATS, metavar="LIST", help=help_)
    help_ = f"of linear layers (default: {DEFAULT_ROWS})"
    add("--rows", default=DEFAULT_ROWS, metavar="LIST", help=help_)
    parts = ",".join(PARTS)
    add("--parts", default=parts, metavar="LIST", help=f"of {', '.join(PARTS)} (default: all)")
    help_ = "instruction set (default: the best that runs here)"
    add("--isa", default="auto", choices=ISAS, help=help_)
    help_ = "threads of the kernels, and of torch (default: all cores)"
    add("--threads", type=_positive, metavar="N", help=help_)
    _add_number(parser, "--rounds", 5, "counted rounds")
    _add_json_option(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    require_native_kernels()
    module = importlib.import_module(MODULES[args.bench])
    startup_line.end()
    return int(module.run(args))
