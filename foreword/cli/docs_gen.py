"""Writes the pages of docs/ that the code itself lists, see PAGES: `python -m foreword.cli.docs_gen`."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from foreword.cli.configuration import environment_name
from foreword.cli.flags import GROUPS, flag
from foreword.config.foreign_flags import ForeignFlag, foreign_flags
from foreword.config.option_parsing import type_name
from foreword.config.options import option_fields
from foreword.config.speculative_config import IGNORED_SPECULATIVE_FIELDS
from foreword.metrics.definitions import CATALOG, MODEL_LABEL, PREFIX, VLLM_METRICS, Metric, VLLMMetric
from foreword.metrics.prometheus import ENGINE_PROCESS
from foreword.server.apis.body import TABLES, IgnoredField, descriptions

FLAGS_HEADER = """# Flags

Written by `python -m foreword.cli.docs_gen`; edit `foreword/config/options.py` instead.

Every option is a flag of `foreword serve`, an environment variable, and a key of the YAML file that
`--config FILE` (or `FOREWORD_CONFIG`) names. A flag beats the environment, the environment beats the file, the
file beats the default. Switches are turned off with `--no-...`, or with `false` in the environment or the file.
Options of the groups model, scheduler and speculation are flags of `chat`, `generate`, `bench` and `check` as well.
`--help` shows the common ones, `--help-all` all. An unknown flag or key is an error that names the nearest one; an
unknown `FOREWORD_*` variable is a warning, because platforms set some (Kubernetes, for a service named `foreword`).
"""  # noqa: E501

FOREIGN_FLAGS_HEADER = """# Flags of other servers

Written by `python -m foreword.cli.docs_gen`; edit `foreword/config/foreign_flags.toml` instead.

The commands that load a model answer these flags, and `LLM(...)` answers them as keyword arguments. Names may
have underscores for dashes; `--option.field VALUE` sets a field of a JSON option. As keys of `--config FILE`
they are refused with the same lines. A flag that several servers have stands in the first table. Flags whose
name and meaning are ours are in [flags](flags.md); [migrating](migrating.md) tells what differs beside flags.
Every flag of vLLM and llama-server is here or there, of the versions in `tests/config/peer_flags.txt`.

Each flag that is taken for ours or without effect has its line on stderr, also with `--log-level error`; in
`LLM(...)` it is a warning of the log. A refused flag ends the command with exit code 2 and the line of this
table. A switch has its opposite too: `--no-NAME`, and `--disable-` for `--enable-`. The opposite of a refused
switch has no effect, the opposite of "always" is refused.

Variables of other servers (`VLLM_*`, `LLAMA_ARG_*`, `SGLANG_*`) have no effect: a start names those that are
set, with our flag if there is one. Keys alone are different: where `VLLM_API_KEY`, `LLAMA_API_KEY` or
`LLAMA_ARG_API_KEY_FILE` is set, a server without `--api-key` and `--api-key-file` does not start.
"""

METRICS_HEADER = f"""# Metrics

Written by `python -m foreword.cli.docs_gen`; edit `foreword/metrics/definitions.py` instead.

`GET /metrics` answers in Prometheus' text format. Every name has the prefix `{PREFIX}`, and every series the
label `{MODEL_LABEL}`, the served name of the generating model, also where a separate encoder works;
`http_requests_total`, `usage_db_errors_total`, `event_loop_stall_seconds` and the processes' metrics have
none. Counts are taken after every cut: a token that was not delivered is in none of them. A ratio does not
exist until there is something to divide by; no value is ever a nan.

Beside the table there are prometheus_client's metrics of the API process (`process_resident_memory_bytes`,
`process_cpu_seconds_total`, `process_open_fds` and others) and the same of the engine process, with the
prefix `{ENGINE_PROCESS}_`.
"""

LOADS_HEADER = """
## Loads of models

Every series of a model has its label `model`, `foreword_engine_process_*` too. What the server counts itself
has none: `http_requests_total`, `usage_db_errors_total`, `event_loop_stall_seconds`, and with several models
`ignored_message_fields_total` and rejections before the model is known.
"""

IMAGES_HEADER = """
## Only where the model sees pictures

Beside these there is a stage `encode` in `step_seconds` and `engine_faults_total` then.
"""

SPECULATION_HEADER = """
## Only where speculation is configured

With `--speculate off` none of these exist. Ratios and reasons appear once there is something to tell;
positions exist from the start, up to `--num-speculative-tokens`.
"""

PREDICTION_HEADER = """
## Only where step times are predicted

With `--draft-length fixed` nothing is predicted, and none of these exist.
"""

VLLM_HEADER = """
## Under vLLM's names

With `--vllm-metrics` the same values are exported under the names and labels (`model_name`, `engine="0"`) of
vLLM, so that its dashboards and `vllm bench serve` show them. Histograms keep the buckets of their source.

| vLLM's name | source |
|---|---|
"""

FIELDS_HEADER = """# Fields of other servers

Written by `python -m foreword.cli.docs_gen`; edit `foreword/server/apis/ignored_fields.toml` instead.

