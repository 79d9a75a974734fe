"""The bodies of /v1/rerank (Jina, Cohere, vLLM) and /v1/score (vLLM)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar

from pydantic import Field

from foreword.errors import InvalidRequest
from foreword.server.apis.body import StrictModel
from foreword.server.apis.embeddings.body import MAX_INPUTS, PoolingBody
from foreword.server.apis.ignored_fields import RANKING, IgnoredField

TextPair = tuple[str, str]
TextsField = str | list[str] | None
PAIR_FIELDS = (("text_1", "text_2"), ("data_1", "data_2"), ("queries", "documents"), ("queries", "items"))


class DocumentBody(StrictModel):
    text: str


class RankingBody(PoolingBody):
    """Fields of rerank and score."""

    peer_fields: ClassVar[Mapping[str, IgnoredField]] = RANKING


class RerankBody(RankingBody):
    query: str
    documents: list[str | DocumentBody]
    top_n: Annotated[int, Field(ge=0)] | None = None  # 0 or null: all
    return_documents: bool | None = None  # default: true

    def texts(self) -> list[str]:
        """The documents' texts. Raises InvalidRequest."""
        _check_count("documents", len(self.documents))
        return [document if isinstance(document, str) else document.text for document in self.documents]


class ScoreBody(RankingBody):
    """One text against several, or two lists of equal length; the pairs of field names are synonyms."""

    text_1: TextsField = None
    text_2: TextsField = None
    data_1: TextsField = None
    data_2: TextsField = None
    queries: TextsField = None
    documents: TextsField = None
    items: TextsField = None

    def pairs(self) -> tuple[list[TextPair], list[TextPair]]:
        """Pairs of texts, and the field names of both texts of each pair. Raises InvalidRequest."""
        first_name, second_name = self._field_names()
        first, second = self._texts_of(first_name), self._texts_of(second_name)
        _check_count(first_name, len(first))
        _check_count(second_name, len(second))
        if len(first) not in (1, len(second)):
            raise InvalidRequest(
                f"{first_name} must hold one text, or as many as {second_name}: "
                f"{len(first)} and {len(second)}",
                first_name,
            )
        if len(first) == 1:
            indices = [(0, j) for j in range(len(second))]
        else:
            indices = [(j, j) for j in range(len(second))]
        names = [(f"{first_name}[{i}]", f"{second_name}[{j}]") for i, j in indices]
        return [(first[i], second[j]) for i, j in indices], names

    def _field_names(self) -> tuple[str, str]:
        """The two fields that are given."""
        fields = ("text_1", "data_1", "queries", "text_2", "data_2", "documents", "items")
        given = tuple(name for name in fields if self._texts_of(name))
        for names in PAIR_FIELDS:
            if given == names:
                return names
        raise InvalidRequest(
            "text_1 and text_2 are required (or queries and documents, or data_1 and data_2), "
            f"got {', '.join(given) or 'none of them'}",
            "text_1",
        )

    def _texts_of(self, name: str) -> list[str]:
        value: TextsField = getattr(self, name)
        return [value] if isinstance(value, str) else value or []


def _check_count(name: str, count: int) -> None:
    if not 1 <= count <= MAX_INPUTS:
        raise InvalidRequest(f"{name} must hold 1 to {MAX_INPUTS} texts, got {count}", name)
