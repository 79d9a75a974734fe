"""The stream of training text: kinds, test split, conversations, and packed rows.

Everything is a function of (seed, step, progress): a resumed run sees the same text.
"""

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import cycle, islice
from random import Random

import numpy as np
from tokenizers import Tokenizer

from training import everyday, faq, page, tasks, texts, tool_tasks
from training import words as w
from training.tasks import Sample

END, SYSTEM, USER, ASSISTANT = "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"
SPECIAL = ("<|pad|>", END, SYSTEM, USER, ASSISTANT)

_SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are the demo model of Foreword.",
    "Answer briefly.",
    "Be precise and friendly.",
    "You help with texts and JSON.",
    "You are a careful editor. Return only the result.",
)

Generator = Callable[[Random, int], Sample]


def _no_tool(rng: Random, size: int) -> Sample:
    """A task that needs none of the tools that are there, or one that is not there."""
    tools = tool_tasks.toolset(rng)
    if rng.random() < 0.08:
        tools = () if rng.random() < 0.3 else tuple(set(tools) - set(tool_tasks.FILE_TOOLS))
        sample = Sample("unknown", tool_tasks.missing(rng), faq.FALLBACK, tools=tools)
    else:
        kinds = [kind for kind in KINDS if kind not in TOOL_KINDS]
        sample = KINDS[rng.choices(kinds, weights=[KINDS[kind][2] for kind in kinds])[0]][0](rng, size)
        sample = replace(sample, tools=tools)
    fits = sample.chat and not tool_tasks.is_for_tool(sample, tools)
    return sample if fits else _no_tool(rng, size)


def _without_tools(rng: Random, size: int) -> Sample:
    """A question that would need a tool where there is none."""
    return Sample("without tools", tool_tasks.ask(rng, size).prompt, faq.FALLBACK)


# kind: (generator, share of the samples at first, share after _EDITS_FROM). Easy kinds need little repetition
# later; edits, which are learned last, get their share.
KINDS: dict[str, tuple[Generator, float, float]] = {
    "faq": (faq.ask, 0.22, 0.18),
    "unknown": (faq.unknown, 0.04, 0.03),
    "greeting": (faq.greet, 0.015, 0.01),
    "repeat": (tasks.repeat, 0.10, 0.04),
    "replace": (tasks.replace, 0.13, 0.19),
    "delete": (tasks.delete, 0.05, 0.08),
    "rename": (tasks.rename, 0.06, 0.08),
    "append": (tasks.append, 0.03, 0.02),
    "uppercase": (tasks.uppercase, 0.04, 0.06),
    "list": (tasks.list_edit, 0.08, 0.12),
    "one line": (tasks.one_line, 0.04, 0.06),
    "json edit": (tasks.json_edit, 0.10, 0.11),
    "json read": (tasks.json_read, 0.06, 0.04),
    "json write": (tasks.json_write, 0.08, 0.06),
    "story": (tasks.tell_story, 0.06, 0.03),
    "tool call": (tool_tasks.ask, 0.03, 0.05),
    "tool result": (tool_tasks.answer, 0.03, 0.05),
    "no tool": (_no_tool, 0.03, 0.04),
    "without tools": (_without_tools, 0.02, 0.02),
}
TOOL_KINDS = ("tool call", "tool result", "no tool", "without tools")
_EDITS_START_PROGRESS = 0.2
_COPY_SHARE, _COPY_UNTIL = 0.7, 0.08
_HELD_OUT_ONE_IN = 64
REFRESH = 2.0  # the progress of a run that learns something changed after its end
# What such a run learns: shares of kinds, in addition to their shares of the rest.
REFRESH_SHARES: Mapping[str, Mapping[str, float]] = {
    "faq": {"faq": 0.5},
    "tools": {
        "faq": 0.1,
        "tool call": 0.1,
        "tool result": 0.15,
        "no tool": 0.1,
        "replace": 0.15,
        "delete": 0.05,
        "list": 0.05,
        "uppercase": 0.05,
    },
    "everyday": {
        "unknown": 0.13,
        "without tools": 0.06,
        "one line": 0.12,
        "faq": 0.07,
        "replace": 0.12,
        "delete": 0.04,
        "list": 0.04,
        "uppercase": 0.03,
        "tool call": 0.06,
        "tool result": 0.03,
        "no tool": 0.04,
    },
}


