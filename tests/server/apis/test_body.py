"""Every field of the API has a description, and every description a field."""

from __future__ import annotations

from foreword.cli.docs_gen import BODIES
from foreword.server.apis.body import StrictModel, describe, descriptions
from tests.server.conftest import RunningServer


def bodies(of: type[StrictModel] = StrictModel) -> list[type[StrictModel]]:
    return [each for sub in of.__subclasses__() for each in (sub, *bodies(sub))]


def field_names(body: type[StrictModel]) -> set[str]:
    """As in JSON."""
    return {field.alias or name for name, field in body.model_fields.items()}


def test_every_field_is_described() -> None:
    for body in bodies():
        if body.__module__.startswith("foreword."):  # else a body of the tests
            missing = {name for name in field_names(body) if not describe(body, name)}
            assert not missing, f"write their meaning into [{body.__name__}] of descriptions.toml"


def test_every_description_has_its_field() -> None:
    by_name = {body.__name__: body for body in bodies()}
    for name, texts in descriptions().items():
        assert texts.keys() <= field_names(by_name[name]), name
    assert BODIES.keys() == descriptions().keys()


def test_schema_has_the_descriptions_without_links(served: RunningServer) -> None:
    schemas = served.http.get("/openapi.json").json()["components"]["schemas"]
    fields = schemas["ChatBody"]["properties"]
    assert fields["stop"]["description"] == descriptions()["SamplingBody"]["stop"]
    assert fields["think"]["description"].startswith("whether the model reasons before")
    assert schemas["ChatBody"]["additionalProperties"] is False
    texts = [
        field.get("description", "")
        for each in schemas.values()
        for field in each.get("properties", {}).values()
    ]
    assert len(list(filter(None, texts))) > 150
    assert not any("](" in text for text in texts)
