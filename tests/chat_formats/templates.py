"""Chat templates of all families, as small as they can be."""

from collections.abc import Mapping

from tests.support.tool_checkpoint import ARGUMENTS, FAMILIES, LFM2_CALL, ToolFamily, chat_template

NAME = "{{ call.function.name }}"
JSON_CALL = f'{{"name": "{NAME}", "arguments": {ARGUMENTS}}}'
PYTHON_CALL = (
    NAME + "({% for name, value in call.function.arguments | items %}{% if not loop.first %}, {% endif %}"
    "{{ name }}={{ value | tojson }}{% endfor %})"
)
ITEMS = "{% for name, value in call.function.arguments | items %}"
VALUE = "{{ value if value is string else value | tojson }}"
# Values with bare keys; @ is the quote.
BARE = (
    "{%- macro bare(value) %}"
    "{%- if value is string %}@{{ value }}@"
    "{%- elif value is mapping %}{% raw %}{{% endraw %}{% for name, item in value | items %}"
    "{% if not loop.first %},{% endif %}{{ name }}:{{ bare(item) }}{% endfor %}}"
    "{%- elif value is iterable %}[{% for item in value %}{% if not loop.first %},{% endif %}{{ bare(item) }}"
    "{% endfor %}]"
    "{%- else %}{{ value | tojson }}{% endif %}{% endmacro %}"
)
THINK = "{% if message.reasoning_content %}<think>\n{{ message.reasoning_content }}\n</think>\n\n{% endif %}"
DEEPSEEK_V3 = (
    f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{NAME}\n```json\n{ARGUMENTS}\n```<｜tool▁call▁end｜>"
)
DEEPSEEK_V31 = f"<｜tool▁call▁begin｜>{NAME}<｜tool▁sep｜>{ARGUMENTS}<｜tool▁call▁end｜>"
DSML = (
    f'<｜DSML｜invoke name="{NAME}">\n{ITEMS}<｜DSML｜parameter name="{{{{ name }}}}" '
    f'string="{{{{ (value is string) | tojson }}}}">{VALUE}</｜DSML｜parameter>\n'
    "{% endfor %}</｜DSML｜invoke>"
)
MINIMAX_VALUE = f'<parameter name="{{{{ name }}}}">{VALUE}</parameter>\n'
MINIMAX = f'<invoke name="{NAME}">\n{ITEMS}{MINIMAX_VALUE}{{% endfor %}}</invoke>'


def glm(newline: str) -> str:
    element = f"<arg_key>{{{{ name }}}}</arg_key>{newline}<arg_value>{VALUE}</arg_value>{newline}"
    return f"<tool_call>{NAME}{newline}{ITEMS}{element}{{% endfor %}}</tool_call>"


def bare(quote: str, begin: str, end: str) -> str:
    arguments = "{{ bare(call.function.arguments) }}"
    return f"{BARE.replace('@', quote)}{begin}call:{NAME}{arguments}{end}"


def with_reasoning(begin: str, end: str) -> str:
    """A content that follows reasoning in other markers than <think>."""
    reasoning = f"{begin}{{{{ message.reasoning_content }}}}{end}"
    return f"{{% if message.reasoning_content %}}{reasoning}{{% endif %}}{{{{ message.content or '' }}}}"


