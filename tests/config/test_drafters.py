"""Names in `--speculate`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from foreword import LLM, SamplingParams
from foreword.config.drafters import DrafterPlugin, find_plugin, parse_drafters, with_head
from foreword.config.options import Config
from foreword.errors import ConfigError

Install = Callable[[str, Sequence[str]], Path]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Install a package with entry points, given as "name = module:Class"."""

    def install_package(package: str, points: Sequence[str]) -> Path:
        info = tmp_path / package / f"{package}-1.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text("\n".join(["[foreword.drafters]", *points]))
        monkeypatch.syspath_prepend(str(info.parent))
        return info.parent

    return install_package


@pytest.mark.parametrize(
    ("speculate", "names"),
    [
        ("ngram,my_drafter:Bigram", ("ngram", "bigram")),
        ("a.b:Own, suffix", ("own", "suffix")),
        ("auto,a:Own", ("grammar", "prediction", "suffix", "text", "own")),
        ("a:_Own1", ("_own1",)),
    ],
)
def test_class_is_named_in_lower_case(speculate: str, names: tuple[str, ...]) -> None:
    config = Config(speculate=speculate)
    assert config.drafter_names() == names
    for plugin in config.drafter_plugins():
        config = config.without_plugin(plugin)
    assert config.drafter_names() == tuple(
        name for name in names if name in ("ngram", "suffix", "text", "grammar", "prediction")
    )


@pytest.mark.parametrize(
    ("speculate", "message"),
    [
        (
            "sufix",
            r"unknown drafter 'sufix', did you mean 'suffix'\? known: auto, off, grammar, .*module:Class",
        ),
        ("ngram,", "unknown drafter ''; known: auto"),
        ("off,ngram", "`off` cannot be combined"),
        ("my_drafter.py:Bigram:", "'my_drafter.py:Bigram:' is not like my_drafter:Bigram"),
        ("./my_drafter:Bigram", "is not like my_drafter:Bigram"),
        ("a:Ngram", "a:Ngram would be named ngram, which is reserved; rename the class"),
        ("a:Auto", "which is reserved"),
        ("a:Policy", "which is reserved"),
        ("a:" + "B" * 65, "at most 64 letters"),
        ("a:Own,b:Own", "two drafters are named own"),
        ("auto,suffix", "two drafters are named suffix"),
    ],
)
def test_wrong_name_is_explained(speculate: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        Config(speculate=speculate)
    assert caught.value.param == "speculate"


def test_entry_point_is_a_name(install: Install) -> None:
    install("one", ["Bigram-2 = one_package.drafters:Bigram", "ngram = one_package:Ngram"])
    assert find_plugin("Bigram-2") == DrafterPlugin("Bigram-2", "one_package.drafters:Bigram", True)
    assert Config(speculate="ngram").drafter_plugins() == (), "a package cannot replace a built-in drafter"
    with pytest.raises(ConfigError, match="did you mean 'Bigram-2'"):
        find_plugin("bigram-2")


def test_auto_runs_no_installed_drafter(install: Install) -> None:
    install("one", ["bigram = one_package:Bigram"])
    assert Config().drafter_plugins() == ()


def test_entry_point_of_two_packages_is_refused(install: Install) -> None:
    install("one", ["bigram = one_package:Bigram"])
    install("two", ["bigram = two_package:Bigram"])
    message = "several packages have a drafter 'bigram'; name one of one_package:Bigram, two_package:Bigram"
    with pytest.raises(ConfigError, match=message):
        find_plugin("bigram")


@pytest.mark.parametrize("value", ["one_package", "one_package:A.B", "one package!", "", "a:B [extra]"])
def test_entry_point_that_names_no_class_is_refused_where_it_is_used(install: Install, value: str) -> None:
    install("one", [f"broken = {value}", "bigram = one_package : Bigram"])
    assert find_plugin("bigram").reference == "one_package:Bigram"
    with pytest.raises(ConfigError, match=r"the entry point broken: .* is not like my_drafter:Bigram"):
        find_plugin("broken")


def test_bad_label_of_an_entry_point_is_refused(install: Install) -> None:
    install("one", ["big gram = one_package:Bigram"])
    with pytest.raises(ConfigError, match="has at most 64 letters"):
        find_plugin("big gram")


CODE = """
from foreword import Drafter

class Same(Drafter):
    def propose(self, requests):
        return [request.tokens[-1:] * request.max_tokens for request in requests]
"""


def test_installed_drafter_runs(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    """And is used by name alone, in fixed lengths so that no cost decides."""
    (install("echo", ["echo = echo_drafters:Same"]) / "echo_drafters.py").write_text(CODE)
    llm = LLM(threads=1, speculate="echo", draft_length="fixed")
    (output,) = llm.generate(["a a a a"], SamplingParams(max_tokens=8, temperature=0.0))
    assert output.outputs[0].metrics.draft_tokens
    monkeypatch.delitem(sys.modules, "echo_drafters")


@pytest.mark.parametrize(
    ("speculate", "expected"),
    [
        ("auto", "auto,eagle3"),
        ("auto, ngram", "auto,eagle3,ngram"),
        ("draft", "eagle3"),
        ("suffix,draft", "suffix,eagle3"),
        ("eagle3", "eagle3"),
        ("auto,eagle3", "auto,eagle3"),
        ("ngram", "ngram"),
    ],
)
def test_trained_head_replaces_the_draft_model(speculate: str, expected: str) -> None:
    assert with_head(speculate, "eagle3", "head") == expected
    assert "draft" not in parse_drafters(expected, "head", None)


@pytest.mark.parametrize("speculate", ["auto", "draft", "off", "suffix"])
def test_draft_model_leaves_the_drafters_as_they_are(speculate: str) -> None:
    assert with_head(speculate, None, "model") == speculate


def test_draft_model_that_is_no_head_is_refused_for_its_method() -> None:
    with pytest.raises(ConfigError, match="model is no trained head; --speculate draft runs a draft model"):
        with_head("suffix,eagle3", None, "model")
