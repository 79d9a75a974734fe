"""The grammars of an engine's requests."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future

from foreword.core.grammar import RequestGrammar
from foreword.core.request import Request
from foreword.core.rows import SampleRow
from foreword.core.vocabulary import Vocabulary

__all__ = ["Grammars"]


class Grammars:
    """Placeholder until the package lands."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    def know(self, vocabulary: Vocabulary) -> None: ...

    def begin(self, request: Request) -> Future[RequestGrammar]:
        return Future()

    def prepare(self, rows: Sequence[SampleRow]) -> None: ...
