"""No code of a checkpoint is run, and nothing is called that could run it."""

import ast
from pathlib import Path

import pytest

from foreword.errors import CheckpointError
from foreword.models.model_loader import read_model_info
from tests.support.checkpoints import write_checkpoint
from tests.test_layering import FILES, name_of, parse

# Messages to our own processes over private sockets: docs/security.md.
OWN_PROCESSES = {
    "embedding/encoder_messages.py",
    "engine_client/engine_process.py",
    "grammar/check.py",
    "grammar/check_worker.py",
    "server/intake.py",
    "server/intake_worker.py",
    "workers/pool.py",  # load_reply() takes no other class than those that its caller names
    "tokenizer/chat_template.py",
}
MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}
CALLS = {
    "eval",
    "exec",
    "compile",
    "__import__",
    "torch.load",
    "numpy.load",
    "np.load",
    "torch.jit.load",
    "torch.hub.load",
}
YAML = {"yaml.load", "yaml.unsafe_load", "yaml.full_load", "yaml.load_all"}
LAST_NAMES = {name.rpartition(".")[2] for name in CALLS | YAML}
PLAIN = ("BaseLoader", "SafeLoader", "_StringLoader")  # the last is a BaseLoader


def dangers(tree: ast.AST) -> list[str]:
    calls = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            calls += [name.name for name in node.names if name.name.split(".")[0] in MODULES]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in MODULES:
            calls.append(str(node.module))
        elif isinstance(node, ast.Call):
            last = getattr(node.func, "attr", getattr(node.func, "id", ""))
            name = ast.unparse(node.func) if last in LAST_NAMES else ""  # which takes seconds for all calls
            loader = next((ast.unparse(word.value) for word in node.keywords if word.arg == "Loader"), "")
            if name in CALLS or (name in YAML and not loader.endswith(PLAIN)):
                calls.append(name)
            calls += [name for word in node.keywords if word.arg in ("allow_pickle", "trust_remote_code")]
    return calls


def test_sources_call_nothing_dangerous() -> None:
    calls = {name_of(path): dangers(parse(path)) for path in FILES if name_of(path) not in OWN_PROCESSES}
    assert {name: found for name, found in calls.items() if found} == {}


def test_every_dangerous_call_is_detected() -> None:
    for source in [
        "import pickle",
        "from pickle import loads",
        "eval('1')",
        "import torch\ntorch.load('x')",
        "yaml.load(x, Loader=yaml.Loader)",
        "yaml.load(x)",
        "np.load('x', allow_pickle=True)",
        "AutoModel.from_pretrained('x', trust_remote_code=True)",
    ]:
        assert dangers(ast.parse(source))


AUTO_MAP = {"AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}


def test_checkpoint_with_custom_code_is_refused(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "own", auto_map=AUTO_MAP)
    config = path / "config.json"
    config.write_text(config.read_text().replace('"llama"', '"own"'))
    with pytest.raises(CheckpointError, match=r"'own' is not supported; the code in `auto_map` is not run"):
        read_model_info(path)


def test_known_architecture_uses_our_code(tmp_path: Path) -> None:
    """The checkpoint's code files are ignored."""
    path = write_checkpoint(tmp_path / "known", auto_map=AUTO_MAP)
    (path / "modeling_own.py").write_text("raise SystemExit('this must never run')")
    assert read_model_info(path).parameters
