"""Structured output fields of OpenAI, vLLM, SGLang and llama.cpp."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, WithJsonSchema, model_validator

from foreword.core.structured_output import StructuredOutput
from foreword.errors import InvalidRequest, Unsupported, shown
from foreword.server.apis.body import TABLES, StrictModel, refusal

Schema = Annotated[
    Any, WithJsonSchema({"anyOf": [{"type": "object"}, {"type": "string"}, {"type": "boolean"}]})
]
Tag = Annotated[Any, WithJsonSchema({"anyOf": [{"type": "object"}, {"type": "string"}]})]
Constraint = StructuredOutput | None
SCHEMA_FORM = '{"type": "json_schema", "json_schema": {"name": ..., "schema": ...}}'
SCHEMA_WORDS = ("json_schema", "properties", "$ref", "$defs", "anyOf", "items", "enum", "type")
# Fields of response_format that belong to each type.
FIELDS_BY_TYPE: Mapping[str, frozenset[str]] = {
    "text": frozenset(),
    "json_object": frozenset({"schema_"}),
    "json_schema": frozenset({"json_schema"}),
    "structural_tag": frozenset({"structures", "triggers", "format"}),
}


class SchemaHolder(StrictModel):
    """An object whose `schema` clients write elsewhere; the refusal names its place."""

    schema_form: ClassVar[str]  # the object as the API takes it

    @model_validator(mode="before")
    @classmethod
    def _show_place(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("schema") is None:
            for name in SCHEMA_WORDS:
                value = data.get(name)
                if value is not None and (name != "type" or value == "object"):
                    raise refusal(
                        "invalid", name, f"is no field of it: the schema goes here: {cls.schema_form}"
                    )
        return data


class NamedSchema(SchemaHolder):
    """OpenAI's `json_schema`. Every schema is enforced, `strict` or not."""

    schema_form: ClassVar[str] = '{"name": ..., "schema": ...}'
    peer_fields = TABLES["json_schema"]
    name: str | None = None
    schema_: Schema = Field(alias="schema")


