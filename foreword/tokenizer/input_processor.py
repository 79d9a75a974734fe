"""A prompt and its parameters become the engine's requests, one for each choice.

Texts become the engine's requests for vectors.

Conversations become prompts: their texts by the chat template, their pictures in the places that it made for them.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from io import BytesIO
from itertools import product
from pathlib import Path
from typing import Any

from PIL.Image import Image

from foreword.config.options import Config
from foreword.core.images import PromptImage, expand_placeholders
from foreword.core.params import SEED_MASK, SamplingParams
from foreword.core.request import POOLING_TYPES, Request
from foreword.errors import ContextLengthExceeded, InvalidRequest, Unsupported
from foreword.multimodal.base import ImageProcessor
from foreword.multimodal.fetch import ImageSource
from foreword.multimodal.images import ImageLoader
from foreword.multimodal.limits import MediaLimits
from foreword.tokenizer.chat_template import ChatTemplate
from foreword.tokenizer.messages import ImagePart, extract_images
from foreword.tokenizer.tokenizer import Tokenizer

__all__ = [
    "ChatInputProcessor",
    "Prompt",
    "SamplingDefaults",
    "check_input",
    "encode_bad_words",
    "encode_dry_breakers",
    "encode_prediction",
    "encode_reasoning_end",
    "image_source",
    "make_embedding_requests",
    "make_requests",
    "open_image_loader",
    "resolve_seed",
]


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """What holds for parameters that say nothing themselves.

    seed        None: a random one
    max_tokens  0: up to the end of the context
    on_runaway  None: nobody looks whether the answer repeats itself
    """

    seed: int | None = None
    max_tokens: int = 0
    on_runaway: str | None = None

    def apply(self, params: SamplingParams) -> SamplingParams:
        """The parameters with the defaults where they are silent; min_tokens are granted. Their seed is not touched."""
        if params.max_tokens is None and self.max_tokens:
            params = replace(params, max_tokens=max(self.max_tokens, params.min_tokens))
        return params if params.on_runaway is not None else replace(params, on_runaway=self.on_runaway)


def make_requests(
    prompt_ids: Sequence[int],
    params: SamplingParams,
    tokenizer: Tokenizer,
    request_id: str,
    max_model_len: int,
    defaults: SamplingDefaults = SamplingDefaults(),
    cache_salt: str = "",
    priority: int = 0,
    vocab_size: int | None = None,
    images: Sequence[PromptImage] = (),
    image_token_id: int | None = None,
) -> list[Request]:
    """The `params.n` requests of one prompt: ids "X-0", "X-1", ..., seeds s, s + 1, ... mod 2^64.

    prompt_ids  cut to its end where `truncate_prompt_tokens` says so; a default of max_tokens takes no room from it
    vocab_size  of the model, which may lie below or above the tokenizer's
    pictures    where they stand in the prompt; every choice has the same
    placeholder the id that stands for a token of a picture; None: the model takes none

    Raises ContextLengthExceeded for a prompt that leaves no room for an answer, InvalidRequest for
    an empty prompt, for ids outside the vocabulary or of pictures that are not there, and for a
    prediction longer than the context.
    """
    _check_images(prompt_ids, params, images, image_token_id, tokenizer)
    prompt = _truncate_prompt(tuple(prompt_ids), params, max_model_len)
    _check_length(len(prompt), max_model_len, images)
    limit = min(tokenizer.vocab_size, vocab_size or tokenizer.vocab_size)
    _check_ids("prompt", prompt, limit)
    _check_ids("logit_bias", params.logit_bias, limit)
    _check_ids("allowed_token_ids", params.allowed_token_ids or (), limit)
    _check_ids("stop_token_ids", params.stop_token_ids, limit)
    _check_ids("logprob_token_ids", params.logprob_token_ids, limit)
    seed, filled = resolve_seed(params.seed, defaults.seed), defaults.apply(params)
    banned, now = encode_bad_words(params.bad_words, tokenizer), time.monotonic()
    breakers = encode_dry_breakers(params.dry_sequence_breakers, tokenizer) if params.uses_dry else ()
    predicted = encode_prediction(params.prediction, tokenizer, max_model_len)
    reasoning_end = encode_reasoning_end(params.structured.after, tokenizer) if params.structured else ()
    return [
        Request(
            id=f"{request_id}-{index}",
            prompt_ids=prompt,
            params=filled.for_choice(index, seed),
            seed=(seed + index) & SEED_MASK,
            eos_token_ids=tokenizer.eos_token_ids,
            bad_words_ids=banned,
            dry_breakers=breakers,
            priority=priority,
            cache_salt=cache_salt,
            prediction_ids=predicted,
            reasoning_end_ids=reasoning_end,
            arrival_s=now,
            images=tuple(images),
        )
        for index in range(params.n)
    ]


def resolve_seed(seed: int | None, default: int | None = None) -> int:
    """The seed of the first choice: as asked for, the server's, or a random one."""
    chosen = default if seed is None else seed
    return secrets.randbits(64) if chosen is None else chosen & SEED_MASK


