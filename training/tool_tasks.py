"""Conversations with tools: questions that need a call, and results that become answers.

The format is that of Hermes, in the tokens of text:

    <|system|>Tools:
    read_file(path)<|end|><|user|>Read notes.txt<|end|>
    <|assistant|><tool_call>{"name": "read_file", "arguments": {"path": "notes.txt"}}</tool_call><|end|>
    <|user|><tool_response>The fox is old.</tool_response><|end|><|assistant|>The file says:
    The fox is old.<|end|>

There are no line ends between the turns. Descriptions and types are left out: the context is small.
"""

import json
import re
from collections.abc import Callable
from random import Random

from training import texts
from training import words as w
from training.tasks import Sample

Value = str | int | bool
CALL = "<tool_call>"
FILE_TOOLS = ("read_file(path)", "list_files(path)", "calculate(expression)")  # of `foreword chat --tools`

_STEMS = w.LISTS["file_stems"]
_SUFFIXES = (*(".txt", ".md", ".py", ".json") * 2, ".toml", ".csv", ".yaml", ".cfg", ".log", "")
_FOLDERS = w.LISTS["folders"]
_VERBS = w.LISTS["tool_verbs"]
_TEXT_FIELDS = ("text", "query", "user", "location", "date", "path", "key", "value", "topic")
_OPERATORS = {" + ": " plus ", " - ": " minus ", " * ": " times ", " / ": " divided by "}


def system_text(tools: tuple[str, ...]) -> str:
    """What the chat template writes about tools into the system turn."""
    return "Tools:\n" + "\n".join(tools)


def call_text(name: str, arguments: dict[str, Value]) -> str:
    """One call as the model writes it."""
    body = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"{CALL}{body}</tool_call>"


def result_text(result: str) -> str:
    """A result as the chat template writes it."""
    return f"<tool_response>{result}</tool_response>"


def file_name(rng: Random) -> str:
    """Return a path of a file, seldom with an invented word, which only quotes make easy to copy."""
    odd = rng.random()
    known = w.THINGS + w.ANIMALS if odd < 0.3 else _STEMS
    stem = w.invented(rng) if odd < 0.06 else rng.choice(known)
    folder = f"{rng.choice(_FOLDERS)}/" if rng.random() < 0.25 else ""
    return folder + stem + rng.choice(_SUFFIXES)


def _folder(rng: Random) -> str:
    return rng.choice(_FOLDERS) if rng.random() < 0.9 else f"{rng.choice(_FOLDERS)}/{rng.choice(_FOLDERS)}"


def expression(rng: Random) -> str:
    """Return an arithmetic expression with digits."""
    gap = rng.choice((" ", " ", ""))
    terms = [_term(rng) for _ in range(rng.choice((2, 2, 2, 3, 3, 4)))]
    if len(terms) > 2 and rng.random() < 0.6:
        at = rng.randrange(len(terms) - 1)
        terms[at : at + 2] = [f"({terms[at]}{gap}{rng.choice('+-*')}{gap}{terms[at + 1]})"]
    text = terms[0]
    for term in terms[1:]:
        operator = rng.choice(("+", "-", "*", "/") * 4 + ("*", "**", "%"))
        text += f"{gap}{operator}{gap}{term}"
    return text


def _term(rng: Random) -> str:
    return w.number(rng) if rng.random() < 0.85 else f"{rng.randrange(100)}.{rng.randrange(1, 100)}"


def _signature(name: str, fields: list[str]) -> str:
    return f"{name}({', '.join(fields)})"


def _split(signature: str) -> tuple[str, list[str]]:
    name, _, fields = signature.rstrip(")").partition("(")
    return name, [field for field in fields.split(", ") if field]


def _invented_tool(rng: Random) -> str:
    if rng.random() < 0.2:
        known = ("get_weather(city)", "get_weather(location)", "get_time(city)", "search(query)")
        return rng.choice(known)
    noun = rng.choice(w.THINGS + w.FOODS + w.TITLES + w.PLACES + w.ANIMALS)
    name = rng.choice((f"{rng.choice(_VERBS)}_{noun}", f"{rng.choice(_VERBS)}_{noun}", noun, w.invented(rng)))
    fields = rng.sample(texts.FIELD_NAMES + _TEXT_FIELDS, rng.choice((0, 1, 1, 2, 2, 3)))
    return _signature(name, fields)


