"""Measure the bundled vision model and its text-only drafter on held-out images.

    python -m training.vision.evaluate [--cases 2000] [--sampled 100]

Regime: one question an image, in the engine itself (bfloat16, first without drafters, then with the draft
model). Greedy: the share that the judge calls right, by kind of question and image. Sampled: of 8 choices
at temperature 0.7, how many are right, and how many texts are distinct. Drafted: tokens accepted of those
drafted. Prints a table and one JSON line.
"""

import argparse
import json
from collections import Counter
from collections.abc import Iterator

from rich.console import Console
from rich.progress import track
from rich.table import Table

from foreword import LLM, RequestOutput, SamplingParams
from training.vision.cases import Case, cases
from training.vision.draw import draw_image

_MAX_TOKENS = 40
_AT_ONCE = 32
GREEDY = SamplingParams(temperature=0.0, max_tokens=_MAX_TOKENS)
SAMPLED = SamplingParams(temperature=0.7, max_tokens=_MAX_TOKENS, n=8, seed=0)


def messages(case: Case) -> list[dict[str, object]]:
    """The conversation of a case."""
    parts = [{"type": "image", "image": draw_image(case.scene)}, {"type": "text", "text": case.question}]
    return [{"role": "user", "content": parts}]


def generate_answers(
    llm: LLM, cases: list[Case], params: SamplingParams, note: str
) -> Iterator[tuple[Case, RequestOutput]]:
    """The cases with their answers, in batches."""
    for part in track([cases[at : at + _AT_ONCE] for at in range(0, len(cases), _AT_ONCE)], note):
        yield from zip(part, llm.chat([messages(one) for one in part], params), strict=True)


def groups(case: Case) -> list[str]:
    """The groups that a case counts in."""
    names = [f"question: {case.kind}", f"picture: {case.scene.kind}", "all"]
    if case.unseen:
        names.append("combinations never trained")
    if (case.scene.kind, case.kind) == ("two", "colour"):
        names.append("colour of one of two")
    return names


def accuracy(llm: LLM, cases: list[Case]) -> dict[str, tuple[int, int]]:
    """Right answers and cases by group; see `groups`."""
    right, count = Counter[str](), Counter[str]()
    for case, output in generate_answers(llm, cases, GREEDY, "greedy"):
        for name in groups(case):
            count[name] += 1
            right[name] += case.is_right(output.text)
    return {name: (right[name], count[name]) for name in sorted(count)}


def count_phrasings(llm: LLM, cases: list[Case]) -> tuple[list[int], list[int]]:
    """For each case: right answers of 8 choices, and distinct texts."""
    right, different = [], []
    for case, output in generate_answers(llm, cases, SAMPLED, "sampled"):
        texts = [choice.text for choice in output.outputs]
        right.append(sum(map(case.is_right, texts)))
        different.append(len(set(texts)))
    return right, different


def measure_acceptance(cases: list[Case], params: SamplingParams) -> dict[str, int]:
    """Tokens drafted by the text-only drafter, and tokens accepted."""
    llm = LLM("demo-vision", draft_model="demo-vision", speculate="draft", draft_length="fixed")
    found = Counter[str]()
    for _, output in generate_answers(llm, cases, params, "drafted"):
        for choice in output.outputs:
            assert choice.metrics is not None
            drafted, share = choice.metrics.draft_tokens or 0, choice.metrics.draft_tokens_acceptance or 0.0
            found.update(tokens=len(choice.token_ids), drafted=drafted, accepted=round(drafted * share))
    return dict(found)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--sampled", type=int, default=100)
    args = parser.parse_args()
    llm = LLM("demo-vision", speculate="off")
    shares = accuracy(llm, cases(args.cases))
    right, different = count_phrasings(llm, cases(args.sampled))
    drafted = {
        name: measure_acceptance(cases(args.sampled), params)
        for name, params in (("greedy", GREEDY), ("sampled", SAMPLED))
    }
    table = Table("", "cases", "right", title="greedy")
    for name, (good, count) in shares.items():
        table.add_row(name, str(count), f"{good / count:.1%}")
    Console().print(table)
    figures = {
        "right_of_8": sorted(Counter(right).items()),
        "different_of_8": sorted(Counter(different).items()),
    }
    print(json.dumps({"right": shares, **figures, "drafter": drafted}))


if __name__ == "__main__":
    main()
