"""Prompts of the training text as JSONL, for `foreword train-head`.

    python -m training.prompts FILE [--count 4000] [--seed 0]

Each line is a conversation up to its last question: the model answers itself.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from random import Random

from training import corpus

MAX_SIZE = 8  # of a task, as in rows of 256 tokens


def prompt_lines(count: int, seed: int) -> Iterator[dict[str, object]]:
    """Records with `messages`, or with `prompt` for texts that are continued."""
    rng = Random(f"prompts:{seed}")
    for _ in range(count):
        turns = corpus.conversation(rng, MAX_SIZE)
        messages = []
        if text := corpus.system_turn(turns[0].tools):
            messages.append({"role": "system", "content": text})
        for turn in turns:
            messages.append({"role": "user", "content": turn.prompt})
            messages.append({"role": "assistant", "content": turn.answer})
        if turns[-1].chat:
            yield {"messages": messages[:-1]}
        else:
            yield {"prompt": turns[-1].prompt}


def main() -> None:
    """Read the command line and write the file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path)
    parser.add_argument("--count", type=int, default=4000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with args.file.open("w", encoding="utf-8") as file:
        for record in prompt_lines(args.count, args.seed):
            file.write(json.dumps(record, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
