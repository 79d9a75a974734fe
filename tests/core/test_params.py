"""Validation of sampling parameters."""

import pytest

from foreword.core.params import TO_THE_END, SamplingParams, Speculation
from foreword.errors import InvalidRequest


def test_invalid_value_is_named() -> None:
    for field, value in [
        ("n", 0),
        ("n", 129),
        ("n", 1.5),
        ("n", True),
        ("temperature", -1),
        ("temperature", float("nan")),
        ("temperature", "hot"),
        ("top_p", 0),
        ("top_p", 1.01),
        ("top_k", -2),
        ("min_p", -0.1),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("repetition_penalty", 0),
        ("min_tokens", -1),
        ("max_tokens", 0),
        ("max_tokens", -2),
        ("logprobs", 21),
        ("prompt_logprobs", -1),
        ("seed", 2**64),
        ("stop", ("",)),
        ("stop", (7,)),
        ("stop", ("a", "\ud800")),
        ("stop_token_ids", (-1,)),
        ("allowed_token_ids", ()),
        ("logit_bias", {5: 101}),
        ("logit_bias", {-5: 1}),
        ("bad_words", ("",)),
        ("bad_words", ("\ud800",)),
        ("bad_words", ("x",) * 1025),
        ("bad_words", ("x" * 16_385,)),
        ("stop", 5),
        ("stop_token_ids", 5),
        ("allowed_token_ids", 5),
        ("logit_bias", [1]),
        ("temperature", 10**400),
        ("ignore_eos", "no"),
        ("speculation", {"method": "off"}),
        ("speculation", None),
        ("structured", "json"),
        ("typical_p", 0),
        ("top_n_sigma", -1.5),
        ("xtc_probability", 1.1),
        ("xtc_threshold", -0.1),
        ("dry_multiplier", -0.5),
        ("dry_base", 0.5),
        ("xtc_threshold", "low"),
        ("seed", 1.0),
        ("top_n_sigma", 101),
        ("dry_allowed_length", 256),
        ("dry_penalty_last_n", -2),
        ("dry_sequence_breakers", ("",)),
        ("dry_sequence_breakers", ("a\udfff",)),
        ("dry_sequence_breakers", ("x" * 41,)),
        ("dry_sequence_breakers", ("x",) * 65),
        ("logprob_token_ids", (-1,)),
        ("logprob_token_ids", range(129)),
        ("truncate_prompt_tokens", 0),
        ("truncate_prompt_tokens", -2),
        ("repetition_penalty", 1e-40),
    ]:
        with pytest.raises(InvalidRequest, match=field) as caught:
            SamplingParams(**{field: value})
        assert caught.value.param == field


def test_error_names_value_and_limit() -> None:
    with pytest.raises(InvalidRequest, match=r"temperature must be between 0 and 100, got -1"):
        SamplingParams(temperature=-1)


def test_min_tokens_above_max_tokens_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="min_tokens 5 is above max_tokens 4"):
        SamplingParams(min_tokens=5, max_tokens=4)
    for limit in (None, TO_THE_END, 5):
        assert SamplingParams(min_tokens=5, max_tokens=limit).max_tokens == limit


def test_speculation_is_checked() -> None:
    for method, max_tokens in [("", None), (None, None), ("auto", -1), ("auto", 1.5)]:
        with pytest.raises(InvalidRequest, match="speculation"):
            Speculation(method, max_tokens)


def test_lists_and_single_strings_become_tuples() -> None:
    params = SamplingParams(
        stop="a", bad_words=["b", "c"], stop_token_ids=[1], allowed_token_ids=[2], logit_bias={3: 1}
    )  # type: ignore[arg-type]
    assert (params.stop, params.bad_words, params.stop_token_ids, params.allowed_token_ids) == (
        ("a",),
        ("b", "c"),
        (1,),
        (2,),
    )


def test_seeds_of_choices_wrap_around() -> None:
    params = SamplingParams(n=3)
    assert [params.for_choice(i, 2**64 - 1).seed for i in range(3)] == [2**64 - 1, 0, 1]
    assert params.for_choice(0, 5).n == 1


def test_prediction_must_be_a_string() -> None:
    assert SamplingParams(prediction="x").prediction == "x"
    with pytest.raises(InvalidRequest, match="prediction must be a string"):
        SamplingParams(prediction=["x"])  # type: ignore[arg-type]


def test_logprob_token_ids_enable_logprobs() -> None:
    assert SamplingParams(logprob_token_ids=[4]).logprobs == 0  # type: ignore[arg-type]
    assert SamplingParams(logprob_token_ids=(4,), logprobs=3).logprobs == 3


def test_dry_is_off_by_default() -> None:
    assert SamplingParams(dry_multiplier=1).uses_dry
    assert (
        not SamplingParams().uses_dry and not SamplingParams(dry_multiplier=1, dry_penalty_last_n=0).uses_dry
    )


def test_greedy_below_the_minimum_temperature() -> None:
    assert SamplingParams(temperature=0).greedy and SamplingParams(temperature=9e-6).greedy
    assert not SamplingParams(temperature=1e-5).greedy


def test_non_default_fields() -> None:
    assert SamplingParams(top_k=5, temperature=1.0).non_default_fields() == {"top_k": 5}
