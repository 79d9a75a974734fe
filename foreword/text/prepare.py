"""A prompt and its parameters become the engine's requests, one for each choice."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import product

from foreword.core.params import SEED_MASK, SamplingParams
from foreword.core.pictures import PromptImage
from foreword.core.request import Request
from foreword.errors import ContextLengthExceeded, InvalidRequest
from foreword.text.tokenizer import Tokenizer

__all__ = ["SamplingDefaults", "encode_bad_words", "encode_dry_breakers", "make_requests", "encode_prediction", "encode_reasoning_end", "resolve_seed"]


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
            "truncate_prompt_tokens must be left out where there are pictures: one that is cut is none", "truncate_prompt_tokens"
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
            raise InvalidRequest(f"{name}: token id {token_id} is outside the vocabulary, which ends at {vocab_size - 1}", name)
