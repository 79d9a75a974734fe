"""Ten models in memory for three: mixed traffic, swaps, waiting, with collation and without.

    python -m benchmarks.many_models [--minutes 10] [--clients 12] [--models 10] [--room 3]

Regime: the bundled demo under ten names in a real server whose --memory-limit holds the plans of three.
Each client draws a model (half of the time one of three) and asks it 1 to 16 times in a row; each time it
draws a kind of request: a stream, a whole answer, two choices, a vector, a count of tokens. All are seeded,
so each answer is compared with the first one to the same request, also after its model was loaded again.
Half of the time requests of loaded models may pass one whose model waits for memory (`max_swap_wait`,
"collation"), half of the time they may not (0 s, "none"); the two alternate, each round in a new server. A
request waits until its first byte.

Checked: every request is answered, answers are equal, the memory of all engines (PSS, sampled from outside)
stays below the limit, and no model is unloaded while it has open requests.

With --kv-cache-dir conversations return instead: random weights of --shape under all names, and each client
has a conversation of --tokens tokens with each model, asks the models in a random order, and one more turn of
64 tokens each time. The arms are a server with a directory of KV blocks ("disk") and one without ("none").

Prints a table and one JSON line. Exit code 1 if one of these does not hold.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import httpx

from benchmarks.script import print_json, run_script
from foreword.bench.agent.checkpoint import AGENT_SHAPES, write_checkpoint
from foreword.bench.server import ServerProcess
from foreword.bench.statistics import percentile
from foreword.bench.tables import print_table
from foreword.cli.terminal import loading_bar
from foreword.config.models_file import read_models
from foreword.config.options import Config
from foreword.engine_client.forkserver import ForkServer
from foreword.fleet.memory import plan_fleet, resident_bytes

SAMPLE_S = 0.2  # between samples of memory and of the models' states
ARMS = ("collation", "none")
KV_ARMS = ("none", "disk")
POPULAR, SHARE = 3, 0.5  # models that are drawn so often
MAX_TURNS = 16  # requests of a client to one model in a row
SEEDS = 4  # different requests of a kind
OPTIONS = "{threads: 2, kv_cache_memory: 4000tokens, max_model_len: 512, max_num_seqs: 16}"
TURN_TOKENS, MAX_RETURNS = 64, 8  # of a conversation, which then begins anew
KINDS: tuple[tuple[str, Mapping[str, Any]], ...] = (
    ("/v1/chat/completions", {"stream": True, "max_tokens": 96}),
    ("/v1/chat/completions", {"max_tokens": 32, "temperature": 0.7}),
    ("/v1/completions", {"prompt": "The town", "max_tokens": 48, "n": 2}),
    ("/v1/embeddings", {"input": ["a railway", "two sisters"]}),
    ("/tokenize", {"prompt": "an old clock"}),
)


@dataclass(slots=True)
class ArmFindings:
    """Measurements of one arm over all of its rounds."""

    seconds: float = 0.0
    waits_s: list[float] = field(default_factory=list)  # until the first byte of each answer
    returns_s: list[float] = field(default_factory=list)  # until the first token, of returning conversations
    errors: Counter[str] = field(default_factory=Counter)
    different: int = 0  # answers that are not those of the same request before
    loads: int = 0
    peak_bytes: int = 0
    max_loaded: int = 0
    broken_holds: int = 0  # samples of a model that was unloaded with open requests


class Traffic:
    """Clients of one round."""

    def __init__(self, http: httpx.AsyncClient, names: list[str], answers: dict[Any, str]) -> None:
        self._http = http
        self._names = names
        self._answers = answers  # by request without its model: all models are the same checkpoint

    def draw_model(self, random: Random) -> str:
        is_popular = random.random() < SHARE
        return random.choice(self._names[:POPULAR] if is_popular else self._names[POPULAR:])

    async def ask(self, name: str, random: Random, findings: ArmFindings) -> None:
        kind, seed = random.randrange(len(KINDS)), random.randrange(SEEDS)
        path, fields = KINDS[kind]
        body: dict[str, Any] = {"model": name, **fields}
        if path.startswith("/v1/chat"):
            body["messages"] = [{"role": "user", "content": f"Tell me about bread, part {seed}."}]
        if "max_tokens" in fields:
            body["seed"] = seed
        started_s = time.monotonic()
        text = b""
        try:
            async with self._http.stream("POST", path, json=body) as response:
                async for part in response.aiter_raw():
                    if not text and not part.startswith(b":"):
                        findings.waits_s.append(time.monotonic() - started_s)
                    text += b"" if not text and part.startswith(b":") else part
            answer = _answer_of(path, text.decode(), bool(fields.get("stream")))
            if response.status_code != 200 or answer is None:
                findings.errors[f"{response.status_code} {text[:200]!r}"] += 1
            elif self._answers.setdefault((kind, seed if "seed" in body else 0), answer) != answer:
                findings.different += 1
        except httpx.HTTPError as error:
            findings.errors[repr(error)] += 1


class Conversations(Traffic):
    """Each client returns to its conversation with each model."""

    def __init__(self, *args: Any, num_tokens: int) -> None:
        super().__init__(*args)
        self._num_tokens = num_tokens
        self._visits: Counter[tuple[int, str]] = Counter()

    async def return_to(self, client: int, name: str, findings: ArmFindings) -> None:
        visit = self._visits[client, name]
        self._visits[client, name] += 1
        number, turn = divmod(visit, MAX_RETURNS)
        tokens = Random(f"{client} {name} {number}")
        length = self._num_tokens + turn * TURN_TOKENS
        prompt = [tokens.randrange(10, 250) for _ in range(length)]
        body = {"model": name, "prompt": prompt, "max_tokens": 8, "temperature": 0, "stream": True}
        await self._send("/v1/completions", body, (client, name, visit), findings, visit > 0)

    async def _send(
        self, path: str, body: dict[str, Any], key: Any, findings: ArmFindings, is_return: bool
    ) -> None:
        started_s, first_s, lines = time.monotonic(), 0.0, list[str]()
        try:
            async with self._http.stream("POST", path, json=body) as response:
                async for line in response.aiter_lines():
                    if line.startswith("data: "):
                        first_s = first_s or time.monotonic() - started_s
                        lines.append(line)
        except httpx.HTTPError as error:
            findings.errors[repr(error)] += 1
            return
        if response.status_code != 200 or not lines or lines[-1] != "data: [DONE]":
            findings.errors[f"{response.status_code} {lines[-1:]}"] += 1
            return
        (findings.returns_s if is_return else findings.waits_s).append(first_s)
        texts = [json.loads(line[6:])["choices"] for line in lines[:-1]]
        answer = "".join(choices[0]["text"] for choices in texts if choices)
        findings.different += self._answers.setdefault(key, answer) != answer


def _answer_of(path: str, text: str, is_stream: bool) -> str | None:
    """Fields that must be the same each time; None for an error."""
    if is_stream:
        events = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
        if not events or events[-1] != "[DONE]" or '"error":' in text:
            return None
        chunks = [json.loads(event) for event in events[:-1]]
        return "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks if c["choices"])
    body = json.loads(text)
    if path == "/tokenize":
        return str(body.get("tokens"))
    if path == "/v1/embeddings":
        return str([item["embedding"] for item in body.get("data", ())])
    return str([choice.get("message") or choice["text"] for choice in body.get("choices", ())])


async def _sample(pid: int, http: httpx.AsyncClient, findings: ArmFindings) -> None:
    """Sample memory and states until cancelled."""
    while True:
        groups = {child for spawner in _children(pid) for child in _children(spawner)}
        size = await asyncio.to_thread(resident_bytes, groups)
        findings.peak_bytes = max(findings.peak_bytes, size)
        cards = (await http.get("/v1/models")).json()["data"]
        findings.max_loaded = max(findings.max_loaded, sum(card["status"] == "loaded" for card in cards))
        gone = [
            card for card in cards if card["status"] in ("unloading", "unloaded") and card["open_requests"]
        ]
        findings.broken_holds += len(gone)
        await asyncio.sleep(SAMPLE_S)


def _children(pid: int) -> Iterator[int]:
    with contextlib.suppress(OSError):  # it has ended
        for file in Path(f"/proc/{pid}/task").glob("*/children"):
            yield from map(int, file.read_text().split())


async def _run_round(
    server: ServerProcess, args: argparse.Namespace, findings: ArmFindings, answers: dict[Any, str], seed: int
) -> None:
    names = [f"m{index}" for index in range(args.models)]
    limits = httpx.Limits(max_connections=args.clients + 4)
    async with httpx.AsyncClient(base_url=server.url, timeout=None, limits=limits) as http:
        traffic, started_s = Traffic(http, names, answers), time.monotonic()
        talks = Conversations(http, names, answers, num_tokens=args.tokens)
        end_s = started_s + args.minutes * 60 / (len(ARMS) * args.rounds)

        async def work(random: Random, client: int) -> None:
            while args.kv_cache_dir and time.monotonic() < end_s:
                for name in random.sample(names, len(names)):
                    if time.monotonic() < end_s:
                        await talks.return_to(client, name, findings)
            while time.monotonic() < end_s:
                name = traffic.draw_model(random)
                for _ in range(random.randint(1, MAX_TURNS)):
                    if time.monotonic() < end_s:
                        await traffic.ask(name, random, findings)

        sampler = asyncio.create_task(_sample(server.pid, http, findings))
        await asyncio.gather(*(work(Random(1000 * seed + each), each) for each in range(args.clients)))
        sampler.cancel()
        await asyncio.gather(sampler, return_exceptions=True)
        findings.seconds += time.monotonic() - started_s
        text = (await http.get("/metrics")).text
        lines = [line for line in text.splitlines() if line.startswith("foreword_model_loads_total{")]
        findings.loads += sum(int(float(line.split()[-1])) for line in lines)


def main() -> int:
    args = _parse()
    arms = KV_ARMS if args.kv_cache_dir else ARMS
    found, answers = {arm: ArmFindings() for arm in arms}, dict[Any, str]()
    with (
        tempfile.TemporaryDirectory() as folder,
        loading_bar(f"{args.models} models for {args.minutes:g} minutes"),
    ):
        file = Path(folder) / "models.yaml"
        model, options = "demo", OPTIONS
        if args.kv_cache_dir:
            model = str(write_checkpoint(Path(folder) / "model", ["a"], AGENT_SHAPES[args.shape]))
            length = args.tokens + (MAX_RETURNS + 1) * TURN_TOKENS
            limits = f"kv_cache_memory: {2 * length}tokens, max_model_len: {length}"
            options = f"{{threads: 2, {limits}, speculate: 'off'}}"
        models = "".join(f"  m{index}: {{model: {model}}}\n" for index in range(args.models))
        file.write_text(f"defaults: {options}\nmodels:\n{models}")
        with ForkServer() as fork_server:
            plan = asyncio.run(plan_fleet(read_models(Config(models=str(file))), fork_server))
        limit = args.room * plan.plans[0].num_bytes
        order = list(arms) * args.rounds
        for seed, arm in enumerate(order if args.rounds % 2 else order[::-1]):
            wait_s = 0.0 if arm == "none" and not args.kv_cache_dir else args.swap_wait
            flags = ["--models", str(file), "--memory-limit", f"{limit}B", "--max-swap-wait", str(wait_s)]
            if arm == "disk":
                flags += ["--kv-cache-dir", str(Path(folder) / f"kv-{seed}")]
            with ServerProcess(Config(), [*flags, "--log-level", "error"]) as server:
                asyncio.run(_run_round(server, args, found[arm], answers, seed))
                errors = server.read_log() if found[arm].errors else []
            print("\n".join(errors), file=sys.stderr)
    return _report(args, found, limit)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=10.0, metavar="X")
    parser.add_argument("--rounds", type=int, default=2, metavar="N", help="of each arm")
    parser.add_argument("--clients", type=int, default=12, metavar="N")
    parser.add_argument("--models", type=int, default=10, metavar="N")
    parser.add_argument("--room", type=int, default=3, metavar="N", help="models that fit in memory")
    parser.add_argument("--swap-wait", type=float, default=10.0, metavar="X", help="seconds of collation")
    parser.add_argument(
        "--kv-cache-dir", action="store_true", help="returning conversations, with and without"
    )
    parser.add_argument(
        "--tokens", type=int, default=1500, metavar="N", help="of a conversation that returns"
    )
    parser.add_argument("--shape", choices=tuple(AGENT_SHAPES), default="27m")
    return parser.parse_args()


def _report(args: argparse.Namespace, found: Mapping[str, ArmFindings], limit: int) -> int:
    figures = {arm: _figures(findings, limit) for arm, findings in found.items()}
    good = all(
        arm["answers"]
        and not arm["failed"]
        and not arm["different"]
        and not arm["open_but_unloaded"]
        and arm["peak_memory_share"] <= 1
        for arm in figures.values()
    )
    rows = [
        [
            name,
            *(
                f"{arm[name]:.3g}" if isinstance(arm[name], float) else str(arm[name])
                for arm in figures.values()
            ),
        ]
        for name in next(iter(figures.values()))
    ]
    title = (
        f"{args.models} models in memory for {args.room}, {args.clients} clients, {args.minutes:g} minutes"
    )
    print_table(title, ("figure", *figures), rows)
    for arm, findings in found.items():
        for error, count in findings.errors.most_common(5):
            print(f"{arm}: {count} times {error}", file=sys.stderr)
    print_json({"bench": "many_models", **vars(args), "memory_limit": limit, "arms": figures, "holds": good})
    return 0 if good else 1


def _figures(findings: ArmFindings, limit: int) -> dict[str, Any]:
    waits = findings.waits_s
    return {
        "answers": len(waits) + len(findings.returns_s),
        "answers_per_s": (len(waits) + len(findings.returns_s)) / findings.seconds,
        "failed": sum(findings.errors.values()),
        "different": findings.different,
        "swaps": findings.loads,
        "answers_per_swap": (len(waits) + len(findings.returns_s)) / max(findings.loads, 1),
        "wait_p50_s": percentile(waits, 50),
        "wait_p99_s": percentile(waits, 99),
        "wait_mean_s": statistics.mean(waits) if waits else None,
        "wait_max_s": max(waits, default=None),
        "returns": len(findings.returns_s),
        **{f"return_p{part}_s": percentile(findings.returns_s, part) for part in (50, 90)},
        "peak_memory_share": findings.peak_bytes / limit,
        "most_loaded": findings.max_loaded,
        "open_but_unloaded": findings.broken_holds,
    }


if __name__ == "__main__":
    sys.exit(run_script(main))
