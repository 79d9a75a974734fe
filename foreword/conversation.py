"""Conversations become prompts: their texts by the chat template, their pictures in the places that it made for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

from PIL.Image import Image

from foreword.config import Config
from foreword.core.pictures import PromptImage, expand_placeholders
from foreword.errors import InvalidRequest, Unsupported
from foreword.media.base import ImageProcessor
from foreword.media.limits import MediaLimits
from foreword.media.pictures import ImageLoader
from foreword.media.source import ImageSource
from foreword.text.messages import ImagePart, extract_images
from foreword.text.template import ChatTemplate
from foreword.text.tokenizer import Tokenizer

__all__ = ["ChatInputProcessor", "Prompt", "open_image_loader", "image_source"]

PNG_MODES = ("1", "L", "LA", "P", "RGB", "RGBA")


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids, and the pictures that their placeholders stand for."""

    token_ids: tuple[int, ...]
    images: tuple[PromptImage, ...] = ()


class ChatInputProcessor:
    """Of one model.

    template     may be slow: others should not wait for ids()
    placeholder  id that stands for a token of a picture; None: the model takes none
    max_images   that one conversation may hold
    """

    def __init__(self, tokenizer: Tokenizer, processor: ImageProcessor | None, max_images: int) -> None:
        """Raises CheckpointError for a broken chat template."""
        self.template = ChatTemplate.from_tokenizer(tokenizer, None if processor is None else processor.placeholder_text)
        self.placeholder_id = None if processor is None else processor.placeholder_id
        self.max_images = max_images
        text = None if processor is None else processor.placeholder_text
        self._placeholder_hint = f"; {text!r} stands for a picture wherever it is written, also where several parts of a text make it up"
        self._tokenizer = tokenizer

    def split_images(
        self, messages: Sequence[Mapping[str, Any]], local: bool = False
    ) -> tuple[Sequence[Mapping[str, Any]], list[ImagePart]]:
        """Messages for ids(), and the pictures of them; `local` as in take_pictures(). Raises InvalidRequest."""
        if self.placeholder_id is None:
            return messages, []  # the template refuses those that there are
        bare, parts = extract_images(messages, local)
        self.check_num_images(len(parts), "messages")
        return bare, parts

    def check_num_images(self, num_images: int, where: str) -> None:
        """Raises InvalidRequest for too many pictures."""
        if num_images > self.max_images:
            raise InvalidRequest(f"{where} hold {num_images} pictures, of at most {self.max_images} (--max-images)", where)

    def render_ids(
        self,
        messages: Sequence[Mapping[str, Any]],
        template_kwargs: Mapping[str, Any],
        num_images: int,
        add_special_tokens: bool = False,
    ) -> list[int]:
        """Token ids with one placeholder for each picture; `rendering` goes to the template, which writes special tokens
        itself. Raises InvalidRequest."""
        ids = self._tokenizer.encode(self.template.render(messages, **template_kwargs), add_special_tokens)
        return self.check_placeholders(ids, num_images, "messages", "the chat template")

    def check_placeholders(self, ids: list[int], num_images: int, where: str, written_by: str = "") -> list[int]:
        """The ids, if they have a place for each picture. Raises InvalidRequest."""
        if self.placeholder_id is None and num_images:
            raise Unsupported(f"{where}: this model takes no pictures", where)
        places = 0 if self.placeholder_id is None else ids.count(self.placeholder_id)
        if places != num_images:
            written_by, why = (written_by, "") if places < num_images else ("", self._placeholder_hint)
            raise InvalidRequest(
                f"{where}: {written_by or 'the prompt'} has places for {places} pictures, and there are {num_images}{why}", where
            )
        return ids

    def insert_images(self, ids: Sequence[int], images: Sequence[PromptImage] = ()) -> Prompt:
        """The prompt of ids that have a place for each picture."""
        if self.placeholder_id is None or not images:
            return Prompt(tuple(ids))
        return Prompt(*expand_placeholders(ids, self.placeholder_id, images))


def open_image_loader(config: Config, processor: ImageProcessor) -> ImageLoader:
    """What reads pictures, within the limits of `config`; the caller closes it. Raises ConfigError."""
    limits = MediaLimits.from_options(
        config.max_image_mb,
        config.max_image_pixels,
        config.allowed_media_domains,
        config.allowed_local_media_path,
        config.media_timeout,
    )
    return ImageLoader(processor, limits)


def image_source(part: ImagePart) -> ImageSource:
    """Where to read a picture. Raises InvalidRequest for what is none."""
    if part.url is not None:
        return ImageSource(part.field_name, url=part.url)
    return ImageSource(part.field_name, data=_read_image_file(part.image, part.field_name))


def _read_image_file(image: object, where: str) -> bytes:
    """A picture's file, of what a caller in this process gives."""
    if isinstance(image, bytes | bytearray | memoryview):
        return bytes(image)
    if isinstance(image, Image):
        return _encode_png(image)
    if not isinstance(image, str | Path):
        raise InvalidRequest(
            f"{where} must be a path, the bytes of a file, or a PIL.Image, got {type(image).__name__}: {image!r:.80}", where
        )
    try:
        return Path(image).read_bytes()
    except (OSError, ValueError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or error
        raise InvalidRequest(f"{where}: {image!s:.200} cannot be read: {reason}", where) from None


def _encode_png(image: Image) -> bytes:
    """As its caller sees it: an orientation that its file asked for is not applied again."""
    kept = image if image.mode in PNG_MODES else image.convert("RGB")
    file = BytesIO()
    kept.save(file, "PNG", exif=b"", compress_level=1)
    return file.getvalue()
