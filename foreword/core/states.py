"""Shapes of layers with state: short convolutions and gated delta rules. Imports no torch.

A state is kept at anchors, the starts of segments of SEGMENT tokens. A row reads the anchor of its segment
and what the rows since then left, so that its bits do not depend on how a prompt was cut, and rejecting a
draft is arithmetic on positions: nothing is restored.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

SEGMENT: Final = 64  # tokens between anchors
NO_ANCHOR: Final = -1  # entry of an anchor table: not kept
RING_ALIGNMENT = 16
MAX_KERNEL_SIZE: Final = 16  # inputs of a convolution: csrc/states/causal_conv.inc
HEAD_DIM_MULTIPLE: Final = 16  # whole vectors of every instruction set


@dataclass(frozen=True, slots=True)
class StateShape:
    """State of one layer: the last inputs of a causal convolution and, if there are heads, a matrix each."""

    channels: int  # C: of the convolution
    kernel_size: int  # K: inputs that an output sees
    key_heads: int = 0  # value heads are a multiple of them
    value_heads: int = 0
    key_dim: int = 0
    value_dim: int = 0

    @property
    def matrix_values(self) -> int:
        """float32 values of an anchor."""
        return self.value_heads * self.key_dim * self.value_dim

    @property
    def row_values(self) -> int:
        """Values that a row leaves: its input of the convolution, keys and updates."""
        return self.channels + self.key_heads * self.key_dim + self.value_heads * self.value_dim

    def anchor_bytes(self, itemsize: int) -> int:
        """itemsize  bytes of an activation"""
        return (self.kernel_size - 1) * self.channels * itemsize + self.matrix_values * 4

    def slot_bytes(self, itemsize: int, max_rows: int) -> int:
        """The ring of a running request; max_rows as in StateSizes."""
        row = self.row_values * itemsize + self.value_heads * 4  # and a decay each
        return self.ring_size(max_rows) * row

    def ring_size(self, max_rows: int) -> int:
        """Rows since the anchor before, those that may be rejected, and inputs before the anchor."""
        return -(-(SEGMENT + max_rows + self.kernel_size) // RING_ALIGNMENT) * RING_ALIGNMENT


class StateSizes(NamedTuple):
    """Memory of all layers with state."""

    num_slots: int  # running requests, and slot 0 for dummy rows
    num_anchors: int
    max_rows: int  # rejectable rows of a step: a token and its draft


NO_STATES = StateSizes(0, 0, 0)
