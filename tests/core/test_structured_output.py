import pydantic
import pytest

from foreword import SamplingParams, StructuredOutput
from foreword.core.structured_output import MAX_CONSTRAINT_BYTES
from foreword.errors import InvalidRequest


class Person(pydantic.BaseModel):
    name: str
    age: int


def test_json_schema_accepts_text_mapping_bool_and_model() -> None:
    text = '{"type":"object","properties":{"b":{},"a":{}}}'
    assert StructuredOutput.json_schema(text).text == text
    assert (
        StructuredOutput.json_schema({"type": "object", "properties": {"b": {}, "a": {}}}).text == text
    )  # keys keep their order
    assert StructuredOutput.json_schema(True).text == "true"
    assert '"Person"' in StructuredOutput.json_schema(Person).text


def test_other_constraint_types() -> None:
    assert StructuredOutput.json_object().constraint_type == "json_object"
    assert StructuredOutput.regex("a+", after="</think>") == StructuredOutput("regex", "a+", after="</think>")
    assert StructuredOutput.choice(["yes", "né"]).text == '["yes","né"]'
    assert StructuredOutput.grammar('root ::= "a"').constraint_type == "gbnf"
    assert StructuredOutput.grammar('start: "a"').constraint_type == "lark"
    assert StructuredOutput.structural_tag({"triggers": ["<a"]}).text == '{"triggers":["<a"]}'
    assert SamplingParams(structured=StructuredOutput.regex("a")).structured is not None


def test_invalid_constraint_is_refused() -> None:
    for make, reason in [
        (lambda: StructuredOutput("xml", "a"), "one of json_schema"),
        (lambda: StructuredOutput("regex", ""), "not be empty"),
        (lambda: StructuredOutput("regex", 5), "not be empty"),  # type: ignore[arg-type]
        (lambda: StructuredOutput("regex", "a", after=""), "after"),
        (lambda: StructuredOutput("regex", "a" * (MAX_CONSTRAINT_BYTES + 1)), "1048576"),
        (lambda: StructuredOutput("regex", "a\ud800"), "surrogate at character 1"),
        (lambda: StructuredOutput.json_schema(5), "JSON schema"),
        (lambda: StructuredOutput.json_schema({"a": float("nan")}), "written as JSON"),
        (lambda: StructuredOutput.json_schema({"a": {1, 2}}), "written as JSON"),
        (lambda: StructuredOutput.choice("yes"), "list of non-empty strings"),
        (lambda: StructuredOutput.choice([]), "list of non-empty strings"),
        (lambda: StructuredOutput.choice(["a", ""]), "list of non-empty strings"),
        (lambda: StructuredOutput.grammar(5), "not be empty"),  # type: ignore[arg-type]
    ]:
        with pytest.raises(InvalidRequest, match=reason) as caught:
            make()
        assert caught.value.param == "structured_outputs"
