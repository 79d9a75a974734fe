"""What a tower has made of pictures, kept within a bound of memory."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container

from torch import Tensor

__all__ = ["EncoderCache", "FeatureKey"]

FeatureKey = tuple[str, bytes]  # tenant and digest: nobody learns from the time it takes what others have shown


class EncoderCache:
    """Features by tenant and picture. Who needs some says so; the others go once the bound is reached, least recently used first.

    num_bytes  that are held
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._features: OrderedDict[FeatureKey, Tensor] = OrderedDict()

    def __contains__(self, key: object) -> bool:
        return key in self._features

    def __getitem__(self, key: FeatureKey) -> Tensor:
        """[num_tokens, width]; it has been used just now."""
        self._features.move_to_end(key)
        return self._features[key]

    def put(self, key: FeatureKey, features: Tensor) -> None:
        """Hold more. What must give way for it does so in trim()."""
        assert key not in self._features, "encoded twice"
        self._features[key] = features
        self.num_bytes += features.nbytes

    def needed_bytes(self, needed: Container[FeatureKey]) -> int:
        """Of those that are needed."""
        return sum(features.nbytes for key, features in self._features.items() if key in needed)

    def evict(self, needed: Container[FeatureKey], room_bytes: int = 0) -> None:
        """Let go of what nobody needs, until `room` bytes more would not exceed the bound."""
        most = self.max_bytes - room_bytes
        for key in [key for key in self._features if key not in needed] if self.num_bytes > most else ():
            self.num_bytes -= self._features.pop(key).nbytes
            if self.num_bytes <= most:
                return

    def evict_unneeded(self, needed: Container[FeatureKey]) -> None:
        """Let go of all that nobody needs: memory is short."""
        self.evict(needed, self.max_bytes)

    def check(self) -> None:
        """Assert that what is held is what is counted."""
        assert self.num_bytes == sum(features.nbytes for features in self._features.values())
