"""Ratios and their intervals."""

import math

import pytest

from foreword.bench.statistics import geometric_mean_ratio, verdict


def test_interval_is_students_t() -> None:
    ratio = geometric_mean_ratio([math.exp(x) for x in (0.0, 0.1, 0.2)])
    assert ratio is not None and ratio.low is not None and ratio.high is not None
    assert ratio.value == pytest.approx(math.exp(0.1))
    reach = 4.303 * 0.1 / math.sqrt(3)  # two degrees of freedom
    assert (math.log(ratio.low), math.log(ratio.high)) == pytest.approx((0.1 - reach, 0.1 + reach))


def test_one_round_has_no_interval() -> None:
    one = geometric_mean_ratio([2.0])
    assert one is not None and one.as_dict() == {"ratio": pytest.approx(2.0)}
    assert geometric_mean_ratio([]) is None


@pytest.mark.parametrize(
    ("ratios", "text"),
    [
        ([2.0, 2.1], "faster"),
        ([0.5, 0.48], "slower"),
        ([2.0, 0.5], "unclear"),
        ([2.0], "unclear"),
    ],
)
def test_verdict_needs_an_interval_that_excludes_one(ratios: list[float], text: str) -> None:
    ratio = geometric_mean_ratio(ratios)
    assert ratio is not None and verdict(ratio.as_dict()) == text
