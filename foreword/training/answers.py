"""Prompts of a JSONL file, and the model's own answers to them, which are kept in a file.

A line of the prompts has one of these fields; others are ignored:
messages  a conversation for the chat template; a last message of the assistant is left out and answered anew
prompt    a text that the model continues, without the chat template
text      a text that is learned as it is, with no answer
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from foreword.core.params import SamplingParams
from foreword.errors import ConfigError, InvalidRequest
from foreword.llm import LLM

FIELDS = ("messages", "prompt", "text")
ROLES = ("system", "developer", "user", "assistant", "tool")
Tokens = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class PromptLine:
    """A line of the prompts."""

    line_number: int  # 1-based
    field: str  # one of FIELDS
    value: Any  # a list of messages, or a text


@dataclass(frozen=True, slots=True)
class Answer:
    """A prompt and the model's answer."""

    token_ids: Tokens  # int32 [L]
    num_prompt: int  # tokens before the answer, at least one


def read_prompts(path: Path) -> list[PromptLine]:
    """The prompts of a file, without empty lines. Raises ConfigError, which names the line and the field."""
    try:
        with path.open("rb") as file:
            prompts = [_parse_line(path, number, raw) for number, raw in enumerate(file, 1) if raw.strip()]
    except OSError as error:
        raise ConfigError(f"DATA {path}: {error.strerror or error}", "data") from None
    if not prompts:
        raise ConfigError(f"DATA {path} has no prompts", "data")
    return prompts


def _parse_line(path: Path, number: int, raw: bytes) -> PromptLine:
    def error(problem: str) -> ConfigError:
        return ConfigError(f"DATA {path}, line {number}: {problem}", "data")

    try:
        record = json.loads(raw)
    except (ValueError, RecursionError) as reason:
        raise error(f"not JSON: {reason}") from None
    if not isinstance(record, dict):
        raise error(f"must be an object, got {record!r:.80}")
    fields = [name for name in FIELDS if name in record]
    if len(fields) != 1:
        names = " and ".join(fields) or f"none of them, but {', '.join(map(str, record)) or 'nothing'}"
        raise error(f"must have one of {', '.join(FIELDS)}, and has {names:.200}")
    if record.get("tools"):
        raise error("tools are not supported: write them into a system message")
    (field,), value = fields, record[fields[0]]
    if field == "messages":
        messages = value if isinstance(value, list) else None
        if not messages:
            raise error(f"messages must be a list of messages, got {value!r:.80}")
        for index, message in enumerate(messages):
            if (problem := _message_problem(message)) is not None:
                raise error(f"messages[{index}]{problem}")
        value = messages[:-1] if messages[-1]["role"] == "assistant" else messages
        if not value:
            raise error("messages has no message before the assistant's")
    elif not isinstance(value, str) or not value:
        raise error(f"{field} must be a text, got {value!r:.80}")
    return PromptLine(number, field, value)


def _message_problem(message: Any) -> str | None:
    if not isinstance(message, dict):
        return f" must be an object with role and content, got {message!r:.80}"
    role, content = message.get("role"), message.get("content")
    if role not in ROLES:
        return f".role must be one of {', '.join(ROLES)}, got {role!r:.80}"
    if not isinstance(content, str):
        return f".content must be a text, got {content!r:.80}"
    return None


@dataclass(frozen=True, slots=True)
class AnswerOptions:
    """Options that determine the answers."""

    model: str  # as the user names it
    data_digest: str
    max_tokens: int  # limit of an answer
    temperature: float
    seed: int  # seed of the first line; the next line has the next seed

    @classmethod
    def create(cls, model: str, data: Path, max_tokens: int, temperature: float, seed: int) -> AnswerOptions:
        digest = hashlib.blake2b(data.read_bytes(), digest_size=16).hexdigest()
        return cls(model, digest, max_tokens, temperature, seed)


