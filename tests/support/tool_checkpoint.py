"""Tiny random checkpoints that call tools: the vocabulary has a family's markers as tokens, and the chat
template renders tools, calls, results and reasoning.

Nothing is trained. Calls happen under tool_choice "required", or with `call_bias`, which makes the marker
of a call and the end of the answer likely under "auto"; the grammar then forces the rest of each call.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tests.support import checkpoints
from tests.support.checkpoints import EOS, write_checkpoint, write_json

MARKERS_SIZE = 32  # rows of the vocabulary for markers
END_OF_TURN = 259  # <|im_end|>
FIRST_MARKER = 270  # behind the tokens of tests/support/checkpoints.py
SYSTEM = (
    "{%- if tools %}<|im_start|>system\n"
    "{% if messages[0].role == 'system' %}{{ messages[0].content }}\n\n{% endif %}"
    "Tools:\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}@HOW@<|im_end|>\n"
    "{%- elif messages[0].role == 'system' %}<|im_start|>system\n{{ messages[0].content }}<|im_end|>\n"
    "{%- endif %}"
)
# @CALL@ writes the `call` of a message, @RESULT@ the result in `message`.
MESSAGES = (
    "{%- for message in messages %}"
    "{%- if message.role == 'assistant' %}<|im_start|>assistant\n"
    "@REASONING@"
    "@CONTENT@"
    "{%- if message.tool_calls %}@BEGIN@{% for call in message.tool_calls %}"
    "{% if not loop.first %}@BETWEEN@{% endif %}@CALL@{% endfor %}@END@{% endif %}<|im_end|>\n"
    "{%- elif message.role == 'tool' %}<|im_start|>user\n@RESULT@<|im_end|>\n"
    "{%- elif not (loop.first and message.role == 'system') %}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n@OPEN@{%- endif %}"
)
REASONING = (
    "{% if message.reasoning_content %}<think>\n{{ message.reasoning_content }}\n</think>\n\n{% endif %}"
)
NO_THINKING = "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
THINKING = NO_THINKING.replace("{% endif %}", "{% else %}<think>\n{% endif %}")
RESULT = "<tool_response>\n{{ message.content }}\n</tool_response>"
ARGUMENTS = (
    "{{ call.function.arguments if call.function.arguments is string else call.function.arguments | tojson }}"
)
XML_ARGUMENTS = (
    "{% for name, value in call.function.arguments | items %}<parameter={{ name }}>\n"
    "{{ value if value is string else value | tojson }}\n</parameter>\n{% endfor %}"
)
# LFM2.5 writes strings of the history without escapes; other values but mappings as Python does.
LFM2_CALL = (
    "{{ call.function.name }}({% for name, value in call.function.arguments | items %}"
    "{% if not loop.first %}, {% endif %}{{ name }}={% if value is string %}'{{ value }}'"
    "{% elif value is mapping %}{{ value | tojson }}{% else %}{{ value }}{% endif %}{% endfor %})"
)


@dataclass(frozen=True, slots=True)
class ToolFamily:
    """How a family writes calls: parts of its chat template, and its markers."""

    call: str
    markers: tuple[str, ...] = ()
    begin: str = ""
    between: str = ""
    end: str = ""
    how: str = ""  # in the system message
    reasoning: str = ""  # at the start of an answer
    special: bool = False  # markers are special tokens
    opener: str | None = None  # the marker that begins a call
    content: str = "{{ message.content or '' }}"
    turn: str = "<|im_start|>"  # before each message
    history: str | None = None  # reasoning of earlier answers; None: REASONING where <think> is a marker


HERMES_CALL = (
    '<tool_call>\n{"name": "{{ call.function.name }}", "arguments": ' + ARGUMENTS + "}\n</tool_call>"
)
HERMES = ToolFamily(
    HERMES_CALL,
    ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"),
    begin="{% if message.content %}\n{% endif %}",
    between="\n",
    how='Write a call as <tool_call>\n{"name": NAME, "arguments": ARGUMENTS}\n</tool_call>',
    reasoning=NO_THINKING,
    opener="<tool_call>",
)
QWEN3_CODER = ToolFamily(
    "<tool_call>\n<function={{ call.function.name }}>\n" + XML_ARGUMENTS + "</function>\n</tool_call>",
    HERMES.markers,
    begin=HERMES.begin,
    between="\n",
    how="Write a call as <tool_call>\n<function=NAME>\n<parameter=KEY>\nVALUE\n</parameter>\n"
    "</function>\n</tool_call>",
    reasoning=NO_THINKING,
    opener="<tool_call>",
)
FAMILIES: Mapping[str, ToolFamily] = {
    "hermes": HERMES,
    "hermes-thinking": ToolFamily(  # the prompt opens the reasoning, as of Qwen3-Thinking and QwQ
        HERMES.call,
        HERMES.markers,
        HERMES.begin,
        HERMES.between,
        "",
        HERMES.how,
        THINKING,
        False,
        HERMES.opener,
    ),
    "qwen3-coder": QWEN3_CODER,
    "qwen3.5": replace(  # the prompt opens the reasoning, and each answer of the history has its markers
        QWEN3_CODER,
        begin="{% if message.content %}\n\n{% endif %}",
        reasoning=THINKING,
        history="<think>\n{{ message.reasoning_content or '' }}\n</think>\n\n",
    ),
    "lfm2.5": ToolFamily(
        LFM2_CALL,
        ("<|tool_call_start|>", "<|tool_call_end|>", "<think>", "</think>"),
        begin="<|tool_call_start|>[",
        between=", ",
        end="]<|tool_call_end|>",
        special=True,
        opener="<|tool_call_start|>",
        history="{% if message.thinking is defined %}<think>{{ message.thinking }}</think>{% endif %}",
    ),
    "mistral-v3": ToolFamily(
        '{"name": "{{ call.function.name }}", "arguments": ' + ARGUMENTS + ', "id": "{{ call.id }}"}',
        ("[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
        begin="[TOOL_CALLS][",
        between=", ",
        end="]",
        special=True,
        opener="[TOOL_CALLS]",
    ),
    "llama-json": ToolFamily(
        '{"name": "{{ call.function.name }}", "parameters": ' + ARGUMENTS + "}",
        ("<|python_tag|>", "<|start_header_id|>"),
        how='Write a call as {"name": NAME, "parameters": ARGUMENTS}',
        special=True,
        content="{% if not message.tool_calls %}{{ message.content }}{% endif %}",
        turn="<|start_header_id|>",
    ),
}
WEATHER: Mapping[str, Any] = {  # a tool of chat whose arguments are short
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 8},
                "days": {"type": "integer", "minimum": 0, "maximum": 14},
                "unit": {"enum": ["celsius", "fahrenheit"]},
            },
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


def write_tool_checkpoint(
    path: Path, family: str = "hermes", seed: int = 1, model_type: str = "llama", **overrides: Any
) -> Path:
    """A model with random weights that calls tools in the format of `family`.

    overrides  options of config.json, and `dtype`, as of write_checkpoint()
    """
    sizes = {"vocab_size": checkpoints.VOCAB_SIZE + MARKERS_SIZE, "max_position_embeddings": 4096}
    write_checkpoint(path, model_type, seed, **{**sizes, **overrides})
    write_tool_tokenizer(path, family)
    return path


def write_tool_tokenizer(path: Path, family: str = "hermes") -> None:
    """tokenizer.json, tokenizer_config.json and generation_config.json of such a checkpoint."""
    described = FAMILIES[family]
    checkpoints.write_tokenizer(path, template=chat_template(family))
    backend = checkpoints.tokenizer()
    add = backend.add_special_tokens if described.special else backend.add_tokens
    add(list(described.markers))
    backend.save(str(path / "tokenizer.json"))
    write_json(path / "generation_config.json", {"bos_token_id": 256, "eos_token_id": [EOS, END_OF_TURN]})


def marker_id(text: str, family: str = "hermes") -> int:
    return FIRST_MARKER + FAMILIES[family].markers.index(text)


def call_bias(family: str = "hermes", call: float = 12.0, end: float = 6.0) -> dict[int, float]:
    """`logit_bias` under which a model that may call does so, and also ends its answer."""
    opener = FAMILIES[family].opener
    assert opener is not None, f"{family} has no marker of a call"
    return {marker_id(opener, family): call, END_OF_TURN: end}


def reasoning_bias(begin: float = 12.0, end: float = 8.0) -> dict[int, float]:
    """`logit_bias` under which a model of the family hermes begins to reason, and stops."""
    return {marker_id("<think>"): begin, marker_id("</think>"): end}


def chat_template(family: str | ToolFamily) -> str:
    described = FAMILIES[family] if isinstance(family, str) else family
    history = described.history
    if history is None:
        history = REASONING if "<think>" in described.markers else ""
    parts = {
        "HOW": described.how,
        "BEGIN": described.begin,
        "BETWEEN": described.between,
        "CALL": described.call,
        "END": described.end,
        "RESULT": RESULT,
        "REASONING": history,
        "CONTENT": described.content,
        "OPEN": described.reasoning,
    }
    template = SYSTEM + MESSAGES
    for name, text in parts.items():
        template = template.replace(f"@{name}@", text)
    template = template.replace("<|im_start|>", described.turn)
    return template.replace("\n", "{{ '\\n' }}")  # Jinja drops line breaks behind its tags
