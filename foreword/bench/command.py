"""`foreword bench latency|throughput|serve|speculate|kernels|gpu`: what speculation and the kernels are worth, within one run.

Each prints a table and then one JSON line. A single figure of tokens per second says more about the
machine's mood than about the program, so every figure stands beside its plain twin of the same run.
"""

from __future__ import annotations

import argparse
import importlib

from foreword.bench.gpu.config import SECTIONS
from foreword.bench.shapes import PARTS, SHAPES, WEIGHT_FORMATS
from foreword.cli.options import ENGINE_GROUPS, GROUPS, add_config_options

__all__ = ["add_arguments"]

MODULES = {
    "latency": "foreword.bench.latency",
    "throughput": "foreword.bench.throughput",
    "serve": "foreword.bench.serve",
    "speculate": "foreword.bench.speculate.command",
    "kernels": "foreword.bench.kernels",
    "gpu": "foreword.bench.gpu.command",
}
DEFAULT_WEIGHT_FORMATS = "bfloat16,int8,int4,q8_0,q4_0,q4_k,q6_k"
DEFAULT_ROWS = "1,2,4,8,16,64,512"
ISAS = ("auto", "amx", "avx512", "avx2", "portable", "reference")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    kinds = parser.add_subparsers(dest="bench", metavar="KIND", required=True)
    latency = kinds.add_parser(
        "latency", help="one request at a time, by kind of prompt; step overhead; start-up"
    )
    latency.add_argument(
        "--rounds", type=int, default=3, metavar="N", help="how often each is measured (default: 3)"
    )
    latency.add_argument("--skip-startup", action="store_true", help="do not measure the start of a server")
    throughput = kinds.add_parser("throughput", help="many requests at once, in this process")
    serve = kinds.add_parser("serve", help="many clients against a server")
    serve.add_argument("--base-url", metavar="URL", help="measure this server instead of starting one")
    for sub in (throughput, serve):
        sub.add_argument(
            "--num-requests", type=int, default=64, metavar="N", help="requests a round (default: 64)"
        )
        sub.add_argument(
            "--concurrency", type=int, default=16, metavar="N", help="of these at once (default: 16)"
        )
        sub.add_argument("--rounds", type=int, default=3, metavar="N", help="rounds of each (default: 3)")
        sub.add_argument(
            "--temperature",
            type=float,
            default=0.8,
            metavar="X",
            help="every request has a seed (default: 0.8)",
        )
    for sub in (latency, throughput, serve):
        sub.add_argument(
            "--max-tokens", type=int, default=96, metavar="N", help="longest answer (default: 96)"
        )
        sub.add_argument(
            "--prompts",
            metavar="FILE",
            help='JSON lines {"kind": ..., "prompt": ...} (default: those of the demo)',
        )
        add_config_options(sub, GROUPS if sub is serve else ENGINE_GROUPS, more=("log_level",))
        sub.set_defaults(run=run)
    _add_speculate(
        kinds.add_parser(
            "speculate", help="speculation on and off, by kind of work and by load, with intervals"
        )
    )
    kernels = kinds.add_parser(
        "kernels", help="the CPU's operations against its memory bandwidth and product rate"
    )
    _add_kernels(kernels)
    kernels.set_defaults(run=run)
    gpu = kinds.add_parser(
        "gpu", help="an NVIDIA GPU: checks of bits, speed of kernels and steps, within eight minutes"
    )
    _add_gpu(gpu)
    gpu.set_defaults(run=run)


def _add_gpu(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--quick", action="store_true", help="half the time: fewer rounds and row counts")
    parser.add_argument("--out", metavar="FILE", help="write what was found as JSON, again after every part")
    parser.add_argument("--only", metavar="LIST", help=f"of {', '.join(SECTIONS)} (default: all)")
    parser.add_argument(
        "--device",
        default="cuda",
        choices=("cuda", "cpu"),
        help="cpu rehearses: all of the code on tiny shapes, no figures",
    )


def _add_speculate(parser: argparse.ArgumentParser) -> None:
    """Defaults that --quick makes smaller are filled in later."""
    add = parser.add_argument
    add("--categories", metavar="LIST", help="kinds of work, joined by commas (default: all)")
    add(
        "--concurrency",
        metavar="LIST",
        help="requests at once (default: 1,4,16,64, as --max-num-seqs allows)",
    )
    add(
        "--modes",
        metavar="LIST",
        help="what is compared with off (default: each drafter that runs, auto, all of --fixed)",
    )
    add("--fixed", metavar="LIST", help="also fixed draft lengths, such as 1,2,4,8,16; loads a second engine")
    add("--plain", action="store_true", help="also an engine that was started without speculation")
    add("--rounds", type=int, metavar="N", help="pairs of rounds that count (default: 7)")
    add(
        "--requests", type=int, metavar="N", help="requests of a round, if more than run at once (default: 4)"
    )
    add("--max-tokens", type=int, metavar="N", help="longest ordinary answer (default: 128)")
    add(
        "--context",
        type=int,
        default=2048,
        metavar="N",
        help="tokens that a prompt and its answer may fill (default: 2048)",
    )
    add(
        "--full-cache",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="also a cell whose KV cache is too small",
    )
    add(
        "--replay-acceptance",
        metavar="LIST",
        help="draft recorded answers, right at these rates, such as 0,0.3,0.6,0.9",
    )
    add("--base-url", metavar="URL", help="measure this server, which nobody else should use meanwhile")
    add("--quick", action="store_true", help="a short look: few categories, two rounds, small answers")
    add(
        "--plot",
        metavar="FILE",
        help="draw the ratios, as PNG; needs matplotlib (pip install foreword[bench])",
    )
    add("--json", metavar="FILE", help="write the last line of the output to a file as well")
    add_config_options(parser, ENGINE_GROUPS, more=("api_key", "log_level"))
    parser.set_defaults(run=run)


def _add_kernels(parser: argparse.ArgumentParser) -> None:
    all_kinds, parts = ", ".join(WEIGHT_FORMATS), ", ".join(PARTS)
    parser.add_argument(
        "--shape",
        default="qwen2.5-0.5b",
        metavar="NAME",
        help=f"{', '.join(SHAPES)}, or one matrix NxK (default: qwen2.5-0.5b)",
    )
    parser.add_argument(
        "--kinds",
        default=DEFAULT_WEIGHT_FORMATS,
        metavar="LIST",
        help=f"of {all_kinds} (default: {DEFAULT_WEIGHT_FORMATS})",
    )
    parser.add_argument(
        "--rows", default=DEFAULT_ROWS, metavar="LIST", help=f"of linear layers (default: {DEFAULT_ROWS})"
    )
    parser.add_argument("--parts", default=",".join(PARTS), metavar="LIST", help=f"of {parts} (default: all)")
    parser.add_argument(
        "--isa", default="auto", choices=ISAS, help="instruction set (default: the best that runs here)"
    )
    parser.add_argument(
        "--threads", type=int, metavar="N", help="threads of the kernels, and of torch (default: all cores)"
    )
    parser.add_argument(
        "--rounds", type=int, default=5, metavar="N", help="how often each is measured (default: 5)"
    )


def run(args: argparse.Namespace) -> int:
    return int(importlib.import_module(MODULES[args.bench]).run(args))
