"""Input processing: prompts become the engine's requests, one for each choice."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from foreword.config.options import Config
from foreword.core.images import PromptImage
from foreword.core.params import RANDOM_SEED, SEED_MASK, TO_THE_END, SamplingParams
from foreword.core.request import POOLING_TYPES, Request
from foreword.errors import ContextLengthExceeded, InvalidRequest, shown
from foreword.tokenizer.tokenizer import MAX_TEXT_TOKENS, Tokenizer

NO_SAMPLING_PARAMS = SamplingParams()
MAX_DRY_SEQUENCES = 1 << 16  # limit of a request; each word of small letters has thousands


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
        """Fill in max_tokens, at least min_tokens, and on_runaway; the seed is left alone.

        Then max_tokens is a number, or None for the end of the context.
        """
        if params.max_tokens == TO_THE_END:
            params = replace(params, max_tokens=None)
        elif params.max_tokens is None and self.max_tokens:
            params = replace(params, max_tokens=max(self.max_tokens, params.min_tokens))
        return params if params.on_runaway is not None else replace(params, on_runaway=self.on_runaway)


@dataclass(frozen=True, slots=True)
class EncodedParams:
    """Parameters with defaults, checked ids, and texts as token ids, shared by all choices of a request."""

    params: SamplingParams
    bad_words: tuple[tuple[int, ...], ...]
    dry_breakers: tuple[tuple[int, ...], ...]
    reasoning_end: tuple[tuple[int, ...], ...]
    prediction: tuple[int, ...]


def encode_params(
    params: SamplingParams,
    tokenizer: Tokenizer,
    max_model_len: int,
    vocab_size: int,
    defaults: SamplingDefaults = SamplingDefaults(),
) -> EncodedParams:
    """Raises InvalidRequest for a wrong id, more ids than the vocabulary has, a text or a prediction.

    Texts must be encodable, and a prediction at most as long as the context.

    vocab_size  ids that the model can sample: texts with others are left out
    """
    for name in ("logit_bias", "allowed_token_ids", "stop_token_ids", "logprob_token_ids"):
        ids = getattr(params, name) or ()
        if len(ids) > vocab_size:
            raise InvalidRequest(f"{name} holds {len(ids)} ids; the vocabulary has {vocab_size}", name)
        _check_ids(name, ids, vocab_size)
    bad_words = encode_bad_words(params.bad_words, tokenizer)
    breakers = encode_dry_breakers(params.dry_sequence_breakers, tokenizer) if params.uses_dry else ()
    reasoning_end = encode_reasoning_end(params.structured.after, tokenizer) if params.structured else ()
    bad_words, breakers, reasoning_end = (
        tuple(ids for ids in sequences if max(ids) < vocab_size)
        for sequences in (bad_words, breakers, reasoning_end)
    )
    prediction = encode_prediction(params.prediction, tokenizer, max_model_len)
    return EncodedParams(defaults.apply(params), bad_words, breakers, reasoning_end, prediction)


def make_requests(
    prompt_ids: Sequence[int],
    params: SamplingParams,
    tokenizer: Tokenizer,
    request_id: str,
    max_model_len: int,
    defaults: SamplingDefaults = SamplingDefaults(),
    vocab_size: int | None = None,
    images: Sequence[PromptImage] = (),
    image_token_id: int | None = None,
    encoded: EncodedParams | None = None,
) -> list[Request]:
    """The `params.n` requests of one prompt: ids "X-0", "X-1", ..., seeds s, s + 1, ... mod 2^64.

    The caller sets what does not depend on the prompt: adapter, salt, priority, deadlines.

    prompt_ids      truncated by `truncate_prompt_tokens`; a default max_tokens does not reduce its room
    vocab_size      of the model; may differ from the tokenizer's
    images          with their positions in the prompt, shared by all choices
    image_token_id  placeholder of image tokens; None: the model takes no images
    encoded         of the parameters, if several prompts share them

    Raises ContextLengthExceeded for a prompt without room for an answer, InvalidRequest for an empty prompt,
    ids outside the vocabulary, placeholders without an image, and a prediction longer than the context.
    """
    _check_images(prompt_ids, params, images, image_token_id, tokenizer)
    prompt = _truncate_prompt(tuple(prompt_ids), params, max_model_len)
    _check_length(len(prompt), max_model_len, images)
    limit = min(tokenizer.vocab_size, vocab_size or tokenizer.vocab_size)
    _check_ids("prompt", prompt, limit)
    seed, now = resolve_seed(params.seed, defaults.seed), time.monotonic()
    shared = encoded or encode_params(params, tokenizer, max_model_len, limit, defaults)
    return [
        Request(
            id=f"{request_id}-{index}",
            prompt_ids=prompt,
            params=shared.params.for_choice(index, seed),
            seed=(seed + index) & SEED_MASK,
            eos_token_ids=tuple(i for i in tokenizer.eos_token_ids if i < limit),
            bad_words_ids=shared.bad_words,
            dry_breakers=shared.dry_breakers,
            prediction_ids=shared.prediction,
            reasoning_end_ids=shared.reasoning_end,
            arrival_s=now,
            images=tuple(images),
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
        bare = _encode_field("bad_words", word.lstrip(), tokenizer)
        spaced = _encode_field("bad_words", " " + word.lstrip(), tokenizer)
        if not bare:
            raise InvalidRequest(f"bad_words must hold words, got {shown(word)}", "bad_words")
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
        ids = _encode_field("structured_outputs.after", f"{before}{text}{after}", tokenizer)
        if not any(known == ids[i : i + len(known)] for known in sequences for i in range(len(ids))):
            sequences.append(ids)
    return tuple(sequences)


def encode_dry_breakers(texts: Iterable[str], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Token sequences that end a repeat for DRY sampling.

    Tokens that contain one of the texts, and tokens that end with a prefix of it plus the tokens of the rest.
    Raises InvalidRequest for more than MAX_DRY_SEQUENCES, or a text that is not valid Unicode.
    """
    name = "dry_sequence_breakers"
    sequences: dict[tuple[int, ...], None] = {}
    for sequence in _dry_sequences(name, texts, tokenizer):
        sequences[sequence] = None
        if len(sequences) > MAX_DRY_SEQUENCES:
            raise InvalidRequest(
                f"{name} match more than {MAX_DRY_SEQUENCES} sequences of tokens, which is the limit: "
                "send fewer texts, or texts of rarer letters",
                name,
            )
    return tuple(sequences)


