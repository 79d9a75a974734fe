"""The chat formats of all families that Foreword knows, by name."""

from __future__ import annotations

from typing import Final

from foreword.chat_formats.chat_format import ChatFormat, ReasoningFormat, ToolFormat
from foreword.chat_formats.parts.json import JsonArguments, JsonCall
from foreword.chat_formats.parts.keywords import BareArguments, PythonArguments
from foreword.chat_formats.parts.part import SPACE, CallId, Header, Name, NameInId, Part
from foreword.chat_formats.parts.tagged import TaggedArguments

THINK: Final = ReasoningFormat("<think>", "</think>")
COMMA: Final = (",", " ")
ID_9: Final = "[a-zA-Z0-9]{9}"

HERMES_CALL: Final = ToolFormat(("<tool_call>", "\n", JsonCall(), "\n", "</tool_call>"))
PYTHON_CALL: Final = (Name(), "(", PythonArguments(), ")")
XML_CALL: Final = (
    "<function=",
    Name(),
    ">",
    "\n",
    TaggedArguments("<parameter=", ">", "</parameter>", padding="\n"),
    "</function>",
)


def _json_array(begin: str, end: str | None, call: Part) -> ToolFormat:
    """Calls as an array behind a marker."""
    closer = (SPACE, end) if end is not None else ()
    return ToolFormat((call,), (begin, SPACE, "["), COMMA, ("]", *closer))


def _python_list(begin: str, end: str) -> ToolFormat:
    return ToolFormat(PYTHON_CALL, (begin, SPACE, "["), COMMA, ("]", SPACE, end))


KIMI_CALL: Final = (
    "<|tool_call_begin|>",
    NameInId("functions.", ":", "[0-9]+"),
    "<|tool_call_argument_begin|>",
    JsonArguments(),
    "<|tool_call_end|>",
)
MISTRAL_V3_CALLS: Final = _json_array("[TOOL_CALLS]", None, JsonCall(id_key="id", id_pattern=ID_9))
MISTRAL_CALL_WITH_ID: Final = ToolFormat(
    ("[TOOL_CALLS]", Name(), "[CALL_ID]", CallId(ID_9), "[ARGS]", JsonArguments())
)
MISTRAL_CALL: Final = ToolFormat(("[TOOL_CALLS]", Name(), "[ARGS]", JsonArguments()))


def _deepseek(*call: Part) -> ToolFormat:
    """Calls of DeepSeek V3 to V3.1, in a section of markers."""
    return ToolFormat(
        ("<｜tool▁call▁begin｜>", *call, "<｜tool▁call▁end｜>"),
        ("<｜tool▁calls▁begin｜>",),
        ("\n",) if "function" in call else (),
        ("<｜tool▁calls▁end｜>",),
    )


DEEPSEEK_V3_CALLS: Final = _deepseek(
    "function",
    "<｜tool▁sep｜>",
    Name(),
    "\n",
    "```json",
    "\n",
    JsonArguments(),
    "\n",
    "```",
)
DEEPSEEK_V31_CALLS: Final = _deepseek(Name(), "<｜tool▁sep｜>", JsonArguments())


def _dsml(name: str, section: str) -> ChatFormat:
    """Elements of DeepSeek V3.2 and later."""
    invoke = (
        '<｜DSML｜invoke name="',
        Name(),
        '">',
        "\n",
        TaggedArguments('<｜DSML｜parameter name="', '"', "</｜DSML｜parameter>", types_in_tag=True),
        "</｜DSML｜invoke>",
    )
    return ChatFormat(
        name,
        ToolFormat(
            invoke,
            (f"<｜DSML｜{section}>", "\n"),
            ("\n",),
            ("\n", f"</｜DSML｜{section}>"),
        ),
        also=(ToolFormat(invoke),),  # the section is left out at times
        reasoning=ReasoningFormat("<think>", "</think>", space="", ended_by_call=True),
        inner_tokens=("｜DSML｜",),
        template_markers=("｜DSML｜", section),
    )


def _glm(name: str, newline: str, *template_markers: str) -> ChatFormat:
    arguments = TaggedArguments(
        "<arg_key>", "</arg_key>", "</arg_value>", value_begin="<arg_value>", between=newline
    )
    return ChatFormat(
        name,
        ToolFormat(("<tool_call>", Name(), newline, arguments, "</tool_call>")),
        reasoning=ReasoningFormat("<think>", "</think>", ended_by_call=True),
        template_markers=("<arg_key>", "</arg_value>", *template_markers),
    )


