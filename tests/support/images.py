"""Images for tests: PNG files, data URLs, and an image processor with few tokens."""

from __future__ import annotations

import base64
import io
from typing import Any

from PIL import Image
from PIL.Image import Resampling

from foreword.multimodal.llava_processor import LlavaProcessor
from foreword.tokenizer.files import TokenizerFiles
from foreword.tokenizer.tokenizer import Tokenizer
from tests.support.fakes import CHATML, END, EOS, byte_backend

PLACEHOLDER, PLACEHOLDER_TEXT = 260, "<image>"
SIDE, TOKENS = 28, 4
PARTS_TEMPLATE = CHATML.replace(
    "message['content'] }}",
    "'' }}{%- for part in message['content'] -%}"
    "{{ '<image>' if part['type'] == 'image' else part['text'] }}{%- endfor -%}",
)


def png(colour: str = "red", size: tuple[int, int] = (40, 30), **options: Any) -> bytes:
    """A PNG file of one colour; `size` is (width, height)."""
    file = io.BytesIO()
    Image.new("RGB", size, colour).save(file, "PNG", **options)
    return file.getvalue()


def data_url(data: bytes | None = None) -> str:
    return "data:image/png;base64," + base64.b64encode(png() if data is None else data).decode()


def image_part(data: bytes | None = None) -> dict[str, Any]:
    """An image part of a message in OpenAI's format."""
    return {"type": "image_url", "image_url": {"url": data_url(data)}}


def image_tokenizer() -> Tokenizer:
    """The byte tokenizer with an image placeholder, and a template for message parts."""
    backend = byte_backend()
    backend.add_special_tokens([PLACEHOLDER_TEXT])
    named = {"bos_token": "<|bos|>", "eos_token": "<|eos|>"}
    return Tokenizer(
        backend, TokenizerFiles(special_tokens=named, eos_token_ids=(EOS, END), chat_template=PARTS_TEMPLATE)
    )


def image_processor() -> LlavaProcessor:
    """Four tokens per image of 28 x 28 pixels."""
    return LlavaProcessor(PLACEHOLDER, PLACEHOLDER_TEXT, TOKENS, SIDE, None, SIDE, True, Resampling.BICUBIC)
