"""Chat templates of models that see, as transformers renders them."""

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from foreword.errors import InvalidRequest, Unsupported
from foreword.tokenizer.chat_template import ChatTemplate
from foreword.tokenizer.messages import IMAGE_PART
from foreword.tokenizer.tokenizer import Tokenizer
from tests.support.fakes import CHATML, byte_backend
from tests.support.tokenizer_builders import write_checkpoint

NAMES = {"bos_token": "<|bos|>", "eos_token": "<|eos|>"}
# As LLaVA's: loops over parts of each type, images first; drops content that is a text.
IMAGES_FIRST = """{% for message in messages %}
{% if message['role'] != 'system' %}{{ message['role'].upper() + ': ' }}{% endif -%}
{% for part in message['content'] | selectattr('type', 'equalto', 'image') %}{{ '<image>\\n' }}{% endfor -%}
{% if message['role'] == 'assistant' %}
{%- for part in message['content'] | selectattr('type', 'equalto', 'text') %}{% generation %}{{ part['text'] + ' ' }}\
{% endgeneration %}{% endfor %}
{%- else %}
{%- for part in message['content'] | selectattr('type', 'equalto', 'text') %}{{ part['text'] + ' ' }}{% endfor %}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"""  # noqa: E501
# As LLaVA-NeXT's on Mistral: instructions, images in place.
INSTRUCTIONS = """{%- for message in messages -%}
{%- if message['role'] == 'user' -%}
{{- '[INST] ' -}}
{%- for part in message['content'] -%}
{%- if part['type'] == 'image' -%}{{- '<image>\\n' -}}{%- elif part['type'] == 'text' -%}{{- part['text'] -}}{%- endif -%}
{%- endfor -%}
{{- ' [/INST]' -}}
{%- else -%}
{%- for part in message['content'] if part['type'] == 'text' -%}{{- ' ' + part['text'] | trim + eos_token -}}{%- endfor -%}
{%- endif -%}
{%- endfor -%}"""  # noqa: E501
# As Qwen's: texts or parts, images counted, with names on request.
COUNTED = """{%- set seen = namespace(pictures=0) -%}
{%- for message in messages -%}
{%- if loop.first and message.role != 'system' -%}<|im_start|>system\nBe helpful.<|im_end|>\n{% endif -%}
<|im_start|>{{ message.role }}\n{% if message.content is string -%}
{{ message.content }}<|im_end|>\n{% else -%}
{%- for part in message.content -%}
{%- if part.type == 'image' or 'image' in part or 'image_url' in part -%}
{%- set seen.pictures = seen.pictures + 1 -%}
{%- if add_vision_id is defined and add_vision_id -%}Picture {{ seen.pictures }}: {% endif -%}
<image>
{%- elif 'text' in part -%}{{ part.text }}
{%- endif -%}
{%- endfor -%}<|im_end|>\n{% endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant\n{% endif -%}"""
SHOWN = [{"role": "user", "content": [IMAGE_PART, {"type": "text", "text": "What is it?"}]}]
TURNS: list[dict[str, Any]] = [
    *[{"role": "system", "content": [{"type": "text", "text": "Look."}]}, *SHOWN],
    {"role": "assistant", "content": [{"type": "text", "text": "A cat."}]},
    {
        "role": "user",
        "content": [
            {"type": "text", "text": "And"},
            IMAGE_PART,
            IMAGE_PART,
            {"type": "text", "text": "these?"},
        ],
    },
]
OPEN = [*SHOWN, {"role": "assistant", "content": [{"type": "text", "text": "It is a"}]}]
TEMPLATES = {"images first": IMAGES_FIRST, "instructions": INSTRUCTIONS, "counted": COUNTED}


@pytest.fixture(params=TEMPLATES.values(), ids=TEMPLATES)
def both(request: Any, tmp_path: Path) -> tuple[ChatTemplate, Any]:
    write_checkpoint(tmp_path, byte_backend(), {**NAMES, "chat_template": request.param})
    return ChatTemplate.from_tokenizer(
        Tokenizer.from_directory(tmp_path), "<image>"
    ), AutoTokenizer.from_pretrained(tmp_path)


@pytest.mark.parametrize("messages", [SHOWN, TURNS, OPEN], ids=["one", "turns", "open"])
@pytest.mark.parametrize("options", [{}, {"add_vision_id": True}], ids=["bare", "named"])
def test_render_equals_transformers(both: tuple[ChatTemplate, Any], messages: Any, options: Any) -> None:
    ours, theirs = both
    plain = [{**message, "content": [dict(part) for part in message["content"]]} for message in messages]
    for generation in (True, False):
        expected = theirs.apply_chat_template(
            plain, tokenize=False, add_generation_prompt=generation, **options
        )
        assert ours.render(messages, add_generation_prompt=generation, options=options) == expected
        assert expected.count("<image>") == sum(message["content"].count(IMAGE_PART) for message in messages)


def test_continue_final_message_equals_transformers(both: tuple[ChatTemplate, Any]) -> None:
    ours, theirs = both
    plain = [{**message, "content": [dict(part) for part in message["content"]]} for message in OPEN]
    expected = theirs.apply_chat_template(plain, tokenize=False, continue_final_message=True)
    assert ours.render(OPEN, add_generation_prompt=False, continue_final_message=True) == expected
    assert expected.rstrip().endswith("It is a")


def test_text_content_equals_a_text_part(both: tuple[ChatTemplate, Any]) -> None:
    """Templates that iterate over parts would drop plain texts."""
    ours, _ = both
    alone, listed = (
        [{"role": "user", "content": "Hi"}],
        [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}],
    )
    assert ours.render(alone) == ours.render(listed) and "Hi" in ours.render(alone)


def test_text_template_gets_placeholders_in_place() -> None:
    template = ChatTemplate(CHATML, {}, "<image>")
    assert (
        template.render(TURNS[-1:])
        == "<|im_start|>user\nAnd\n<image>\n<image>\nthese?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_template_that_prints_parts_is_a_text_template() -> None:
    for source in (
        "{{ messages[0].content }}",
        "{{ messages[0].content | tojson }}",
        "{{ raise_exception('no') }}",
    ):
        template = ChatTemplate(source, {}, "<image>")
        if "raise" not in source:
            assert "<image>\\nWhat" in template.render(SHOWN) or "<image>\nWhat" in template.render(SHOWN)


def test_placeholder_in_text_is_refused(both: tuple[ChatTemplate, Any]) -> None:
    ours, _ = both
    texts = [*TURNS, {"role": "user", "content": [{"type": "text", "text": "an <image> here"}]}]
    for messages in (texts, [{"role": "user", "content": "an <image> here"}]):
        with pytest.raises(InvalidRequest, match=r"contains '<image>', which represents an image") as caught:
            ours.render(messages)
        assert caught.value.param == f"messages[{len(messages) - 1}].content"


@pytest.mark.parametrize(
    ("kind", "hint"),
    [
        ("video_url", "as its frames"),
        ("input_audio", "audio is not supported"),
        ("file", "only texts and images"),
    ],
)
def test_unsupported_parts_are_refused_with_a_hint(
    both: tuple[ChatTemplate, Any], kind: str, hint: str
) -> None:
    with pytest.raises(Unsupported, match=hint) as caught:
        both[0].render([{"role": "user", "content": [{"type": kind, kind: {}}]}])
    assert caught.value.param == "messages[0].content[0]"
