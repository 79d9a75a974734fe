"""Layers: which package may import which, and no import of the package inside a function."""

import ast
from functools import cache
from pathlib import Path

from tests.conftest import FULL_ONLY

ROOT = Path(__file__).parent.parent / "foreword"

ALLOWED = {
    "errors": set(),
    "utils": {"errors"},
    "demo": {"errors"},
    "config": {"core.params", "errors"},
    "planning": {"config", "core.states", "errors"},
    "core": {"errors"},
    "workers": {"errors", "utils"},
    "kernels": {"core", "errors", "utils"},
    "kv_cache": {"core", "errors", "utils"},
    "layers": {"core", "kernels"},
    "weights": {"core.states", "errors", "kernels", "layers", "planning", "utils", "workers"},
    "models": {"core", "errors", "kernels", "layers", "planning", "weights"},
    "lora": {"config", "core", "errors", "kernels", "layers", "weights"},
    "cuda_graphs": {"core", "errors", "kernels"},
    "sampling": {"core", "kernels"},
    "speculation": {"core", "cuda_graphs", "errors", "kernels", "kv_cache", "models", "sampling", "utils"},
    "chat_formats": {"core", "errors"},
    "grammar": {"chat_formats", "core", "errors", "workers"},
    "multimodal": {"core", "errors", "weights.config_reader", "workers"},
    "tokenizer": {
        "chat_formats",
        "config",
        "core",
        "errors",
        "grammar.check",
        "grammar.tool_calls",
        "multimodal",
        "planning",
        "workers",
    },
    "embedding": {
        "config",
        "core",
        "errors",
        "kernels",
        "layers",
        "models",
        "planning",
        "tokenizer",
        "utils",
        "weights",
        "workers",
    },
    "metrics": {"core", "errors"},
    "engine": {
        "config",
        "core",
        "errors",
        "cuda_graphs",
        "grammar",
        "kernels",
        "kv_cache",
        "layers",
        "lora",
        "models",
        "planning",
        "sampling",
        "speculation",
        "utils",
        "weights",
    },
    "engine_client": {
        "config",
        "core",
        "engine",
        "errors",
        "kv_cache.prefix_cache",
        "planning",
        "speculation.draft_length.cost_model",
        "utils",
    },
    "checkpoint": {
        "chat_formats",
        "config",
        "demo",
        "errors",
        "multimodal",
        "planning",
        "tokenizer",
        "weights.config_reader",
        "weights.gguf.header",
        "weights.hub",
        "weights.trained_heads",
        "weights.unsupported_families",
    },
    "outputs": {"chat_formats", "core", "metrics", "tokenizer"},
    "llm": {
        "chat_formats",
        "checkpoint",
        "config",
        "core",
        "demo",
        "embedding.encoder_messages",
        "embedding.local",
        "embedding.sentence_transformers",
        "engine_client.local",
        "errors",
        "grammar.check",
        "metrics",
        "multimodal",
        "outputs",
        "planning",
        "tokenizer",
        "utils",
    },
    "training": {
        "config",
        "core",
        "engine.loader",
        "errors",
        "kernels",
        "kv_cache",
        "llm",
        "models",
        "planning",
    },
    "server": {
        "chat_formats",
        "config",
        "core",
        "embedding.client",
        "embedding.encoder_messages",
        "embedding.encoder_tokenizer",
        "embedding.sentence_transformers",
        "engine_client.base",
        "engine_client.make_client",
        "engine_client.messages",
        "engine_client.remote_messages",
        "engine_client.router",
        "errors",
        "grammar.check",
        "kv_cache.block_files",
        "kv_cache.pinned_prefixes",
        "kv_cache.prefix_cache",
        "metrics",
        "multimodal",
        "planning",
        "tokenizer",
        "utils",
        "workers",
    },
    "fleet": {
        "checkpoint",
        "config",
        "core",
        "embedding",
        "engine_client",
        "errors",
        "grammar.check",
        "metrics",
        "planning",
        "server",
        "tokenizer",
        "utils",
        "weights.hub",
    },
}
FILES = sorted(ROOT.rglob("*.py"))


FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def _package(path: Path) -> str:
    first = path.relative_to(ROOT).parts[0]
    return first.removesuffix(".py")


