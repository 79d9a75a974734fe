"""Breaks the code in small ways, one at a time, and counts the breaks that tests notice.

    python -m benchmarks.mutants --num 120 --seed 1 --jobs 2 --json after.json
    python -m benchmarks.mutants --survivors after.json  # whether other tests catch the survivors

A mutant changes one operator, constant, condition, return value or statement of a module below PACKAGES,
chosen by the seed. It runs in a copy of the tree, against the test file of the module's name, then the tests
of its package, then FALLBACK, as far as `make test` runs them; the first failure ends it. A mutant that
survives is printed: a test is missing there, or the change is harmless. It takes a minute of a core.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from queue import Queue

from rich.console import Console
from rich.progress import track

from tests.conftest import FULL_ONLY

ROOT = Path(__file__).parent.parent
PACKAGES = ("core", "engine", "kv_cache", "sampling", "speculation", "engine_client", "server")
FALLBACK = ("tests/test_llm.py", "tests/test_exact*.py", "tests/test_limits.py")
TIMEOUT_S = 900
SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.And: ast.Or,
    ast.Or: ast.And,
}


@dataclass(frozen=True, slots=True)
class Mutant:
    """One change of one line. `index` is the number of the change among those of its file."""

    path: str
    index: int
    line: int
    change: str
    caught_by: str = ""  # a test file; empty: it survived


def _is_none(node: ast.expr | None) -> bool:
    return node is None or (isinstance(node, ast.Constant) and node.value is None)


def _changes(tree: ast.Module) -> Iterator[tuple[int, str, ast.AST]]:
    """(line, description, node) of every possible change, in a fixed order."""
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        for node in ast.walk(ast.Module(function.body, [])):
            line = getattr(node, "lineno", 0)
            if isinstance(node, ast.Compare) and type(node.ops[0]) in SWAPS:
                yield line, f"{type(node.ops[0]).__name__} swapped", node
            elif isinstance(node, ast.BinOp | ast.BoolOp | ast.AugAssign) and type(node.op) in SWAPS:
                yield line, f"{type(node.op).__name__} swapped", node
            elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
                yield line, "not removed", node
            elif isinstance(node, ast.Constant) and type(node.value) is int:
                yield line, f"{node.value} + 1", node
            elif isinstance(node, ast.If | ast.IfExp):
                yield line, "condition is true", node
            elif isinstance(node, ast.Return) and not _is_none(node.value):
                yield line, "returns None", node
            elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call | ast.Await):
                yield line, "call removed", node


def _mutate(node: ast.AST) -> None:
    """Apply the change that _changes() described, in place."""
    if isinstance(node, ast.Compare):
        node.ops[0] = SWAPS[type(node.ops[0])]()  # type: ignore[assignment]
    elif isinstance(node, ast.BinOp | ast.BoolOp | ast.AugAssign):
        node.op = SWAPS[type(node.op)]()  # type: ignore[assignment]
    elif isinstance(node, ast.UnaryOp):
        node.operand = ast.UnaryOp(ast.Not(), node.operand)
    elif isinstance(node, ast.Constant):
        node.value += 1
    elif isinstance(node, ast.If | ast.IfExp):
        node.test = ast.Constant(True)
    elif isinstance(node, ast.Return | ast.Expr):
        node.value = ast.Constant(None)


def choose(num: int, seed: int) -> list[Mutant]:
    """`num` mutants of the package, the same for the same sources and seed."""
    every = []
    for package in PACKAGES:
        for path in sorted((ROOT / "foreword" / package).rglob("*.py")):
            for index, (line, change, _) in enumerate(_changes(ast.parse(path.read_text()))):
                every.append(Mutant(path.relative_to(ROOT).as_posix(), index, line, change))
    return sorted(random.Random(seed).sample(every, num), key=lambda mutant: (mutant.path, mutant.line))


def _is_fast(file: Path) -> bool:
    """Whether `make test` runs a test file: conftest leaves modules and folders out by name."""
    names = file.relative_to(ROOT / "tests")
    return not FULL_ONLY & {names.as_posix(), *(parent.as_posix() for parent in names.parents)}


def _test_stages(path: str) -> list[list[str]]:
    """Test files to run for a module, in stages; each stage is one run of pytest."""
    module = Path(path)
    folder = ROOT / "tests" / module.parent.relative_to("foreword")
    own = folder / f"test_{module.name}"
    while not folder.is_dir():
        folder = folder.parent
    first = [own] if own.exists() else sorted(folder.glob(f"test_{module.stem}*.py"))
    rest = sorted(set((ROOT / "tests" / module.parts[1]).rglob("test_*.py")) - set(first))
    stages = [first, rest, [file for name in FALLBACK for file in sorted(ROOT.glob(name))]]
    fast = [[file for file in stage if _is_fast(file)] for stage in stages]
    return [[file.relative_to(ROOT).as_posix() for file in stage] for stage in fast if stage]


def run_mutant(mutant: Mutant, number: int, tree: Path) -> Mutant:
    """The mutant with the test file that caught it; `number` differs from that of the others."""
    target = tree / mutant.path
    source = target.read_text()
    module = ast.parse(source)
    _, _, node = list(_changes(module))[mutant.index]
    _mutate(node)
    target.write_text(ast.unparse(ast.fix_missing_locations(module)))
    os.utime(target, (number, number))  # stale bytecode is told by time and size
    env = {
        **os.environ,
        "PYTHONPATH": str(tree),
        "PYTHONPYCACHEPREFIX": str(tree / "bytecode"),
        "PYTHONDONTWRITEBYTECODE": "",
    }
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--tb=no"]
    try:
        for stage in _test_stages(mutant.path):
            process = subprocess.Popen(
                [*command, *stage],
                cwd=tree,
                env=env,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
            try:
                output, _ = process.communicate(timeout=TIMEOUT_S)
            except subprocess.TimeoutExpired:
                return replace(mutant, caught_by="timeout")
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # servers that a broken test has left
            if process.returncode not in (0, 5):
                failed = [line for line in output.splitlines() if line.startswith(("FAILED", "ERROR"))]
                return replace(mutant, caught_by=(failed or ["exit"])[0].split("::")[0])
        return mutant
    finally:
        target.write_text(source)


def read_survivors(path: Path) -> list[Mutant]:
    """The mutants of an earlier run that no test caught."""
    mutants = [Mutant(**fields) for fields in json.loads(path.read_text())]
    return [mutant for mutant in mutants if not mutant.caught_by]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--num", type=int, default=120, help="mutants (default: 120)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--survivors", type=Path, metavar="FILE", help="try those of an earlier --json again")
    parser.add_argument("--jobs", type=int, default=1, help="mutants at once, each in its own copy")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the mutants, after each of them")
    args = parser.parse_args()
    mutants = read_survivors(args.survivors) if args.survivors else choose(args.num, args.seed)
    console, done = Console(stderr=True), []
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(args.jobs) as pool:
        trees: Queue[Path] = Queue()
        for number in range(args.jobs):
            tree = Path(folder) / f"tree{number}"
            ignored = shutil.ignore_patterns(".git", ".venv*", "build", "__pycache__")
            trees.put(shutil.copytree(ROOT, tree, ignore=ignored))

        def run(number: int, mutant: Mutant) -> Mutant:
            tree = trees.get()
            try:
                return run_mutant(mutant, number, tree)
            finally:
                trees.put(tree)

        runs = [pool.submit(run, number, mutant) for number, mutant in enumerate(mutants)]
        for future in track(as_completed(runs), "mutants", total=len(runs), console=console):
            done.append(result := future.result())
            outcome = result.caught_by or "SURVIVED"
            console.print(f"{result.path}:{result.line} {result.change}: {outcome}", highlight=False)
            if args.json:
                args.json.write_text(json.dumps([asdict(one) for one in done], indent=1))
    caught = sum(bool(one.caught_by) for one in done)
    print(json.dumps({"mutants": len(done), "caught": caught, "seed": args.seed}))


if __name__ == "__main__":
    main()
