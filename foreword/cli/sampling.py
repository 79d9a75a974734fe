"""Flags for the sampling parameters of one answer."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

from foreword.core.params import SamplingParams, Speculation

__all__ = ["FLAGS", "SamplingFlag", "add_sampling_options", "read_params"]


@dataclass(frozen=True, slots=True)
class SamplingFlag:
    """A field of SamplingParams that is also a flag. (`--seed` and `--on-runaway` are fields of Config.)"""

    name: str
    type: Any
    default: Any
    help: str


FLAGS = (
    SamplingFlag("max_tokens", int, 512, "longest answer in tokens (default 512)"),
    SamplingFlag("temperature", float, 0.0, "0, the default, takes the likeliest token"),
    SamplingFlag("top_p", float, 1.0, "keep the likeliest tokens up to this probability"),
    SamplingFlag("top_k", int, 0, "keep this many of the likeliest tokens; 0 keeps all"),
    SamplingFlag("min_p", float, 0.0, "drop tokens less likely than this share of the likeliest"),
    SamplingFlag("typical_p", float, 1.0, "keep tokens about as surprising as expected, up to this probability"),
    SamplingFlag("top_n_sigma", float, 0.0, "keep tokens at most so many standard deviations below the likeliest; 0 keeps all"),
    SamplingFlag("xtc_probability", float, 0.0, "how often to exclude likely tokens"),
    SamplingFlag("xtc_threshold", float, 0.1, "likely are those of at least this probability; the last of them stays"),
    SamplingFlag("presence_penalty", float, 0.0, "subtract from tokens that the answer has already"),
    SamplingFlag("frequency_penalty", float, 0.0, "subtract for every time that the answer has a token already"),
    SamplingFlag("repetition_penalty", float, 1.0, "divide by this what prompt or answer have already"),
    SamplingFlag("dry_multiplier", float, 0.0, "subtract from tokens that would go on with a repeat"),
    SamplingFlag("dry_base", float, 1.75, "times this for each token that the repeat is longer than allowed"),
    SamplingFlag("dry_allowed_length", int, 2, "longest repeat that may go on for the multiplier alone"),
)


def add_sampling_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sampling")
    for item in FLAGS:
        group.add_argument("--" + item.name.replace("_", "-"), type=item.type, default=item.default, metavar="N", help=item.help)
    group.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="end the answer before this text; may be repeated"
    )
    group.add_argument("--speculation", metavar="METHOD", help="for this answer: auto, off, or the name of one drafter")


def read_params(args: argparse.Namespace) -> SamplingParams:
    """The parameters that were given, the defaults elsewhere. Raises InvalidRequest."""
    values = {item.name: getattr(args, item.name) for item in FLAGS}
    if args.speculation is not None:
        values["speculation"] = Speculation(args.speculation)
    return SamplingParams(
        stop=tuple(args.stop), seed=getattr(args, "seed", None), on_runaway=getattr(args, "on_runaway", None), **values
    )
