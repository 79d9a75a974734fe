"""Parts of benchmarks/peers.py that need no other engine."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.peers_models import MODELS, write_checkpoint
from benchmarks.peers_worker import Worker
from foreword import LLM, SamplingParams

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "benchmarks"
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
    worker = Worker(sys.executable, SCRIPTS / "peers_foreword.py", log)
    facts = worker(
        "load", path=str(checkpoint), threads=1, tokens=2048, streams=16, options={"cpu_isa": "reference"}
    )
    assert facts["weight_bytes"] > 2 * 1024 * 256
    yield worker
    worker.close()


def test_peers_script_starts() -> None:
    done = subprocess.run(
        [sys.executable, SCRIPTS / "peers.py", "--help"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert "llama.cpp" in done.stdout


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
    assert foreword("prompt", ids=list(range(40)))["seconds"] > 0
    rows = foreword("rows", context=256, counts=[1, 4], steps=4)
    assert set(rows) == {"1", "4"}
    assert min(rows.values()) > 0
