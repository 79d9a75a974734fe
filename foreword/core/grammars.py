"""The compiler of an engine's grammars (see foreword/grammar)."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Protocol

from foreword.core.batch import SampleRow
from foreword.core.request import Request
from foreword.core.structured_output import RequestGrammar, Vocabulary
from foreword.errors import InvalidRequest


class Grammars(Protocol):
    """All grammars of an engine. `compile` is thread-safe; call the other methods in the engine's thread."""

    def set_vocabulary(self, vocabulary: Vocabulary) -> None:
        """Set the bytes of each token; `compile` waits for it. A second vocabulary is ignored."""
        return

    def compile(self, request: Request) -> Future[RequestGrammar]:
        """The matcher of a request, after its resumed output. Raises InvalidRequest, as the future does."""

    def start_masks(self, rows: Sequence[SampleRow]) -> None:
        """Compute the masks of these rows in the background. Rows without a grammar are ignored."""
        return

    def close(self) -> None:
        """Stop all threads; waiting requests are cancelled."""
        return


class NoGrammars(Grammars):
    """Where llguidance is not installed."""

    def compile(self, request: Request) -> Future[RequestGrammar]:
        assert request.params.structured is not None, "the request has no constraint"
        field = request.params.structured.field
        raise InvalidRequest(f"{field} needs the Python package llguidance: pip install llguidance", field)
