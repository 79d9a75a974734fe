"""The generated pages are those in docs/."""

from pathlib import Path

import pytest

from foreword.cli.configuration import environment_name
from foreword.cli.docs_gen import PAGES, write
from foreword.cli.flags import flag
from foreword.config.options import option_fields
from foreword.metrics.definitions import CATALOG

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("name", PAGES)
def test_pages_are_up_to_date(name: str) -> None:
    written = (DOCS / name).read_text(encoding="utf-8")
    assert written == PAGES[name](), f"docs/{name} is stale: run `python -m foreword.cli.docs_gen`"


def test_every_option_and_metric_is_documented() -> None:
    for item in option_fields():
        assert f"`{flag(item.name)}`" in PAGES["flags.md"]()
        assert f"`{environment_name(item.name)}`" in PAGES["flags.md"]()
    for row in CATALOG:
        assert f"`{row.name}`" in PAGES["metrics.md"]()


def test_write(tmp_path: Path) -> None:
    write(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == set(PAGES)
