from __future__ import annotations

from collections.abc import Iterator

import pytest

from foreword.grammar.manager import GrammarManager
from tests.support.grammar_walks import open_grammar_manager


@pytest.fixture(scope="module")
def grammars() -> Iterator[GrammarManager]:
    with open_grammar_manager() as grammars:
        yield grammars
