"""Verification of drafts where the host does not look: `sampling/verify.py` on tensors."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["count_accepted"]


def count_accepted(sampled: Tensor, draft_ids: Tensor, num_draft_tokens: Tensor) -> Tensor:
    """How many leading drafted tokens equal the samples.

    sampled    int64 [L, 1 + D], column j follows drafts[:, :j]
    drafts     int64 [L, D]; what lies beyond num_draft does not count
    num_draft  int64 [L], at most D
    Returns int64 [L].
    """
    drafted = torch.arange(draft_ids.shape[1], device=draft_ids.device) < num_draft_tokens[:, None]
    return (drafted & (sampled[:, :-1] == draft_ids)).long().cumprod(dim=1).sum(dim=1)