def _harmony_call(*begin: Part) -> ToolFormat:
    return ToolFormat(
        (*begin, Header(" <|constrain|>json"), "<|message|>", JsonArguments(), "<|call|>"),
        opens_answer=begin[0] == "to=functions.",
    )


_ALL: Final = (
    ChatFormat("hermes", HERMES_CALL, reasoning=THINK, template_markers=("<tool_call>", '"name"')),
    ChatFormat(
        "qwen3-coder",
        ToolFormat(("<tool_call>", "\n", *XML_CALL, "\n", "</tool_call>")),
        also=(ToolFormat(XML_CALL),),  # the opener is left out at times
        reasoning=ReasoningFormat("<think>", "</think>", ended_by_call=True),
        template_markers=("<function=", "<parameter="),
    ),
    ChatFormat(
        "llama-json",
        ToolFormat((JsonCall(arguments_key="parameters"),), opens_answer=True),
        also=(
            ToolFormat(("<|python_tag|>", JsonCall(arguments_key="parameters")), separator=(";",)),
            ToolFormat(("<|python_tag|>", Name(), ".call(", PythonArguments(), ")")),
        ),
        template_markers=("header_", '"parameters"'),  # <|start_header_id|>, <|header_start|>
    ),
    ChatFormat(
        "pythonic",
        ToolFormat(PYTHON_CALL, ("[",), COMMA, ("]",), opens_answer=True),
        also=(_python_list("<|python_start|>", "<|python_end|>"),),
        template_markers=("[func_name1(",),
    ),
    ChatFormat(
        "olmo3",
        ToolFormat(PYTHON_CALL, ("<function_calls>",), ("\n",), ("</function_calls>",)),
        reasoning=THINK,
        template_markers=("<function_calls>", "</function_calls>"),
    ),
    ChatFormat(
        "mistral-v3",
        MISTRAL_V3_CALLS,
        template_markers=("[TOOL_CALLS]", '"id"'),
    ),
    ChatFormat(
        "mistral-call-id",
        MISTRAL_CALL_WITH_ID,
        also=(MISTRAL_CALL,),
        template_markers=("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
    ),
    ChatFormat(
        "mistral-args",
        MISTRAL_CALL,
        also=(MISTRAL_CALL_WITH_ID,),
        reasoning=ReasoningFormat("[THINK]", "[/THINK]", space=""),
        template_markers=("[TOOL_CALLS]", "[ARGS]"),
    ),
    ChatFormat(
        "phi4-mini",
        _json_array("<|tool_call|>", "<|/tool_call|>", JsonCall()),
        also=(ToolFormat((JsonCall(),), ("functools[",), COMMA, ("]",)),),
        template_markers=("<|tool_call|>", "<|/tool_call|>"),
    ),
    ChatFormat(
        "functiongemma",
        ToolFormat(
            (
                "<start_function_call>",
                "call:",
                Name(),
                "{",
                BareArguments("<escape>"),
                "}",
                "<end_function_call>",
            )
        ),
        template_markers=("<start_function_call>", "<escape>"),
    ),
    ChatFormat(
        "gemma4",
        ToolFormat(("<|tool_call>", "call:", Name(), "{", BareArguments('<|"|>'), "}", "<tool_call|>")),
        reasoning=ReasoningFormat("<|channel>thought", "<channel|>"),
        inner_tokens=("<|channel>",),
        template_markers=("<|tool_call>", "<tool_call|>"),
    ),
    ChatFormat(
        "deepseek-v3",
        DEEPSEEK_V3_CALLS,
        also=(DEEPSEEK_V31_CALLS,),
        reasoning=THINK,
        template_markers=("<｜tool▁calls▁begin｜>", "```json"),
    ),
    ChatFormat(
        "deepseek-v3.1",
        DEEPSEEK_V31_CALLS,
        also=(DEEPSEEK_V3_CALLS,),
        reasoning=ReasoningFormat("<think>", "</think>", space=""),
        template_markers=("<｜tool▁calls▁begin｜>",),
    ),
    _dsml("deepseek-v3.2", "function_calls"),
    _dsml("deepseek-v4", "tool_calls"),
    _glm("glm-4.5", "\n"),
    _glm("glm-4.7", ""),
    ChatFormat(
        "kimi-k2",
        ToolFormat(KIMI_CALL, ("<|tool_calls_section_begin|>",), (), ("<|tool_calls_section_end|>",)),
        also=(ToolFormat(KIMI_CALL),),  # the section is left out at times
        reasoning=ReasoningFormat("<think>", "</think>", space="", ended_by_call=True),
        template_markers=("<|tool_calls_section_begin|>",),
    ),
    ChatFormat(
        "lfm2",
        _python_list("<|tool_call_start|>", "<|tool_call_end|>"),
        also=(ToolFormat(("<|tool_call_start|>", *PYTHON_CALL, "<|tool_call_end|>")),),
        reasoning=THINK,
        template_markers=("<|tool_", "_start|>"),  # <|tool_list_start|>, in LFM2.5 <|tool_call_start|>
    ),
    ChatFormat(
        "granite",
        _json_array("<|tool_call|>", None, JsonCall()),
        also=(_json_array("<tool_call>", None, JsonCall()),),
        reasoning=ReasoningFormat("<think>", "</think>", space=""),
        content=("<response>", "</response>"),
        template_markers=("<|tool_call|>", "<response>"),
    ),
    ChatFormat(
        "command-r7b",
        _json_array(
            "<|START_ACTION|>",
            "<|END_ACTION|>",
            JsonCall("tool_name", "parameters", "tool_call_id", "[0-9]+", id_first=True, id_is_local=True),
        ),
        reasoning=ReasoningFormat("<|START_THINKING|>", "<|END_THINKING|>", space=""),
        content=("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
        template_markers=("<|START_ACTION|>", "tool_call_id"),
    ),
    ChatFormat(
        "minimax-m2",
        ToolFormat(
            (
                '<invoke name="',
                Name(),
                '">',
                "\n",
                TaggedArguments('<parameter name="', '">', "</parameter>"),
                "</invoke>",
            ),
            ("<minimax:tool_call>", "\n"),
            ("\n",),
            ("\n", "</minimax:tool_call>"),
        ),
        reasoning=THINK,
        template_markers=("<minimax:tool_call>",),
    ),
    ChatFormat(
        "hunyuan",
        _json_array("<tool_calls>", "</tool_calls>", JsonCall()),
        reasoning=THINK,
        content=("<answer>", "</answer>"),  # which its templates do not write
        template_markers=("<tool_calls>[", "<think>"),
    ),
    ChatFormat(
        "apertus",
        ToolFormat(
            ('{"', Name(), '":', SPACE, JsonArguments(), "}"),
            ("<|tools_prefix|>", "["),
            COMMA,
            ("]", "<|tools_suffix|>"),
        ),
        reasoning=ReasoningFormat("<|inner_prefix|>", "<|inner_suffix|>", space="", ended_by_call=True),
        template_markers=("<|tools_prefix|>", "<|inner_prefix|>"),
    ),
    ChatFormat(
        "solar-open",
        ToolFormat(
            (
                "<|tool_call:begin|>",
                CallId("[a-z0-9]{1,10}"),
                "<|tool_call:name|>",
                Name(),
                "<|tool_call:args|>",
                JsonArguments(),
                "<|tool_call:end|>",
            ),
            ("<|tool_calls|>",),
            (),
        ),
        reasoning=ReasoningFormat("<|think|>", "<|end|>", space=""),
        content=("<|content|>", "<|end|>"),
        dropped=("<|begin|>assistant", "<|calls|>"),
        inner_tokens=("<|begin|>",),
        template_markers=("<|tool_calls|>", "<|tool_call:args|>"),
    ),
    ChatFormat(
        "nemotron",
        _json_array("<TOOLCALL>", "</TOOLCALL>", JsonCall()),
        reasoning=THINK,
        template_markers=("<TOOLCALL>",),
    ),
    ChatFormat(
        "gpt-oss",
        _harmony_call("<|channel|>commentary to=functions.", Name()),
        also=(
            # the recipient in the header of the role, with any channel, or in the channel of reasoning
            _harmony_call("<|start|>assistant to=functions.", Name(), "<|channel|>"),
            _harmony_call("<|channel|>analysis to=functions.", Name()),
            _harmony_call("to=functions.", Name(), "<|channel|>"),
        ),
        reasoning=ReasoningFormat("<|channel|>analysis<|message|>", "<|end|>", space="", ended_by_call=True),
        content=("<|channel|>final<|message|>", "<|end|>"),
        dropped=(
            "<|start|>assistant",
            "<|channel|>commentary<|message|>",
            "<|channel|>final <|constrain|>json<|message|>",
            "<|return|>",
        ),
        inner_tokens=("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"),
        template_markers=("<|channel|>", "<|call|>"),
    ),
    # For templates without tools: a system text asks for this form.
    ChatFormat("generic", HERMES_CALL, reasoning=THINK),
)

FORMATS: Final = {fmt.name: fmt for fmt in _ALL}