def toolset(rng: Random) -> tuple[str, ...]:
    """Return the tools of a conversation: those of the terminal's chat, invented ones, or both."""
    kind = rng.random()
    if kind < 0.5:
        return FILE_TOOLS
    invented = {_split(one)[0]: one for one in (_invented_tool(rng) for _ in range(rng.choice((1, 1, 2, 3))))}
    files = rng.sample(FILE_TOOLS, rng.randint(1, 3)) if kind < 0.7 else []
    tools = [*invented.values(), *files]
    rng.shuffle(tools)
    return tuple(tools)


Call = tuple[str, dict[str, Value]]


def _read(rng: Random) -> tuple[str, Call]:
    path = file_name(rng)
    shown = rng.choice((path, path, path, f'"{path}"'))
    say = (
        f"Read {shown}|Read the file {shown}|Please read {shown}|Can you read {shown}?|What is in {shown}?|"
        f"What is in the file {shown}?|What does {shown} say?|What does the file {shown} contain?|"
        f"Show me {shown}|Show me the content of {shown}|Show the file {shown}|Open the file {shown}|"
        f"Print {shown}|cat {shown}"
    )
    return rng.choice(say.split("|")), ("read_file", {"path": path})


def _list(rng: Random) -> tuple[str, Call]:
    if rng.random() < 0.4:
        say = (
            "List the files|List files|List all files|List this directory|Which files are here?|"
            "What files are there?|Which files do you see?|Which files are in this directory?|ls|"
            "Show me the files|Show the files in this folder|What is in this folder?|"
            "List the files in the current directory"
        )
        return rng.choice(say.split("|")), ("list_files", {"path": "."})
    path = _folder(rng)
    shown = rng.choice((path, path, path, f'"{path}"'))
    say = (
        f"List the files in {shown}|Which files are in {shown}?|Show me the files in {shown}|ls {shown}|"
        f"What is in the folder {shown}?|List the folder {shown}|List {shown}|What files are in {shown}?|"
        f"Show the files in the folder {shown}|List the directory {shown}"
    )
    return rng.choice(say.split("|")), ("list_files", {"path": path})


def _calculate(rng: Random) -> tuple[str, Call]:
    text = expression(rng)
    spoken = text
    if rng.random() < 0.3 and "(" not in text:
        for sign, word in _OPERATORS.items():
            spoken = spoken.replace(sign, word)
    say = (
        f"What is {spoken}?|What is {spoken}?|What's {spoken}?|How much is {spoken}?|Calculate {spoken}|"
        f"Please calculate {spoken}|Compute {spoken}|Work out {spoken}|{spoken}|{spoken} =|"
        f"What is the result of {spoken}?"
    )
    return rng.choice(say.split("|")), ("calculate", {"expression": text})


_ASK_FILES: dict[str, Callable[[Random], tuple[str, Call]]] = {
    "read_file": _read,
    "list_files": _list,
    "calculate": _calculate,
}


def _ask_invented(rng: Random, signature: str) -> tuple[str, Call]:
    name, fields = _split(signature)
    if name in ("get_weather", "get_time"):
        city, what = w.city(rng), name.removeprefix("get_")
        say = f"What is the {what} in {city}?|Tell me the {what} in {city}|"
        say += f"What time is it in {city}?" if what == "time" else f"How is the {what} in {city}?"
        return rng.choice(say.split("|")), (name, {fields[0]: city})
    if name == "search":
        text = rng.choice((w.plain_word(rng), w.city(rng), f"{rng.choice(w.COLORS)} {rng.choice(w.THINGS)}"))
        say = rng.choice((f"Search for {text}", f"Search {text}", f"Look up {text}"))
        return say, (name, {fields[0]: text})
    arguments = {field: _value(rng, field) for field in fields}
    style = rng.choice((" ", " ", "=", ": ", " is "))
    spoken = ", ".join(f"{field}{style}{texts.bare(value)}" for field, value in arguments.items())
    verb = rng.choice(("Use", "Call", "Run", "Please call", "Please use"))
    if not fields:
        return f"{verb} {name}", (name, {})
    verb_of_name, _, noun = name.partition("_")
    if noun and rng.random() < 0.4:
        words = f"{verb_of_name.capitalize()} the {noun}"
        return f"{words} with {spoken}", (name, arguments)
    return rng.choice((f"{verb} {name} with {spoken}", f"{verb} {name}: {spoken}")), (name, arguments)


