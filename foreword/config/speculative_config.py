"""vLLM's speculative_config: JSON that stands for other options."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from foreword.config.drafters import HEAD_DRAFTERS
from foreword.config.options import Config
from foreword.errors import ConfigError, did_you_mean

# Fields of vLLM's speculative_config without effect: the only values taken (none: all), and why.
CONTROLLER_DECIDES = "the controller decides in each step whether drafts pay"
SUFFIX_SIZES = "--suffix-corpus-memory limits what suffix remembers; the controller chooses the length"
IGNORED_SPECULATIVE_FIELDS: dict[str, tuple[tuple[object, ...], str]] = {
    "draft_tensor_parallel_size": ((1,), "the draft model runs where the model runs"),
    "disable_by_batch_size": ((), CONTROLLER_DECIDES),
    "disable_logprobs": ((), "logprobs are the same with speculation"),
    "disable_padded_drafter_batch": ((), "drafts are not padded"),
    "draft_sample_method": ((), "a draft never changes the answer's distribution"),
    "rejection_sample_method": (("strict", "standard", "block"), "acceptance is always exact"),
    "enforce_eager": ((), "--enforce-eager applies to both models"),
    "max_model_len": ((), "the draft model's own context applies"),
    "parallel_drafting": ((), "a head's own config says how it drafts"),
    "suffix_decoding_max_tree_depth": ((), SUFFIX_SIZES),
    "suffix_decoding_max_cached_requests": ((), SUFFIX_SIZES),
    "suffix_decoding_max_spec_factor": ((), SUFFIX_SIZES),
    "suffix_decoding_min_token_prob": ((), CONTROLLER_DECIDES),
}
SPECULATIVE_NUMBERS = ("num_speculative_tokens", "prompt_lookup_min", "prompt_lookup_max")
TRAINED_HEADS = re.compile("eagle|medusa|mtp|mlp_speculator|dflash")


def apply_speculative_config(config: Config) -> Config:
    """Set the options that `speculative_config` stands for; it keeps the fields without effect."""
    if config.speculative_config is None:
        return config
    given, ignored = _split_speculative_config(config.speculative_config)
    rest = json.dumps(ignored) if ignored else None
    if not given:
        return replace(config, speculative_config=rest)
    if config.speculate != "auto":
        raise ConfigError("give speculate or speculative_config, not both", "speculative_config")
    changes = _parse_speculative_config(given, config.model, bool(ignored.get("parallel_drafting")))
    return replace(config, speculative_config=rest, **changes)


def check_draft_model_options(config: Config) -> None:
    """Check the options that are kept of `speculative_config` for a draft model that is no head.

    Raises ConfigError.
    """
    if "parallel_drafting" in ignored_speculative_fields(config):
        raise _not_parallel("draft_model")


def ignored_speculative_fields(config: Config) -> dict[str, str]:
    """Fields of `speculative_config` without effect, and why, once it is applied."""
    names = json.loads(config.speculative_config) if config.speculative_config else {}
    return {name: IGNORED_SPECULATIVE_FIELDS[name][1] for name in names}


def _split_speculative_config(text: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The fields of vLLM's JSON that mean something here, and those without effect that deserve a note."""
    try:
        given = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"speculative_config is not JSON: {error}", "speculative_config") from None
    if not isinstance(given, Mapping):
        raise ConfigError("speculative_config must be a JSON object", "speculative_config")
    given = {name: value for name, value in given.items() if value is not None}
    if not given.get("parallel_drafting", True):
        del given["parallel_drafting"]
    ignored = {name: given.pop(name) for name in IGNORED_SPECULATIVE_FIELDS if name in given}
    for name in list(ignored):
        accepted, reason = IGNORED_SPECULATIVE_FIELDS[name]
        if not accepted:
            continue
        if (value := ignored.pop(name)) not in accepted:
            limits = " or ".join(map(json.dumps, accepted))
            problem = f"{name} can only be {limits}, got {json.dumps(value)}: {reason}"
            raise ConfigError(f"speculative_config: {problem}", "speculative_config")
    return given, ignored


def _parse_speculative_config(given: dict[str, Any], target: str | None, is_parallel: bool) -> dict[str, Any]:
    """The changed options; `target` is the option `model`. Raises ConfigError."""
    changes = {name: given.pop(name) for name in SPECULATIVE_NUMBERS if name in given}
    model, method = given.pop("model", None), given.pop("method", None)
    has_no_model = model in (None, "ngram", "[ngram]")
    if given:
        name = sorted(map(str, given))[0]
        known = ("method", "model", "parallel_drafting", *SPECULATIVE_NUMBERS)
        problem = f"unknown field {name!r}{did_you_mean(name, known)}; known: {', '.join(known)}"
        raise ConfigError(f"speculative_config: {problem}", "speculative_config")
    if method is None:
        if model is None and not changes.keys() & {"prompt_lookup_min", "prompt_lookup_max"}:
            return changes  # limits of the drafters that `speculate` names
        method = "ngram" if has_no_model else "draft_model"
        is_parallel = is_parallel and has_no_model  # else it may be a head: only its files tell
    method = "dflash" if method == "dspark" else method
    if is_parallel and method not in HEAD_DRAFTERS:
        raise _not_parallel(method)
    if method in ("ngram", "suffix") and has_no_model:
        return {**changes, "speculate": method}
    if method in ("draft", "draft_model") and isinstance(model, str):
        return {**changes, "speculate": "draft", "draft_model": model}
    if method == "mtp" or str(method).endswith("_mtp"):
        return {**changes, "speculate": "mtp", "draft_model": None if model == target else model}
    if method in HEAD_DRAFTERS and isinstance(model, str):
        return {**changes, "speculate": str(method), "draft_model": model}
    kinds = "ngram, suffix or mtp, or with a model draft_model, eagle3, dflash, dspark or mtp"
    problem = f"method must be {kinds}, got {method!r}"
    if TRAINED_HEADS.search(str(method).lower()) and method not in HEAD_DRAFTERS:
        problem += ": this kind of head is not supported yet"
    raise ConfigError(f"speculative_config: {problem}", "speculative_config")


def _not_parallel(method: object) -> ConfigError:
    problem = f"parallel_drafting can only be false with {method}: only trained heads draft in one pass"
    return ConfigError(f"speculative_config: {problem}", "speculative_config")