def _dry_sequences(name: str, texts: Iterable[str], tokenizer: Tokenizer) -> Iterator[tuple[int, ...]]:
    search = tokenizer.token_search()
    for text in dict.fromkeys(texts):
        _encode_field(name, text, tokenizer)  # raises InvalidRequest for a lone surrogate
        yield from ((token_id,) for token_id in search.containing(text.encode()))
        for cut in range(1, len(text)):
            rest = _encode_field(name, text[cut:], tokenizer)
            yield from ((token_id, *rest) for token_id in search.ending_with(text[:cut].encode()))


def encode_prediction(text: str | None, tokenizer: Tokenizer, max_model_len: int) -> tuple[int, ...]:
    """Tokens of the predicted output; () without one."""
    if not text:
        return ()
    ids = _encode_field("prediction", text, tokenizer, max_model_len)
    if len(ids) > max_model_len:
        raise InvalidRequest(
            f"the prediction has {len(ids)} tokens; an answer has at most {max_model_len} (--max-model-len)",
            "prediction",
        )
    return ids


def _encode_field(
    field: str, text: str, tokenizer: Tokenizer, max_tokens: int = MAX_TEXT_TOKENS
) -> tuple[int, ...]:
    """Token ids of a text that is no prompt. Raises InvalidRequest, which names the field."""
    try:
        return tuple(tokenizer.encode(text, False, max_tokens))
    except InvalidRequest as error:
        raise InvalidRequest(field + error.message.removeprefix("prompt"), field) from None


def _truncate_prompt(prompt: tuple[int, ...], params: SamplingParams, max_model_len: int) -> tuple[int, ...]:
    """`truncate_prompt_tokens` of the prompt; with -1, room for max_tokens is left in the context."""
    wanted = params.truncate_prompt_tokens
    if wanted is None:
        return prompt
    length = max(max_model_len - max(params.max_tokens or 1, 1), 1) if wanted < 0 else wanted
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
            raise InvalidRequest(f"{name} must hold token ids, got {shown(token_id)}", name)
        if not 0 <= token_id < vocab_size:
            raise InvalidRequest(
                f"{name}: token id {token_id} is outside the vocabulary, which ends at {vocab_size - 1}", name
            )


def make_embedding_requests(
    inputs: Sequence[Sequence[int]],
    pooling: str,
    request_id: str,
    image_token_id: int | None = None,
) -> list[Request]:
    """One request per input, after check_input(): ids "X-0", "X-1", ... Raises InvalidRequest.

    pooling         one of POOLING_TYPES
    image_token_id  placeholder of images, which are not supported here
    """
    if pooling not in POOLING_TYPES:
        raise InvalidRequest(
            f"pooling must be one of {', '.join(POOLING_TYPES)}, got {shown(pooling)}", "pooling"
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
            raise InvalidRequest(
                f"{name} holds {shown(token_id, 40)}; token ids are 0 to {vocab_size - 1}", name
            )
