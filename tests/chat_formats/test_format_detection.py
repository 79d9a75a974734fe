"""The format of a checkpoint is found by its chat template, and proven by a round trip."""

from collections.abc import Sequence
from typing import Any

import pytest

from foreword.chat_formats.chat_format import ReasoningFormat
from foreword.chat_formats.families import FORMATS
from foreword.chat_formats.format_detection import Detection
from foreword.chat_formats.tools import Tool, ToolUse
from foreword.errors import InvalidRequest
from foreword.tokenizer.chat_processor import ChatInputProcessor, ChatTask
from foreword.tokenizer.tokenizer import Tokenizer
from tests.chat_formats.templates import TEMPLATES
from tests.support.budget import some_of
from tests.support.fakes import byte_backend, byte_tokenizer

NAMES = {  # of families, where a template's name is another
    "hermes-thinking": "hermes",
    "qwen3.5": "qwen3-coder",
    "gemma4-calls-first": "gemma4",
    "lfm2.5": "lfm2",
    "lfm2.5-calls-first": "lfm2",
}
ENDS = ("<|im_end|>", "<|call|>", "<|return|>")
TOOL = Tool("look", "Look at it.", {"type": "object", "properties": {"at": {"type": "string"}}})


def processor(template: str, tool_format: str = "auto", **attributes: Any) -> ChatInputProcessor:
    tokenizer = byte_tokenizer(template)
    for name, value in attributes.items():
        setattr(tokenizer, name, value)
    return ChatInputProcessor(tokenizer, None, 0, tool_format)


def detect(template: str, tool_format: str = "auto", **attributes: Any) -> Detection:
    return processor(template, tool_format, **attributes).detection


@pytest.mark.parametrize(
    ("name", "as_tokens"),
    some_of([(name, (n + turn) % 2 == 1) for n, name in enumerate(TEMPLATES) for turn in (0, 1)], 2),
)
def test_families_are_found_and_proven(name: str, as_tokens: bool) -> None:
    tokenizer = byte_tokenizer(TEMPLATES[name])
    if as_tokens:
        fmt = FORMATS[NAMES.get(name, name)]
        backend = byte_backend()
        backend.add_tokens([*markers_of(fmt), *(end for end in ENDS if name == "gpt-oss")])
        tokenizer = Tokenizer(backend)
        tokenizer.chat_template = TEMPLATES[name]
        ids = (backend.token_to_id(end) for end in ENDS)
        tokenizer.eos_token_ids = tuple(token_id for token_id in ids if token_id is not None)
    detection = ChatInputProcessor(tokenizer, None, 0).detection
    assert detection.format is not None, detection
    assert (detection.format.name, detection.is_proven) == (NAMES.get(name, name), True), str(detection)
    assert detection.problems == ()


def markers_of(fmt: Any) -> list[str]:
    """Texts of a record in brackets, which a model of the family has as tokens."""
    tools = fmt.tools
    texts = [part for part in (*tools.begin, *tools.call, *tools.end) if isinstance(part, str)]
    texts += [] if fmt.reasoning is None else [fmt.reasoning.begin, fmt.reasoning.end]
    return [
        text for text in texts if len(text) > 2 and text[0] in "<[" and text[-1] in ">]" and " " not in text
    ]


def test_every_family_has_a_template() -> None:
    assert {NAMES.get(name, name) for name in TEMPLATES} == FORMATS.keys() - {"generic"}


def test_template_without_tools_gets_them_described() -> None:
    template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}<|im_end|>{% endfor %}"
    ending = "{% if add_generation_prompt %}[assistant]{% endif %}"
    chat = processor(template + ending)
    assert str(chat.detection) == "generic (the chat template has no tools), proven"
    question = [{"role": "user", "content": "Where?"}]
    prompt = chat.template.render(question, tools=[TOOL])
    assert prompt.startswith("[system]") and '{"name": "look"' in prompt and "<tool_call>\n{" in prompt
    strict = "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}"
    chat = processor(strict + template + ending)
    assert chat.template.render(question, tools=[TOOL]).startswith("[user]You can call")


