"""Strict request bodies: exact types, null is absence, and no field is dropped without a word.

descriptions.toml has the meaning of each field: for the API's schema, docs/request-fields.md and the page.
"""

from __future__ import annotations

import difflib
import functools
import json
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Final

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import CoreSchema, PydanticCustomError

from foreword.core.structured_output import StructuredOutput
from foreword.errors import MAX_SHOWN_CHARS, ContextLengthExceeded, InvalidRequest, shown
from foreword.server.http.responses import REQUEST_ID_PATTERN

REFUSED = ("invalid", "unsupported")  # error types of this module, with the field in `ctx`
MAX_SALT_CHARS = 1024
MAX_OBJECTS = 1 << 15  # most objects of a list: each takes some 20 us to validate
LINK = re.compile(r"\[([^\]]+)\]\([^)]*\)")  # a link in Markdown
LONE_SURROGATE = re.compile(r"[\ud800-\udfff]")
MAX_SUGGESTED_CHARS = 64  # length of an unknown name up to which similar names are searched
PART_FIELDS: Final = ("content", "tool_calls", "output")  # fields that hold lists of parts
MAX_ARGUMENTS_CHARS: Final = 1 << 20  # limit of one call in the history
TOOL_FORMS: Final = {  # form of a tool, by API
    "chat": '{"type": "function", "function": {"name": ..., "description": ..., "parameters": ...}}',
    "Messages": '{"name": ..., "description": ..., "input_schema": ...}',
    "Responses": '{"type": "function", "name": ..., "description": ..., "parameters": ...}',
}

TextOrIds = str | Sequence[int]
_TEXT_SCHEMA = {"type": "string"}
_IDS_SCHEMA = {"type": "array", "items": {"type": "integer"}}
_LIST_SCHEMAS = [{"type": "array", "items": schema} for schema in (_TEXT_SCHEMA, _IDS_SCHEMA)]
# One text or token ids, or a list of either; checked by the body, whose errors are clearer than pydantic's.
TextsOrIds = Annotated[Any, WithJsonSchema({"anyOf": [_TEXT_SCHEMA, _IDS_SCHEMA, *_LIST_SCHEMAS]})]


@dataclass(frozen=True, slots=True)
class IgnoredField:
    """A field of other servers and clients that has no effect here: its senders, and its accepted values.

    It is a hint, of which any value is accepted because none changes the answer, or a feature that this
    server lacks, of which the values that switch it off are accepted. Null counts as absent.
    """

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
    """The fields of ignored_fields.toml by table. Raises KeyError or TypeError for a row of another form."""
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


TABLES = read_tables(Path(__file__).with_name("ignored_fields.toml").read_text(encoding="utf-8"))


def _check_request_id(value: str) -> str:
    if REQUEST_ID_PATTERN.fullmatch(value) is None:
        raise ValueError("must be 1 to 128 visible ASCII characters")
    return value


RequestId = Annotated[
    str,
    AfterValidator(_check_request_id),
    WithJsonSchema({"type": "string", "pattern": f"^{REQUEST_ID_PATTERN.pattern}$"}),
]
SlotId = Annotated[int, Field(ge=-1, le=2**31 - 1)]  # -1: any slot
ModelName = Annotated[str | None, AfterValidator(lambda name: name or None)]  # "" counts as left out


def is_token_ids(value: object) -> bool:
    return isinstance(value, list) and all(type(item) is int for item in value)


@functools.cache
def descriptions() -> Mapping[str, Mapping[str, str]]:
    """The texts of descriptions.toml, which is read with the first schema, by class and name in JSON."""
    return tomllib.loads(Path(__file__).with_name("descriptions.toml").read_text(encoding="utf-8"))


def describe(body: type, field: str) -> str | None:
    """The text of a field by its name in JSON, in Markdown."""
    tables = descriptions()
    return next(
        (texts[field] for base in body.__mro__ if field in (texts := tables.get(base.__name__, {}))), None
    )


