"""Record the flags of vLLM and llama-server: python benchmarks/peer_flags.py VLLM LLAMA_CPP

    pip download --no-deps --only-binary :all: vllm
    pip download --no-deps --no-binary :all: llama-cpp-python

VLLM       vLLM's wheel
LLAMA_CPP  the sdist of llama-cpp-python, which has llama.cpp's source

Writes tests/config/peer_flags.txt: a line for each option, with all its names and its environment variable.
Names end with "=" if a value follows, "?" if one may follow, "*" if several follow. Nothing of the packages
is run. `tests/config/test_foreign_flags.py` then names the flags that have no answer.
"""

from __future__ import annotations

import argparse
import ast
import re
import tarfile
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path

RECORD = Path(__file__).parents[1] / "tests/config/peer_flags.txt"
VLLM_PARSERS = ("vllm/engine/arg_utils.py", "vllm/entrypoints/common/cli_args.py")
FRONTEND_CLASSES = ("BaseFrontendArgs", "FrontendArgs")
INVERSES = {"--enable-": "--disable-", "--disable-": "--enable-"}  # vLLM's EnableDisableAction
SERVER_EXAMPLES = re.compile(r"LLAMA_EXAMPLE_(SERVER|COMMON)\b|mmproj_examples")


def vllm_flags(wheel: Path) -> Iterator[str]:
    """Options of `vllm serve`: of its calls of add_argument(), and fields of its frontend's classes."""
    with zipfile.ZipFile(wheel) as archive:
        configs = [name for name in archive.namelist() if re.fullmatch(r"vllm/config/\w+\.py", name)]
        sources = {name: archive.read(name).decode() for name in (*VLLM_PARSERS, *configs)}
    trees = {name: ast.parse(source) for name, source in sources.items()}
    single = set(re.findall(r'del \w+\["(\w+)"\]\["nargs"\]', sources[VLLM_PARSERS[1]]))  # one JSON text
    classes = {node.name: _annotations(node) for tree in trees.values() for node in _classes(tree)}
    for name in FRONTEND_CLASSES:
        for field, annotation in classes[name].items():
            yield _with_values([f"--{field.replace('_', '-')}"], "str" if field in single else annotation)
    for name in VLLM_PARSERS:
        calls = [node for node in ast.walk(trees[name]) if isinstance(node, ast.Call)]
        options = {  # model_kwargs = get_kwargs(ModelConfig)
            node.targets[0].id: ast.unparse(node.value.args[0])
            for node in ast.walk(trees[name])
            if isinstance(node, ast.Assign)
            and isinstance(node.targets[0], ast.Name)
            and ast.unparse(node.value).startswith("get_kwargs(")
            and isinstance(node.value, ast.Call)
        }
        for call in calls:
            if not ast.unparse(call.func).endswith(".add_argument"):
                continue
            names = [each.value for each in call.args if isinstance(each, ast.Constant)]
            if names and all(str(each).startswith("-") for each in names):
                yield _with_values([str(each) for each in names], _annotation(call, options, classes))


def _classes(tree: ast.AST) -> list[ast.ClassDef]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]


def _annotations(node: ast.ClassDef) -> dict[str, str]:
    fields = (each for each in node.body if isinstance(each, ast.AnnAssign))
    return {ast.unparse(each.target): ast.unparse(each.annotation) for each in fields}


def _annotation(call: ast.Call, sources: Mapping[str, str], classes: Mapping[str, Mapping[str, str]]) -> str:
    """The type of an option: "bool" of a switch, that of its field in a class, or "str"."""
    text = ast.unparse(call)
    if "store_true" in text:
        return "store_true"
    if "BooleanOptionalAction" in text:
        return "bool"
    for source, field in re.findall(r"(\w+_kwargs)\['(\w+)'\]", text):
        if field in classes.get(sources.get(source, ""), {}):
            return classes[sources[source]][field]
    return "str"


def _with_values(names: list[str], annotation: str) -> str:
    """The line of an option; a switch has its negations."""
    if annotation == "store_true":
        return " ".join(names)
    if re.search(r"\bbool\b", annotation):
        if "str" in annotation:
            return " ".join(f"{name}?" for name in names)
        long = [name for name in names if name.startswith("--")]
        negated = [f"--no-{name[2:]}" for name in long]
        inverse = [
            b + name.removeprefix(a) for name in long for a, b in INVERSES.items() if name.startswith(a)
        ]
        return " ".join([*names, *negated, *inverse])
    suffix = "*" if re.search(r"\b(list|tuple|set)\[", annotation) and "dict" not in annotation else "="
    return " ".join(f"{name}{suffix}" for name in names)


def llama_flags(sdist: Path) -> Iterator[str]:
    """Options of llama-server: add_opt(common_arg({NAMES}, {NEGATED NAMES}, HINT, help, handler)...)."""
    with tarfile.open(sdist) as archive:
        name = next(name for name in archive.getnames() if name.endswith("/common/arg.cpp"))
        source = archive.extractfile(name)
        assert source is not None, "arg.cpp is a file"
        text = source.read().decode()
    for block in text.split("add_opt(common_arg(")[1:]:
        examples = re.search(r"\.set_examples\(([^)]*)\)", block)
        if (examples and not SERVER_EXAMPLES.search(examples[1])) or _excludes_server(block):
            continue
        head = re.match(r"(?:\s|//[^\n]*\n)*\{([^}]*)\}(?:\s*,\s*\{([^}]*)\})?", block)
        handler = re.search(r"\[[^\]]*\]\s*\(\s*common_params ?&([^)]*)\)", block)
        assert head and handler, block[:200]
        num_values = 0 if "bool value" in handler[1] else handler[1].count(",")
        names = [f"{name}{'=' * num_values}" for name in re.findall(r'"(-[^"]+)"', f"{head[1]} {head[2]}")]
        variable = re.search(r'\.set_env\("(\w+)"\)', block)
        yield " ".join([*names, *([variable[1]] if variable else [])])


def _excludes_server(block: str) -> bool:
    excludes = re.search(r"\.set_excludes\(([^)]*)\)", block)
    return bool(excludes and "LLAMA_EXAMPLE_SERVER" in excludes[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("vllm", type=Path, help="vLLM's wheel")
    parser.add_argument("llama_cpp", type=Path, help="sdist of llama-cpp-python")
    args = parser.parse_args()
    sections = []
    for file, flags in ((args.vllm, vllm_flags(args.vllm)), (args.llama_cpp, llama_flags(args.llama_cpp))):
        package = "-".join(file.name.removesuffix(".tar.gz").split("-")[:2])
        sections.append("\n".join([f"# {package}", *sorted(set(flags))]))
    RECORD.write_text("\n\n".join(sections) + "\n", encoding="utf-8")
    print(f"{RECORD}: {[section.count(chr(10)) for section in sections]} options")


if __name__ == "__main__":
    main()