Fields that clients of OpenAI, vLLM, SGLang, llama-server and others send, and that have no effect here. "Any"
value of a hint is accepted, because none would change the answer. Of other fields the accepted values are
those that change nothing; another value is a 400 that names the field. Null counts as absent. Fields that
work are in [serving](serving.md#requests).
"""
REQUEST_FIELDS_HEADER = """# Fields of requests

Written by `python -m foreword.cli.docs_gen`; edit `foreword/server/apis/descriptions.toml` instead.

Every field that has an effect, with its meaning. The page `/docs` and `/openapi.json` of a server have the
same texts, with types.
Fields that are accepted without effect are in [fields of other servers](fields.md).
"""
# Headings of bodies that share their fields.
BODIES: Mapping[str, str] = MappingProxyType(
    {
        "RequestBody": "Every request for an answer, vectors or scores",
        "SamplingBody": "Chat and completions; mostly responses too",
        "StreamOptions": "`stream_options`",
        "SpeculationBody": "`speculation`",
        "TextPart": "a part of `prediction.content`",
        "PredictionBody": "`prediction`",
        "ChatBody": "`POST /v1/chat/completions`",
        "Message": "a message of chat",
        "ToolCallBody": "`tool_calls` of a message",
        "CalledFunction": "`function` of a call",
        "CalledCustom": "`custom` of a call",
        "ReasoningBody": "Chat and `/tokenize`: reasoning",
        "ToolsBody": "Chat: tools",
        "ChatTool": "a tool of chat",
        "FunctionBody": "`function` of a tool",
        "CustomBody": "`custom` of a tool",
        "TemplateOptions": "Chat and `/tokenize`: the template",
        "StructuredBody": "Chat and completions: the answer's form",
        "ResponseFormat": "`response_format`",
        "NamedSchema": "`response_format.json_schema`",
        "StructuredOutputsBody": "`structured_outputs`",
        "CompletionBody": "`POST /v1/completions`",
        "PoolingBody": "Embeddings and ranking",
        "EmbeddingBody": "`POST /v1/embeddings`",
        "RerankBody": "`POST /rerank`, `/v1/rerank`, `/v2/rerank`",
        "DocumentBody": "a document of rerank",
        "ScoreBody": "`POST /score`, `/v1/score`",
        "ItemsBody": "`POST /v1/responses` and `/v1/responses/input_tokens`",
        "ResponsesBody": "`POST /v1/responses`",
        "InputItem": "an item of `input`",
        "FlatTool": "a tool of responses",
        "ReasoningFields": "`reasoning`",
        "TextBody": "`text`",
        "TextFormat": "`text.format`",
        "ConversationBody": "`POST /v1/messages` and `/v1/messages/count_tokens`",
        "MessagesBody": "`POST /v1/messages`",
        "MessageBody": "a message of messages",
        "OutputConfigBody": "`output_config`",
        "OutputFormatBody": "`output_config.format`",
        "ThinkingBody": "`thinking`",
        "ToolBody": "a tool of messages",
        "ToolChoiceBody": "`tool_choice` of messages",
        "TokenizeBody": "`POST /tokenize`",
        "DetokenizeBody": "`POST /detokenize`",
        "LoadAdapterBody": "`POST /v1/load_lora_adapter`",
        "UnloadAdapterBody": "`POST /v1/unload_lora_adapter`",
        "LoadModelBody": "`POST /models/load`",
        "UnloadModelBody": "`POST /models/unload`",
        "SlotBody": "`POST /slots/{id_slot}`",
        "AddReplicaBody": "`POST /engine/replicas`, of a router",
    }
)
FIELDS: Mapping[str, Mapping[str, IgnoredField]] = MappingProxyType(
    {
        "Chat and completions": TABLES["generation"],
        "Chat alone": TABLES["chat"],
        "Completions alone": TABLES["completion"],
        "Messages": TABLES["message"],
        "`/v1/responses`": TABLES["responses"],
        "`/v1/responses`: items of `input`": TABLES["response_item"],
        "`/v1/responses`: `reasoning`": TABLES["response_reasoning"],
        "`/v1/messages`": TABLES["messages_api"],
        "`stream_options`": TABLES["stream_options"],
        "`response_format.json_schema`": TABLES["json_schema"],
        "`structured_outputs`": TABLES["structured_outputs"],
        "Embeddings and ranking": TABLES["pooling"],
        "Embeddings alone": TABLES["embedding"],
        "Ranking alone": TABLES["ranking"],
        "`/tokenize` and `/detokenize`": TABLES["template"],
    }
)


SPECULATIVE_FIELDS_HEADER = """\
## Fields of vLLM's `--speculative-config`

| field | here |
|---|---|
| `method` | `ngram`, `suffix`, `mtp`, `draft_model`, `eagle3`, `dflash`, `dspark`; others are refused |
| `model` | the draft model or the trained head; with `mtp` also the model itself, which brings the head |
| `parallel_drafting` | taken with a head, whose config decides; `true` is refused with a draft model |
| `num_speculative_tokens`, `prompt_lookup_min`, `prompt_lookup_max` | the flags of these names |

These change nothing, and a start says so:
"""


def flags_page() -> str:
    """One table per group of options."""
    return "\n".join([FLAGS_HEADER, *(line for group in GROUPS for line in _group(group))]) + "\n"


def foreign_flags_page() -> str:
    """One table per server."""
    lines = [FOREIGN_FLAGS_HEADER]
    for source, flags in foreign_flags().items():
        title = "Values of flags whose names are ours" if source == "values" else source
        lines += [f"## {title}\n", "| flag | here |", "|---|---|"]
        for item in flags:
            names = [*item.names, *item.variables]
            lines.append(f"| {', '.join(f'`{name}`' for name in names)} | {_foreign_answer(item)} |")
        lines.append("")
    lines += [SPECULATIVE_FIELDS_HEADER, "| field | here |", "|---|---|"]
    for name, (accepted, reason) in IGNORED_SPECULATIVE_FIELDS.items():
        values = " or ".join(f"`{json.dumps(value)}`" for value in accepted)
        condition = f", if it is {values}" if values else ""
        lines.append(f"| `{name}` | taken without effect{condition}: {_with_flags(reason)} |")
    return "\n".join([*lines, ""])


def _with_flags(text: str) -> str:
    """Flags as code."""
    return re.sub(r"(?<![\w`-])(--[a-z][a-z-]*\w)", r"`\1`", text)


def _foreign_answer(item: ForeignFlag) -> str:
    parts = []
    if item.refused:
        parts.append(f"refused: {_with_flags(item.refused)}")
    if item.ours:
        parts.append(f"`{item.ours}`" + (f"; {_with_flags(item.note)}" if item.note else ""))
    if item.none and item.ours:
        parts.append(f"on a server without effect: {_with_flags(item.none)}")
    elif item.none or item.always:
        kind = "always" if item.always else "without effect"
        only = f", if it is {' or '.join(f'`{value}`' for value in item.only)}" if item.only else ""
        parts.append(f"{kind}{only}: {_with_flags(item.none or item.always)}")
    if item.reads == "number":
        parts.append("with units, such as `8k` or `8K`")
    parts += [
        f"`{value}` is {f'`{words}`' if words else 'the default'}" for value, words in item.values.items()
    ]
    return "; ".join(parts)


def metrics_page() -> str:
    """Tables of the metrics that always exist, of those of images, and of those of speculation."""
    sections = {
        METRICS_HEADER: [row for row in CATALOG if not (row.speculative or row.multimodal or row.of_loads)],
        LOADS_HEADER: [row for row in CATALOG if row.of_loads],
        IMAGES_HEADER: [row for row in CATALOG if row.multimodal],
        SPECULATION_HEADER: [row for row in CATALOG if row.speculative and not row.predictive],
        PREDICTION_HEADER: [row for row in CATALOG if row.predictive],
    }
    lines = [line for header, rows in sections.items() for line in (header, *_metrics(rows))]
    vllm = [f"| `{row.name}` | `{row.source}`{_over(row)} |" for row in VLLM_METRICS]
    return "\n".join([*lines, VLLM_HEADER.rstrip("\n"), *vllm]) + "\n"


def fields_page() -> str:
    """One table per body; a field is in the first that has it."""
    lines, listed = [FIELDS_HEADER], set[int]()
    for title, table in FIELDS.items():
        lines += [f"## {title}\n", "| field | of | accepted | instead of other values |", "|---|---|---|---|"]
        rows = {name: row for name, row in table.items() if id(row) not in listed}
        lines += [_peer_field(name, row) for name, row in rows.items()]
        listed |= {id(row) for row in rows.values()}
        lines.append("")
    return "\n".join(lines)


def request_fields_page() -> str:
    """One table per body."""
    lines = [REQUEST_FIELDS_HEADER]
    for body, texts in descriptions().items():
        title = BODIES[body]
        lines += [f"## {title[0].upper()}{title[1:]}\n", "| field | meaning |", "|---|---|"]
        lines += [f"| `{name}` | {text.replace('|', '/')} |" for name, text in texts.items()]
        lines.append("")
    return "\n".join(lines)


def _peer_field(name: str, row: IgnoredField) -> str:
    values = ["any"] if row.neutral is None else [f"`{json.dumps(value)}`" for value in row.neutral]
    cells = (f"`{name}`", row.source, ", ".join(values) or "null", row.reason)
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"


def _over(row: VLLMMetric) -> str:
    """Differences in the labels of vLLM's metric."""
    parts = [f"summed over `{label}`" for label in row.summed]
    parts += [f"`{old}` is called `{new}`" for old, new in row.renamed]
    return "".join(f", {part}" for part in parts)


PAGES: Mapping[str, Any] = MappingProxyType(
    {
        "flags.md": flags_page,
        "foreign-flags.md": foreign_flags_page,
        "metrics.md": metrics_page,
        "fields.md": fields_page,
        "request-fields.md": request_fields_page,
    }
)


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
                ", ".join(
                    f"`{name}`" for name in (environment_name(item.name), item.metadata["variable"]) if name
                ),
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
