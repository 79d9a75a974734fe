"""Fields of other servers and clients that have no effect here, with the values that are accepted.

ignored_fields.toml has a table for each body. A field is a hint, of which any value is accepted because none
changes the answer, or a feature that this server lacks, of which the values that switch it off are accepted.
Null counts as absent.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foreword.errors import MAX_SHOWN_CHARS, shown


@dataclass(frozen=True, slots=True)
class IgnoredField:
    """One row: the senders of a field, and its accepted values."""

    source: str  # the server or client that defines it
    neutral: tuple[Any, ...] | None  # accepted values; None: any
    reason: str = ""  # why other values are refused, or what to use instead

    def accepts(self, value: Any) -> bool:
        """Whether the value changes nothing. 1 and 1.0 are equal, 1 and true are not."""
        return self.neutral is None or any(
            value == item and isinstance(value, bool) == isinstance(item, bool) for item in self.neutral
        )

    def refusal(self, value: Any) -> str:
        """The end of the sentence that begins with the field's name."""
        allowed = " or ".join(json.dumps(item) for item in self.neutral or ())
        limit = f"it may only be {allowed}" if allowed else "leave it out"
        got = shown(value, MAX_SHOWN_CHARS + 1)
        got = got if len(got) <= MAX_SHOWN_CHARS else got[:MAX_SHOWN_CHARS] + "..."
        verb = f"is refused: {self.reason}" if self.reason else "is not supported"
        return f"{verb}; {limit}, got {got}"


def read_tables(text: str) -> dict[str, Mapping[str, IgnoredField]]:
    """The fields by table. Raises KeyError or TypeError for a row that is not as the file explains."""
    rows = tomllib.loads(text)
    reasons: Mapping[str, str] = rows.pop("reasons")
    tables: dict[str, Mapping[str, IgnoredField]] = {}
    for name, table in rows.items():
        base, without = table.pop("extends", None), table.pop("without", ())
        inherited = {} if base is None else tables[base]
        tables[name] = {
            **{field: row for field, row in inherited.items() if field not in without},
            **{field: _read_row(reasons, **row) for field, row in table.items()},
        }
    return tables


def _read_row(
    reasons: Mapping[str, str], source: str, only: list[Any] | None = None, reason: str = ""
) -> IgnoredField:
    return IgnoredField(source, None if only is None else tuple(only), reasons.get(reason, reason))


TABLES = read_tables(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
GENERATION = TABLES["generation"]  # chat and completions
CHAT = TABLES["chat"]
COMPLETION = TABLES["completion"]
TEMPLATE = TABLES["template"]  # /tokenize and /detokenize
MESSAGE = TABLES["message"]  # of a conversation
MESSAGES_API = TABLES["messages_api"]
RESPONSES = TABLES["responses"]
RESPONSE_ITEM = TABLES["response_item"]
RESPONSE_REASONING = TABLES["response_reasoning"]
STREAM_OPTIONS = TABLES["stream_options"]
JSON_SCHEMA = TABLES["json_schema"]
STRUCTURED_OUTPUTS = TABLES["structured_outputs"]
POOLING = TABLES["pooling"]  # embeddings and ranking
EMBEDDING = TABLES["embedding"]
RANKING = TABLES["ranking"]
