"""The texts that sessions are made of: Foreword's own files in three languages, and sentences from them."""

from __future__ import annotations

import ast
import re
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import foreword

LANGUAGES: Mapping[str, tuple[str, ...]] = {"python": (".py",), "c++": (".cpp", ".h"), "javascript": (".js",)}
MIN_FILE_LINES, MAX_FILE_LINES = 60, 700
MIN_NAME_LENGTH, MIN_SENTENCE_LENGTH = 8, 40
MIN_NAMES = 4  # names that a session's file has at least
IDENTIFIER = re.compile(r"[A-Za-z_]\w*")


@dataclass(frozen=True, slots=True)
class Corpus:
    """The files of one language that the sessions of one set see."""

    language: str
    texts: Mapping[str, str]  # by path
    names: Mapping[str, Sequence[str]]  # file of a fit size: identifiers that it uses more than once

    @property
    def paths(self) -> list[str]:
        return list(self.names)


class Sources:
    """The files of the installed package. Each is in one of two halves, by its path; a set has one half."""

    def __init__(self) -> None:
        folder = Path(foreword.__file__).parent
        languages = {suffix: name for name, suffixes in LANGUAGES.items() for suffix in suffixes}
        files = [path for path in sorted(folder.rglob("*")) if path.suffix in languages]
        self.texts = {
            f"foreword/{path.relative_to(folder).as_posix()}": path.read_text(encoding="utf-8")
            for path in files
        }
        self._languages = {path: languages[Path(path).suffix] for path in self.texts}
        trees = {path: ast.parse(text) for path, text in self.texts.items() if path.endswith(".py")}
        self.notes = "\n".join(
            f"- `{path}`: {doc}" for path, tree in trees.items() if (doc := ast.get_docstring(tree))
        )
        docs = (
            (ast.get_docstring(node) or "").partition("\n")[0]
            for tree in trees.values()
            for node in ast.walk(tree)
            if isinstance(node, ast.FunctionDef)
        )
        self.sentences = sorted({line for line in docs if len(line) >= MIN_SENTENCE_LENGTH})
        self.languages = [name for name in LANGUAGES if name in self._languages.values()]

    def corpus(self, language: str, half: int) -> Corpus:
        """half  0 or 1"""
        texts = {
            path: text
            for path, text in self.texts.items()
            if self._languages[path] == language and zlib.crc32(path.encode()) % 2 == half
        }
        names = {path: _names(text) for path, text in texts.items()}
        return Corpus(language, texts, {path: found for path, found in names.items() if found})


def _names(text: str) -> list[str]:
    """Long identifiers that occur more than once; none of a file that is too short or too long."""
    if not MIN_FILE_LINES <= text.count("\n") <= MAX_FILE_LINES:
        return []
    counts = Counter(name for name in IDENTIFIER.findall(text) if len(name) >= MIN_NAME_LENGTH)
    names = sorted(name for name, count in counts.items() if 1 < count < 30)
    return names if len(names) >= MIN_NAMES else []
