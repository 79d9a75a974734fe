"""The bodies of /v1/rerank (as Jina, Cohere and vLLM have it) and of /v1/score (as vLLM)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import Field

from foreword.errors import InvalidRequest
from foreword.server.protocol.base import StrictModel
from foreword.server.protocol.embeddings import MAX_INPUTS, PoolingBody

__all__ = ["RankingBody", "RerankBody", "ScoreBody"]

TextPair = tuple[str, str]
TextsField = str | list[str] | None


class DocumentBody(StrictModel):
    text: str


class RankingBody(PoolingBody):
    """What both have in common."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **PoolingBody.unsupported,
        "use_activation": (True,),
        "rank_fields": ([], ["text"]),
        "max_chunks_per_doc": (),
        "max_tokens_per_doc": (),
    }


class RerankBody(RankingBody):
    """top_n: the best so many, 0 or none for all; return_documents: their texts too, unless it is false."""

    query: str
    documents: list[str | DocumentBody]
    top_n: Annotated[int, Field(ge=0)] | None = None
    return_documents: bool | None = None

    def texts(self) -> list[str]:
        """Of the documents. Raises InvalidRequest."""
        _check_count("documents", len(self.documents))
        return [document if isinstance(document, str) else document.text for document in self.documents]


class ScoreBody(RankingBody):
    """One text and others, or two lists of the same length; each pair of names means the same."""

    text_1: TextsField = None
    text_2: TextsField = None
    data_1: TextsField = None
    data_2: TextsField = None
    queries: TextsField = None
    documents: TextsField = None
    items: TextsField = None

    def pairs(self) -> tuple[list[TextPair], list[TextPair]]:
        """Pairs of texts, and what both texts of each are called. Raises InvalidRequest."""
        (first_name, first), (second_name, second) = self._text_lists()
        _check_count(first_name, len(first))
        _check_count(second_name, len(second))
        if len(first) not in (1, len(second)):
            raise InvalidRequest(
                f"{first_name} must hold one text, or as many as {second_name}: {len(first)} and {len(second)}",
                first_name,
            )
        names = [
            (f"{first_name}[{index % len(first)}]", f"{second_name}[{index}]") for index in range(len(second))
        ]
        return [(first[index % len(first)], text) for index, text in enumerate(second)], names

    def _text_lists(self) -> tuple[tuple[str, list[str]], tuple[str, list[str]]]:
        given = [
            name
            for name in ("text_1", "data_1", "queries", "text_2", "data_2", "documents", "items")
            if self._texts_of(name)
        ]
        for names in (
            ("text_1", "text_2"),
            ("data_1", "data_2"),
            ("queries", "documents"),
            ("queries", "items"),
        ):
            if given == list(names):
                first, second = names
                return (first, self._texts_of(first)), (second, self._texts_of(second))
        shown = ", ".join(given) or "none of them"
        raise InvalidRequest(
            f"text_1 and text_2 are required (or queries and documents, or data_1 and data_2), got {shown}",
            "text_1",
        )

    def _texts_of(self, name: str) -> list[str]:
        value: TextsField = getattr(self, name)
        return [value] if isinstance(value, str) else value or []


def _check_count(name: str, count: int) -> None:
    if not 1 <= count <= MAX_INPUTS:
        raise InvalidRequest(f"{name} must hold 1 to {MAX_INPUTS} texts, got {count}", name)
