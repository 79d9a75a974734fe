"""One generator for each kind of task, from a random source and a size (1 small .. 8 long)."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from random import Random

from training import texts
from training import words as w
from training.stories import story


@dataclass(frozen=True, slots=True)
class Sample:
    """One exchange; without `chat` the answer continues the prompt as plain text."""

    kind: str
    prompt: str
    answer: str
    chat: bool = True
    tools: tuple[str, ...] = ()  # that the system turn names, such as "read_file(path)"
    before: Sample | None = None  # the exchange that this one continues


def _ask(rng: Random, instruction: str, text: str, either: bool = False) -> str:
    """Put the text after the instruction, in some kinds sometimes before it.

    So small a model can edit a word only if it knows the word before it reads the text.
    """
    if not either or rng.random() < 0.75:
        return f"{instruction}:\n{text}"
    return f"{text}\n\n{instruction}."


def repeat(rng: Random, size: int) -> Sample:
    """Repeat the text unchanged."""
    text = texts.passage(rng, size)
    say = rng.choice(
        (
            "Repeat this text",
            "Repeat",
            "Copy this text",
            "Write this again",
            "Repeat the text unchanged",
            "Copy",
        )
    )
    return Sample("repeat", _ask(rng, say, text, either=True), text)


def swap(text: str, old: str, new: str) -> str:
    return re.sub(rf"(?<!\w){re.escape(old)}(?!\w)", lambda _: new, text)


def _quoted(rng: Random, *several: str) -> list[str]:
    """Quote all the words, or (mostly) none.

    Only known words are quoted: "word and (blank)word are different tokens, which are memorized.
    """
    mark = '"' if rng.random() < 0.25 and _KNOWN.issuperset(several) else ""
    return [f"{mark}{one}{mark}" for one in several]


_KNOWN = frozenset(w.UPPER_WORDS) | frozenset(w.NAMES + w.COMMON + w.CITIES + w.JOBS)


def replace(rng: Random, size: int) -> Sample:
    """Replace one word by another wherever it occurs."""
    text = texts.passage(rng, size)
    # The first word has no blank before it, so its tokens differ from the instruction; it is rarer.
    inner = re.findall(r"(?<=\s)\w+(?=[\s.,;:!?]|$)", text)
    if not inner:
        return replace(rng, size)
    old = rng.choice(inner)
    like = (
        w.number if old.isdigit() else w.name if old[0].isupper() else rng.choice((w.plain_word, w.invented))
    )
    new = like(rng)
    a, b = _quoted(rng, old, new)
    say = rng.choice(
        (
            f"Replace {a} with {b}",
            f"Replace the word {a} with {b}",
            f"Change {a} to {b}",
            f"Change the word {a} to {b}",
            f"Write {b} instead of {a}",
            f"Replace {a} by {b} in this text",
        )
    )
    return Sample("replace", _ask(rng, say, text), swap(text, old, new))


def delete(rng: Random, size: int) -> Sample:
    """Take one word out."""
    text = texts.passage(rng, size)
    inner = [
        one for one in re.findall(r"(?<=\w )\w+(?= \w)", text) if len(re.findall(rf"\b{one}\b", text)) == 1
    ]
    if not inner:
        return delete(rng, size)
    old = rng.choice(inner)
    (a,) = _quoted(rng, old)
    say = rng.choice(
        (f"Delete the word {a}", f"Remove the word {a}", f"Remove {a}", f"Leave out the word {a}")
    )
    return Sample("delete", _ask(rng, say, text), re.sub(rf" {old}\b", "", text, count=1))


def rename(rng: Random, size: int) -> Sample:
    """Give a variable another name."""
    text, variables = texts.code(rng)
    for _ in range(size // 3):
        text += "\n\n" + texts.code(rng)[0]
    old, new = rng.choice(variables), rng.choice((w.plain_word, w.invented))(rng)
    (a, b) = _quoted(rng, old, new)
    say = rng.choice(
        (f"Rename {a} to {b}", f"Rename the variable {a} to {b}", f"Replace {a} with {b}", f"Call {a} {b}")
    )
    return Sample("rename", _ask(rng, say, text), swap(text, old, new))


def append(rng: Random, size: int) -> Sample:
    """Add a sentence at the end or at the beginning."""
    text, new = " ".join(texts.sentence(rng) for _ in range(size)), texts.sentence(rng)
    if rng.random() < 0.7:
        return Sample("append", f"{text}\n\nAdd this at the end:\n{new}", f"{text} {new}")
    return Sample("append", f"{text}\n\nAdd this at the beginning:\n{new}", f"{new} {text}")


def uppercase(rng: Random, size: int) -> Sample:
    """Write one known word in capitals."""
    text = " ".join(texts.sentence(rng) for _ in range(max(1, size // 2)))
    known = [one for one in re.findall(r"\w+", text) if one in w.UPPER_WORDS]
    if not known:
        return uppercase(rng, size)
    old = rng.choice(known)
    (a,) = _quoted(rng, old)
    say = rng.choice(
        (f"Write the word {a} in capitals", f"Uppercase the word {a}", f"Put {a} in capital letters")
    )
    return Sample("uppercase", _ask(rng, say, text), swap(text, old, old.upper()))


def _bullets(entries: list[str], style: str) -> str:
    return ", ".join(entries) if style == "," else "\n".join(f"- {one}" for one in entries)


def list_edit(rng: Random, size: int) -> Sample:
    """Remove, add or replace one entry of a list."""
    entries = texts.items(rng, rng.randint(3, 4 + size))
    style = rng.choice(("-", "-", ","))
    text, new, old = (
        _bullets(entries, style),
        rng.choice((w.plain_word, w.invented))(rng),
        rng.choice(entries),
    )
    action = rng.choice(("remove", "remove", "add", "replace"))
    if action == "remove":
        say = rng.choice(
            (f"Remove {old} from the list", f"Delete {old} from this list", f"Take {old} off the list")
        )
        after = [one for one in entries if one != old]
    elif action == "add":
        say = rng.choice(
            (f"Add {new} to the list", f"Append {new} to this list", f"Put {new} at the end of the list")
        )
        after = [*entries, new]
    else:
        say = rng.choice((f"Replace {old} with {new} in the list", f"Change {old} to {new} in this list"))
        after = [new if one == old else one for one in entries]
    return Sample("list", _ask(rng, say, text), _bullets(after, style))


def one_line(rng: Random, size: int) -> Sample:
    """Edit a list or a text that follows the instruction on its line, as Enter of a chat sends it."""
    edit = rng.choice((list_edit, list_edit, list_edit, replace, delete, uppercase))
    sample = edit(rng, min(size, 4))
    instruction, _, text = sample.prompt.partition(":\n")
    if "\n" in text and edit is not list_edit:
        return one_line(rng, size)
    kind = rng.random()
    if kind < 0.15:
        instruction = re.sub(r" (?:the|this) list$", "", instruction)
    elif kind < 0.3:
        instruction = instruction[0].lower() + instruction[1:]
    elif kind < 0.35:
        instruction = f"Please {instruction[0].lower()}{instruction[1:]}"
    colon = "" if text.startswith("-") and rng.random() < 0.25 else ":"
    prompt, answer = (" ".join(one.split("\n")) for one in (f"{instruction}{colon} {text}", sample.answer))
    return Sample("one line", prompt, answer)


def json_edit(rng: Random, size: int) -> Sample:
    """Set, add or remove one field of an object, or set one in an array of objects."""
    if rng.random() < 0.25:
        return table_edit(rng, size)
    before, pretty = texts.record(rng, 2, 3 + size // 2), rng.random() < 0.3
    field, after = rng.choice(list(before)), dict(before)
    action = rng.choice(("set", "set", "set", "add", "remove"))
    if action == "remove" and len(before) > 1:
        del after[field]
        say = rng.choice((f"Remove the field {field}", f"Delete {field}", f"Remove {field} from this JSON"))
    else:
        if action == "add":
            field = rng.choice([one for one in texts.FIELD_NAMES if one not in before])
        after[field] = texts.value(rng, field)
        new = texts.bare(after[field])
        (new,) = _quoted(rng, new) if isinstance(after[field], str) else (new,)
        if action == "add":
            say = rng.choice(
                (f"Add the field {field} with the value {new}", f"Add {field} {new} to this JSON")
            )
        else:
            say = rng.choice(
                (
                    f"Set {field} to {new}",
                    f"Change {field} to {new}",
                    f"Change the {field} to {new} in this JSON",
                )
            )
    return Sample(
        "json edit", _ask(rng, say, texts.as_json(before, pretty), either=True), texts.as_json(after, pretty)
    )


def table_edit(rng: Random, size: int) -> Sample:
    """Set one field of one record in an array."""
    before = texts.table(rng, rng.randint(2, 2 + size // 2))
    at = rng.randrange(len(before))
    key, *others = before[at]
    field = rng.choice(others)
    after = [dict(one) for one in before]
    after[at][field] = texts.value(rng, field)
    new = texts.bare(after[at][field])
    say = rng.choice(
        (f"Set the {field} of {before[at][key]} to {new}", f"Change {field} of {before[at][key]} to {new}")
    )
    text, result = (
        _lines(one) if len(before) > 2 else json.dumps(one, ensure_ascii=False) for one in (before, after)
    )
    return Sample("json edit", _ask(rng, say, text), result)


def _lines(rows: list[dict[str, str | int | bool]]) -> str:
    return "[\n" + ",\n".join("  " + json.dumps(one, ensure_ascii=False) for one in rows) + "\n]"


def json_read(rng: Random, size: int) -> Sample:
    """Read the value of one field."""
    fields = texts.record(rng, 2, 3 + size // 2)
    field, text = rng.choice(list(fields)), texts.as_json(fields, rng.random() < 0.3)
    ask = rng.choice(
        (f"What is the {field}?", f"Read the field {field}:", f"Which {field} is given?", f"Get {field}:")
    )
    prompt = f"{ask}\n{text}" if rng.random() < 0.75 else f"{text}\n\n{ask.rstrip(':')}"
    return Sample("json read", prompt, texts.bare(fields[field]))


def _spoken(rng: Random, fields: dict[str, str | int | bool]) -> str:
    style = rng.choice((" ", " ", "=", ": ", " is "))
    return ", ".join(f"{field}{style}{texts.bare(value)}" for field, value in fields.items())


def json_write(rng: Random, size: int) -> Sample:
    """Write an object from its description, as a chat or as a completion."""
    fields = texts.record(rng, 2, 3 + size // 3)
    spoken = _spoken(rng, fields)
    if rng.random() < 0.3:
        return Sample(
            "json write", f"Record: {spoken}\nJSON:", " " + texts.as_json(fields, False), chat=False
        )
    say = rng.choice(
        ("Write JSON", "Make a JSON object", "Write this as JSON", "JSON for", "Turn this into JSON")
    )
    return Sample("json write", f"{say}: {spoken}", texts.as_json(fields, False))


def tell_story(rng: Random, size: int) -> Sample:
    """Tell a short story about the subjects of the prompt."""
    return Sample("story", *story(rng, long=size > 2))
