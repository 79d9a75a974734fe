"""Conversations become prompts: their texts by the chat template, their pictures in the places that it made for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

from PIL.Image import Image

from foreword.config import Config
from foreword.core.pictures import Picture, placed
from foreword.errors import InvalidRequest, Unsupported
from foreword.media.base import Processor
from foreword.media.limits import MediaLimits
from foreword.media.pictures import Pictures
from foreword.media.source import Source
from foreword.text.messages import PicturePart, take_pictures
from foreword.text.template import ChatTemplate
from foreword.text.tokenizer import Tokenizer

__all__ = ["Conversations", "Prompt", "open_pictures", "source_of"]

PNG_MODES = ("1", "L", "LA", "P", "RGB", "RGBA")


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids, and the pictures that their placeholders stand for."""

    ids: tuple[int, ...]
    pictures: tuple[Picture, ...] = ()


class Conversations:
    """Of one model.

    template     may be slow: others should not wait for ids()
    placeholder  id that stands for a token of a picture; None: the model takes none
    max_images   that one conversation may hold
    """

    def __init__(self, tokenizer: Tokenizer, processor: Processor | None, max_images: int) -> None:
        """Raises CheckpointError for a broken chat template."""
        self.template = ChatTemplate.of(tokenizer, None if processor is None else processor.placeholder_text)
        self.placeholder = None if processor is None else processor.placeholder
        self.max_images = max_images
        text = None if processor is None else processor.placeholder_text
        self._written = f"; {text!r} stands for a picture wherever it is written, also where several parts of a text make it up"
        self._tokenizer = tokenizer

    def read(
        self, messages: Sequence[Mapping[str, Any]], local: bool = False
    ) -> tuple[Sequence[Mapping[str, Any]], list[PicturePart]]:
        """Messages for ids(), and the pictures of them; `local` as in take_pictures(). Raises InvalidRequest."""
        if self.placeholder is None:
            return messages, []  # the template refuses those that there are
        bare, parts = take_pictures(messages, local)
        self.check_count(len(parts), "messages")
        return bare, parts

    def check_count(self, num_pictures: int, where: str) -> None:
        """Raises InvalidRequest for too many pictures."""
        if num_pictures > self.max_images:
            raise InvalidRequest(f"{where} hold {num_pictures} pictures, of at most {self.max_images} (--max-images)", where)

    def ids(
        self,
        messages: Sequence[Mapping[str, Any]],
        rendering: Mapping[str, Any],
        num_pictures: int,
        add_special_tokens: bool = False,
    ) -> list[int]:
        """Token ids with one placeholder for each picture; `rendering` goes to the template, which writes special tokens
        itself. Raises InvalidRequest."""
        ids = self._tokenizer.encode(self.template.render(messages, **rendering), add_special_tokens)
        return self.with_places(ids, num_pictures, "messages", "the chat template")

    def with_places(self, ids: list[int], num_pictures: int, where: str, who: str = "") -> list[int]:
        """The ids, if they have a place for each picture. Raises InvalidRequest."""
        if self.placeholder is None and num_pictures:
            raise Unsupported(f"{where}: this model takes no pictures", where)
        places = 0 if self.placeholder is None else ids.count(self.placeholder)
        if places != num_pictures:
            who, why = (who, "") if places < num_pictures else ("", self._written)
            raise InvalidRequest(
                f"{where}: {who or 'the prompt'} has places for {places} pictures, and there are {num_pictures}{why}", where
            )
        return ids

    def prompt(self, ids: Sequence[int], pictures: Sequence[Picture] = ()) -> Prompt:
        """The prompt of ids that have a place for each picture."""
        if self.placeholder is None or not pictures:
            return Prompt(tuple(ids))
        return Prompt(*placed(ids, self.placeholder, pictures))


def open_pictures(config: Config, processor: Processor) -> Pictures:
    """What reads pictures, within the limits of `config`; the caller closes it. Raises ConfigError."""
    limits = MediaLimits.of(
        config.max_image_mb,
        config.max_image_pixels,
        config.allowed_media_domains,
        config.allowed_local_media_path,
        config.media_timeout,
    )
    return Pictures(processor, limits)


def source_of(part: PicturePart) -> Source:
    """Where to read a picture. Raises InvalidRequest for what is none."""
    if part.url is not None:
        return Source(part.where, url=part.url)
    return Source(part.where, data=_file_of(part.image, part.where))


def _file_of(image: object, where: str) -> bytes:
    """A picture's file, of what a caller in this process gives."""
    if isinstance(image, bytes | bytearray | memoryview):
        return bytes(image)
    if isinstance(image, Image):
        return _png(image)
    if not isinstance(image, str | Path):
        raise InvalidRequest(
            f"{where} must be a path, the bytes of a file, or a PIL.Image, got {type(image).__name__}: {image!r:.80}", where
        )
    try:
        return Path(image).read_bytes()
    except (OSError, ValueError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or error
        raise InvalidRequest(f"{where}: {image!s:.200} cannot be read: {reason}", where) from None


def _png(image: Image) -> bytes:
    """As its caller sees it: an orientation that its file asked for is not applied again."""
    kept = image if image.mode in PNG_MODES else image.convert("RGB")
    file = BytesIO()
    kept.save(file, "PNG", exif=b"", compress_level=1)
    return file.getvalue()
