"""Some hundred inputs for each parser, and the detection of every kind of finding."""

import gc
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import pytest

from benchmarks import fuzz_parsers, fuzz_worker
from benchmarks.fuzz_checkpoints import checkpoint_targets
from benchmarks.fuzz_mutate import (
    MAX_BYTES,
    change_bytes,
    change_json,
    change_lines,
    change_safetensors,
    shrink,
)
from benchmarks.fuzz_parsers import ParserTally, main
from benchmarks.fuzz_targets import FuzzTarget
from benchmarks.fuzz_worker import TARGETS, fuzz
from foreword.errors import CheckpointError

SLOW = "grammar-worker"  # it starts processes
ELSEWHERE = set(checkpoint_targets())  # test_fuzz_checkpoints.py
INPUTS = 120


@pytest.fixture(autouse=True)
def small_heap() -> Iterator[None]:
    """The fuzzer collects garbage to measure memory: objects of other tests would take most of the time."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.parametrize("name", sorted(set(TARGETS) - {SLOW} - ELSEWHERE))
def test_parser_accepts_or_refuses_every_input(name: str, tmp_path: Path) -> None:
    target = TARGETS[name]()
    report, lines = fuzz(target, INPUTS, 7, tmp_path)
    target.close()
    assert report.findings == {} and report.inputs == INPUTS
    assert report.accepted and lines.seen, "a sound input is taken, and its way is seen"


def planted(run: Callable[[bytes, Path], None]) -> FuzzTarget:
    return FuzzTarget([b"a sound input"], run, (CheckpointError,), ("errors.py",))


def found(run: Callable[[bytes, Path], None], tmp_path: Path) -> dict[str, bytes]:
    return fuzz(planted(run), 400, 1, tmp_path)[0].findings


def test_refusal_is_no_finding(tmp_path: Path) -> None:
    def run(data: bytes, folder: Path) -> None:
        raise CheckpointError("in words")

    assert found(run, tmp_path) == {}


def test_refusal_without_a_message_is_a_finding(tmp_path: Path) -> None:
    def run(data: bytes, folder: Path) -> None:
        raise CheckpointError("")

    assert list(found(run, tmp_path)) == ["CheckpointError without a message"]


def test_undocumented_error_is_found_and_shortened(tmp_path: Path) -> None:
    def run(data: bytes, folder: Path) -> None:
        if b"(" in data:
            raise KeyError("x")

    findings = found(run, tmp_path)
    assert [what.partition(" at")[0] for what in findings] == ["KeyError"] and [*findings.values()] == [b"("]


def test_base_exception_is_a_finding(tmp_path: Path) -> None:
    def run(data: bytes, folder: Path) -> None:
        raise SystemExit(3)

    assert next(iter(found(run, tmp_path))).startswith("SystemExit")


def test_endless_input_is_a_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(data: bytes, folder: Path) -> None:
        while data == b"a":
            pass

    monkeypatch.setattr(fuzz_worker, "INPUT_CPU_S", 0.02)
    assert next(iter(found(run, tmp_path))).startswith("more than")


def test_inputs_that_reach_new_lines_are_kept(tmp_path: Path) -> None:
    def run(data: bytes, folder: Path) -> None:
        if b"\x00" in data:
            CheckpointError("x")  # a line of errors.py

    report, lines = fuzz(planted(run), 400, 1, tmp_path)
    assert report.kept == 1 and lines.seen


def test_crashed_process_is_a_finding_with_its_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = tmp_path / "worker.py"
    worker.write_text(
        "import os, sys\n"
        "from pathlib import Path\n"
        "words = dict(zip(sys.argv[2::2], sys.argv[3::2]))\n"
        "data = Path(words['--replay']).read_bytes() if '--replay' in words else b'x(y'\n"
        "(Path(words['--folder']) / 'current').write_bytes(bytes(8) + data)\n"
        "os.abort() if b'(' in data else sys.exit(0)\n"
    )
    monkeypatch.setattr(fuzz_parsers, "WORKER", (os.sys.executable, str(worker)))  # type: ignore[attr-defined]
    assert main(["any", "--inputs", "1", "--deaths", "1", "--findings", str(tmp_path / "found")]) == 1
    assert (tmp_path / "found" / "any-0").read_bytes() == b"("


def test_growing_memory_is_a_finding() -> None:
    assert ParserTally(memory=(100 << 20, 200 << 20, 201 << 20)).growth == 1.0, "little"
    assert ParserTally(memory=(100 << 20, 200 << 20, 300 << 20)).growth == 1.5


@pytest.mark.parametrize("change", [change_bytes, change_json, change_lines, change_safetensors])
def test_mutations_accept_any_input(change: Callable[[Random, bytes, bytes], bytes]) -> None:
    random, inputs = (
        Random(3),
        [b"", b"{", b"[]", b'{"a": [1, {"b": null}]}', b"x\n{}", (2).to_bytes(8, "little") + b"{}ab"],
    )
    for _ in range(2000):
        data = change(random, random.choice(inputs), random.choice(inputs))
        assert len(data) <= MAX_BYTES + 64
        inputs.append(data[:200])


def test_mutated_json_is_mostly_valid() -> None:
    random, sound, taken = Random(5), b'{"a": [1, {"b": null}], "c": "d"}', 0
    for _ in range(500):
        try:
            json.loads(change_json(random, sound, sound))
        except (ValueError, RecursionError):
            continue
        taken += 1
    assert 300 < taken < 500


def test_shrink_stops_at_its_time_limit() -> None:
    def fails(data: bytes) -> bool:
        time.sleep(0.01)
        return True

    assert shrink(b"x" * 1000, fails, seconds=0.0) != b""
    assert shrink(b"abc(def", lambda data: b"(" in data) == b"("
