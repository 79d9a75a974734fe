"""Stop strings over text that comes in pieces."""

from __future__ import annotations

__all__ = ["StopStrings"]


class StopStrings:
    """Looks for stop strings and holds back only what may still become one.

    The stop string that ends first wins, of several that end at the same character the longest. Each
    character costs constant time (Knuth, Morris and Pratt), whatever the text before it.

    include  the stop string is part of the text, so that nothing needs to be held back
    """

    __slots__ = ("_held", "_include", "_patterns")

    def __init__(self, stops: tuple[str, ...], include: bool = False) -> None:
        self._patterns = [_Pattern(stop) for stop in sorted(set(stops), key=len, reverse=True)]
        self._include = include
        self._held = ""

    def feed(self, text: str, search: bool = True) -> tuple[str, str | None]:
        """Text that is certain now, and the stop string that ended it; nothing may be fed after one.

        With `search` off a stop string that ends within `text` does not count.
        """
        if not self._patterns:
            return text, None
        known = self._held + text
        for end, char in enumerate(text, len(self._held) + 1):
            stop = self._advance(char)
            if stop is not None and search:
                self._held = ""
                return known[: end if self._include else end - len(stop)], stop
        held = 0 if self._include else max(pattern.matched for pattern in self._patterns)
        self._held = known[len(known) - held :]
        return known[: len(known) - held], None

    def flush(self) -> str:
        """What was held back, now that nothing follows."""
        held, self._held = self._held, ""
        return held

    def _advance(self, char: str) -> str | None:
        complete = [pattern.text for pattern in self._patterns if pattern.advance(char)]
        return complete[0] if complete else None


class _Pattern:
    """One stop string, and how many of its characters the text ends with."""

    __slots__ = ("_borders", "matched", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self.matched = 0
        self._borders = _borders(text)

    def advance(self, char: str) -> bool:
        """Take one character; True if the string is complete (it may begin anew within itself)."""
        while self.matched and self.text[self.matched] != char:
            self.matched = self._borders[self.matched]
        self.matched += self.text[self.matched] == char
        if self.matched < len(self.text):
            return False
        self.matched = self._borders[self.matched]
        return True


def _borders(text: str) -> list[int]:
    """borders[k]: length of the longest proper prefix of text[:k] that is also its suffix."""
    borders = [0, 0]
    for char in text[1:]:
        length = borders[-1]
        while length and text[length] != char:
            length = borders[length]
        borders.append(length + (text[length] == char))
    return borders
