"""Parts of benchmarks/peers.py that need no other engine."""

import argparse
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.peers_models import MODELS, write_checkpoint
from benchmarks.peers_worker import Worker
from foreword import LLM, SamplingParams
from foreword.bench.regime import RegimeError

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "benchmarks"
sys.path.append(str(SCRIPTS))  # where the scripts find each other
peers: Any = importlib.import_module("peers")
ECHO = f"""
import sys
sys.path.insert(0, {str(SCRIPTS)!r})
from peers_worker import serve

class Echo:
    def twice(self, number):
        print("what a library prints")
        return {{"number": 2 * number}}

serve(Echo())
"""


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """PYTHONPATH of the package, for a script in another folder."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("peers") / "tiny"
    write_checkpoint(MODELS["tiny"], folder)
    return folder


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "log"


@pytest.fixture
def foreword(checkpoint: Path, log: Path) -> Iterator[Worker]:
    yield from load_foreword(checkpoint, log, {})


@pytest.fixture
def adaptive(checkpoint: Path, log: Path) -> Iterator[Worker]:
    """Foreword whose controller chooses the length of drafts."""
    yield from load_foreword(checkpoint, log, {"draft_length": "adaptive"})


def load_foreword(checkpoint: Path, log: Path, options: dict[str, str]) -> Iterator[Worker]:
    worker = Worker(sys.executable, SCRIPTS / "peers_foreword.py", log)
    options = {"cpu_isa": "reference", **options}
    facts = worker("load", path=str(checkpoint), threads=1, tokens=2048, streams=16, options=options)
    assert facts["weight_bytes"] > 2 * 1024 * 256
    yield worker
    worker.close()


def test_random_checkpoint_answers_have_the_requested_length(checkpoint: Path) -> None:
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=20)
    llm = LLM(str(checkpoint), threads=1, kv_cache_memory="1000tokens")
    (answer,) = llm.generate(["some text"], params)
    assert len(answer.token_ids) == 20
    assert llm.tokenizer.vocab_size == MODELS["tiny"].vocab


def test_layer_weights_exclude_the_embedding() -> None:
    assert MODELS["qwen2.5-0.5b"].layer_weights() == 24 * (896 * (896 + 2 * 128) + 896 * 896 + 3 * 896 * 4864)


def test_existing_checkpoint_is_kept(checkpoint: Path) -> None:
    before = (checkpoint / "model.safetensors").stat().st_mtime_ns
    write_checkpoint(MODELS["tiny"], checkpoint)
    assert (checkpoint / "model.safetensors").stat().st_mtime_ns == before


def test_worker_answers_despite_library_output(tmp_path: Path, log: Path) -> None:
    script = tmp_path / "echo.py"
    script.write_text(ECHO)
    worker = Worker(sys.executable, script, log)
    assert worker("twice", number=21) == {"number": 42}
    assert worker("twice", number=1) == {"number": 2}
    assert worker.peak_bytes > 1 << 20
    with pytest.raises(RuntimeError, match=str(log)):
        worker("nonsense")
    worker.close()
    assert "what a library prints" in log.read_text()


def test_foreword_peer_is_measured(foreword: Worker) -> None:
    decoded = foreword("decode", prompt=[1, 2, 3], tokens=4)
    assert 0 < decoded["forward"] < decoded["seconds"]
    assert len(decoded["ids"]) == 4
    peers._check_prompt(foreword("prompt", ids=list(range(40))))
    prompts = [[1, 2, number] for number in range(8)]
    peers._check_streams(8, 5, foreword("streams", prompts=prompts, tokens=5))
    rows = foreword("rows", context=256, counts=list(peers.ROW_COUNTS), steps=4)
    peers._check_rows(rows)
    assert min(peers._row_ratios(rows).values()) > 0


def test_step_without_its_drafts_is_no_measurement(adaptive: Worker) -> None:
    """An adaptive length never verifies wrong drafts: the step of 16 rows has one."""
    rows = adaptive("rows", context=256, counts=list(peers.ROW_COUNTS), steps=4)
    with pytest.raises(RegimeError, match="rows verified"):
        peers._check_rows(rows)


STREAMS = {"ids": [[1, 2], [3, 4]], "seconds": 1.0}


@pytest.mark.parametrize(
    ("answer", "claim"),
    [
        ({"ids": [[1, 2], [3]]}, "tokens emitted"),
        ({"at_once": 1}, "requests at once"),
        ({"spans": [(0.0, 1.0), (1.0, 2.0)]}, "requests at once"),
    ],
)
def test_streams_that_are_not_what_was_asked_are_refused(answer: dict[str, Any], claim: str) -> None:
    peers._check_streams(2, 2, STREAMS)
    with pytest.raises(RegimeError, match=claim):
        peers._check_streams(2, 2, STREAMS | answer)


def test_cached_prompt_is_no_measurement() -> None:
    with pytest.raises(RegimeError, match="prompt tokens found in a cache: 16, not 0"):
        peers._check_prompt({"ids": [1], "cached": 16})


def test_foreword_with_other_answers_in_a_later_round_is_refused() -> None:
    engine = peers.PeerEngine("foreword", "foreword")
    one = peers.LoadedEngine(engine, pytest.fail, pytest.fail)
    (measure, *_) = peers._measures(1024, argparse.Namespace(tokens=2, contexts=[], prompts=[]))
    one.add(measure, {"ids": [1, 2], "seconds": 0.5}, True)
    assert one.rounds["decode"] == [4.0]
    with pytest.raises(RegimeError, match="every round has the same answers"):
        one.add(measure, {"ids": [1, 3], "seconds": 0.5}, True)
    with pytest.raises(RegimeError, match="tokens emitted: 1, not 2"):
        one.add(measure, {"ids": [1], "seconds": 0.5}, True)