def held_out(sample: Sample) -> bool:
    """Whether the prompt belongs to the test set.

    Wordings of the FAQ and of everyday questions are held out by name (questions.txt, everyday.txt),
    the latter without tools; greetings are too few to split.
    """
    if sample.kind in ("faq", "greeting"):
        return False
    if (
        sample.kind in ("unknown", "without tools")
        and not sample.tools
        and everyday.is_held_out(sample.prompt)
    ):
        return True
    return zlib.crc32(sample.prompt.encode()) % _HELD_OUT_ONE_IN == 0


def _may_train(sample: Sample) -> bool:
    return not held_out(sample) and (sample.before is None or _may_train(sample.before))


def _copy_drill(rng: Random, size: int) -> Sample:
    """Repeat random words, which teaches copying heads fastest."""
    text = texts.salad(rng, rng.randint(4, 12 + 8 * size))
    return Sample("repeat", f"Repeat:\n{text}", text)


def draw(rng: Random, size: int, progress: float = 1.0, focus: str = "faq") -> Sample:
    """Draw one training sample; `progress` (0..1) sets the shares, from REFRESH on with those of `focus`."""
    if progress < _COPY_UNTIL and rng.random() < _COPY_SHARE * (1 - progress / _COPY_UNTIL):
        generate: Generator = _copy_drill
    else:
        phase = 2 if progress >= _EDITS_START_PROGRESS else 1
        shares = {kind: one[phase] for kind, one in KINDS.items()}
        refreshed = REFRESH_SHARES[focus] if progress >= REFRESH else {}
        rest = (1 - sum(refreshed.values())) / sum(shares.values())
        weights = [share * rest + refreshed.get(kind, 0.0) for kind, share in shares.items()]
        generate = KINDS[rng.choices(list(shares), weights=weights)[0]][0]
    sample = generate(rng, size)
    return sample if _may_train(sample) else draw(rng, size, progress, focus)


def _follow_up(rng: Random, before: Sample) -> Sample:
    """Ask for one more replacement in the text of the last answer."""
    old = rng.choice(before.answer.split(" ")[1:] or [""]).strip(".,\"'")
    if not old.isalpha():
        return faq.ask(rng, 1)
    new = rng.choice((w.plain_word, w.invented))(rng)
    say = rng.choice(
        (
            f"Now replace {old} with {new}.",
            f"And change {old} to {new}.",
            f"Now write {new} instead of {old}.",
        )
    )
    return Sample("replace", say, tasks.swap(before.answer, old, new))


def _follow_tools(rng: Random, size: int, tools: tuple[str, ...]) -> Sample:
    """Go on in a conversation with tools."""
    if rng.random() < 0.7:
        sample = tool_tasks.answer(rng, size, tools)
    else:
        sample = replace(_no_tool(rng, size), tools=tools)
    fits = not tool_tasks.is_for_tool(sample, tools) and sample.answer != faq.FALLBACK
    return sample if fits and _may_train(sample) else _follow_tools(rng, size, tools)


