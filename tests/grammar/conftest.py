from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from foreword.grammar.manager import GrammarManager
from tests.support.grammar_walks import open_grammar_manager
from tests.support.tool_walks import ToolCases


@pytest.fixture(scope="module")
def grammars() -> Iterator[GrammarManager]:
    with open_grammar_manager() as grammars:
        yield grammars


@pytest.fixture(scope="session")
def cases() -> Iterator[ToolCases]:
    with ExitStack() as stack:
        yield ToolCases(stack)
