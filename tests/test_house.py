"""The layering of DESIGN §4: who may import whom; and no import inside a function to escape a cycle."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "foreword"

ALLOWED = {
    "errors": set(),
    "hardware": {"errors", "config", "resolve"},
    "config": {"errors"},
    "resolve": {"config", "estimate", "errors"},
    "estimate": {"errors"},
    "core": {"errors"},
    "kernels": {"errors", "hardware", "core"},
    "layers": {"kernels", "core", "cache", "errors"},
    "models": {"layers", "kernels", "core", "cache", "config", "resolve", "errors"},
    "cache": {"core", "errors"},
    "grammar": {"core", "errors"},
    "encoders": {"kernels", "layers", "models", "hardware", "text", "core", "config", "errors"},
    "text": {"core", "errors"},
    "media": {"core", "errors"},
    "sampling": {"kernels", "core"},
    "drafting": {"models", "sampling", "cache", "kernels", "core", "errors"},
    "metrics": {"core", "errors"},
    "engine": {
        "config",
        "estimate",
        "resolve",
        "hardware",
        "core",
        "cache",
        "grammar",
        "sampling",
        "drafting",
        "models",
        "kernels",
        "errors",
    },
    "conversation": {"text", "media", "config", "core", "errors"},
    "prepare": {"text", "media", "models.hub", "models.gguf.reader", "config", "errors", "demo"},
    "outputs": {"metrics", "core"},
    "llm": {
        "outputs",
        "conversation",
        "encoders.local",
        "encoders.recipe",
        "grammar.check",
        "prepare",
        "engine.client",
        "engine.local",
        "text",
        "media",
        "metrics",
        "config",
        "resolve",
        "core",
        "errors",
        "demo",
    },
    "serve": {
        "conversation",
        "engine.client",
        "text",
        "media",
        "grammar.check",
        "encoders.client",
        "encoders.recipe",
        "metrics",
        "config",
        "resolve",
        "core",
        "errors",
    },
    "demo": {"errors"},
}
FILES = sorted(ROOT.rglob("*.py"))


def _package(path: Path) -> str:
    first = path.relative_to(ROOT).parts[0]
    return first.removesuffix(".py")


def _imports(tree: ast.AST) -> list[tuple[ast.stmt, str]]:
    """(statement, dotted name below `foreword`) of every import of the package."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "foreword":
            found.append((node, node.module.removeprefix("foreword").lstrip(".")))
        elif isinstance(node, ast.Import):
            found += [(node, a.name.removeprefix("foreword.")) for a in node.names if a.name.startswith("foreword.")]
    return found


def _may_import(package: str, target: str) -> bool:
    return package in ("cli", "__init__", "__main__", target.split(".")[0]) or any(
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
    assert not _may_import("engine", "text.tokenizer")
    assert not _may_import("core", "engine.client")
    assert not _may_import("serve", "engine.engine")
    assert _may_import("serve", "engine.client")