UNKNOWN = "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}" + (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
    "{% for call in m.tool_calls or [] %}@CALL@{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CALL_NAME = "{{ call.function.name }}"
CALL_ARGUMENTS = "{{ call.function.arguments | tojson }}"
COMPACT = f'<tool_call>{{"name": "{CALL_NAME}", "arguments": {CALL_ARGUMENTS}}}</tool_call>'
TAGGED = (
    "{% for name, value in call.function.arguments | items %}"
    "<arg name={{ name }}>{{ value if value is string else value | tojson }}</arg>{% endfor %}"
)


@pytest.mark.parametrize(
    "call",
    [
        f'<do>{{"tool": "{CALL_NAME}", "input": {CALL_ARGUMENTS}}}</do>',
        "<do>{{ {call.function.name: call.function.arguments} | tojson }}</do>",
        f"<do={CALL_NAME}>{CALL_ARGUMENTS}</do>\n",
        f"<do>{CALL_NAME}\n{TAGGED}</do>",
        "{% if loop.first %}<do>[{% endif %}"
        f'{{"tool": "{CALL_NAME}", "input": {CALL_ARGUMENTS}}}'
        "{% if loop.last %}]</do>{% else %}, {% endif %}",
        "{% if loop.first %}<all>\n{% endif %}"
        f"<do name={CALL_NAME}>\n{TAGGED}\n</do>\n"
        "{% if loop.last %}</all>{% endif %}",
        f"{{% if loop.first %}}<all>{{% endif %}}<do>{CALL_NAME}<with>{CALL_ARGUMENTS}</do>"
        "{% if loop.last %}</all>{% endif %}",
    ],
    ids=["JSON", "name as key", "name and JSON", "tagged", "array", "section of tagged", "section"],
)
def test_unknown_format_is_derived(call: str) -> None:
    detection = detect(UNKNOWN.replace("@CALL@", call))
    assert str(detection) == "derived (what the chat template writes), proven"


def test_unproven_format_is_none_and_tools_are_refused() -> None:
    # Arguments in hexadecimal: no record describes that.
    template = UNKNOWN.replace("@CALL@", f"<tool_call>{CALL_NAME} {{{{ '%x' % 255 }}}} {CALL_ARGUMENTS}x</t>")
    template = template.replace("| tojson }}x", "| tojson | replace('\"', '~') }}x")
    chat = processor(template + '{# <tool_call> "name" #}')
    assert chat.format is None and "hermes: a call:" in str(chat.detection)
    with pytest.raises(
        InvalidRequest, match=r"--tool-format NAME, such as generic; hermes: a call:"
    ) as caught:
        chat.render(ChatTask([{"role": "user", "content": "a"}], tools=ToolUse((TOOL,))))
    assert caught.value.param == "tools"
    assert chat.render(ChatTask([{"role": "user", "content": "a"}]))


PYTHONIC = (  # @VALUE@ is a value of the history
    "{% if loop.first %}[{% endif %}"
    f"{CALL_NAME}({{% for key, value in call.function.arguments | items %}}{{{{ key }}}}=@VALUE@"
    "{% if not loop.last %}, {% endif %}{% endfor %})"
    "{% if loop.last %}]{% else %}, {% endif %}"
)
SAYS_PYTHONIC = "{# Answer [func_name1(params_name1=params_value1)] #}"
SAYS_JSON = '{# <|header_start|> {"name": function name, "parameters": arguments} #}'


@pytest.mark.parametrize(
    ("call", "says", "name"),
    [
        (PYTHONIC.replace("@VALUE@", "{{ '%s' | format(value) }}"), SAYS_PYTHONIC, "pythonic"),
        (PYTHONIC.replace("@VALUE@", "{{ '%sr' | format(value) }}"), SAYS_PYTHONIC, "pythonic"),
        (PYTHONIC.replace("@VALUE@", """{{ '"%s"' | format(value) }}"""), SAYS_PYTHONIC, "pythonic"),
        (
            PYTHONIC.replace("@VALUE@{% if not loop.last %}, {% endif %}", "{{ value | tojson }}"),
            SAYS_PYTHONIC,
            "pythonic",
        ),
        (f'{{"name": "{CALL_NAME}", "parameters": {CALL_ARGUMENTS}}}', SAYS_JSON, "llama-json"),
    ],
    ids=["no quotes", "no quotes and a letter", "no escapes", "no commas", "text before JSON"],
)
def test_history_that_cannot_be_read_back_leaves_the_format_of_the_markers(
    call: str, says: str, name: str
) -> None:
    chat = processor(UNKNOWN.replace("@CALL@", call) + says)
    assert str(chat.detection).startswith(
        f"{name} (markers of the chat template), proven for parsing alone ("
    )
    assert not chat.detection.is_proven
    question = [{"role": "user", "content": "Where?"}]
    assert chat.render(ChatTask(question, tools=ToolUse((TOOL,))))


def test_template_that_iterates_over_tools_takes_none() -> None:
    """Named tool templates of older checkpoints fail where `tools` is none, as transformers pass it."""
    chat = processor(TEMPLATES["hermes"] + "{% for tool in tools %}{% endfor %}")
    assert str(chat.detection).startswith("hermes (markers of the chat template), proven;")
    assert chat.render(ChatTask([{"role": "user", "content": "Where?"}]))


def test_named_format_is_taken_without_proof() -> None:
    template = TEMPLATES["hermes"]
    assert detect(template, "none").format == FORMATS["hermes"].__class__(
        "text", reasoning=FORMATS["hermes"].reasoning
    )
    mistral = detect(template, "mistral-v3")
    assert mistral.format is not None and mistral.format.tools == FORMATS["mistral-v3"].tools
    assert not mistral.is_proven and "not proven (a call: " in str(mistral)
    unquoted = UNKNOWN.replace("@CALL@", PYTHONIC.replace("@VALUE@", "{{ value }}"))
    assert str(detect(unquoted, "pythonic")).startswith(
        "pythonic (--tool-format), proven for parsing alone ("
    )
    named = detect(template, "hermes")
    assert named.is_proven and str(named).startswith("hermes (--tool-format), proven")
    chat = processor(template, "generic")
    prompt = chat.template.render([{"role": "user", "content": "Where?"}], tools=[TOOL])
    assert chat.detection.is_proven and "You can call these tools:" in prompt and "Tools:\n" not in prompt


def test_reasoning_is_the_template_s() -> None:
    """A family's models may have other markers, or none."""
    plain = detect(UNKNOWN.replace("@CALL@", COMPACT))
    assert plain.format is not None and plain.format.name == "hermes" and plain.format.reasoning is None
    own = TEMPLATES["hermes"].replace("<think>", "<mull>").replace("</think>", "</mull>")
    derived = detect(own)
    assert derived.format is not None
    assert derived.format.reasoning == ReasoningFormat("<mull>", "</mull>", space="\n")
    no_tools = "{% for m in messages %}{{ m.content }}{% endfor %}<think></think><|im_end|>"
    assert detect(no_tools, "none").format is not None


def test_marker_of_content_and_reasoning_alike_tells_neither() -> None:
    """Messages that name their receiver: the answer was taken for reasoning."""
    named = (
        "{% for m in messages %}<|im_start|>{{ m.role }}"
        "{% if m.reasoning_content %} to=self<|message|>{{ m.reasoning_content }}<|eom|>"
        "<|im_start|>assistant{% endif %} to=user<|message|>{{ m.content }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant{% endif %}"
    )
    found = detect(named).format
    assert found is None or found.reasoning is None


def test_checkpoint_s_response_template_comes_first() -> None:
    described = {
        "start_anchor": "<|im_start|>assistant\n",
        "fields": {
            "thinking": {"open": "<think>", "close": "</think>"},
            "tool_calls": {
                "open": "<tool_call>",
                "close": "</tool_call>",
                "repeats": True,
                "content": "json",
                "transform": {"type": "function", "function": "{content}"},
            },
            "content": {"close": "<|im_end|>"},
        },
    }
    template = UNKNOWN.replace("@CALL@", COMPACT)
    detection = detect(template, response_template=described)
    assert str(detection).startswith("response_template (tokenizer_config.json), proven")
    wrong = {**described, "fields": {**described["fields"]}}
    wrong["fields"]["tool_calls"] = {**described["fields"]["tool_calls"], "open": "<call>"}
    detection = detect(TEMPLATES["hermes"], response_template=wrong)
    assert str(detection).startswith("hermes (markers of the chat template), proven")


def test_template_that_writes_values_as_python_does_is_proven() -> None:
    template = TEMPLATES["qwen3-coder"].replace("value if value is string else value | tojson", "value")
    assert detect(template).is_proven


LFM2_TOKENS = ("<|tool_call_start|>", "<|tool_call_end|>", "<think>", "</think>")


def detect_with_tokens(template: str, tokens: Sequence[str]) -> Detection:
    backend = byte_backend()
    backend.add_tokens(list(tokens))
    tokenizer = Tokenizer(backend)
    tokenizer.chat_template, tokenizer.eos_token_ids = template, (backend.token_to_id("<|im_end|>"),)
    return ChatInputProcessor(tokenizer, None, 0).detection


def test_token_of_the_vocabulary_names_the_family() -> None:
    """LFM2.5's first templates describe tools, and have no marker of a call."""
    template = UNKNOWN.replace("@CALL@", "")
    assert detect(template).format is None
    detection = detect_with_tokens(template, LFM2_TOKENS)
    assert str(detection) == "lfm2 (a token of the vocabulary), proven"


def test_end_of_reasoning_in_the_template_is_a_marker_of_the_family() -> None:
    """LFM2.5-Thinking's template removes reasoning from the history, and writes none."""
    template = UNKNOWN.replace("@CALL@", "").replace(
        "m.content or ''", "(m.content or '').split('</think>')[-1]"
    )
    detection = detect_with_tokens(template, LFM2_TOKENS)
    assert detection.format is not None
    assert detection.format.reasoning == ReasoningFormat("<think>", "</think>")
    assert (detection.format.name, detection.is_proven) == ("lfm2", True)


def test_lfm2_template_that_renders_json_calls_is_derived() -> None:
    array = (
        "{% if loop.first %}<|tool_call_start|>[{% else %}, {% endif %}"
        f'{{"name": "{CALL_NAME}", "arguments": {CALL_ARGUMENTS}}}'
        "{% if loop.last %}]<|tool_call_end|>{% endif %}"
    )
    detection = detect_with_tokens(
        UNKNOWN.replace("@CALL@", array) + "{# <|tool_list_start|> #}", LFM2_TOKENS
    )
    assert str(detection) == "derived (what the chat template writes), proven"
