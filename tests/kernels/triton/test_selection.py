"""Runs end within ties that several programs share, whichever of them is first."""

from __future__ import annotations

import pytest
import torch

from tests.support.kernel_rows import make_row
from tests.support.triton_interpreter import IS_INTERPRETED, program_order
from tests.support.triton_sample_rows import assert_same


@pytest.mark.parametrize("k", [32, 63, 99])
def test_top_k_cuts_ties_by_id(k: int) -> None:
    row = torch.zeros(1, 101)
    row[0, 70] = -0.0
    row[0, 90] = 2.0
    row[0, 3] = -torch.inf
    assert_same("apply_top_k", row, torch.tensor([k]))


@pytest.mark.parametrize("operation", ["apply_top_p", "apply_typical_p"])
def test_shares_cut_ties_by_id(operation: str) -> None:
    rows = torch.zeros(2, 70)
    rows[:, ::2] = -1.0
    assert_same(operation, rows, torch.tensor([0.3, 0.9]).double())


def test_typical_ties_of_different_weight() -> None:
    """Distances from the mean are equal on both sides of it, masses are not."""
    pair = torch.log(torch.tensor([0.5, 0.125]).double())
    row = torch.cat([pair.repeat(20), torch.full((30,), -2.0).double()]).float()[None].repeat(3, 1)
    assert_same("apply_typical_p", row, torch.tensor([0.05, 0.4, 0.95]).double())


def test_a_share_of_everything_but_the_last() -> None:
    row = torch.cat([torch.zeros(33), torch.full((33,), -29.0), torch.full((10,), -40.0)])[None]
    share = torch.tensor([1 - 2.0**-53], dtype=torch.float64)
    assert_same("apply_top_p", row, share)
    assert_same("apply_typical_p", row, share)


@pytest.mark.skipif(not IS_INTERPRETED, reason="the order of programs is the card's")
@pytest.mark.parametrize("operation", ["apply_top_k", "apply_top_p"])
def test_the_order_of_programs_changes_nothing(operation: str) -> None:
    row = make_row("ties", 120, 4)[None]
    bound = torch.tensor([17]) if operation == "apply_top_k" else torch.tensor([0.8]).double()
    with program_order(lambda numbers: numbers[::-1]):
        assert_same(operation, row, bound)