def extend_schema(schema: dict[str, Any], body: type) -> None:
    """Add the descriptions to a body's schema, without their links; other fields are refused."""
    schema["additionalProperties"] = False
    for name, field in schema.get("properties", {}).items():
        if (text := describe(body, name)) is not None:
            field["description"] = LINK.sub(r"\1", text)


def _fail_fast(schema: Any) -> None:
    """Set pydantic's `fail_fast` for all lists in a core schema."""
    if isinstance(schema, dict):
        if schema.get("type") == "list":
            schema["fail_fast"] = True
        for part in schema.values():
            _fail_fast(part)
    elif isinstance(schema, (list, tuple)):
        for part in schema:
            _fail_fast(part)


class StrictModel(BaseModel):
    """An object of a body. Unknown fields are kept in `model_extra`, for ServedModels.check_fields()."""

    model_config = ConfigDict(extra="allow", strict=True, json_schema_extra=extend_schema)
    peer_fields: ClassVar[Mapping[str, IgnoredField]] = MappingProxyType({})  # dropped, or refused by name
    aliases: ClassVar[Mapping[str, str]] = MappingProxyType({})  # other projects' names of fields
    is_lenient: ClassVar[bool] = False  # unknown fields are ignored and counted

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Validation of a list ends at its first wrong item: each error takes as long as many items."""
        schema = handler(source)
        _fail_fast(schema)
        return schema

    @model_validator(mode="before")
    @classmethod
    def _drop_neutral(cls, data: Any) -> Any:
        """Drop nulls and fields without effect, and rename aliases."""
        if not isinstance(data, dict):
            return data
        for name in data:
            if not name.isascii() and LONE_SURROGATE.search(name):
                start = name[:MAX_SUGGESTED_CHARS].encode("utf-8", "backslashreplace").decode()
                raise refusal("invalid", start, "is not the name of a field: it has a lone surrogate")
        given = {name: value for name, value in data.items() if value is not None}
        for name, value in given.items():
            if isinstance(value, list) and len(value) > MAX_OBJECTS and isinstance(value[0], dict):
                raise refusal("invalid", name, f"holds {len(value)} objects; the limit is {MAX_OBJECTS}")
            field = cls.peer_fields.get(name)
            if field is not None and not field.accepts(value):
                raise refusal("unsupported", name, field.refusal(value))
        return _apply_aliases(
            {name: given[name] for name in given if name not in cls.peer_fields}, cls.aliases
        )

    def walk(self, path: str = "") -> Iterator[tuple[str, StrictModel]]:
        """This object and those inside it, each with the prefix of its fields: "messages[0]."."""
        yield path, self
        for name, info in type(self).model_fields.items():
            value, prefix = getattr(self, name), f"{path}{info.alias or name}"
            if isinstance(value, StrictModel):
                yield from value.walk(f"{prefix}.")
            elif isinstance(value, list) and not isinstance(next(iter(value), None), int):
                for index, item in enumerate(value):
                    if isinstance(item, StrictModel):
                        yield from item.walk(f"{prefix}[{index}].")

    def num_parts(self) -> tuple[int, str]:
        """Messages, parts, calls and ids, each of which is at least a token of a prompt; and their field."""
        return 0, ""

    def check_num_parts(self, limit: int | None) -> None:
        """Raises ContextLengthExceeded for more parts than the context has tokens. None: not known yet."""
        count, field = self.num_parts()
        check_num_parts(count, field, limit)

    def check_constraints(self) -> None:
        """Raises InvalidRequest for a constraint on the answer that is malformed or too large."""

    def num_unknown(self) -> int:
        """Unknown fields of this object itself."""
        return len(self.model_extra or ())


class RequestBody(StrictModel):
    """Fields of every request to a model."""

    aliases: ClassVar[Mapping[str, str]] = {"rid": "request_id"}  # SGLang
    model: ModelName = None
    priority: int | None = None
    request_id: RequestId | None = None
    cache_salt: Annotated[str, Field(max_length=MAX_SALT_CHARS)] | None = None


def check_num_parts(count: int, field: str, limit: int | None) -> None:
    """Raises ContextLengthExceeded for more parts than tokens, before anything is converted."""
    if limit is not None and count > limit:
        raise ContextLengthExceeded(
            f"{field} holds {count} messages, parts, calls or ids, of which each is at least one token; "
            f"the context is {limit} tokens long",
            field,
        )


def count_parts(turns: Iterable[StrictModel]) -> int:
    """Messages or items, their parts and calls."""
    return sum(max(1, sum(map(_num_inner, map(vars(turn).get, PART_FIELDS)))) for turn in turns)


def _num_inner(value: object) -> int:
    """Parts of a content, of which a tool's result has parts of its own."""
    if not isinstance(value, list):
        return 0
    inner = (part.get("content") if isinstance(part, Mapping) else None for part in value)
    return sum(len(content) if isinstance(content, list) and content else 1 for content in inner)


