"""Measure a checkpoint and its drafter on held-out prompts.

    python -m training.evaluate [--model M] [--drafter D] [--samples 40] [--temperature T]

Regime: greedy unless a temperature is given, bfloat16, one prompt at a time, with transformers. Prints a
table and one JSON line. For each kind: right (exact match; a story follows the grammar and the prompt),
answers with a call, and the share of draft tokens that the target accepts, for the draft model and for
n-gram lookup, in chains of at most four.
"""

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM

from foreword import demo
from training import corpus, stories, tool_tasks
from training.tasks import Sample

DRAFT_LEN = 4
_MAX_NEW_TOKENS = 300


@dataclass(slots=True)
class KindCounts:
    """Counts over the samples of one kind."""

    samples: int = 0
    right: int = 0
    calls: int = 0
    tokens: int = 0
    model_drafted: int = 0
    model_accepted: int = 0
    ngram_drafted: int = 0
    ngram_accepted: int = 0


def chat_ids(tokenizer: Tokenizer, sample: Sample) -> list[int]:
    """Return the prompt as the chat template writes it, or plain."""
    text = sample.prompt
    if sample.chat:
        turns = [(corpus.SYSTEM, corpus.system_turn(sample.tools))] if sample.tools else []
        if sample.before:
            turns += [(corpus.USER, sample.before.prompt), (corpus.ASSISTANT, sample.before.answer)]
        turns.append((corpus.USER, sample.prompt))
        text = "".join(f"{role}{said}{corpus.END}" for role, said in turns) + corpus.ASSISTANT
    return tokenizer.encode(text, add_special_tokens=False).ids


@torch.inference_mode()
def greedy_tokens(model: LlamaForCausalLM, prompt: list[int], output: list[int]) -> list[int]:
    """Return the model's greedy token at each position of `output`, given the tokens before it."""
    logits = model(torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1]
    return logits.float().argmax(-1).tolist()


@torch.inference_mode()
def generate(
    model: LlamaForCausalLM, prompt: list[int], expected: list[int], temperature: float
) -> list[int]:
    """Return the continuation; one pass over the expected answer may confirm a greedy one."""
    if not temperature and greedy_tokens(model, prompt, expected) == expected:
        return expected
    room = min(_MAX_NEW_TOKENS, model.config.max_position_embeddings - len(prompt))
    ids = torch.tensor([prompt])
    sampling = (
        {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
    )
    whole = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=room, **sampling)
    return whole[0, len(prompt) :].tolist()


def prompt_lookup(tokens: list[int], max_ngram: int = 4, min_ngram: int = 2) -> list[int]:
    """Return what followed the last occurrence of the longest matching suffix (prompt lookup)."""
    for size in range(min(max_ngram, len(tokens) - 1), min_ngram - 1, -1):
        suffix = tokens[-size:]
        for at in range(len(tokens) - size - 1, -1, -1):
            if tokens[at : at + size] == suffix:
                start = at + size
                period = len(tokens) - start
                return [tokens[start + i % period] for i in range(DRAFT_LEN)]
    return []


def count_accepted(output: list[int], draft: Callable[[int], list[int]]) -> tuple[int, int]:
    """Verify drafts along the output as speculative decoding does; return tokens drafted and accepted.

    `draft(i)` continues from position i. Drafts are cut at the end of the output.
    """
    at = drafted = accepted = 0
    while at < len(output):
        guess = draft(at)[: len(output) - at]
        hit = next((i for i, one in enumerate(guess) if one != output[at + i]), len(guess))
        drafted, accepted, at = drafted + len(guess), accepted + hit, at + hit + 1
    return drafted, accepted


def is_right(sample: Sample, text: str) -> bool:
    """Compare exactly; a story may be any that its grammar and prompt allow."""
    return stories.is_story(sample.prompt, text) if sample.kind == "story" else text == sample.answer


def measure(
    model: LlamaForCausalLM,
    drafter: LlamaForCausalLM,
    tokenizer: Tokenizer,
    samples: list[Sample],
    show: bool = False,
    temperature: float = 0.0,
) -> KindCounts:
    """Run the samples of one kind."""
    tally, end = KindCounts(), tokenizer.token_to_id(corpus.END)
    for sample in track(samples, description=samples[0].kind, transient=True):
        prompt = chat_ids(tokenizer, sample)
        expected = [*tokenizer.encode(sample.answer, add_special_tokens=False).ids, end]
        output = generate(model, prompt, expected, temperature)
        text = tokenizer.decode(output[:-1], skip_special_tokens=False)
        right = output[-1] == end and is_right(sample, text)
        if show and not right:
            print(f"--- {sample.prompt}\nwanted: {sample.answer}\ngot:    {text}")
        tally.samples, tally.right, tally.calls, tally.tokens = (
            tally.samples + 1,
            tally.right + right,
            tally.calls + (tool_tasks.CALL in text),
            tally.tokens + len(output),
        )
        # While a chain agrees with the target, their contexts are equal: one pass gives all chains.
        agreed = greedy_tokens(drafter, prompt, output)
        by_model = count_accepted(output, lambda at, g=agreed: g[at : at + DRAFT_LEN])
        by_ngram = count_accepted(output, lambda at, p=prompt, o=output: prompt_lookup(p + o[:at]))
        tally.model_drafted, tally.model_accepted = (
            tally.model_drafted + by_model[0],
            tally.model_accepted + by_model[1],
        )
        tally.ngram_drafted, tally.ngram_accepted = (
            tally.ngram_drafted + by_ngram[0],
            tally.ngram_accepted + by_ngram[1],
        )
    return tally


def report(tallies: dict[str, KindCounts]) -> None:
    """Print the table and the JSON line."""
    table = Table(
        "kind",
        "samples",
        "right %",
        "calls",
        "draft model %",
        "n-gram %",
        "n-gram tokens drafted / output token",
    )
    for kind, one in tallies.items():
        table.add_row(
            kind,
            str(one.samples),
            f"{100 * one.right / one.samples:.0f}",
            str(one.calls),
            f"{100 * one.model_accepted / max(1, one.model_drafted):.0f}",
            f"{100 * one.ngram_accepted / one.ngram_drafted:.0f}" if one.ngram_drafted else "-",
            f"{one.ngram_drafted / one.tokens:.2f}",
        )
    Console(width=120).print(table)
    print(json.dumps({kind: asdict(one) for kind, one in tallies.items()}))


def main() -> None:
    """Read the command line and measure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=demo.MODEL)
    parser.add_argument("--drafter", type=Path, default=demo.DRAFTER)
    parser.add_argument("--samples", type=int, default=40)
    parser.add_argument(
        "--kinds", nargs="*", default=[*corpus.KINDS, "everyday", "no tool, faq", "repeat, long"]
    )
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--show", action="store_true", help="print what went wrong")
    args = parser.parse_args()
    model, drafter = (
        LlamaForCausalLM.from_pretrained(one, dtype=torch.bfloat16) for one in (args.model, args.drafter)
    )
    tokenizer = Tokenizer.from_file(str(args.model / "tokenizer.json"))
    tallies = {}
    for name in args.kinds:
        kind = name.removesuffix(", long")
        samples = corpus.test_samples(kind, args.samples, size=4 if kind == name else 16)
        tallies[name] = measure(model, drafter, tokenizer, samples, args.show, args.temperature)
    report(tallies)


if __name__ == "__main__":
    main()