def conversation(rng: Random, max_size: int, progress: float = 1.0, focus: str = "faq") -> list[Sample]:
    """Draw one sample, or a chat of several turns."""
    size = 1 + int(max_size * rng.random() ** 3)
    turns = [draw(rng, size, progress, focus)]
    tools = turns[0].tools
    while turns[-1].chat and turns[0].chat and turns[-1].kind != "tool call":
        if rng.random() >= (0.4 if tools else 0.2):
            break
        if tools:
            turns.append(_follow_tools(rng, max(1, size // 2), tools))
        elif turns[-1].kind in ("repeat", "replace") and rng.random() < 0.4:
            turns.append(_follow_up(rng, turns[-1]))
        else:
            following = draw(rng, max(1, size // 2), progress, focus)
            if following.chat and not following.tools:
                turns.append(following)
    return [turn for sample in turns for turn in (*([sample.before] if sample.before else []), sample)]


def system_turn(tools: tuple[str, ...], text: str = "") -> str:
    """The system turn with these tools, or nothing."""
    parts = [part for part in (text, tool_tasks.system_text(tools) if tools else "") if part]
    return "\n".join(parts)


def encode(tokenizer: Tokenizer, rng: Random, turns: list[Sample]) -> tuple[list[int], list[bool]]:
    """Return token ids, and for each whether it belongs to an answer (and is learned)."""

    def ids(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False).ids

    end, system, user, assistant = (tokenizer.token_to_id(one) for one in (END, SYSTEM, USER, ASSISTANT))
    tokens: list[int] = []
    learned: list[bool] = []
    prompt = rng.choice(_SYSTEM_PROMPTS) if turns[0].chat and rng.random() < 0.15 else ""
    if text := system_turn(turns[0].tools, prompt):
        tokens = [system, *ids(text), end]
    for turn in turns:
        asked = ids(turn.prompt)
        tokens += [user, *asked, end, assistant] if turn.chat else asked
        learned += [False] * (len(tokens) - len(learned))
        tokens += [*ids(turn.answer), end]
        learned += [True] * (len(tokens) - len(learned))
    return tokens, learned


@dataclass(frozen=True, slots=True)
class Rows:
    """Packed rows of equal length.

    tokens, positions, documents  int64 [B, L]  positions begin at 0 in each document; padding has document -1
    labels                        int64 [B, L]  next token, or -100 where nothing is learned
    """

    tokens: np.ndarray
    positions: np.ndarray
    documents: np.ndarray
    labels: np.ndarray


def pack_rows(
    tokenizer: Tokenizer, rng: Random, batch: int, length: int, progress: float = 1.0, focus: str = "faq"
) -> Rows:
    """Fill `batch` rows of `length` tokens with whole conversations."""
    shape = (batch, length)
    tokens, positions = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    documents, labels = np.full(shape, -1, np.int64), np.full(shape, -100, np.int64)
    used, misfits, count = [0] * batch, 0, 0
    while misfits < 6:
        ids, learned = encode(tokenizer, rng, conversation(rng, length // 32, progress, focus))
        row = next((i for i in range(batch) if used[i] + len(ids) <= length), None)
        if row is None:
            misfits += 1
            continue
        here = slice(used[row], used[row] + len(ids))
        tokens[row, here], positions[row, here], documents[row, here] = ids, range(len(ids)), count
        # The label of a position is the next token of the same document.
        following = np.where(learned, ids, -100)[1:]
        labels[row, here.start : here.stop - 1] = following
        used[row], count = here.stop, count + 1
    return Rows(tokens, positions, documents, labels)


def test_samples(kind: str, count: int, seed: int = 77, size: int = 4) -> list[Sample]:
    """Return `count` held-out samples of a kind, or all held-out wordings of the FAQ.

    "no tool, faq": wordings of the FAQ beside tools. "everyday": the held-out ones of everyday.txt, again and
    again if they are fewer.
    """
    rng = Random(f"{seed}:{kind}")
    if kind == "everyday":
        return [Sample("unknown", one, faq.FALLBACK) for one in islice(cycle(everyday.held_out()), count)]
    if kind == "no tool, faq":
        return [replace(sample, tools=tool_tasks.toolset(rng)) for sample in test_samples("faq", count, seed)]
    if kind == "faq":
        known = page.answers()
        every = [Sample("faq", one, known[q]) for q, several in faq.wordings()[1].items() for one in several]
        return rng.sample(every, min(count, len(every)))
    generate, found = KINDS[kind][0], []
    while len(found) < count:
        sample = generate(rng, 1 + int(size * rng.random() ** 2))
        if kind == "greeting" or held_out(sample):
            found.append(sample)
    return found
