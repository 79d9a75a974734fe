"""Layers: which package may import which, and no import of the package inside a function."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "foreword"

ALLOWED = {
    "errors": set(),
    "utils": {"errors"},
    "demo": {"errors"},
    "config": {"core.params", "errors"},
    "core": {"errors"},
    "workers": {"errors", "utils"},
    "kernels": {"core", "utils", "errors"},
    "kv_cache": {"core", "utils", "errors"},
    "layers": {"kernels", "core", "errors"},
    "models": {"layers", "kernels", "workers", "core", "config", "utils", "errors"},
    "lora": {"models", "layers", "kernels", "config", "core", "errors"},
    "executor": {"kernels", "core", "errors"},
    "sampling": {"kernels", "core"},
    "speculation": {"executor", "models", "sampling", "kv_cache", "kernels", "core", "errors"},
    "formats": {"core", "errors"},
    "grammar": {"formats", "workers", "core", "errors"},
    "multimodal": {"workers", "core", "errors"},
    "tokenizer": {"formats", "multimodal", "workers", "config", "core", "errors"},
    "embedding": {"models", "layers", "kernels", "tokenizer", "workers", "config", "core", "utils", "errors"},
    "metrics": {"core", "errors"},
    "engine": {
        "speculation",
        "sampling",
        "executor",
        "lora",
        "models",
        "layers",
        "kv_cache",
        "kernels",
        "grammar",
        "config",
        "core",
        "utils",
        "errors",
    },
    "engine_client": {
        "engine",
        "kv_cache.prefix_cache",
        "speculation.control.cost_model",
        "config",
        "core",
        "utils",
        "errors",
    },
    "checkpoint": {
        "formats",
        "models.config",
        "models.hub",
        "models.gguf.header",
        "models.unsupported",
        "tokenizer",
        "multimodal",
        "demo",
        "config",
        "errors",
    },
    "outputs": {"formats", "metrics", "core"},
    "llm": {
        "checkpoint",
        "engine_client.local",
        "embedding.local",
        "embedding.sentence_transformers",
        "embedding.vectors",
        "formats",
        "grammar.check",
        "grammar.tool_calls",
        "tokenizer",
        "multimodal",
        "metrics",
        "outputs",
        "demo",
        "config",
        "core",
        "errors",
    },
    "server": {
        "engine_client.base",
        "engine_client.client",
        "engine_client.messages",
        "engine_client.remote_messages",
        "engine_client.replicas",
        "embedding.client",
        "embedding.sentence_transformers",
        "embedding.vectors",
        "formats",
        "grammar.check",
        "grammar.tool_calls",
        "tokenizer",
        "multimodal",
        "metrics",
        "config",
        "core",
        "utils",
        "errors",
    },
    "fleet": {
        "server",
        "engine_client",
        "embedding",
        "checkpoint",
        "models.hub",
        "tokenizer",
        "metrics",
        "config",
        "core",
        "utils",
        "errors",
    },
}
FILES = sorted(ROOT.rglob("*.py"))


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


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_layering(path: Path) -> None:
    tree = ast.parse(path.read_text())
    package = _package(path)
    wrong = [target for _, target in _imports(tree) if not _may_import(package, target)]
    assert not wrong, f"{package} may not import {wrong}"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_no_internal_import_inside_a_function(path: Path) -> None:
    tree = ast.parse(path.read_text())
    inside = {
        id(child)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for child in ast.walk(node)
    }
    assert not [target for node, target in _imports(tree) if id(node) in inside]


def test_a_forbidden_import_is_noticed() -> None:
    assert not _may_import("engine", "tokenizer.tokenizer")
    assert not _may_import("core", "engine_client.client")
    assert not _may_import("server", "engine.engine")
    assert _may_import("server", "engine_client.client")


def test_no_public_class_name_is_used_twice() -> None:
    """One word per thing: a class name means the same everywhere in the package."""
    places: dict[str, list[str]] = {}
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(str(path.relative_to(ROOT)))
    assert {name: files for name, files in places.items() if len(files) > 1} == {}
