"""Every feature of a request by name: tests/test_feature_matrix.py runs each with every drafter.

`python -m tests.support.feature_matrix` writes docs/features.md from the same entries.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from foreword import StructuredOutput
from foreword.chat_formats.tools import ReasoningOptions
from foreword.config.drafters import DRAFTERS, HEAD_DRAFTERS
from tests.support.tool_checkpoint import WEATHER, call_bias, reasoning_bias

PAGE = Path(__file__).parents[2] / "docs" / "features.md"
# Others are the drafter of eagle3 with another head: tests/test_exact_mtp.py, tests/test_exact.py
DRAFTER_COLUMNS = (*(name for name in DRAFTERS if name not in ("mtp", "dflash")), "auto")
# Those of an engine with a draft model, which excludes a trained head
MODEL_DRAFTERS = tuple(name for name in DRAFTERS if name not in HEAD_DRAFTERS)
MODEL_COLUMNS = (*MODEL_DRAFTERS, "auto")

SCHEMA = {
    "type": "object",
    "properties": {
        "identifier": {"type": "integer", "minimum": 0, "maximum": 999},
        "category": {"enum": ["alpha", "beta", "gamma"]},
        "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    },
    "required": ["identifier", "category", "tags"],
    "additionalProperties": False,
}
TAG = {
    "structures": [
        {
            "begin": "<call>",
            "schema": {"type": "object", "properties": {"a": {"type": "integer"}}},
            "end": "</call>",
        }
    ],
    "triggers": ["<call>"],
}
LARK = 'start: "sum(" NUMBER ("," NUMBER)* ")"\nNUMBER: /[0-9]{1,3}/'
GBNF = 'root ::= "list:" item+ "end"\nitem ::= " " [a-f]+ ";"'
THINK_END = "the"  # a token of the tiny checkpoints: their reasoning ends where they first say it


def structured(kind: str, text: str = "", **options: Any) -> dict[str, Any]:
    return {"structured": StructuredOutput(kind, text, **options)}


def structured_with_bias(word: str) -> dict[str, Any]:
    """A constraint that begins behind a word, and a bias that lets it come soon."""
    return structured("regex", "[a-c]{3,40}x", after=word) | {"logit_bias": {262: 6.0}}


SAMPLING: Mapping[str, dict[str, Any]] = {
    "greedy (temperature 0)": {"temperature": 0.0},
    "temperature, seed": {"temperature": 1.3},
    "top_k": {"top_k": 7},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.05},
    "top_n_sigma": {"top_n_sigma": 1.0},
    "typical_p": {"typical_p": 0.7},
    "xtc_probability, xtc_threshold": {"xtc_probability": 0.5, "xtc_threshold": 0.05},
    "dry_multiplier and its kind": {"dry_multiplier": 0.8, "dry_base": 1.75, "dry_allowed_length": 1},
    "presence_penalty, frequency_penalty": {"presence_penalty": 1.5, "frequency_penalty": 0.7},
    "repetition_penalty": {"repetition_penalty": 1.3},
    "logit_bias": {"logit_bias": {65: 4.0, 66: -100.0}},
    "allowed_token_ids": {"allowed_token_ids": tuple(range(40, 140))},
    "bad_words": {"bad_words": ("e", "th")},
}
FINISH_OPTIONS: Mapping[str, dict[str, Any]] = {
    "max_tokens": {"max_tokens": 5},
    "min_tokens": {"min_tokens": 12, "stop_token_ids": tuple(range(70, 78))},
    "stop": {"stop": ("a", "Q"), "include_stop_str_in_output": True},
    "stop_token_ids": {"stop_token_ids": tuple(range(70, 90))},
    "ignore_eos": {"ignore_eos": True, "max_tokens": 60},
}
OUTPUT_OPTIONS: Mapping[str, dict[str, Any]] = {
    "n": {"n": 3},
    "logprobs": {"logprobs": 3},
    "logprob_token_ids": {"logprob_token_ids": (65, 66, 70), "logprobs": 1},
    "prompt_logprobs": {"prompt_logprobs": 2},
    "skip_special_tokens": {"skip_special_tokens": False},
    "truncate_prompt_tokens": {"truncate_prompt_tokens": 9},
    "prediction": {"prediction": "the thing in the an the er on"},
}
STRUCTURED: Mapping[str, dict[str, Any]] = {
    "JSON schema": structured("json_schema", json.dumps(SCHEMA)),
    "JSON schema without whitespace": structured("json_schema", json.dumps(SCHEMA), whitespace=False),
    "JSON object": structured("json_object"),
    "regex": structured("regex", "(ab|cd){2,9}[0-9]+(th|in)*z"),
    "choice": structured("choice", json.dumps(["the first choice", "the second choice", "another"])),
    "Lark grammar": structured("lark", LARK),
    "GBNF grammar": structured("gbnf", GBNF),
    "structural tag": structured("structural_tag", json.dumps(TAG)),
    "constraint behind reasoning": structured_with_bias(THINK_END),
}
IMAGES: Mapping[str, dict[str, Any]] = {  # tests/test_feature_matrix.py runs them with a model that sees
    "images": {"temperature": 0.0},
    "images, sampled": {"temperature": 1.0, "top_p": 0.9, "repetition_penalty": 1.05},
    "images, n": {"temperature": 0.7, "n": 3},
    "images, logprobs, prompt_logprobs": {"logprobs": 2, "prompt_logprobs": 1},
    "images, JSON schema": structured("json_schema", json.dumps(SCHEMA)),
    "images, choice": structured(
        "choice", json.dumps(["the thing in the house", "the thing in a box", "nothing"])
    ),
    "images, on_runaway: stop": {"on_runaway": "stop", "frequency_penalty": -2.0, "max_tokens": 160},
}
TOOLS = [
    WEATHER,
    {"type": "function", "function": {"name": "get_time"}},
]
REASON = ReasoningOptions(budget_tokens=9)
CALLS: dict[str, dict[str, Any]] = {  # tests/test_feature_matrix.py runs them with a model that calls
    "tools, auto": {"tools": TOOLS, "logit_bias": call_bias()},
    "tools, auto, greedy": {"tools": TOOLS, "logit_bias": call_bias(), "temperature": 0.0},
    "tools, required": {"tools": TOOLS, "tool_choice": "required"},
    "tools, one by name": {"tools": TOOLS, "tool_choice": TOOLS[0], "n": 2, "logprobs": 1},
    "tools, not parallel": {"tools": TOOLS, "parallel_tool_calls": False, "logit_bias": call_bias()},
    "tools, beside a JSON schema": {
        "tools": TOOLS,
        "logit_bias": call_bias(call=40.0),  # or the model reasons
        **structured("json_schema", json.dumps(SCHEMA)),
    },
    "reasoning": {"logit_bias": reasoning_bias()},
    "reasoning, JSON schema": {
        "logit_bias": reasoning_bias(),
        **structured("json_schema", json.dumps(SCHEMA)),
    },
    "reasoning with a budget": {"logit_bias": reasoning_bias(), "reasoning": REASON},
    "reasoning with a budget, tools, required": {
        "logit_bias": reasoning_bias(),
        "reasoning": REASON,
        "tools": TOOLS,
        "tool_choice": "required",
    },
}
PREDICTED_CALL = (
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Bonn", "days": 2}}\n</tool_call>'
)
for settings in CALLS.values():
    settings |= {"max_tokens": 120, "prediction": PREDICTED_CALL}
CHAT_ARGUMENTS = ("tools", "tool_choice", "parallel_tool_calls", "reasoning")  # arguments of LLM.chat
REPETITION: Mapping[str, dict[str, Any]] = {  # tests/test_repetition.py runs them: they take long answers
    "on_runaway: stop": {"on_runaway": "stop", "frequency_penalty": -2.0},
    "on_runaway: stop, sampled": {
        "on_runaway": "stop",
        "frequency_penalty": -2.0,
        "temperature": 0.9,
        "n": 2,
    },
    "on_runaway: stop, behind a preamble": {
        "on_runaway": "stop",
        **structured("regex", "[a-z]{20,40}(0123456789){90}z"),
    },
    "on_runaway: warn": {"on_runaway": "warn", "frequency_penalty": -2.0},
}
GROUPS: Mapping[str, Mapping[str, dict[str, Any]]] = {
    "Sampling": SAMPLING,
    "Ending": FINISH_OPTIONS,
    "Showing": OUTPUT_OPTIONS,
    "Structured output": STRUCTURED,
}
FEATURES: Mapping[str, dict[str, Any]] = {
    name: params for group in GROUPS.values() for name, params in group.items()
}

# Body fields of the HTTP API, beside the entries above.
HTTP: Mapping[str, dict[str, Any]] = {
    "stream": {"stream": True},
    "stream, n": {"stream": True, "n": 3},
    "best_of": {"best_of": 3, "n": 2},
    "echo": {"echo": True, "logprobs": 1},
    "return_token_ids": {"return_token_ids": True},
    "response_format": {
        "response_format": {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA}}
    },
}
# Of chat, Messages and Responses, whole and streamed, for the model of CALLS: arguments of
# tests/support/wires.py: Question. tests/server/apis/test_enforced.py runs them.
CONVERSATIONS: Mapping[str, dict[str, Any]] = {
    "text, stop strings": {"stop": ("th", "e")},
    "JSON schema": {"schema": SCHEMA},
    "tools, auto": {"tools": TOOLS, "logit_bias": call_bias()},
    "tools, auto, not parallel": {"tools": TOOLS, "logit_bias": call_bias(), "parallel": False},
    "tools, required": {"tools": TOOLS, "choice": "required"},
    "tools, one by name": {"tools": TOOLS, "choice": "get_time"},
    "reasoning": {"thinks": True, "logit_bias": reasoning_bias()},
    "reasoning with a budget, tools, required": {
        "thinks": True,
        "budget": 9,
        "tools": TOOLS,
        "choice": "required",
        "logit_bias": reasoning_bias(),
    },
}
EMBEDDINGS_ALONGSIDE = "embeddings in the same engine"

PAGE_HEADER = """# Features and drafters

