"""Patterns of modules' names: what they match, and that none takes forever."""

from __future__ import annotations

import pytest

from foreword.errors import CheckpointError
from foreword.weights import module_patterns
from foreword.weights.module_patterns import NamePattern, find_first, match_first
from foreword.workers.pool import JobLimits

NAMES = ("lm_head", "model.layers.0.mlp.up_proj", "model.layers.10.mlp.up_proj", "model.layers.1.q_proj")
PATTERNS = [
    NamePattern(text, place)
    for text, place in (
        ("lm_head", "exact"),
        ("lm", "exact"),
        (r"model\.layers\.1\.", "start"),
        ("layers.0.mlp.up_proj", "end"),
        (r".*\.(?:up|down)_proj", "whole"),
    )
]


def test_first_pattern_decides() -> None:
    assert find_first(PATTERNS, NAMES, "config.json") == [0, 3, 4, 2]
    assert find_first(PATTERNS[1:4], NAMES, "config.json") == [-1, 2, -1, 1]
    assert find_first((), NAMES, "config.json") == [-1] * 4 and find_first(PATTERNS, (), "config.json") == []


def test_plain_patterns() -> None:
    for text, is_plain in [
        ("", True),
        ("q_proj", True),
        (r"model\.layers.0.*", False),
        (r".*lm_head$", True),
        (r".*mlp\.gate", True),
        ("(a|b)", False),
        ("a+", False),
        (r"\d", False),
        ("[ab]", False),
        ("a{9}", False),
    ]:
        assert NamePattern(text, "start").is_plain == is_plain


@pytest.mark.parametrize("place", ["start", "end", "whole"])
def test_pattern_that_backtracks_forever_is_refused(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = JobLimits(cpu_s=0.2, wall_s=60.0, num_bytes=1 << 28, queue_timeout_s=60.0)
    monkeypatch.setattr(module_patterns, "LIMITS", limits)
    with pytest.raises(CheckpointError, match=r"config.json: patterns .* more than 0\.2 s of CPU time"):
        find_first([NamePattern("(([a-z]|[a-z0-9])+)+X", place)], ["q" * 200], "config.json")


def test_long_names_and_many_patterns_have_the_limit_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a process of their own; the answers are the same."""
    names = ("a" * 2000, "b")
    patterns = [NamePattern(".*a", "start"), NamePattern("b", "whole")]
    monkeypatch.setattr(module_patterns, "match_first", None)
    assert find_first(patterns, names, "config.json") == match_first(patterns, names) == [0, 1]
    monkeypatch.setattr(module_patterns, "MAX_TESTS", 3)
    assert find_first(patterns, names[1:] * 2, "config.json") == [1, 1]
