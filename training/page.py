"""The FAQ page as data."""

import re
from functools import cache
from pathlib import Path

FOLDER = Path(__file__).parent


@cache
def answers() -> dict[str, str]:
    """Map each heading of docs/faq.md to its answer, in one line."""
    page = (FOLDER.parent / "docs" / "faq.md").read_text(encoding="utf-8")
    return {
        question: " ".join(answer.split())
        for question, answer in re.findall(r"^### (.+)\n\n((?:.+\n)+)", page, re.M)
    }


@cache
def sentences() -> list[str]:
    """Return all sentences of the answers."""
    return [one for answer in answers().values() for one in re.split(r"(?<=\.) ", answer)]