def _imports(tree: ast.AST) -> list[tuple[ast.stmt, str]]:
    """(statement, dotted name below `foreword`) of every import of the package."""
    imports = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "foreword":
            imports.append((node, node.module.removeprefix("foreword").lstrip(".")))
        elif isinstance(node, ast.Import):
            imports += [
                (node, a.name.removeprefix("foreword.")) for a in node.names if a.name.startswith("foreword.")
            ]
    return imports


def _may_import(package: str, target: str) -> bool:
    return package in ("cli", "bench", "__init__", "__main__", target.split(".")[0]) or any(
        target == allowed or target.startswith(allowed + ".") for allowed in ALLOWED[package]
    )


def test_packages_import_only_allowed_packages() -> None:
    wrong = [
        (name_of(path), target)
        for path in FILES
        for _, target in _imports(parse(path))
        if not _may_import(_package(path), target)
    ]
    assert wrong == []


def test_no_internal_import_inside_a_function() -> None:
    wrong = []
    for path in FILES:
        functions = [node for node in ast.walk(parse(path)) if isinstance(node, FUNCTIONS)]
        inside = {id(child) for function in functions for child in ast.walk(function)}
        wrong += [(name_of(path), target) for node, target in _imports(parse(path)) if id(node) in inside]
    assert wrong == []


def test_a_forbidden_import_is_noticed() -> None:
    assert not _may_import("engine", "tokenizer.tokenizer")
    assert not _may_import("core", "engine_client.process_client")
    assert not _may_import("server", "engine.engine")
    assert _may_import("server", "engine_client.router")


def test_no_public_class_name_is_used_twice() -> None:
    """One word per thing: a class name means the same everywhere in the package."""
    places: dict[str, list[str]] = {}
    for path in FILES:
        for node in ast.walk(parse(path)):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(name_of(path))
    assert {name: files for name, files in places.items() if len(files) > 1} == {}


# Tests of behaviour that several files share, or of a resource. All others bear the name of a source file.
SHARED_BEHAVIOUR = {
    "bench": {"interrupt"},
    "bench/gpu": {"fake_card"},
    "benchmarks": {"imports"},
    "cli": {"replica_urls"},
    "clients": {"clients"},
    "core": {"upload"},  # needs Triton, unlike the tests of batch.py
    "demo": {"bundle", "training", "vision", "vision_training"},
    "embedding": {"models"},
    "engine": {"draft_encoder", "faults", "grammar"},
    "engine_client": {"adapters", "images"},
    "fleet": {"several_models"},
    "kernels": {"compare_isas", "varlen_attention"},  # what several backends have
    "kernels/triton": {"compiling", "float8", "graphs", "interpreted", "latent"},
    "models": {"families"},
    "models/vision": {"qwen", "qwen_bits"},
    "server": {
        "cached_prefixes",
        "choices_returned",
        "clients",
        "embedding_servers",
        "fair_share",
        "features",
        "fuzz",
        "fuzz_api",
        "images",
        "log_privacy",
        "prediction",
        "replica_routes",
        "runaway",
        "same_conversation",
        "server",
        "slow_clients",
        "speculation",
        "tenants",
        "tracing",
        "usage",
        "vision_server",
    },
    "server/apis": {"enforced", "wires"},
    "server/apis/chat": {"families_with_state", "tools"},
    "server/apis/messages": {"tools"},
    "ui": {"chat_page", "views"},
}
TESTS = Path(__file__).parent


@cache
def source_names(folder: str) -> set[str]:
    """Names that a test file in the folder may begin with: `dense`, and `cpu_dense` for cpu/dense.py."""
    names = set()
    for root in (ROOT / folder, ROOT.parent / folder):
        for path in root.rglob("*.py"):
            parts = path.relative_to(root).with_suffix("").parts
            names |= {"_".join(parts), *parts}
    return names


def test_a_test_file_bears_the_name_of_a_source_file() -> None:
    unnamed: dict[str, set[str]] = {}
    for path in TESTS.rglob("*/test_*.py"):
        folder = path.parent.relative_to(TESTS).as_posix()
        name = path.stem.removeprefix("test_")
        sources = source_names(folder)
        if not any(name == source or name.startswith(f"{source}_") for source in sources):
            unnamed.setdefault(folder, set()).add(name)
    assert unnamed == SHARED_BEHAVIOUR


def test_modules_that_make_test_leaves_out_exist() -> None:
    assert {name for name in FULL_ONLY if not (TESTS / name).exists()} == set()