def encode_bad_words(words: Iterable[str], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Token sequences that spell a bad word at the beginning of a text, or after a space.

    The form after a space counts only where it is as long and begins with another token: otherwise the
    space is a token of its own, and banning that sequence would ban nothing new.
    """
    banned: list[tuple[int, ...]] = []
    for word in words:
        bare = tuple(tokenizer.encode(word.lstrip(), add_special_tokens=False))
        spaced = tuple(tokenizer.encode(" " + word.lstrip(), add_special_tokens=False))
        if not bare:
            raise InvalidRequest(f"bad_words must hold words, got {word!r}", "bad_words")
        banned.append(bare)
        if len(spaced) == len(bare) and spaced[0] != bare[0]:
            banned.append(spaced)
    return tuple(dict.fromkeys(banned))


def encode_reasoning_end(text: str | None, tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Token sequences that spell the end of the reasoning, also where whitespace beside it is part of its tokens.

    A text that is a token of its own has one; one that is not may still be missed behind a mark it merges with.
    """
    found: list[tuple[int, ...]] = []
    for before, behind in product(("", " ", "\n", "\n\n"), ("", "\n", "\n\n")) if text else ():
        try:
            ids = tuple(tokenizer.encode(f"{before}{text}{behind}", add_special_tokens=False))
        except InvalidRequest as error:
            field = "structured_outputs.after"
            raise InvalidRequest(field + error.message.removeprefix("prompt"), field) from None
        if not any(known == ids[i : i + len(known)] for known in found for i in range(len(ids))):
            found.append(ids)
    return tuple(found)


def encode_dry_breakers(texts: Iterable[str], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Token sequences with which a repeat ends: tokens that have one of the texts in them, and those that end with the
    beginning of one, followed by the tokens of its rest."""
    spelling = tokenizer.token_search()
    found: list[tuple[int, ...]] = []
    for text in texts:
        found += [(token_id,) for token_id in spelling.containing(text.encode())]
        for cut in range(1, len(text)):
            rest = tokenizer.encode(text[cut:], add_special_tokens=False)
            found += [(token_id, *rest) for token_id in spelling.ending_with(text[:cut].encode())]
    return tuple(dict.fromkeys(found))


def encode_prediction(text: str | None, tokenizer: Tokenizer, max_model_len: int) -> tuple[int, ...]:
    """The tokens of the answer that the caller expects; none without one."""
    if not text:
        return ()
    try:
        ids = tokenizer.encode(text, add_special_tokens=False)
    except InvalidRequest as error:
        raise InvalidRequest("prediction" + error.message.removeprefix("prompt"), "prediction") from None
    if len(ids) > max_model_len:
        raise InvalidRequest(
            f"the prediction has {len(ids)} tokens; the context is {max_model_len} tokens long, and no answer is longer",
            "prediction",
        )
    return tuple(ids)


def _truncate_prompt(prompt: tuple[int, ...], params: SamplingParams, max_model_len: int) -> tuple[int, ...]:
    """Its last `truncate_prompt_tokens`, or with -1 what leaves room for max_tokens in the context."""
    wanted = params.truncate_prompt_tokens
    if wanted is None:
        return prompt
    return prompt[-(max(max_model_len - (params.max_tokens or 1), 1) if wanted < 0 else wanted) :]


def _check_images(
    prompt_ids: Sequence[int],
    params: SamplingParams,
    images: Sequence[PromptImage],
    image_token_id: int | None,
    tokenizer: Tokenizer,
) -> None:
    if images and params.truncate_prompt_tokens is not None:
        raise InvalidRequest(
            "truncate_prompt_tokens must be left out where there are pictures: one that is cut is none",
            "truncate_prompt_tokens",
        )
    expected = sum(picture.num_tokens for picture in images)
    if image_token_id is not None and prompt_ids.count(image_token_id) != expected:
        raise InvalidRequest(
            f"prompt has the token {image_token_id} ({tokenizer.id_to_token(image_token_id)!r}) in it, which stands for a picture; "
            "pictures are sent as parts of the messages of a chat",
            "prompt",
        )


def _check_length(length: int, max_model_len: int, images: Sequence[PromptImage]) -> None:
    if length == 0:
        raise InvalidRequest("the prompt is empty: it must hold at least one token", "prompt")
    if length >= max_model_len:
        seen = sum(picture.num_tokens for picture in images)
        of_these = f", {seen} of them for {len(images)} picture{'s' * (len(images) > 1)}" if images else ""
        raise ContextLengthExceeded(
            f"the prompt has {length} tokens{of_these}; the context is {max_model_len} tokens long, "
            f"so a prompt may have at most {max_model_len - 1}",
            "prompt",
        )


def _check_ids(name: str, ids: Iterable[int], vocab_size: int) -> None:
    for token_id in ids:
        if isinstance(token_id, bool) or not isinstance(token_id, int):
            raise InvalidRequest(f"{name} must hold token ids, got {token_id!r:.80}", name)
        if not 0 <= token_id < vocab_size:
            raise InvalidRequest(
                f"{name}: token id {token_id} is outside the vocabulary, which ends at {vocab_size - 1}", name
            )


NO_SAMPLING_PARAMS = SamplingParams()


def make_embedding_requests(
    inputs: Sequence[Sequence[int]],
    pooling: str,
    request_id: str,
    cache_salt: str = "",
    priority: int = 0,
    image_token_id: int | None = None,
) -> list[Request]:
    """One for each input, which check_input() has seen: ids "X-0", "X-1", ...

    pooling      one of POOLINGS
    placeholder  the id that stands for pictures, of which there are none here
    Raises InvalidRequest.
    """
    if pooling not in POOLING_TYPES:
        raise InvalidRequest(
            f"pooling must be one of {', '.join(POOLING_TYPES)}, got {pooling!r:.80}", "pooling"
        )
    for index, ids in enumerate(inputs):
        if image_token_id is not None and image_token_id in ids:
            raise InvalidRequest(
                f"input[{index}] has the token {image_token_id} in it, which stands for a picture", "input"
            )
    now = time.monotonic()
    return [
        Request(
            id=f"{request_id}-{index}",
            prompt_ids=tuple(ids),
            params=NO_SAMPLING_PARAMS,
            seed=0,
            priority=priority,
            cache_salt=cache_salt,
            pooling=pooling,
            arrival_s=now,
        )
        for index, ids in enumerate(inputs)
    ]


def check_input(name: str, ids: Sequence[int], max_tokens: int, vocab_size: int) -> None:
    """Raises ContextLengthExceeded, or InvalidRequest, which call the input by its name."""
    if not ids:
        raise InvalidRequest(f"{name} has no tokens", name)
    if len(ids) > max_tokens:
        raise ContextLengthExceeded(
            f"{name} has {len(ids)} tokens; the model takes at most {max_tokens} (truncate_prompt_tokens cuts longer ones)",
            name,
        )
    for token_id in ids:
        if isinstance(token_id, bool) or not isinstance(token_id, int) or not 0 <= token_id < vocab_size:
            raise InvalidRequest(f"{name} holds {token_id!r:.40}; token ids are 0 to {vocab_size - 1}", name)


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
        self.template = ChatTemplate.from_tokenizer(
            tokenizer, None if processor is None else processor.placeholder_text
        )
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
            raise InvalidRequest(
                f"{where} hold {num_images} pictures, of at most {self.max_images} (--max-images)", where
            )

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

    def check_placeholders(
        self, ids: list[int], num_images: int, where: str, written_by: str = ""
    ) -> list[int]:
        """The ids, if they have a place for each picture. Raises InvalidRequest."""
        if self.placeholder_id is None and num_images:
            raise Unsupported(f"{where}: this model takes no pictures", where)
        places = 0 if self.placeholder_id is None else ids.count(self.placeholder_id)
        if places != num_images:
            written_by, why = (written_by, "") if places < num_images else ("", self._placeholder_hint)
            raise InvalidRequest(
                f"{where}: {written_by or 'the prompt'} has places for {places} pictures, and there are {num_images}{why}",
                where,
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
            f"{where} must be a path, the bytes of a file, or a PIL.Image, got {type(image).__name__}: {image!r:.80}",
            where,
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
