"""llama-server's slots: what the last request of each one has left in the cache.

A slot here is a number that a client gives a conversation (`id_slot`). No memory belongs to it: requests of
the same slot run beside each other. Each key has slots of its own.
"""

from __future__ import annotations

import asyncio
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from foreword.core.images import PromptImage
from foreword.core.request import Request
from foreword.kv_cache.prefix_cache import extend_hashes

MAX_SLOTS: Final = 1024  # of all keys; the least recently used is forgotten


class SlotKey(NamedTuple):
    owner: str
    id: int


@dataclass(slots=True, eq=False)
class Slot:
    """The tokens of the last request, or the blocks of a prefix that was restored."""

    num_open: int = 0
    tokens: array[int] = field(default_factory=lambda: array("q"))
    namespace: str = ""
    images: tuple[PromptImage, ...] = ()
    restored: list[bytes] = field(default_factory=list)

    def digests(self, block_size: int) -> list[bytes]:
        """Hashes of the full blocks, but not of the last token's, whose KV nobody has computed."""
        hashes = list(self.restored)
        extend_hashes(hashes, self.tokens[:-1], block_size, self.namespace, self.images)
        return hashes


class SlotTable:
    """The slots of one model."""

    def __init__(self) -> None:
        self.lock = asyncio.Lock()  # one client at a time saves, restores or erases
        self._slots: OrderedDict[SlotKey, Slot] = OrderedDict()

    def find(self, key: SlotKey) -> Slot:
        """An empty one if the slot was not used."""
        return self._slots.get(key) or Slot()

    def start(self, key: SlotKey) -> None:
        """A request of the slot was sent to the engine."""
        slot = self._slots.setdefault(key, Slot())
        slot.num_open += 1
        self._use(key)

    def end(self, key: SlotKey, request: Request, output_ids: Sequence[int]) -> None:
        """The request has ended. Without a token of an answer it leaves the slot as it was."""
        slot = self._slots.setdefault(key, Slot(num_open=1))
        slot.num_open -= 1
        if not output_ids:
            return
        slot.tokens = array("q", (*request.prompt_ids, *output_ids))
        slot.namespace, slot.restored = request.namespace, []
        slot.images = tuple(image.without_pixels() for image in request.images)
        self._use(key)

    def restore(self, key: SlotKey, digests: list[bytes]) -> None:
        """The slot has this prefix now."""
        slot = self._slots.setdefault(key, Slot())
        slot.tokens, slot.restored = array("q"), digests
        self._use(key)

    def erase(self, key: SlotKey) -> None:
        slot = self.find(key)
        slot.tokens, slot.restored = array("q"), []

    def _use(self, key: SlotKey) -> None:
        self._slots.move_to_end(key)
        while len(self._slots) > MAX_SLOTS:
            self._slots.popitem(last=False)
