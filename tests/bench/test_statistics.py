"""Ratios and their intervals."""

import math

import pytest

from foreword.bench.statistics import geometric_mean_ratio, speed_ratio, verdict


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


def test_verdict_needs_an_interval_that_excludes_one() -> None:
    assert verdict(speed_ratio([2.0, 2.2], [1.0, 1.1])) == "faster"
    assert verdict(speed_ratio([1.0, 1.1], [2.0, 2.2])) == "slower"
    assert verdict(speed_ratio([2.0, 1.0], [1.0, 2.0])) == "unclear"
    assert verdict(speed_ratio([2.0], [1.0])) == verdict(speed_ratio([], [])) == "unclear"