Generated by `python -m tests.support.feature_matrix` from the entries that the tests run; do not edit.

Each row is a test: requests with its feature, each drafted by the drafter of a column, equal the
requests without speculation. *exact* means equal token ids, 64-bit logits hashes, log-probabilities, texts,
finish reasons, reasoning, tool calls and counts; over HTTP texts, token ids, reasons and usage; with
embeddings texts and vectors. Random pairs are tested too, except in the last six tables. Method:
[exactness.md](exactness.md).
"""


def render_page() -> str:
    """The table as Markdown."""
    lines = [PAGE_HEADER]
    for title, names in (
        *GROUPS.items(),
        ("Images", IMAGES),
        ("Tool calls and reasoning", CALLS),
        ("Repetition", REPETITION),
        ("Over HTTP", HTTP),
        ("Conversations over HTTP: chat, Messages and Responses", CONVERSATIONS),
        ("Other work", {EMBEDDINGS_ALONGSIDE: {}}),
    ):
        lines.append(
            f"\n## {title}\n\n| | {' | '.join(f'`{column}`' for column in DRAFTER_COLUMNS)} |"
            f"\n|---|{'---|' * len(DRAFTER_COLUMNS)}"
        )
        lines += [f"\n| {name} | {' | '.join(['exact'] * len(DRAFTER_COLUMNS))} |" for name in names]
        lines.append("\n")
    return "".join(lines)


if __name__ == "__main__":
    PAGE.write_text(render_page())
