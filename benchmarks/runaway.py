"""The repetition guard: its cost per token, its detection delay, and its false alarms.

    python -m benchmarks.runaway [--tokenizer FOLDER ...] [--samples 2000] [--tokens 200000]

Cost: tokens are fed one at a time (first checked, then taken), as in a step without speculation; in
bursts of eight, as in a step with it; and through `RequestState` with and without a guard. Streams are
random tokens, a loop broken off just below the limit, and repeated patterns of every length; one Python
thread, no model. Alarms: the texts of tests/support/repetition_samples.py, which repeat themselves
legitimately, in each tokenizer. Loops: repeated tokens until a pattern of each length is found. Prints
tables and then one JSON line; exit code 1 after a false alarm or a late detection.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from benchmarks.script import print_json, run_script
from foreword.bench.tables import print_table
from foreword.core.finish import PATTERN_LIMITS, RepetitionDetector
from foreword.core.params import SamplingParams
from foreword.core.request import Request, RequestState
from foreword.demo import MODEL
from foreword.tokenizer.tokenizer import Tokenizer
from tests.support.fakes import byte_tokenizer
from tests.support.repetition_samples import sample

MIN_REPEATING_TOKENS = PATTERN_LIMITS[0][1]
BURST = 8


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--tokenizer", action="append", default=[], metavar="FOLDER", help="one more; may be repeated"
    )
    parser.add_argument("--samples", type=int, default=2000)
    parser.add_argument("--tokens", type=int, default=200_000)
    args = parser.parse_args(arguments)
    costs = {name: _detector_costs(tokens) for name, tokens in _streams(args.tokens).items()}
    print_table(
        "nanoseconds a token",
        ("tokens", "one by one", f"in bursts of {BURST}", "request, guarded", "request, off"),
        _rows(costs),
    )
    tokenizers = {"demo": Tokenizer.from_directory(MODEL), "bytes": byte_tokenizer()}
    tokenizers |= {Path(path).name: Tokenizer.from_directory(path) for path in args.tokenizer}
    alarms = {name: _false_positives(tokenizer, args.samples) for name, tokenizer in tokenizers.items()}
    print_table(
        f"alarms on {args.samples} texts",
        ("tokenizer", "alarms", "kinds"),
        [_alarm_row(*item) for item in alarms.items()],
    )
    late = {pattern: _detection_delay(pattern) for pattern in range(1, PATTERN_LIMITS[-1][0] + 1)}
    worst = [max(late[p] for p in late if p <= longest) for longest, _ in PATTERN_LIMITS]
    rows = [(str(longest), str(delay)) for (longest, _), delay in zip(PATTERN_LIMITS, worst, strict=True)]
    print_table("repeating tokens with which a loop is found", ("patterns up to", "at most"), rows)
    print_json(
        {
            "nanoseconds": costs,
            "alarms": {name: dict(found) for name, found in alarms.items()},
            "worst_delay": worst,
        }
    )
    on_time = all(delay <= enough for delay, (_, enough) in zip(worst, PATTERN_LIMITS, strict=True))
    return 0 if on_time and not any(alarms.values()) else 1


def _streams(count: int) -> dict[str, list[int]]:
    """Streams without a runaway loop."""
    chance = random.Random(1)
    block = [*[7] * MIN_REPEATING_TOKENS, 8]
    broken = [token + 2 * start for start in range(count // len(block)) for token in block]
    lengths = [[1000 * p + i % p for i in range(p + MIN_REPEATING_TOKENS - 1)] for p in range(1, 129)]
    patterns = [token for loop in lengths for token in loop]
    return {
        "chance": [chance.randrange(150_000) for _ in range(count)],
        "two ids by chance": [chance.randrange(2) for _ in range(count)],
        "broken off": broken,
        "every pattern": patterns * max(count // len(patterns), 1),
    }


def _detector_costs(tokens: Sequence[int]) -> tuple[float, float, float, float]:
    singles = [(token,) for token in tokens]
    bursts = [tuple(tokens[i : i + BURST]) for i in range(0, len(tokens), BURST)]
    return (
        _time(_time_detector(), singles, len(tokens)),
        _time(_time_detector(), bursts, len(tokens)),
        _time(_time_counts("warn", len(tokens)), singles, len(tokens)),
        _time(_time_counts("off", len(tokens)), singles, len(tokens)),
    )


def _time_detector() -> Callable[[Sequence[int]], None]:
    guard = RepetitionDetector()

    def take(run: Sequence[int]) -> None:
        assert guard.peek(run) is None
        guard.feed(run)

    return take


def _time_counts(mode: str, count: int) -> Callable[[Sequence[int]], None]:
    params = SamplingParams(on_runaway=mode)
    state = RequestState(Request("bench", (1,), params, 0), 0, count + 2)

    def take(run: Sequence[int]) -> None:
        state.append(run[: state.check_finish(run).num_kept])

    return take


def _time(take: Callable[[Sequence[int]], None], runs: Iterable[Sequence[int]], count: int) -> float:
    began = time.perf_counter()
    for run in runs:
        take(run)
    return (time.perf_counter() - began) / count * 1e9


def _false_positives(tokenizer: Tokenizer, count: int) -> Counter[str]:
    """Count of texts of each kind that raise an alarm."""
    found: Counter[str] = Counter()
    for number in range(count):
        kind, text = sample(number)
        found[kind] += RepetitionDetector().feed(tokenizer.encode(text, add_special_tokens=False)) is not None
    return +found


def _detection_delay(pattern: int) -> int:
    """Repeated tokens until a loop of this length is found, after a preamble of other tokens."""
    preamble = range(10_000, 10_000 + pattern)
    found = RepetitionDetector().feed(
        [*preamble, *(i % pattern for i in range(PATTERN_LIMITS[-1][0] + PATTERN_LIMITS[-1][1]))]
    )
    assert found is not None and found.pattern_len == pattern
    return found.num_tokens - len(preamble) - pattern


def _rows(costs: dict[str, tuple[float, float, float, float]]) -> list[tuple[str, ...]]:
    return [(name, *(f"{value:.0f}" for value in values)) for name, values in costs.items()]


def _alarm_row(name: str, found: Counter[str]) -> tuple[str, ...]:
    return name, str(found.total()), ", ".join(f"{kind} {count}" for kind, count in found.items())


if __name__ == "__main__":
    sys.exit(run_script(main))
