"""Flags of sampling parameters."""

import argparse

from foreword.cli.flags import FLAGS, add_config_options, add_sampling_options, read_params
from foreword.core.params import SamplingParams, Speculation


def parse(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_sampling_options(parser)
    return parser.parse_args(words)


def test_default_is_greedy_and_bounded() -> None:
    """A terminal needs reproducible answers that do not fill the context."""
    assert read_params(parse()) == SamplingParams(temperature=0.0, max_tokens=512)


def test_every_flag_reaches_the_parameters() -> None:
    words = [word for item in FLAGS for word in ("--" + item.name.replace("_", "-"), "1")]
    params = read_params(parse(*words, "--stop", "a", "--stop", "b", "--speculation", "off"))
    assert all(getattr(params, item.name) == 1 for item in FLAGS)
    assert (params.stop, params.speculation) == (("a", "b"), Speculation("off"))


def test_other_defaults_match_the_sampler() -> None:
    plain = SamplingParams(temperature=0.0, max_tokens=512)
    assert all(item.default == getattr(plain, item.name) for item in FLAGS)


def test_flags_precede_the_checkpoint_and_it_precedes_the_defaults() -> None:
    defaults = {"temperature": 0.7, "top_p": 0.8, "max_tokens": 99}
    params = read_params(parse("--top-p", "1"), defaults)
    assert params == SamplingParams(temperature=0.7, top_p=1.0, max_tokens=99)


def test_on_runaway_reaches_a_server() -> None:
    """It is an option of the engine, so the request must carry it."""
    parser = argparse.ArgumentParser()
    add_sampling_options(parser)
    add_config_options(parser, ("scheduler",))
    assert read_params(parser.parse_args(["--on-runaway", "stop"])).on_runaway == "stop"
    assert read_params(parser.parse_args([])).on_runaway is None
