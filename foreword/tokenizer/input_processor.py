"""Input processing: conversations and prompts become the engine's requests, one for each choice."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from io import BytesIO
from itertools import product
from pathlib import Path
from typing import Any

from PIL.Image import Image

from foreword.chat_formats.chat_format import bind_format
from foreword.chat_formats.events import ChatEvent
from foreword.chat_formats.format_detection import ProofTokenizer, detect_format
from foreword.chat_formats.parser import starts_in_reasoning
from foreword.chat_formats.tools import ReasoningOptions, Tool, ToolUse
from foreword.config.options import Config
from foreword.core.images import PromptImage, expand_placeholders
from foreword.core.params import SEED_MASK, SamplingParams
from foreword.core.request import POOLING_TYPES, Request
from foreword.errors import ContextLengthExceeded, InvalidRequest, Unsupported
from foreword.multimodal.fetch import ImageSource
from foreword.multimodal.image_loader import ImageLoader
from foreword.multimodal.image_processor import ImageProcessor
from foreword.multimodal.limits import MediaLimits
from foreword.tokenizer.answer_cache import AnswerTokenCache
from foreword.tokenizer.chat_template import ChatTemplate
from foreword.tokenizer.detokenizer import Detokenizer
from foreword.tokenizer.messages import ImagePart, extract_images
from foreword.tokenizer.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

MAX_MARKER_TOKENS = 64  # at the end of a prompt, where a marker of several tokens may open the reasoning
RANDOM_SEED = -1  # as llama-server's clients send it
PNG_MODES = ("1", "L", "LA", "P", "RGB", "RGBA")
NO_SAMPLING_PARAMS = SamplingParams()


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """Defaults for unset sampling parameters."""

    seed: int | None = None  # None: random
    max_tokens: int = 0  # 0: up to the end of the context
    on_runaway: str | None = None  # None: repetition is not detected

    @classmethod
    def from_config(cls, config: Config, tokenizer: Tokenizer) -> SamplingDefaults:
        """max_tokens is the smaller of the option's and the checkpoint's."""
        limits = (config.default_max_tokens, tokenizer.generation_config.max_tokens)
        return cls(config.seed, min(filter(None, limits), default=0), config.on_runaway)

    def apply(self, params: SamplingParams) -> SamplingParams:
        """Fill in max_tokens, at least min_tokens, and on_runaway; the seed is left alone."""
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
    adapter: str = "",
) -> list[Request]:
    """The `params.n` requests of one prompt: ids "X-0", "X-1", ..., seeds s, s + 1, ... mod 2^64.

    prompt_ids      truncated by `truncate_prompt_tokens`; a default max_tokens does not reduce its room
    vocab_size      of the model; may differ from the tokenizer's
    images          with their positions in the prompt, shared by all choices
    image_token_id  placeholder of image tokens; None: the model takes no images
    adapter         digest of the LoRA adapter; empty: the base model

    Raises ContextLengthExceeded for a prompt without room for an answer, InvalidRequest for an empty prompt,
    ids outside the vocabulary, placeholders without an image, and a prediction longer than the context.
    """
    _check_images(prompt_ids, params, images, image_token_id, tokenizer)
    prompt = _truncate_prompt(tuple(prompt_ids), params, max_model_len)
    _check_length(len(prompt), max_model_len, images)
    limit = min(tokenizer.vocab_size, vocab_size or tokenizer.vocab_size)
    _check_ids("prompt", prompt, limit)
    _check_ids("logit_bias", params.logit_bias, limit)
    if len(params.allowed_token_ids or ()) > limit:
        raise InvalidRequest(
            f"allowed_token_ids holds {len(params.allowed_token_ids or ())} ids; the vocabulary has {limit}",
            "allowed_token_ids",
        )
    _check_ids("allowed_token_ids", params.allowed_token_ids or (), limit)
    _check_ids("stop_token_ids", params.stop_token_ids, limit)
    _check_ids("logprob_token_ids", params.logprob_token_ids, limit)
    seed, now, filled = resolve_seed(params.seed, defaults.seed), time.monotonic(), defaults.apply(params)
    bad_words = encode_bad_words(params.bad_words, tokenizer)
    breakers = encode_dry_breakers(params.dry_sequence_breakers, tokenizer) if params.uses_dry else ()
    predicted = encode_prediction(params.prediction, tokenizer, max_model_len)
    reasoning_end = encode_reasoning_end(params.structured.after, tokenizer) if params.structured else ()
    if limit < tokenizer.vocab_size:  # the model never samples the others
        bad_words, breakers, reasoning_end = (
            tuple(ids for ids in sequences if max(ids) < limit)
            for sequences in (bad_words, breakers, reasoning_end)
        )
    return [
        Request(
            id=f"{request_id}-{index}",
            prompt_ids=prompt,
            params=filled.for_choice(index, seed),
            seed=(seed + index) & SEED_MASK,
            eos_token_ids=tuple(i for i in tokenizer.eos_token_ids if i < limit),
            bad_words_ids=bad_words,
            dry_breakers=breakers,
            priority=priority,
            cache_salt=cache_salt,
            prediction_ids=predicted,
            reasoning_end_ids=reasoning_end,
            arrival_s=now,
            images=tuple(images),
            adapter=adapter,
        )
        for index in range(params.n)
    ]


def resolve_seed(seed: int | None, default: int | None = None) -> int:
    """Seed of the first choice: the request's, the default, or a random one, which -1 asks for too."""
    chosen = default if seed is None else seed
    return secrets.randbits(64) if chosen in (None, RANDOM_SEED) else chosen & SEED_MASK


