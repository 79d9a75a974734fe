"""llama-server's slots: the last conversation of each, which the engine's caches may still have.

A slot here is a number that a client gives a conversation (`id_slot`). No memory belongs to it: requests of
the same slot run beside each other. Each key has slots of its own.
"""

from __future__ import annotations

import asyncio
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

from foreword.core.images import PromptImage
from foreword.core.request import Request
from foreword.kv_cache.prefix_cache import extend_hashes

# Limits shared by all keys: beyond them the least recently used slots without open requests are forgotten.
MAX_SLOTS: Final = 1024
MAX_TOKENS: Final = 4 << 20  # a restored block counts as RESTORED_TOKENS
RESTORED_TOKENS: Final = 16


class SlotKey(NamedTuple):
    owner: str
    id: int


@dataclass(slots=True, eq=False)
class Slot:
    """The tokens of the last request, or the blocks of a prefix that was restored."""

    num_open: int = 0
    tokens: array[int] = field(default_factory=lambda: array("i"))
    namespace: str = ""
    images: tuple[PromptImage, ...] = ()
    restored: list[bytes] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return len(self.tokens) + len(self.restored) * RESTORED_TOKENS

    def num_blocks(self, block_size: int) -> int:
        """Full blocks, but not that of the last token, whose KV nobody has computed."""
        return max(len(self.restored), (len(self.tokens) - 1) // block_size)

    def block_hashes(self, block_size: int) -> list[bytes]:
        """Hashes of the num_blocks() blocks."""
        hashes = list(self.restored)
        extend_hashes(hashes, self.tokens[:-1], block_size, self.namespace, self.images)
        return hashes


def shared_hashes(slots: Sequence[Slot], hashes: Sequence[bytes], block_size: int) -> set[bytes]:
    """Hashes of the conversations that begin with the first of `hashes`: the others share none of them."""
    shared: set[bytes] = set()
    for slot in slots:
        first = replace(slot, tokens=slot.tokens[: block_size + 1], restored=slot.restored[:1])
        if hashes and first.block_hashes(block_size) == list(hashes[:1]):
            shared.update(slot.block_hashes(block_size))
    return shared


class SlotTable:
    """The slots of one model. Methods are for the event loop."""

    def __init__(self) -> None:
        self.lock = asyncio.Lock()  # one client at a time changes what is saved
        self._slots: OrderedDict[SlotKey, Slot] = OrderedDict()
        self._num_tokens = 0

    def find(self, key: SlotKey) -> Slot:
        """A copy that later requests do not change; an empty one if the slot was not used."""
        return replace(self._slots.get(key) or Slot())

    def others(self, key: SlotKey) -> list[Slot]:
        """Copies of the slots of all keys besides this one."""
        return [replace(slot) for other, slot in self._slots.items() if other != key]

    def start(self, key: SlotKey) -> None:
        """A request of the slot was sent to the engine."""
        self._use(key).num_open += 1
        self._evict(key)

    def end(self, key: SlotKey, request: Request, output_ids: Sequence[int] | None) -> None:
        """The request that was started has ended; None: without an answer, which leaves the tokens."""
        slot = self._slots[key]
        slot.num_open -= 1
        assert slot.num_open >= 0, "a request ended twice"
        if output_ids is not None:
            tokens = array("i", request.prompt_ids)
            tokens.extend(output_ids)
            slot.namespace = request.namespace
            slot.images = tuple(image.without_pixels() for image in request.images)
            self._set(key, tokens, [])
        self._evict(key)

    def restore(self, key: SlotKey, hashes: list[bytes]) -> None:
        """The slot has this prefix now."""
        self._set(key, array("i"), hashes)
        self._evict(key)

    def erase(self, key: SlotKey) -> None:
        if key in self._slots:
            self._set(key, array("i"), [])

    def _use(self, key: SlotKey) -> Slot:
        slot = self._slots.setdefault(key, Slot())
        self._slots.move_to_end(key)
        return slot

    def _set(self, key: SlotKey, tokens: array[int], restored: list[bytes]) -> None:
        slot = self._use(key)
        self._num_tokens -= slot.num_tokens
        slot.tokens, slot.restored = tokens, restored
        self._num_tokens += slot.num_tokens

    def _evict(self, used: SlotKey) -> None:
        """Forget slots beyond the limits, but not the one in use."""
        while len(self._slots) > MAX_SLOTS or self._num_tokens > MAX_TOKENS:
            idle = (key for key, slot in self._slots.items() if not slot.num_open and key != used)
            oldest = next(idle, None)
            if oldest is None:
                break
            self._num_tokens -= self._slots.pop(oldest).num_tokens
