"""Flags of other servers, and their answers: a flag of ours, a note, or the reason against it.

foreign_flags.toml is the table. It is read when a command line, the environment or `LLM(...)` has a name that
is not ours.
"""

from __future__ import annotations

import functools
import importlib
import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from foreword.config.options import option_fields
from foreword.errors import ConfigError, did_you_mean

NO_EFFECT = "--no-effect"  # stands for a flag without effect, so that words around it stay apart
OPPOSITES = {"--enable-": "--disable-", "--disable-": "--enable-"}
OFF_VALUES = ("0", "false", "off", "disabled", "no")
NUMBER_UNITS = {
    unit: base**power
    for units, base in (("kmgt", 1000), ("KMGT", 1024))
    for power, unit in enumerate(units, start=1)
}


@dataclass(frozen=True, slots=True)
class ForeignUse:
    """The translation of a foreign flag: words of ours with a note, or a refusal."""

    words: tuple[str, ...] = ()
    note: str = ""
    refusal: str = ""


@dataclass(frozen=True, slots=True)
class ForeignFlag:
    """An entry of foreign_flags.toml, which explains its keys.

    names      names of the option, and the suffix that says how many values follow each
    off_names  names that turn a switch off, beside those by rule
    variables  variables of the environment that stand for it
    """

    source: str
    names: Mapping[str, str]
    off_names: tuple[str, ...] = ()
    variables: tuple[str, ...] = ()
    ours: str = ""
    none: str = ""
    always: str = ""
    refused: str = ""
    note: str = ""
    only: tuple[str, ...] = ()
    reads: str = ""
    values: Mapping[str, str] = field(default_factory=dict)

    def use(self, name: str, value: str | None, is_off: bool, own: Collection[str]) -> ForeignUse:
        """The answer to NAME VALUE of a command that has the flags `own`; `value` is None for a switch."""
        if is_off:
            return self._use_off(name, own)
        if value is not None and value in self.values:
            words = self.values[value]
            here = words or "the default"
            return ForeignUse(("=".join(words.split()),) if words else (), f"{name} {value} is {here} here")
        reason = self.none or self.always
        if self.refused:
            return ForeignUse(refusal=f"{name}: {self.refused}")
        if self.only and value is not None and value.lower() not in self.only:
            choices = " or ".join([*self.only, *self.values])
            return ForeignUse(refusal=f"{name} can only be {choices}, got {value!r}: {reason}")
        ours = self.our_flag(own)
        if not ours and reason:
            return ForeignUse((), f"{name} has no effect: {reason}")
        if not ours:
            return ForeignUse(refusal=f"{name}: {self.ours} is no flag of this command")
        try:
            constant = self._value(value)
        except ValueError as error:
            return ForeignUse(refusal=f"{name} must be {error}, got {value!r}")
        shown = f"{ours} {constant}" if value is None or constant != value else ours
        note = f"{name} is {shown.strip()} here" + (f"; {self.note}" if self.note else "")
        return ForeignUse((f"{ours}={constant}" if constant else ours,), note)

    def answer(self, name: str) -> str:
        """The answer where no value can be translated: to a key of a file, or a variable."""
        if self.ours and not self.refused:
            return f"{name} is {self.ours} here"
        return (
            f"{name}: {self.refused}" if self.refused else f"{name} has no effect: {self.none or self.always}"
        )

    def our_flag(self, own: Collection[str]) -> str:
        """The first flag of `ours` that the command has; empty if there is none."""
        flags = (word for word in self.ours.split() if word.startswith("--"))
        return next((word for word in flags if word.partition(".")[0] in own), "")

    def _value(self, value: str | None) -> str:
        """The value of `ours`. Raises ValueError with what it must be."""
        template = next((word for word in self.ours.split() if not word.startswith("--")), "{}")
        if self.reads and value is not None:
            value = READERS[self.reads](value)
        return template.format(value or "")

    def _use_off(self, name: str, own: Collection[str]) -> ForeignUse:
        if self.always:
            return ForeignUse(refusal=f"{name}: {self.always}")
        if self.refused:
            return ForeignUse((), f"{name} has no effect: it is off here")
        ours = self.our_flag(own)
        if not ours and not self.none:
            return ForeignUse(refusal=f"{name}: {self.ours} is no flag of this command")
        if not ours or " " in self.ours:
            return ForeignUse((), f"{name} has no effect: {self.none or 'it is the default here'}")
        opposite = f"--{ours[5:]}" if ours.startswith("--no-") else f"--no-{ours[2:]}"
        return ForeignUse((opposite,), f"{name} is {opposite} here")