class AnswersFile:
    """Answers as JSON, one a line in order of the prompts, after a line of their options.

    A second run goes on after the last whole line. Raises ConfigError for a file of other options.
    """

    def __init__(self, path: Path, options: AnswerOptions) -> None:
        self._path = path
        self._answers: list[Answer | str] = []  # or why there is none
        header, lines = asdict(options), _whole_lines(path)
        if not lines:
            self._write([header])
            return
        old, *records = map(self._parse, range(1, len(lines) + 1), lines)
        changed = [name for name, value in header.items() if old.get(name) != value]
        if changed:
            was = ", ".join(f"{name} {old.get(name)!r:.80}" for name in changed)
            raise ConfigError(f"{path} was made with {was}: choose another --output or remove it", "output")
        for number, record in enumerate(records, 2):
            try:
                self._answers.append(_read_record(record))
            except (KeyError, TypeError, ValueError, OverflowError) as error:
                raise self._error(number, error) from None

    @property
    def num_done(self) -> int:
        """Prompts that are answered or skipped."""
        return len(self._answers)

    @property
    def skipped(self) -> list[str]:
        """Reasons of prompts without an answer."""
        return [reason for reason in self._answers if isinstance(reason, str)]

    def append(self, records: Sequence[dict[str, Any]]) -> None:
        """Add answers: {"prompt": ids, "answer": ids}, or {"skipped": reason}."""
        self._write(records)
        self._answers += map(_read_record, records)

    def answers(self, max_len: int, vocab_size: int) -> list[Answer]:
        """The answers, cut after `max_len` tokens; without those that are empty then."""
        answers = []
        for number, answer in enumerate(self._answers, 2):
            if isinstance(answer, str):
                continue
            ids = answer.token_ids[:max_len]
            if len(ids) and not 0 <= ids.min() <= ids.max() < vocab_size:
                raise self._error(number, f"token ids must be from 0 to {vocab_size - 1}")
            if len(ids) > answer.num_prompt:
                answers.append(replace(answer, token_ids=ids))
        return answers

    def _parse(self, number: int, line: bytes) -> dict[str, Any]:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise self._error(number, error) from None
        if not isinstance(record, dict):
            raise self._error(number, "no object")
        return record

    def _error(self, number: int, problem: object) -> ConfigError:
        return ConfigError(f"{self._path}, line {number} is no answer ({problem}): remove the file", "output")

    def _write(self, records: Sequence[Mapping[str, Any]]) -> None:
        text = "".join(json.dumps(record, separators=(",", ":")) + "\n" for record in records)
        try:
            with self._path.open("ab") as file:
                file.write(text.encode())
        except OSError as error:
            problem = f"{self._path} cannot be written: {error.strerror or error}"
            raise ConfigError(f"{problem}; the same command goes on", "output") from None


def _read_record(record: Mapping[str, Any]) -> Answer | str:
    if "skipped" in record:
        return str(record["skipped"])
    ids = np.array([*record["prompt"], *record["answer"]], np.int32)
    return Answer(ids, max(len(record["prompt"]), 1))


def _whole_lines(path: Path) -> list[bytes]:
    """Lines of the file; one that a kill has cut short is removed from it."""
    with suppress(FileNotFoundError), path.open("r+b") as file:
        lines = file.readlines()
        if lines and not lines[-1].endswith(b"\n"):
            file.truncate(sum(map(len, lines[:-1])))
            lines.pop()
        return lines
    return []


def answer_prompts(
    llm: LLM, prompts: Sequence[PromptLine], file: AnswersFile, options: AnswerOptions, batch_size: int
) -> Iterator[int]:
    """Answer the prompts that have no answer yet, and yield the number done after each batch.

    A prompt that the model refuses, such as one longer than the context, is skipped with its reason.
    """
    for start in range(file.num_done, len(prompts), batch_size):
        batch = prompts[start : start + batch_size]
        seeds = range(options.seed + start, options.seed + start + len(batch))
        try:
            file.append(_answer(llm, batch, options, seeds))
        except InvalidRequest:  # one prompt is invalid: find it
            for prompt, seed in zip(batch, seeds, strict=True):
                try:
                    file.append(_answer(llm, [prompt], options, [seed]))
                except InvalidRequest as error:
                    file.append([{"skipped": f"line {prompt.line_number}: {error}"}])
        yield file.num_done


def _answer(
    llm: LLM, prompts: Sequence[PromptLine], options: AnswerOptions, seeds: Sequence[int]
) -> list[dict[str, Any]]:
    """Records of the answers to one batch. Raises InvalidRequest."""
    default = replace(
        llm.get_default_sampling_params(),
        max_tokens=options.max_tokens,
        temperature=options.temperature,
        n=1,
        on_runaway="stop",
    )
    records: list[dict[str, Any]] = [{}] * len(prompts)
    for field in FIELDS:
        indexes = [index for index, prompt in enumerate(prompts) if prompt.field == field]
        values = [prompts[index].value for index in indexes]
        params: list[SamplingParams] = [replace(default, seed=seeds[index]) for index in indexes]
        pairs: list[tuple[Sequence[int], Sequence[int]]] = []
        if field == "text":
            token_ids = [llm.tokenizer.encode(value) for value in values]
            pairs = [(ids[:1], ids[1:]) for ids in token_ids]
        elif values:
            outputs = llm.chat(values, params) if field == "messages" else llm.generate(values, params)
            pairs = [(output.prompt_token_ids, output.token_ids) for output in outputs]
        for index, (prompt_ids, answer_ids) in zip(indexes, pairs, strict=True):
            records[index] = {"prompt": prompt_ids, "answer": answer_ids}
    return records


def choose_draft_vocabulary(answers: Sequence[Answer], vocab_size: int, size: int) -> list[int]:
    """The `size` most frequent tokens of the answers, ascending; ties, and tokens of none, by id."""
    counts: Counter[int] = Counter()
    for answer in answers:
        counts.update(answer.token_ids[answer.num_prompt :].tolist())
    ids = sorted(range(vocab_size), key=lambda token_id: (-counts[token_id], token_id))
    return sorted(ids[:size])