def has_seed(seed: int | None, default: int | None = None) -> bool:
    """Whether resolve_seed() is no random one."""
    return (default if seed is None else seed) not in (None, RANDOM_SEED)


def encode_bad_words(words: Iterable[str], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Token sequences of bad words at the start of a text and after a space.

    The form after a space counts only if it is as long and begins with another token. Otherwise the space is
    a token of its own, and the ban is complete already.
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
    """Token sequences of the text that ends the reasoning, also merged with whitespace around it.

    A text that is one token has one sequence; other texts may be missed if they merge with punctuation.
    """
    sequences: list[tuple[int, ...]] = []
    for before, after in product(("", " ", "\n", "\n\n"), ("", "\n", "\n\n")) if text else ():
        try:
            ids = tuple(tokenizer.encode(f"{before}{text}{after}", add_special_tokens=False))
        except InvalidRequest as error:
            field = "structured_outputs.after"
            raise InvalidRequest(field + error.message.removeprefix("prompt"), field) from None
        if not any(known == ids[i : i + len(known)] for known in sequences for i in range(len(ids))):
            sequences.append(ids)
    return tuple(sequences)


def encode_dry_breakers(texts: Iterable[str], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Token sequences that end a repeat for DRY sampling.

    Tokens that contain one of the texts, and tokens that end with a prefix of it plus the tokens of the rest.
    """
    search = tokenizer.token_search()
    sequences: list[tuple[int, ...]] = []
    for text in texts:
        sequences += [(token_id,) for token_id in search.containing(text.encode())]
        for cut in range(1, len(text)):
            rest = tokenizer.encode(text[cut:], add_special_tokens=False)
            sequences += [(token_id, *rest) for token_id in search.ending_with(text[:cut].encode())]
    return tuple(dict.fromkeys(sequences))


def encode_prediction(text: str | None, tokenizer: Tokenizer, max_model_len: int) -> tuple[int, ...]:
    """Tokens of the predicted output; () without one."""
    if not text:
        return ()
    try:
        ids = tokenizer.encode(text, add_special_tokens=False)
    except InvalidRequest as error:
        raise InvalidRequest("prediction" + error.message.removeprefix("prompt"), "prediction") from None
    if len(ids) > max_model_len:
        raise InvalidRequest(
            f"the prediction has {len(ids)} tokens; an answer has at most {max_model_len} (--max-model-len)",
            "prediction",
        )
    return tuple(ids)


def _truncate_prompt(prompt: tuple[int, ...], params: SamplingParams, max_model_len: int) -> tuple[int, ...]:
    """`truncate_prompt_tokens` of the prompt; with -1, room for max_tokens is left in the context."""
    wanted = params.truncate_prompt_tokens
    if wanted is None:
        return prompt
    length = max(max_model_len - (params.max_tokens or 1), 1) if wanted < 0 else wanted
    return prompt[:length] if params.truncation_side == "right" else prompt[-length:]


def _check_images(
    prompt_ids: Sequence[int],
    params: SamplingParams,
    images: Sequence[PromptImage],
    image_token_id: int | None,
    tokenizer: Tokenizer,
) -> None:
    if images and params.truncate_prompt_tokens is not None:
        raise InvalidRequest(
            "truncate_prompt_tokens cannot be used with images: it could cut one", "truncate_prompt_tokens"
        )
    expected = sum(image.num_tokens for image in images)
    if image_token_id is not None and prompt_ids.count(image_token_id) != expected:
        token = tokenizer.id_to_token(image_token_id)
        raise InvalidRequest(
            f"prompt contains token {image_token_id} ({token!r}), which represents an image; "
            "send images as parts of chat messages",
            "prompt",
        )


def _check_length(length: int, max_model_len: int, images: Sequence[PromptImage]) -> None:
    if length == 0:
        raise InvalidRequest("the prompt is empty: it must hold at least one token", "prompt")
    if length >= max_model_len:
        num_image_tokens = sum(image.num_tokens for image in images)
        of_images = (
            f", {num_image_tokens} of them for {len(images)} image{'s'[: len(images) - 1]}" if images else ""
        )
        raise ContextLengthExceeded(
            f"the prompt has {length} tokens{of_images}; the context is {max_model_len} tokens long, "
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


def make_embedding_requests(
    inputs: Sequence[Sequence[int]],
    pooling: str,
    request_id: str,
    cache_salt: str = "",
    priority: int = 0,
    image_token_id: int | None = None,
) -> list[Request]:
    """One request per input, after check_input(): ids "X-0", "X-1", ... Raises InvalidRequest.

    pooling         one of POOLING_TYPES
    image_token_id  placeholder of images, which are not supported here
    """
    if pooling not in POOLING_TYPES:
        raise InvalidRequest(
            f"pooling must be one of {', '.join(POOLING_TYPES)}, got {pooling!r:.80}", "pooling"
        )
    for index, ids in enumerate(inputs):
        if image_token_id is not None and image_token_id in ids:
            raise InvalidRequest(
                f"input[{index}] contains token {image_token_id}, which represents an image", "input"
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
    """Raises ContextLengthExceeded or InvalidRequest, which name the input."""
    if not ids:
        raise InvalidRequest(f"{name} has no tokens", name)
    if len(ids) > max_tokens:
        raise ContextLengthExceeded(
            f"{name} has {len(ids)} tokens; the model takes at most {max_tokens} (truncate_prompt_tokens)",
            name,
        )
    for token_id in ids:
        if isinstance(token_id, bool) or not isinstance(token_id, int) or not 0 <= token_id < vocab_size:
            raise InvalidRequest(f"{name} holds {token_id!r:.40}; token ids are 0 to {vocab_size - 1}", name)


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids, and the images of their placeholders."""

    token_ids: tuple[int, ...]
    images: tuple[PromptImage, ...] = ()


class ChatInputProcessor:
    """Turns conversations into prompts of one model."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        processor: ImageProcessor | None,
        max_images: int,
        tool_format: str = "auto",
    ) -> None:
        """Compile the chat template and detect the format of calls, in a fraction of a second.

        max_images   limits one conversation
        tool_format  as Config.tool_format
        Raises CheckpointError for a broken chat template.
        """
        text = None if processor is None else processor.placeholder_text
        self.template = ChatTemplate.from_tokenizer(tokenizer, text)
        proof_tokenizer = ProofTokenizer(
            tokenizer.token_to_id,
            lambda text: _tokenize(tokenizer, text),
            tokenizer.special_ids,
            tuple(tokenizer.token_text(token_id) for token_id in tokenizer.eos_token_ids),
        )
        self.detection = detect_format(
            self.template, proof_tokenizer, tool_format, tokenizer.response_template
        )
        logger.info("tool calls: %s", self.detection)
        fmt = self.detection.format  # how the model writes reasoning and calls
        self.format = None if fmt is None else bind_format(fmt, tokenizer.token_to_id, tokenizer.special_ids)
        self._replay = None if self.format is None else AnswerTokenCache(tokenizer, self.format)
        self.placeholder_id = None if processor is None else processor.placeholder_id  # of an image token
        self.max_images = max_images
        self._placeholder_hint = f"; {text!r} represents an image, also if several parts of a text form it"
        self._tokenizer = tokenizer

    def split_images(
        self, messages: Sequence[Mapping[str, Any]], local: bool = False
    ) -> tuple[Sequence[Mapping[str, Any]], list[ImagePart]]:
        """Messages for render_ids(), and their images. Raises InvalidRequest.

        local  as allow_local of extract_images()
        """
        if self.placeholder_id is None:
            return messages, []  # render() refuses images
        bare, parts = extract_images(messages, local)
        self.check_num_images(len(parts), "messages")
        return bare, parts

    def check_num_images(self, num_images: int, where: str) -> None:
        """Raises InvalidRequest for too many images."""
        if num_images > self.max_images:
            raise InvalidRequest(
                f"{where} hold {num_images} images, of at most {self.max_images} (--max-images)", where
            )

    def check_tools(self, tools: Sequence[Tool]) -> None:
        """Raises InvalidRequest for tools of a model whose format of calls is not known."""
        if tools and (self.format is None or self.format.format.tools is None):
            reasons = "".join(f"; {problem}" for problem in self.detection.problems)
            raise InvalidRequest(
                "tools: it is not known how this model writes tool calls; "
                f"start the server with --tool-format NAME, such as generic{reasons}",
                "tools",
            )

    def render_ids(
        self,
        messages: Sequence[Mapping[str, Any]],
        template_kwargs: Mapping[str, Any],
        num_images: int,
        add_special_tokens: bool = False,
        tools: Sequence[Tool] = (),
        reasoning: ReasoningOptions | None = None,
        cache_salt: str = "",
        is_seeded: bool = False,
    ) -> list[int]:
        """Token ids with one placeholder for each image. Raises InvalidRequest.

        template_kwargs     of ChatTemplate.render()
        add_special_tokens  False: templates write special tokens themselves
        tools, reasoning    as in ChatTemplate.render()
        cache_salt          namespace of the prefix cache, whose answers are replayed
        is_seeded           replay none: the prompt is a function of the arguments alone
        """
        self.check_tools(tools)

        def render(messages: Sequence[Mapping[str, Any]]) -> str:
            return self.template.render(messages, tools=tools, reasoning=reasoning, **template_kwargs)

        if self._replay is None or is_seeded or template_kwargs.get("continue_final_message"):
            ids = self._tokenizer.encode(render(messages), add_special_tokens)
        else:
            ids = self._replay.encode(messages, tools, cache_salt, render, add_special_tokens)
        return self.check_placeholders(ids, num_images, "messages", "the chat template")

    def described_tools(self, use: ToolUse) -> Sequence[Tool]:
        """The tools in the prompt: also those of tool_choice "none", so that the cached prefix stays."""
        knows_tools = self.format is not None and self.format.format.tools is not None
        return use.listed_tools if knows_tools or use.callable_tools else ()

    def starts_in_reasoning(self, prompt_ids: Sequence[int]) -> bool:
        """Whether a prompt has opened the reasoning that the answer continues."""
        if self.format is None or self.format.format.reasoning is None:
            return False
        text = ""
        if self.format.format.reasoning.begin not in self.format.token_ids:
            text = self._tokenizer.decode(prompt_ids[-MAX_MARKER_TOKENS:], skip_special_tokens=False)
        return starts_in_reasoning(self.format, prompt_ids, text)

    def remember(self, request: Request, token_ids: Sequence[int], events: Iterable[ChatEvent]) -> None:
        """Keep an answer for the conversation's next prompt, if a token of the model ended it.

        token_ids  of the answer, the last included; `events` are what the parser read in it
        """
        if self._replay is not None:
            self._replay.remember(request.prompt_ids, token_ids, events, request.cache_salt)

    def check_placeholders(
        self, ids: list[int], num_images: int, where: str, written_by: str = ""
    ) -> list[int]:
        """Returns `ids` if they have one placeholder for each image. Raises InvalidRequest."""
        if self.placeholder_id is None and num_images:
            raise Unsupported(f"{where}: this model takes no images", where)
        count = 0 if self.placeholder_id is None else ids.count(self.placeholder_id)
        if count != num_images:
            source, hint = (written_by, "") if count < num_images else ("", self._placeholder_hint)
            raise InvalidRequest(
                f"{where}: {source or 'the prompt'} has places for {count} images, got {num_images}{hint}",
                where,
            )
        return ids

    def insert_images(self, ids: Sequence[int], images: Sequence[PromptImage] = ()) -> Prompt:
        """The prompt, with each placeholder expanded to the tokens of its image."""
        if self.placeholder_id is None or not images:
            return Prompt(tuple(ids))
        return Prompt(*expand_placeholders(ids, self.placeholder_id, images))


def _tokenize(tokenizer: Tokenizer, text: str) -> list[tuple[int, str]]:
    """Ids of a text, and the characters that each completes."""
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=False, at_start=True)
    return [(token_id, detokenizer.feed(token_id)) for token_id in tokenizer.encode(text, False)]


def open_image_loader(config: Config, processor: ImageProcessor) -> ImageLoader:
    """The image loader with the limits of `config`; the caller closes it. Raises ConfigError."""
    limits = MediaLimits.from_options(
        config.max_image_mb,
        config.max_image_pixels,
        config.allowed_media_domains,
        config.allowed_local_media_path,
        config.media_timeout,
    )
    return ImageLoader(processor, limits)


def image_source(part: ImagePart) -> ImageSource:
    """The source of an image. Raises InvalidRequest."""
    if part.url is not None:
        return ImageSource(part.field_name, url=part.url)
    return ImageSource(part.field_name, data=_read_image_file(part.image, part.field_name))


def _read_image_file(image: object, where: str) -> bytes:
    """The file of an image from a Python caller."""
    if isinstance(image, bytes | bytearray | memoryview):
        return bytes(image)
    if isinstance(image, Image):
        return _encode_png(image)
    if not isinstance(image, str | Path):
        raise InvalidRequest(
            f"{where} must be a path, file bytes or PIL.Image, got {type(image).__name__}: {image!r:.80}",
            where,
        )
    try:
        return Path(image).read_bytes()
    except (OSError, ValueError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or error
        raise InvalidRequest(f"{where}: {image!s:.200} cannot be read: {reason}", where) from None


def _encode_png(image: Image) -> bytes:
    """A PNG without EXIF: an orientation in it would be applied twice."""
    converted = image if image.mode in PNG_MODES else image.convert("RGB")
    file = BytesIO()
    converted.save(file, "PNG", exif=b"", compress_level=1)
    return file.getvalue()