def _read_number(text: str) -> str:
    """The number of "8k" (8000), "8K" (8192) or "8192"."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kKmMgGtT]?)", text)
    if match is None:
        raise ValueError("a number such as 8k or 8192")
    return str(int(float(match[1]) * NUMBER_UNITS.get(match[2], 1)))


def _read_list(text: str) -> str:
    """The items of a JSON list, joined by commas; another text as it is."""
    try:
        items = json.loads(text)
    except ValueError:
        return text
    return ",".join(map(str, items)) if isinstance(items, list) else text


def _read_images(text: str) -> str:
    """The number of images of {"image": 4, ...} or {"image": {"count": 4}}."""
    try:
        count = json.loads(text)["image"]
        return str(int(count["count"] if isinstance(count, dict) else count))
    except (ValueError, LookupError, TypeError):
        raise ValueError('a JSON object such as {"image": 4}') from None


READERS = {"number": _read_number, "list": _read_list, "images": _read_images}


@functools.cache
def foreign_flags() -> Mapping[str, tuple[ForeignFlag, ...]]:
    """The table by server. A flag that several servers have stands with the first."""
    tomllib: Any = importlib.import_module("tomllib")  # a start without foreign names does not pay for it
    table = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
    return MappingProxyType(
        {
            source: tuple(_read_entry(source, **entry) for entry in entries)
            for source, entries in table.items()
        }
    )


def _read_entry(source: str, flags: str, only: Sequence[str] = (), **texts: Any) -> ForeignFlag:
    words = flags.split()
    names = {word.rstrip("=?*"): word[len(word.rstrip("=?*")) :] for word in words if word.startswith("-")}
    off_names = tuple(word[1:] for word in words if word.startswith("!"))
    variables = tuple(word for word in words if word[0].isalpha())
    return ForeignFlag(source, names, off_names, variables, only=tuple(only), **texts)


@functools.cache
def _index() -> Mapping[str, tuple[ForeignFlag, bool]]:
    """Flags by name, and whether the name turns a switch off."""
    entries = [entry for source, flags in foreign_flags().items() for entry in flags if source != "values"]
    index = {name: (entry, False) for entry in reversed(entries) for name in entry.names}
    for entry in entries:
        switches = [name for name, suffix in entry.names.items() if not suffix and name.startswith("--")]
        opposites = [
            there + name.removeprefix(here)
            for name in switches
            for here, there in OPPOSITES.items()
            if name.startswith(here)
        ]
        for name in (*entry.off_names, *(f"--no-{name[2:]}" for name in switches), *opposites):
            index.setdefault(name, (entry, True))
    return index


def find_foreign(name: str) -> tuple[ForeignFlag, bool] | None:
    """The flag of another server that has this name, and whether the name turns it off."""
    return _index().get(name)


def describe_variable(name: str, value: str) -> str:
    """Our flag for a variable of another server, such as "--max-model-len 4096"; empty if there is none."""
    entries = (entry for flags in foreign_flags().values() for entry in flags)
    entry = next((entry for entry in entries if name in entry.variables), None)
    if entry is None:
        return ""
    switches = {
        f"--{each.name.replace('_', '-')}" for each in option_fields() if isinstance(each.default, bool)
    }
    is_switch = entry.ours in switches
    is_off = is_switch and value.lower() in OFF_VALUES
    use = entry.use(name, None if is_switch else value, is_off, {*entry.ours.split(), *switches})
    return " ".join(word.replace("=", " ", 1) for word in use.words)


def translate_words(words: Sequence[str], own: Collection[str]) -> tuple[list[str], list[str], list[str]]:
    """The words of a command line in our flags, notes, and refusals.

    own  the flags of the command
    Names may have underscores for dashes. Of a JSON option, --option.field VALUE sets a field. Unknown flags
    stay as they are.
    """
    return _Translation(words, own).run()


class _Translation:
    """One pass over the words of a command line."""

    def __init__(self, words: Sequence[str], own: Collection[str]) -> None:
        self._rest = list(words)
        self._own = own
        self._words: list[str] = []
        self._notes: list[str] = []
        self._refusals: list[str] = []
        self._fields: dict[str, dict[str, Any]] = {}  # fields of JSON options

    def run(self) -> tuple[list[str], list[str], list[str]]:
        while self._rest:
            word = self._rest.pop(0)
            if word == "--":
                self._words += [word, *self._rest]
                break
            if re.match(r"-\D[^\s=]*(=|$)", word):
                self._translate(word)
            else:
                self._words.append(word)
        for name, fields in list(self._fields.items()):
            if name not in self._own:
                self._use(*_index()[name], name, json.dumps(fields))
        for name, fields in self._fields.items():
            if name not in self._own:
                continue
            if any(word.partition("=")[0] == name for word in self._words):
                self._refusals.append(f"{name}: give its fields in JSON or one by one, not both")
            self._words[:0] = [f"{name}={json.dumps(fields)}"]
        return self._words, self._notes, self._refusals

    def _translate(self, word: str) -> None:
        given, sign, value = word.partition("=")
        base, dot, path = (given, "", "") if find_foreign(given) else given.partition(".")
        name = base.replace("_", "-") if base.startswith("--") else base
        found = find_foreign(name)
        if name in self._own and not dot:
            self._translate_own(name, value if sign else None)
        elif dot and (name in self._own or found):
            text = value if sign else self._next_value()
            _set_field(self._fields.setdefault(name, {}), path, text or "")
        elif found and not dot:
            self._use_name(name, given, value if sign else None)
        elif match := re.fullmatch(r"(-[a-z]+)(\d.*)|(-[a-zA-Z])(\w.*)", word):  # -np4, -mFILE
            short, text = match[1] or match[3], match[2] or match[4]
            if find_foreign(short) and short not in self._own:
                self._use_name(short, short, text)
            else:
                self._words.append(word)
        else:
            self._words.append(word)

    def _translate_own(self, name: str, value: str | None) -> None:
        """A flag of ours, whose value may be one of another server's."""
        entry = next((each for each in foreign_flags()["values"] if name in each.names), None)
        text = self._rest[0] if value is None and self._rest else value or ""
        if entry is not None and text in entry.values:
            self._use(entry, False, name, text)
        elif entry is not None and entry.reads and re.fullmatch(r"[\d.]+[a-zA-Z]", text):
            self._words.append(f"{name}={READERS[entry.reads](text)}")
        else:
            self._words.append(name if value is None else f"{name}={value}")
            return
        if value is None:
            self._rest.pop(0)

    def _use_name(self, name: str, given: str, value: str | None) -> None:
        """A foreign flag with the values that follow it."""
        entry, is_off = _index()[name]
        suffix = "" if is_off else entry.names[name]
        if value is not None and not suffix:
            self._refusals.append(f"{given} takes no value, got {value!r} (a flag of {entry.source})")
            return
        if value is None and suffix == "?" and self._rest and self._rest[0].lower() in entry.only:
            value = self._rest.pop(0)
        elif value is None and suffix in ("=", "=="):
            value = self._next_value()
            if value is None and not entry.refused:
                self._refusals.append(f"{given} expected a value (a flag of {entry.source})")
                return
        elif suffix == "*":
            values = [value] if value is not None else []
            while self._rest and not self._rest[0].startswith("-"):
                values.append(self._rest.pop(0))
            value = ",".join(values)
        if suffix == "==":
            self._next_value()
        self._use(entry, is_off, given, value)

    def _next_value(self) -> str | None:
        if not self._rest or re.match(r"-\D", self._rest[0]):
            return None
        return self._rest.pop(0)

    def _use(self, entry: ForeignFlag, is_off: bool, given: str, value: str | None) -> None:
        use = entry.use(given, value, is_off, self._own)
        if use.refusal:
            self._refusals.append(f"{use.refusal} (a flag of {entry.source})")
            return
        self._notes.append(use.note)
        for word in use.words or (NO_EFFECT,):
            base, dot, rest = word.partition(".")
            if dot and base in self._own and "=" not in base:
                path, _, text = rest.partition("=")
                _set_field(self._fields.setdefault(base, {}), path, text)
            else:
                self._words.append(word)


