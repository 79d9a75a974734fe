"""Kernels compiled for GPUs that are not present, to test the compiled code.

One process without the interpreter compiles for all tests of a session.
"""

from __future__ import annotations

import atexit
import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

MAX_SHARED = {80: 163 * 1024, 89: 99 * 1024, 90: 227 * 1024}  # bytes of a program, by compute capability


@dataclass(frozen=True, slots=True)
class KernelSource:
    """A kernel with its launch parameters."""

    kernel: str  # "foreword.kernels.triton.gemm:gemm_kernel"
    arguments: Mapping[
        str, str
    ]  # name -> type ("*bf16", "i32", "fp32") in the kernel's order, without constants
    constants: Mapping[str, Any]  # name -> value of each constexpr; None for an absent pointer
    capability: int = 90
    num_warps: int = 4
    num_stages: int = 3
    enable_fp_fusion: bool = True
    divisible: Sequence[str] | None = None  # arguments that are multiples of 16; default: all pointers


@dataclass(frozen=True, slots=True)
class KernelBinary:
    ptx: str
    shared: int  # bytes of shared memory
    registers: int  # of a thread
    stack: int  # bytes of a thread, above 0 after register spills
    spills: int  # spill instructions
    products: list[str] = field(default_factory=list)
    operands: list[str] = field(default_factory=list)  # of products in registers: places of k in a thread
    opcodes: dict[str, int] = field(default_factory=dict)  # of the machine code, without modifiers

    def count(self, pattern: str) -> int:
        """Matches of a regular expression in the PTX."""
        return len(re.findall(pattern, self.ptx))


def argument_types(text: str) -> dict[str, str]:
    """Types by name from "logits:*fp32 width:i32"; names joined by commas share a type."""
    groups = (group.split(":") for group in text.split())
    return {name: kind for names, kind in groups for name in names.split(",")}


def compile_all(sources: Sequence[KernelSource]) -> list[KernelBinary]:
    """Compile each source once, in the worker process; raises its compiler errors."""
    return [_compile_once(json.dumps(asdict(source))) for source in sources]


@cache
def _compile_once(source: str) -> KernelBinary:
    worker = _worker()
    assert worker.stdin is not None and worker.stdout is not None
    worker.stdin.write(source + "\n")
    worker.stdin.flush()
    answer = worker.stdout.readline()
    assert answer, f"the compiler process ended: {worker.wait()}"
    binary = json.loads(answer)
    assert isinstance(binary, dict), binary[-6000:]
    return KernelBinary(**binary)


@cache
def _worker() -> subprocess.Popen[str]:
    """Answers each line of stdin."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(
        filter(None, (str(Path(__file__).parents[3]), environment.get("PYTHONPATH")))
    )
    worker = subprocess.Popen(
        [sys.executable, "-m", "tests.support.triton_compile"],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    atexit.register(worker.communicate)
    return worker


def _compile_json(line: str) -> str:
    """JSON of a KernelSource -> JSON of its KernelBinary, or a traceback."""
    with redirect_stdout(sys.stderr):
        try:
            return json.dumps(asdict(_compile(KernelSource(**json.loads(line)))))
        except Exception:
            return json.dumps(traceback.format_exc())


def _compile(source: KernelSource) -> KernelBinary:
    triton = importlib.import_module("triton")
    compiler = importlib.import_module("triton.compiler")
    backends = importlib.import_module("triton.backends.compiler")
    module, name = source.kernel.split(":")
    kernel = getattr(importlib.import_module(module), name)
    places = {argument: place for place, argument in enumerate(kernel.arg_names)}
    divisible = source.divisible
    if divisible is None:
        divisible = [argument for argument, kind in source.arguments.items() if kind.startswith("*")]
    signature = {argument: source.arguments.get(argument, "constexpr") for argument in kernel.arg_names}
    constants = {(places[argument],): value for argument, value in source.constants.items()}
    attributes = {(places[argument],): [["tt.divisibility", 16]] for argument in divisible}
    options = {
        "num_warps": source.num_warps,
        "num_stages": source.num_stages,
        "enable_fp_fusion": source.enable_fp_fusion,
    }
    target = backends.GPUTarget("cuda", source.capability, 32)
    made = triton.compile(
        compiler.ASTSource(kernel, signature, constants, attributes), target=target, options=options
    )
    usage, machine_code = _disassemble(Path(triton.__file__).parent, made.asm["cubin"])
    ptx = made.asm["ptx"]
    return KernelBinary(
        ptx=ptx,
        shared=made.metadata.shared,
        registers=usage["REG"],
        stack=usage["STACK"],
        spills=len(re.findall(r"\b(?:LDL|STL)\b", machine_code)),
        products=sorted(set(re.findall(r"wgmma\.mma_async\S+|mma\.sync\S+", ptx))),
        operands=sorted(set(re.findall(r"opIdx = \d, parent = #mma\d*, kWidth = \d+", made.asm["ttgir"]))),
        opcodes=dict(Counter(re.findall(r"\*/\s+(?:@!?U?P\w+ )?([A-Z]\w+)", machine_code))),
    )


def _disassemble(package: Path, cubin: bytes) -> tuple[dict[str, int], str]:
    """Resource usage of a thread, and the machine code."""
    tool = str(package / "backends" / "nvidia" / "bin" / "cuobjdump")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        output = subprocess.run(
            [tool, "-res-usage", "-sass", file.name], capture_output=True, text=True, check=True
        ).stdout
    return {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", output)}, output


if __name__ == "__main__":
    for request in sys.stdin:
        print(_compile_json(request), flush=True)
