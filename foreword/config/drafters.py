"""Names in `--speculate`: built-in drafters, `module:Class`, and entry points of installed packages.

Names are resolved without importing a plug-in: only the engine process runs its code.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Final

from foreword.errors import ConfigError

HEAD_DRAFTERS: Final = ("eagle3", "dflash", "mtp")  # trained heads, by their method
DRAFTERS: Final = ("grammar", "prediction", "suffix", "text", "ngram", "draft", *HEAD_DRAFTERS, "replay")
NATIVE_DRAFTERS: Final = ("suffix", "text")  # need the native library
AUTO_DRAFTERS: Final = ("grammar", "prediction", "suffix", "text")
ENTRY_POINT_GROUP: Final = "foreword.drafters"
RESERVED_NAMES: Final = (*DRAFTERS, "auto", "off", "policy")  # "policy" counts errors of the controller
CLASS_REFERENCE: Final = re.compile(r"[^\W\d][\w.]*:[^\W\d]\w*")
NAME: Final = re.compile(r"[\w.-]{1,64}")  # a label value of metrics


@dataclass(frozen=True, slots=True)
class DrafterPlugin:
    """A drafter that is not part of this package."""

    name: str  # its label in metrics, and method of a request
    reference: str  # "module:Class"
    is_installed: bool  # an entry point; else the module may lie in the current directory

    @property
    def item(self) -> str:
        """As `--speculate` names it."""
        return self.name if self.is_installed else self.reference


def parse_drafters(
    speculate: str, draft_model: str | None, replay_file: str | None
) -> list[str | DrafterPlugin]:
    """The drafters that `--speculate` names; empty if it is off. Raises ConfigError.

    `auto` includes the draft model if there is one, but not `ngram`, because `suffix` covers it.
    """
    if speculate == "off":
        return []
    drafters: list[str | DrafterPlugin] = []
    items = [*map(str.strip, speculate.split(","))]
    has_draft_model = draft_model is not None and not {*HEAD_DRAFTERS} & {*items}
    for item in items:
        if item == "off":
            raise ConfigError("speculate: `off` cannot be combined with drafters", "speculate")
        if item.isdecimal():
            problem = f"names drafters; --num-speculative-tokens {item} limits their tokens"
            raise ConfigError(f"speculate {problem}", "speculate")
        if item == "auto":
            drafters += (*AUTO_DRAFTERS, *(("draft",) if has_draft_model else ()))
        else:
            drafters.append(item if item in DRAFTERS else find_plugin(item))
    needs_model = [name for name in ("draft", *HEAD_DRAFTERS) if name in drafters]
    if needs_model and needs_model != ["mtp"] and not draft_model:
        raise ConfigError(f"speculate: `{needs_model[0]}` needs --draft-model", "draft_model")
    if len(needs_model) > 1:
        both = " and ".join(needs_model)
        raise ConfigError(f"speculate: {both} exclude each other: --draft-model is one of them", "speculate")
    if "replay" in drafters and not replay_file:
        raise ConfigError("speculate: `replay` needs --replay-file", "replay_file")
    names = [each.name if isinstance(each, DrafterPlugin) else each for each in drafters]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"speculate: two drafters are named {name}: {speculate}", "speculate")
    return drafters


def with_head(speculate: str, method: str | None, path: str) -> str:
    """`--speculate` with the method of the trained head in `path`, instead of `draft` and beside `auto`.

    None: `path` is no head. Raises ConfigError if another method is named.
    """
    items = [*map(str.strip, speculate.split(","))]
    named = [item for item in items if item in HEAD_DRAFTERS]
    if method is None:
        if named:
            problem = f"{path} is no trained head; --speculate draft runs a draft model"
            raise ConfigError(f"speculate: `{named[0]}`: {problem}", "draft_model")
        return speculate
    items = [method if item == "draft" else item for item in items]
    if "auto" in items and method not in items:
        items.insert(items.index("auto") + 1, method)
    if any(item not in (method, "auto") for item in named):
        raise ConfigError(f"speculate: `{named[0]}`: the head in {path} is of method {method}", "draft_model")
    return ",".join(items)


def find_plugin(text: str) -> DrafterPlugin:
    """The plug-in that an item of `--speculate` names. Raises ConfigError."""
    is_installed = ":" not in text
    reference = _find_installed(text) if is_installed else text
    if not CLASS_REFERENCE.fullmatch(reference):
        problem = f"{reference!r} is not like my_drafter:Bigram, an importable module and a class in it"
        if is_installed:
            problem = f"the entry point {text}: {problem}"
        raise ConfigError(f"speculate: {problem}", "speculate")
    plugin = DrafterPlugin(text if is_installed else text.rpartition(":")[2].lower(), reference, is_installed)
    if plugin.name in RESERVED_NAMES:
        problem = f"{text} would be named {plugin.name}, which is reserved; rename the class"
        raise ConfigError(f"speculate: {problem}", "speculate")
    if not NAME.fullmatch(plugin.name):
        problem = (
            f"the name of a drafter has at most 64 letters, digits, '_', '-' and '.', got {plugin.name!r}"
        )
        raise ConfigError(f"speculate: {problem}", "speculate")
    return plugin


def _find_installed(name: str) -> str:
    """The value of the entry point of this name, as its package wrote it. Raises ConfigError."""
    values = {(point.name, point.value.replace(" ", "")) for point in entry_points(group=ENTRY_POINT_GROUP)}
    references = sorted(value for each, value in values if each == name)
    if len(references) > 1:
        problem = f"several packages have a drafter {name!r}; name one of {', '.join(references)}"
        raise ConfigError(f"speculate: {problem}", "speculate")
    if not references:
        raise ConfigError(_unknown_message(name, sorted(each for each, _ in values)), "speculate")
    return references[0]


def _unknown_message(text: str, installed: list[str]) -> str:
    known = ["auto", "off", *DRAFTERS, *installed]
    close = difflib.get_close_matches(text, known, n=1)
    hint = f", did you mean {close[0]!r}?" if close else ";"
    own = f"your own is module:Class, or an entry point of {ENTRY_POINT_GROUP}"
    return f"speculate: unknown drafter {text!r}{hint} known: {', '.join(known)}; {own}"