def _set_field(fields: dict[str, Any], path: str, text: str) -> None:
    """Set the field "a.b" to the JSON value of a text, or to the text."""
    *parents, name = path.split(".")
    for parent in parents:
        fields = fields.setdefault(parent, {})
    try:
        fields[name] = json.loads(text)
    except ValueError:
        fields[name] = text


def translate_keywords(options: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Fields of Config for keyword arguments of `LLM`, those of vLLM's `LLM` included, and notes.

    vLLM's arguments are answered like its flags; a `speculative_config` may be a mapping. Raises ConfigError.
    """
    fields = {item.name: item for item in option_fields()}
    translated: dict[str, Any] = {}
    notes: list[str] = []
    for name, value in options.items():
        if name == "speculative_config" and isinstance(value, Mapping):
            translated[name] = json.dumps(value)
        elif name in fields:
            translated[name] = value
        elif value is not None:
            translated.update(_translate_keyword(name, value, fields, notes))
    return translated, notes


def _translate_keyword(
    name: str, value: object, fields: Mapping[str, Any], notes: list[str]
) -> dict[str, Any]:
    """One argument that is no field of Config. False turns a switch off, or leaves the default."""
    found = find_foreign(f"--{name.replace('_', '-')}")
    if found is None:
        raise ConfigError(f"LLM has no option {name!r}{did_you_mean(name, tuple(fields))}", name)
    entry, is_off = found
    own = [flag for field in fields for flag in (f"--{field}", f"--no-{field}")]
    text = json.dumps(value) if isinstance(value, dict | list) else str(value)
    use = entry.use(
        name,
        None if isinstance(value, bool) else text,
        is_off != (value is False),
        {flag.replace("_", "-") for flag in own},
    )
    if use.refusal:
        raise ConfigError(use.refusal, name)
    if use.words or value is not False:
        notes.append(use.note)
    return dict(_field_of(word, fields, {text: value}) for word in use.words)


def _field_of(word: str, fields: Mapping[str, Any], values: Mapping[str, Any]) -> tuple[str, Any]:
    """The field of Config that a word of ours sets, and its value; `values` has those by their text."""
    flag, sign, text = word.partition("=")
    name, dot, path = flag.removeprefix("--").replace("-", "_").partition(".")
    if dot:
        return name, json.dumps({path: values[text]})
    if not sign:
        return name.removeprefix("no_"), name in fields
    kind = type(fields[name].default)
    value = values.get(text, kind(text) if kind in (int, float) else text)
    return name, text if str(fields[name].type).startswith("str") else value
