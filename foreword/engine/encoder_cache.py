"""The cache of image features."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container

from torch import Tensor

FeatureKey = tuple[str, bytes]  # cache salt and digest: timing does not reveal other tenants' images


class EncoderCache:
    """LRU cache of image features within a memory bound; needed features are never evicted."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._features: OrderedDict[FeatureKey, Tensor] = OrderedDict()

    def __contains__(self, key: object) -> bool:
        return key in self._features

    def __getitem__(self, key: FeatureKey) -> Tensor:
        """Features [num_tokens, width], marked as used."""
        self._features.move_to_end(key)
        return self._features[key]

    def put(self, key: FeatureKey, features: Tensor) -> None:
        """Add features; evict() restores the bound."""
        assert key not in self._features, "the image is encoded twice"
        self._features[key] = features
        self.num_bytes += features.nbytes

    def needed_bytes(self, needed: Container[FeatureKey]) -> int:
        return sum(features.nbytes for key, features in self._features.items() if key in needed)

    def evict(self, needed: Container[FeatureKey], room_bytes: int = 0) -> None:
        """Evict features that are not needed until `room_bytes` more fit."""
        for key in list(self._features):
            if self.num_bytes <= self.max_bytes - room_bytes:
                return
            if key not in needed:
                self.num_bytes -= self._features.pop(key).nbytes

    def check(self) -> None:
        assert self.num_bytes == sum(features.nbytes for features in self._features.values())