def _value(rng: Random, field: str) -> Value:
    if field in texts.FIELD_NAMES:
        return texts.value(rng, field)
    if field == "path":
        return file_name(rng)
    return rng.choice((w.plain_word, w.plain_word, w.city))(rng) if rng.random() < 0.9 else w.invented(rng)


def _question(rng: Random, tools: tuple[str, ...]) -> tuple[str, Call]:
    signature = rng.choice(tools)
    ask_file = _ASK_FILES.get(_split(signature)[0])
    return ask_file(rng) if ask_file and signature in FILE_TOOLS else _ask_invented(rng, signature)


def ask(rng: Random, size: int, tools: tuple[str, ...] = ()) -> Sample:
    """Ask something that needs a call, rarely two of them."""
    tools = tools or toolset(rng)
    question, call = _question(rng, tools)
    calls = [call]
    if rng.random() < 0.05:
        second, another = _question(rng, tools)
        if another != call:
            question, calls = f"{question.rstrip('?.')} and {second[0].lower()}{second[1:]}", [call, another]
    marks = ("", "", ".") if question[-1].isalpha() else ("",)
    question += rng.choice(marks)
    if rng.random() < 0.15:
        question = question[0].lower() + question[1:]
    return Sample("tool call", question, "".join(call_text(*one) for one in calls), tools=tools)


def _result(rng: Random, name: str, size: int) -> tuple[str, str]:
    """Return a result of a tool, and the answer that it leads to."""
    if rng.random() < 0.08:
        error = rng.choice(
            (
                "no such file",
                "this is a directory",
                "the user refused this call",
                f"{file_name(rng)} does not exist",
                f"{w.plain_word(rng)} not found",
                "division by zero",
                "the path leaves the directory",
                texts.sentence(rng),
            )
        )
        return f"error: {error}", f"That did not work.\nerror: {error}"
    if name == "read_file":
        text = texts.passage(rng, size)
        return text, f"The file says:\n{text}"
    if name == "list_files":
        names = dict.fromkeys(
            f"{rng.choice(_FOLDERS)}/" if rng.random() < 0.2 else file_name(rng).rpartition("/")[2]
            for _ in range(rng.randint(1, 3 + 2 * size))
        )
        listing = "\n".join(sorted(names))
        return listing, f"I see these files:\n{listing}"
    if name == "calculate" or rng.random() < 0.3:
        value = rng.choice(("", "", "", "-")) + w.number(rng) * rng.choice((1, 1, 2))
        if rng.random() < 0.3:
            value += "." + "".join(rng.choice("0123456789") for _ in range(rng.randint(1, 12)))
        return value, f"The result is {value}."
    if rng.random() < 0.3:
        text = texts.as_json(texts.record(rng, 1, 3), False)
    else:
        text = rng.choice((w.plain_word, w.odd_word, texts.sentence, texts.english))(rng)
    return text, f"The result is:\n{text}"


def answer(rng: Random, size: int, tools: tuple[str, ...] = ()) -> Sample:
    """Answer from the results of the calls before."""
    asked = ask(rng, size, tools)
    names = re.findall(r'<tool_call>{"name": "([^"]+)"', asked.answer)
    results = [_result(rng, name, max(1, size // len(names))) for name in names]
    prompt = "".join(result_text(result) for result, _ in results)
    said = "\n".join(text for _, text in results)
    return Sample("tool result", prompt, said, tools=asked.tools, before=asked)


def is_for_tool(sample: Sample, tools: tuple[str, ...]) -> bool:
    """Whether a question that has a fixed answer without tools would need one of these."""
    files = "(?i)file|folder|document|computer"
    needed = {
        "calculate": r"(?i)plus|times|\d|percent|square|divide",
        "get_weather": "(?i)weather|rain|cold|coat",
        "get_time": "(?i)time|spät|hora|heure|date|day",
        "search": ".",
        "read_file": files,
        "list_files": files,
    }
    names = {_split(one)[0] for one in tools}
    patterns = [pattern for name, pattern in needed.items() if name in names]
    return sample.kind == "unknown" and any(re.search(pattern, sample.prompt) for pattern in patterns)


def missing(rng: Random) -> str:
    """Return a question that needs a tool which is not there."""
    return rng.choice(list(_ASK_FILES.values()))(rng)[0]