def suggest_field(model: StrictModel, name: str) -> str:
    """The end of an error, "; did you mean 'n'?", or "" if no field of the model has a similar name."""
    if len(name) > MAX_SUGGESTED_CHARS:
        return ""
    fields = type(model).model_fields.items()
    known = [*(info.alias or field for field, info in fields), *model.aliases, *model.peer_fields]
    similar = difflib.get_close_matches(name, known, 1, 0.8)
    return f"; did you mean {similar[0]!r}?" if similar else ""


def _apply_aliases(data: dict[str, Any], aliases: Mapping[str, str]) -> dict[str, Any]:
    """Rename aliased fields; a field given under both names must have one value."""
    renamed: dict[str, Any] = {}
    for alias, name in aliases.items():
        if alias not in data:
            continue
        value = data.pop(alias)
        if {**renamed, **data}.get(name, value) != value:
            raise refusal("invalid", alias, f"is another name of {name}: only one of them may be given")
        renamed[name] = value
    return data | renamed


def refusal(error_type: str, field: str, text: str) -> PydanticCustomError:
    """An error of one field; the handler of errors prefixes its path."""
    assert error_type in REFUSED
    return PydanticCustomError(error_type, "{text}", {"field": field, "text": text})


def check_arguments(arguments: object, field: str) -> None:
    """Raises InvalidRequest for arguments of a call in the history that are too long."""
    if isinstance(arguments, str) and len(arguments) > MAX_ARGUMENTS_CHARS:
        raise InvalidRequest(
            f"{field} has {len(arguments)} characters; the limit is {MAX_ARGUMENTS_CHARS}", field
        )


def custom_input_grammar(format_: Mapping[str, Any] | None, field: str) -> StructuredOutput | None:
    """The constraint on a custom tool's input: OpenAI's {"type": "text"} or {"type": "grammar", ...}.

    A grammar is {"syntax": "lark" or "regex", "definition": ...}, in chat inside of "grammar".
    """
    if format_ is None or format_.get("type") == "text":
        return None
    described = format_.get("grammar", format_)
    syntax = described.get("syntax") if isinstance(described, Mapping) else None
    definition = described.get("definition") if isinstance(described, Mapping) else None
    if format_.get("type") != "grammar" or syntax not in ("lark", "regex") or not isinstance(definition, str):
        raise InvalidRequest(
            f'{field} must be {{"type": "text"}} or {{"type": "grammar"}} with syntax "lark" or "regex" '
            f"and a definition, got {shown(dict(format_))}",
            field,
        )
    if syntax == "regex":
        return StructuredOutput.regex(definition, field=field)
    return StructuredOutput("lark", definition, field=field)


def check_tool_form(tool: StrictModel, form: str, field: str) -> None:
    """Raises InvalidRequest, which shows the form of this API, for a tool in another API's form.

    form  name in TOOL_FORMS
    """
    given = tool.model_dump(exclude_none=True)
    written = None
    if isinstance(given.get("function"), dict):
        written = "chat"
    elif isinstance(given.get("input_schema"), dict):
        written = "Messages"
    elif "name" in given and ("parameters" in given or given.get("type") == "function"):
        written = "Responses"
    if written is not None and written != form:
        raise InvalidRequest(
            f"{field} is a tool in the form of {written}; this API takes {TOOL_FORMS[form]}", field
        )
