"""Checks README and docs against the code: links, names, routes, dependencies, flags and examples."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import redirect_stdout
from functools import cache
from io import StringIO
from pathlib import Path

import pytest

from foreword.bench.server import ServerProcess
from foreword.chat_formats.chat_format import write_calls
from foreword.chat_formats.families import FORMATS
from foreword.chat_formats.tools import WrittenCall
from foreword.cli.banner import curl_line
from foreword.cli.command_line import COMMANDS, build_parser
from foreword.cli.flags import flag
from foreword.config.foreign_flags import find_foreign
from foreword.config.options import Config, option_fields
from foreword.core.params import SamplingParams
from foreword.models.architectures import ALIASES, ARCHITECTURES
from foreword.models.model_loader import TEXT_MODELS, VISION_MODELS
from foreword.server.app import ROUTERS
from foreword.weights.unsupported_families import describe_checkpoint
from tests.support.waiting import WAIT_S
from tests.test_layering import ALLOWED

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
DOCS = ROOT / "docs"
FIRST_STEPS = DOCS / "first-steps.md"
PAGES = [README, ROOT / "CHANGELOG.md", *sorted(DOCS.rglob("*.md")), *sorted(ROOT.glob("[a-z]*/README.md"))]
EXEMPT = {
    "faq.md",
    "flags.md",
    "foreign-flags.md",
    "migrating.md",
}  # demo training data, generated, other programs' flags
OWN = [README, *(path for path in sorted(DOCS.glob("*.md")) if path.name not in EXEMPT)]
LOCAL = "http://127.0.0.1:8000"
# Flags of other programs and of pytest.
FOREIGN = {"--trust-remote-code", "--full", "--full-product", "--build-arg", "--unix-socket", "--rm", "--now"}
FOREIGN |= {"--extra-index-url", "--gpus", "--retries", "--health-start-period"}
FOREIGN |= {"--head", "--target", "--build", "--wait", "--profile"}
FOREIGN |= {"--cpus", "--cpuset-cpus", "--memory", "--patch-file", "--from-literal"}


def read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def blocks(path: Path, language: str) -> list[str]:
    """Fenced code of one language."""
    return re.findall(rf"^```{language}\n(.*?)^```", read(path), re.MULTILINE | re.DOTALL)


def prose(path: Path) -> str:
    """The page without its code blocks."""
    return re.sub(r"^```.*?^```|^    .*?$", "", read(path), flags=re.MULTILINE | re.DOTALL)


def table(path: Path, first: str) -> list[list[str]]:
    """Cells of the rows of the table whose head begins with `first`."""
    lines = read(path).splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(f"| {first} |")) + 2
    end = next((i for i, line in enumerate(lines[start:], start) if not line.startswith("|")), len(lines))
    return [[cell.strip() for cell in line.strip("|").split(" |")] for line in lines[start:end]]


@cache
def anchors(path: Path) -> set[str]:
    """Names of the headings, as they are made on the web."""
    headings = re.findall(r"^#+ (.*)$", read(path), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


# Links and names


def test_links_exist() -> None:
    for path in PAGES:
        for target in re.findall(r"\]\(([^)\s]+)\)", prose(path)):
            if target.startswith(("https://", "http://")):
                continue
            file, _, anchor = target.partition("#")
            target_path = (path.parent / file).resolve() if file else path
            assert target_path.exists(), f"{name_of(path)}: {target} does not exist"
            assert not anchor or anchor in anchors(target_path), f"{name_of(path)}: {target}: no such heading"


@cache
def definitions(path: Path) -> set[str]:
    """Names of all functions, methods and classes of a module, and of its constants."""
    nodes = list(ast.walk(ast.parse(read(path))))
    kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    return {node.name for node in nodes if isinstance(node, kinds)}


@pytest.mark.parametrize(
    "path", [DOCS / "architecture.md", DOCS / "development.md", DOCS / "exactness.md"], ids=name_of
)
def test_named_files_and_functions_exist(path: Path) -> None:
    """`path.py` and `path.py: name()` are relative to the package, or begin with a folder beside it."""
    named = re.findall(r"`([\w/]+\.py)(?:: (\w+)(?:\(\))?)?`", read(path))
    assert named
    for file, name in named:
        module = ROOT / "foreword" / file if (ROOT / "foreword" / file).exists() else ROOT / file
        assert module.exists(), f"{file} does not exist"
        assert not name or name in definitions(module), f"{file} has no {name}"


def test_named_test_files_exist() -> None:
    for path in PAGES:
        files = set(re.findall(r"\btests/[\w/]+\.py\b", read(path))) if path.name != "renames.md" else ()
        assert not {file for file in files if not (ROOT / file).exists()}, name_of(path)


def failures() -> tuple[list[str], list[str]]:
    """Entries of docs/failures.md: guarded ones, and those that are not yet."""
    guarded, open_ = read(DOCS / "failures.md").split("\n## Not yet guarded\n")
    split = [re.split(r"^- (?=\*\*)", part, flags=re.MULTILINE)[1:] for part in (guarded, open_)]
    return split[0], split[1]


def test_every_failure_has_its_test() -> None:
    guarded, open_ = failures()
    assert len(guarded) > 25
    assert open_
    for entry in guarded:
        assert "*Here*" in entry, entry
        check_tests_exist(entry)
    assert all("*Today:*" in entry for entry in open_)


def check_tests_exist(text: str) -> None:
    """A text names at least one test, and all that it names exist."""
    tests = re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", text)
    assert tests, f"no test: {text}"
    for file, name in tests:
        assert (ROOT / file).is_file(), f"{file} does not exist"
        assert name in definitions(ROOT / file), f"{file} has no {name}"


def test_what_a_key_learns_of_another_has_its_test() -> None:
    rows = table(DOCS / "security.md", "channel")
    assert len(rows) >= 13
    for _, _, tests in rows:
        check_tests_exist(tests)


def test_layer_table_equals_the_enforced_one() -> None:
    written = {
        package: set(names.split(", ")) - {"nothing"}
        for package, names in table(DOCS / "architecture.md", "package")
    }
    assert written == ALLOWED, "docs/architecture.md and tests/test_layering.py differ"


# What the code offers


def test_every_route_is_documented() -> None:
    written = {cells[0] for cells in table(DOCS / "serving.md", "route")}
    offered = {
        f"`{method} {route.path.replace(':path', '')}`"
        for router in ROUTERS
        for route in router.routes
        for method in route.methods - {"HEAD"}
    }
    assert written == offered | {"`GET /openapi.json`"}


def test_every_dependency_has_its_line() -> None:
    project = tomllib.loads(read(ROOT / "pyproject.toml"))
    wanted = {*project["project"]["dependencies"], *project["build-system"]["requires"]}
    for extra in project["project"]["optional-dependencies"].values():
        wanted |= set(extra)
    names = {re.split(r"[^\w.-]", line)[0] for line in wanted}
    rows = re.findall(r"^\| ([\w.-]+) \| (.+) \|$", read(DOCS / "dependencies.md"), re.MULTILINE)
    assert {name for name, _ in rows} - {"package"} == names - {"foreword"}


def test_every_chat_format_is_documented() -> None:
    """With a call as it is written, and its markers of reasoning."""
    rows = re.findall(r"^\| `([\w.-]+)` \| `` (.+?) `` \| (.*) \|$", read(DOCS / "tools.md"), re.MULTILINE)
    written = {name: (call.replace("\\|", "|"), markers.replace("\\|", "|")) for name, call, markers in rows}
    call = WrittenCall("get_time", {"zone": "CET"}, "call00001")
    assert written == {
        name: (
            write_calls(fmt.tools, [call]).replace("\n", "↵") if fmt.tools else "",
            f"`` {fmt.reasoning.begin} `` `` {fmt.reasoning.end} ``" if fmt.reasoning else "",
        )
        for name, fmt in FORMATS.items()
    }


def test_every_family_is_documented() -> None:
    count = re.search(r"\[(\d+) families\]", read(README))
    assert count is not None
    assert int(count[1]) == len({*ARCHITECTURES, *VISION_MODELS})
    assert {cells[0].strip("`") for cells in table(DOCS / "models.md", "`model_type`")} == set(ARCHITECTURES)
    assert {cells[0].strip("`") for cells in table(DOCS / "models.md", "multimodal `model_type`")} == set(
        VISION_MODELS
    )


def test_most_downloaded_models_are_what_the_code_says() -> None:
    """Whether each runs, or the words of the refusal."""
    rows = [(cells[1].strip("`"), cells[2]) for cells in table(DOCS / "models.md", "most downloaded")]
    assert len(rows) >= 50
    for model_type, status in rows:
        reason = describe_checkpoint(model_type).removeprefix(" (").removesuffix(")")
        expected = f"refused: {reason}" if reason else "unknown, refused without a reason"
        if model_type in ARCHITECTURES or model_type in ALIASES:
            expected = "runs"
        elif model_type in VISION_MODELS:
            expected = "runs, with pictures"
        elif model_type in TEXT_MODELS:
            expected = "runs as text"
        assert status == expected, model_type


def test_sampling_parameters_are_documented_with_their_defaults() -> None:
    rows = {cells[0].strip("`"): cells[1].strip("`") for cells in table(DOCS / "python.md", "field")}
    for field in dataclasses.fields(SamplingParams):
        default = getattr(SamplingParams(), field.name)
        shown = "Speculation()" if field.name == "speculation" else repr(default)
        assert rows.pop(field.name, None) == shown, field.name
    assert not rows


def test_flags_of_the_first_steps_are_those_of_the_code() -> None:
    options = {f"`{flag(item.name)}`": item for item in option_fields()}
    for row in table(FIRST_STEPS, "flag"):
        item = options[row[0]]
        wanted = [row[0], "" if item.default is None else f"`{item.default}`", item.metadata["help"]]
        assert row == wanted, f"docs/first-steps.md should say: | {' | '.join(wanted)} |"


@cache
def every_flag() -> set[str]:
    """The flags of all commands, those of subcommands too."""
    return {name for command in COMMANDS for name in flags_of(build_parser(command.name))}


def flags_of(parser: argparse.ArgumentParser) -> Iterator[str]:
    for action in parser._actions:
        yield from action.option_strings
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                yield from flags_of(inner)


def test_named_flags_exist() -> None:
    known = every_flag() | FOREIGN
    named = {name_of(path): set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", read(path))) for path in OWN}
    assert {page: flags - known for page, flags in named.items() if flags - known} == {}


def test_migrating_agrees_with_what_is_answered() -> None:
    """Each flag in the first column is ours, or is answered."""
    for program in ("vLLM", "llama-server, llama-box"):
        code = re.findall(r"`([^`]+)`", " ".join(cells[0] for cells in table(DOCS / "migrating.md", program)))
        named = set(re.findall(r"(?<![\w-])--?[a-z][a-z0-9-]+", " ".join(code)))
        assert len(named) > 30
        unanswered = {name for name in named if find_foreign(name) is None} - every_flag()
        assert unanswered == set()


def test_migration_targets_exist() -> None:
    lines = [line for line in read(DOCS / "migrating.md").splitlines() if line.startswith("| ")]
    ours = {
        name
        for line in lines
        for name in re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", line.strip("|").split(" | ")[-1])
    }
    assert ours
    assert ours - every_flag() == set()


# Examples


def test_curl_line_equals_the_printed_one() -> None:
    assert blocks(README, "sh") == [curl_line(LOCAL, "demo", needs_key=False) + "\n"]


def test_code_of_every_page_compiles() -> None:
    for path in PAGES:
        for code in blocks(path, "python"):
            compile(code, name_of(path), "exec")


def run(code: str) -> str:
    """What a program prints."""
    with redirect_stdout(StringIO()) as printed:
        exec(compile(code, "program", "exec"), {"__name__": "__main__"})
    return printed.getvalue()


def programs(path: Path) -> list[tuple[str, str]]:
    """The programs of a page, each with what the page says that it prints, if it does."""
    code, prints = r"^```python\n((?s:.*?))^```", r"\n\nprints\b.*\n\n```text\n((?s:.*?))^```"
    return re.findall(f"{code}(?:{prints})?", read(path), re.MULTILINE)


def test_readme_is_short() -> None:
    assert len(read(README).splitlines()) <= 120


def test_the_programs_of_the_first_pages_run() -> None:
    every = programs(README) + programs(FIRST_STEPS)
    with ServerProcess(Config(threads=1)) as server:
        said = [(run(code.replace(LOCAL, server.url)), shown) for code, shown in every]
    assert len(said) == 5
    assert all(text.strip() for text, _ in said)
    assert [text for text, shown in said if shown] == [shown for _, shown in said if shown]


@pytest.mark.full
def test_the_demo_answers_as_the_pages_say() -> None:
    pages = [path for path in OWN if path not in (README, FIRST_STEPS)]
    every = [(path, *one) for path in pages for one in programs(path) if one[1]]
    assert {path.stem for path, _, _ in every} >= {"python", "responses", "structured-output", "tools"}
    with ServerProcess(Config(threads=1)) as server:
        for path, code, shown in every:
            said = run(code.replace(LOCAL, server.url).replace("LLM()", "LLM(threads=1)"))
            assert said == shown, name_of(path)
    question, answer = re.findall(r"`(.*?)`", read(DOCS / "chat.md").partition("`--temperature 0` it")[2])[:2]
    flags = ("-m", "foreword", "chat", "--tools", "--yes", "--temperature", "0", "--threads", "1")
    command = [sys.executable, "-W", "error", *flags]
    done = subprocess.run(command, input=question, capture_output=True, text=True, timeout=WAIT_S, check=True)
    assert done.stdout == f"{answer}\n"


@pytest.mark.full
def test_the_programs_of_the_python_page_run() -> None:
    assert run("\n".join(blocks(DOCS / "python.md", "python")).replace("LLM()", "LLM(threads=1)")).strip()
    assert run("\n".join(blocks(DOCS / "speculation.md", "python"))) == ""