class ResponseFormat(StrictModel):
    """OpenAI's `response_format`, plus vLLM's structural tags and llama.cpp's schema of json_object."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: NamedSchema | None = None
    schema_: Schema = Field(default=None, alias="schema")
    structures: list[dict[str, Any]] | None = None
    triggers: list[str] | None = None
    format: dict[str, Any] | None = None

    def constraint(self) -> Constraint:
        """None for type text. Raises InvalidRequest for a missing field, or a field of another type."""
        field = "response_format"
        if self.type == "json_schema" and (self.json_schema is None or self.schema_ is not None):
            given = (
                "schema does not belong to" if self.schema_ is not None else "json_schema is required with"
            )
            raise InvalidRequest(
                f"{field}.{given} type 'json_schema', which has this form: {SCHEMA_FORM}",
                f"{field}.json_schema",
            )
        self._check_fields()
        if self.json_schema is not None:
            return StructuredOutput.json_schema(self.json_schema.schema_, field=f"{field}.json_schema.schema")
        if self.type == "json_object" and self.schema_ is not None:
            return StructuredOutput.json_schema(self.schema_, field=f"{field}.schema")
        if self.type == "json_object":
            return StructuredOutput.json_object(field=field)
        if self.type == "structural_tag":
            return StructuredOutput.structural_tag(self._structural_tag(), field=field)
        return None

    def _structural_tag(self) -> dict[str, Any]:
        """Its fields as they were given: their values are plain, and may be large."""
        given = {"structures": self.structures, "triggers": self.triggers, "format": self.format}
        return {"type": self.type} | {name: value for name, value in given.items() if value is not None}

    def _check_fields(self) -> None:
        for name in sorted(set().union(*FIELDS_BY_TYPE.values()) - FIELDS_BY_TYPE[self.type]):
            if getattr(self, name) is not None:
                field = f"response_format.{name.rstrip('_')}"
                raise InvalidRequest(f"{field} does not belong to type {shown(self.type)}", field)


class StructuredOutputsBody(StrictModel):
    """vLLM's `structured_outputs`, and `after`: the text, such as "</think>", that starts the constraint."""

    peer_fields = TABLES["structured_outputs"]
    json_: Schema = Field(default=None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: Tag = None
    disable_any_whitespace: bool | None = None
    whitespace_pattern: str | None = None
    after: str | None = None


class StructuredBody(StrictModel):
    """Constraints on the answer; at most one may be given."""

    response_format: ResponseFormat | None = None  # OpenAI
    structured_outputs: StructuredOutputsBody | None = None  # vLLM
    guided_json: Schema = None  # guided_*: vLLM's older names
    guided_json_object: bool | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None
    grammar: str | None = None  # llama.cpp: GBNF, or Lark, which has no `::=`
    json_schema: Schema = None  # llama.cpp, SGLang
    regex: str | None = None  # SGLang
    ebnf: str | None = None  # SGLang: GBNF

    def check_constraints(self) -> None:
        super().check_constraints()
        self.structured()

    def structured(self) -> Constraint:
        """The constraint, or None. Raises InvalidRequest for two, Unsupported for a whitespace pattern."""
        options = self.structured_outputs or StructuredOutputsBody()
        given = [constraint for constraint in self._constraints(options) if constraint is not None]
        if len(given) > 1:
            raise InvalidRequest(
                f"{given[0].field} and {given[1].field} cannot both constrain the answer", given[1].field
            )
        if not given:
            _check_no_options(options)
            return None
        if options.after == "":
            name = "structured_outputs.after"
            raise InvalidRequest(f"{name} must not be empty", name)
        return replace(given[0], whitespace=self._allows_whitespace(options), after=options.after)

    def _constraints(self, options: StructuredOutputsBody) -> list[Constraint]:
        make = StructuredOutput
        given: list[tuple[str, Any, Callable[..., StructuredOutput]]] = [
            ("structured_outputs.json", options.json_, make.json_schema),
            ("structured_outputs.regex", options.regex, make.regex),
            ("structured_outputs.choice", options.choice, make.choice),
            ("structured_outputs.grammar", options.grammar, make.grammar),
            ("structured_outputs.json_object", options.json_object or None, _json_object),
            ("structured_outputs.structural_tag", options.structural_tag, _structural_tag),
            ("guided_json", self.guided_json, make.json_schema),
            ("guided_regex", self.guided_regex, make.regex),
            ("guided_choice", self.guided_choice, make.choice),
            ("guided_grammar", self.guided_grammar, make.grammar),
            ("guided_json_object", self.guided_json_object or None, _json_object),
            ("grammar", self.grammar or None, make.grammar),
            ("ebnf", self.ebnf or None, make.grammar),
            ("regex", self.regex or None, make.regex),
            ("json_schema", self.json_schema, make.json_schema),
        ]
        first = self.response_format.constraint() if self.response_format else None
        return [first, *(write(value, field=field) for field, value, write in given if value is not None)]

    def _allows_whitespace(self, options: StructuredOutputsBody) -> bool:
        """Whether JSON may hold whitespace; the pattern "" forbids it too."""
        patterns = {
            "structured_outputs.whitespace_pattern": options.whitespace_pattern,
            "guided_whitespace_pattern": self.guided_whitespace_pattern,
        }
        for name, pattern in patterns.items():
            if pattern:
                raise Unsupported(
                    f"{name} is not supported: whitespace in JSON is bounded, and "
                    "structured_outputs.disable_any_whitespace forbids it",
                    name,
                )
        return not options.disable_any_whitespace and "" not in patterns.values()


def _json_object(enabled: bool, field: str) -> StructuredOutput:
    return StructuredOutput.json_object(field=field)


def _structural_tag(description: Any, field: str) -> StructuredOutput:
    if not isinstance(description, str | dict):
        raise InvalidRequest(f"{field} must be an object or its JSON, got {shown(description)}", field)
    return StructuredOutput.structural_tag(description, field=field)


def _check_no_options(options: StructuredOutputsBody) -> None:
    """Raises InvalidRequest for options of a constraint that is not given."""
    for name in ("after", "disable_any_whitespace", "whitespace_pattern"):
        if getattr(options, name):
            field = f"structured_outputs.{name}"
            raise InvalidRequest(f"{field} needs a constraint", field)
