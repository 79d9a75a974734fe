"""Writes docs/flags.md and docs/metrics.md: `python -m foreword.cli.docs_gen`."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from foreword.cli.flags import GROUPS, environment_name, flag, type_name
from foreword.config.options import option_fields
from foreword.metrics.definitions import CATALOG, PREFIX, Metric

__all__ = ["PAGES", "flags_page", "metrics_page", "write"]

FLAGS_HEADER = """# Flags

Written by `python -m foreword.cli.docs_gen`; edit `foreword/config/options.py` instead.

Every option is a flag of `foreword serve`, an environment variable, and a key of the YAML file that
`--config FILE` (or `FOREWORD_CONFIG`) names. A flag beats the environment, the environment beats the file, the
file beats the default. Switches are turned off with `--no-...`, or with `false` in the environment or the file.
Options of the groups model, scheduler and speculation are flags of `chat`, `generate`, `bench` and `check` as well.
"""  # noqa: E501

METRICS_HEADER = f"""# Metrics

Written by `python -m foreword.cli.docs_gen`; edit `foreword/metrics/definitions.py` instead.

`GET /metrics` answers in Prometheus' text format. Every name has the prefix `{PREFIX}`. Counts are taken
after every cut: a token that was not delivered is in none of them. A ratio does not exist until there is
something to divide by; no value is ever a nan.
"""

IMAGES_HEADER = """
## Only where the model sees pictures

Beside these there is a stage `encode` in `step_seconds` and `engine_faults_total` then.
"""

SPECULATION_HEADER = """
## Only where speculation is configured

With `--speculate off` none of these exist. Ratios, positions and reasons appear once there is something to tell.
"""  # noqa: E501


def flags_page() -> str:
    """One table per group of options."""
    return "\n".join([FLAGS_HEADER, *(line for group in GROUPS for line in _group(group))]) + "\n"


def metrics_page() -> str:
    """Tables of the metrics that always exist, of those of images, and of those of speculation."""
    sections = {
        METRICS_HEADER: [row for row in CATALOG if not (row.speculative or row.multimodal)],
        IMAGES_HEADER: [row for row in CATALOG if row.multimodal],
        SPECULATION_HEADER: [row for row in CATALOG if row.speculative],
    }
    lines = [line for header, rows in sections.items() for line in (header, *_metrics(rows))]
    return "\n".join(lines) + "\n"


PAGES: Mapping[str, Any] = MappingProxyType({"flags.md": flags_page, "metrics.md": metrics_page})


def write(folder: Path) -> None:
    for name, page in PAGES.items():
        (folder / name).write_text(page(), encoding="utf-8")


def _group(group: str) -> Iterator[str]:
    yield f"## {group.capitalize()}\n"
    yield "| flag | value | default | environment | what it does |"
    yield "|---|---|---|---|---|"
    for item in option_fields():
        if item.metadata["group"] == group:
            value = ", ".join(item.metadata["choices"]) or type_name(item)
            cells = (
                f"`{flag(item.name)}`",
                value,
                _default(item.default),
                f"`{environment_name(item.name)}`",
                item.metadata["help"],
            )
            yield f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"
    yield ""


def _default(value: object) -> str:
    if value is None or value == "":
        return ""
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def _metrics(rows: list[Metric]) -> Iterator[str]:
    yield "| metric | kind | labels | what it counts |"
    yield "|---|---|---|---|"
    for row in rows:
        yield f"| `{row.name}` | {row.metric_type} | {', '.join(row.labels)} | {row.help} |"


if __name__ == "__main__":
    write(Path(sys.argv[1] if len(sys.argv) > 1 else "docs"))