MORE_FAMILIES: Mapping[str, ToolFamily] = {
    "pythonic": ToolFamily(
        PYTHON_CALL,
        begin="[",
        between=", ",
        end="]",
        how="Write calls as [func_name1(name=value), func_name2()]",
        content="{% if not message.tool_calls %}{{ message.content }}{% endif %}",
    ),
    "olmo3": ToolFamily(PYTHON_CALL, begin="<function_calls>", between="\n", end="</function_calls>"),
    "mistral-call-id": ToolFamily(f"[TOOL_CALLS]{NAME}[CALL_ID]{{{{ call.id }}}}[ARGS]{ARGUMENTS}"),
    "mistral-args": ToolFamily(
        f"[TOOL_CALLS]{NAME}[ARGS]{ARGUMENTS}", content=with_reasoning("[THINK]", "[/THINK]")
    ),
    "phi4-mini": ToolFamily(JSON_CALL, begin="<|tool_call|>[", between=", ", end="]<|/tool_call|>"),
    "functiongemma": ToolFamily(bare("<escape>", "<start_function_call>", "<end_function_call>")),
    "gemma4": ToolFamily(
        bare('<|"|>', "<|tool_call>", "<tool_call|>"),
        content=with_reasoning("<|channel>thought\n", "\n<channel|>"),
    ),
    "gemma4-calls-first": ToolFamily(  # as published: earlier reasoning is left out
        bare('<|"|>', "<|tool_call>", "<tool_call|>"),
        end="{{ message.content or '' }}",
        content="{% if not message.tool_calls %}{{ message.content }}{% endif %}",
    ),
    "deepseek-v3": ToolFamily(
        DEEPSEEK_V3, begin="<｜tool▁calls▁begin｜>", between="\n", end="<｜tool▁calls▁end｜>"
    ),
    "deepseek-v3.1": ToolFamily(DEEPSEEK_V31, begin="<｜tool▁calls▁begin｜>", end="<｜tool▁calls▁end｜>"),
    "deepseek-v3.2": ToolFamily(
        DSML, begin="<｜DSML｜function_calls>\n", between="\n", end="\n</｜DSML｜function_calls>"
    ),
    "deepseek-v4": ToolFamily(
        DSML, begin="<｜DSML｜tool_calls>\n", between="\n", end="\n</｜DSML｜tool_calls>"
    ),
    "glm-4.5": ToolFamily(glm("\n"), between="\n"),
    "glm-4.7": ToolFamily(glm("")),
    "kimi-k2": ToolFamily(
        f"<|tool_call_begin|>functions.{NAME}:{{{{ loop.index0 }}}}"
        f"<|tool_call_argument_begin|>{ARGUMENTS}<|tool_call_end|>",
        begin="<|tool_calls_section_begin|>",
        end="<|tool_calls_section_end|>",
    ),
    "command-r7b": ToolFamily(
        f'{{"tool_call_id": "{{{{ loop.index0 }}}}", "tool_name": "{NAME}", "parameters": {ARGUMENTS}}}',
        begin="<|START_ACTION|>[\n",
        between=",\n",
        end="\n]<|END_ACTION|>",
        content="{% if message.reasoning_content %}<|START_THINKING|>{{ message.reasoning_content }}"
        "<|END_THINKING|>{% endif %}"
        "{% if message.content %}<|START_RESPONSE|>{{ message.content }}<|END_RESPONSE|>{% endif %}",
    ),
    "minimax-m2": ToolFamily(
        MINIMAX, begin="<minimax:tool_call>\n", between="\n", end="\n</minimax:tool_call>"
    ),
    "lfm2.5-calls-first": ToolFamily(
        LFM2_CALL.replace("'", '"'),
        begin="<|tool_call_start|>[",
        between=", ",
        end="]<|tool_call_end|>{{ message.content or '' }}",
        content="{% if not message.tool_calls %}{{ message.content }}{% endif %}",
        history=FAMILIES["lfm2.5"].history,
    ),
    "hunyuan": ToolFamily(
        JSON_CALL,
        begin="<tool_calls>[",
        between=", ",
        end="]</tool_calls>",
        how="Write calls as <tool_calls>[...]</tool_calls>",
    ),
    "apertus": ToolFamily(
        f'{{"{NAME}": {ARGUMENTS}}}',
        begin="<|tools_prefix|>[",
        between=", ",
        end="]<|tools_suffix|>",
        content=with_reasoning("<|inner_prefix|>", "<|inner_suffix|>"),
    ),
    "solar-open": ToolFamily(
        f"<|tool_call:begin|>{{{{ call.id }}}}<|tool_call:name|>{NAME}<|tool_call:args|>{ARGUMENTS}"
        "<|tool_call:end|>",
        begin="<|tool_calls|>",
        end="<|calls|>",
        content="{% if message.reasoning_content %}<|think|>{{ message.reasoning_content }}<|end|>"
        "<|begin|>assistant{% endif %}"
        "{% if message.content %}<|content|>{{ message.content }}<|end|>{% endif %}",
    ),
    "nemotron": ToolFamily(JSON_CALL, begin="<TOOLCALL>[", between=", ", end="]</TOOLCALL>"),
}
THINKING = (
    *("olmo3", "deepseek-v3", "deepseek-v3.1", "deepseek-v3.2", "deepseek-v4", "kimi-k2", "minimax-m2"),
    "hunyuan",
)
# Templates that describe tools, and leave calls to be written into the content.
WRITTEN = {
    "lfm2": "<|tool_list_start|>{{ tools | tojson }}<|tool_list_end|>",
    "granite": "Answer <|tool_call|> or <think></think><response></response>. {{ tools | tojson }}",
}
WRITTEN_TEMPLATE = (
    "{% if tools %}<|im_start|>system\n@TOOLS@<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
GPT_OSS = (
    "{% if tools %}<|start|>developer<|message|>{{ tools | tojson }}<|end|>{% endif %}"
    "{% for message in messages %}"
    "{% if message.role == 'assistant' and message.tool_calls %}"
    "{% set thought = message.thinking or message.content %}"
    "{% if message.thinking and message.content %}{{ raise_exception('thinking or content') }}{% endif %}"
    "{% if thought %}<|start|>assistant<|channel|>analysis<|message|>{{ thought }}<|end|>{% endif %}"
    "{% set call = message.tool_calls[0] %}"
    f"<|start|>assistant to=functions.{NAME}<|channel|>commentary json<|message|>{ARGUMENTS}<|call|>"
    "{% elif message.role == 'assistant' %}"
    "<|start|>assistant<|channel|>final<|message|>{{ message.content }}<|return|>"
    "{% elif message.role == 'tool' %}"
    "<|start|>functions.{{ message.name }} to=assistant<|channel|>commentary<|message|>"
    "{{ message.content | tojson }}<|end|>"
    "{% else %}<|start|>{{ message.role }}<|message|>{{ message.content }}<|end|>{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)


def _template(name: str, family: ToolFamily) -> str:
    source = chat_template(family)
    if name not in THINKING:
        return source
    content = family.content.replace("\n", "{{ '\\n' }}")
    return source.replace(content, (THINK + family.content).replace("\n", "{{ '\\n' }}"))


TEMPLATES: Mapping[str, str] = (
    {name: chat_template(name) for name in FAMILIES}
    | {name: _template(name, family) for name, family in MORE_FAMILIES.items()}
    | {name: WRITTEN_TEMPLATE.replace("@TOOLS@", text) for name, text in WRITTEN.items()}
    | {"gpt-oss": GPT_OSS}
)
