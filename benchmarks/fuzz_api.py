"""Requests generated from the server's own OpenAPI document: each gets an answer or a refusal.

    python -m benchmarks.fuzz_api [--requests 10000] [--changes 0] [--url URL] [--seed N]

A third of the bodies obeys the document, a third breaks it, and a third obeys a narrowed one, with
numbers within their limits and known texts, so that most of them reach the engine. Four at a time.
With --changes N, each is followed by N copies with some JSON changed, which cost less to make.
Without --url the bundled model is served. A failure is a status of 500 and above, an error without
an envelope, no answer within a minute, or afterwards an engine that is not idle or changes a fixed
answer. Prints counts by status and one JSON line; exit code 1 after a failure.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Any

import httpx
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as seeded
from schemathesis import GenerationMode

from benchmarks.fuzz_mutate import change_json
from benchmarks.script import print_json, run_script
from foreword.bench.server import ServerProcess
from foreword.bench.tables import print_table
from foreword.config.options import Config

WORKERS, TIMEOUT_S = 4, 60.0
NUM_DONORS, MAX_PENDING = 64, 256  # bodies whose parts are exchanged; requests that wait for a thread
IDLE_S = 2.5  # the engine checks its bookkeeping after a second of idleness
SERVER_CONFIG = Config(max_model_len=256, kv_cache_memory="20000tokens", log_level="error", log_interval=0)
PROBE = {
    "messages": [{"role": "user", "content": "What is a draft?"}],
    "temperature": 1.0,
    "seed": 7,
    "max_tokens": 60,
}


def _numbers(low: float, high: float) -> dict[str, Any]:
    return {"anyOf": [{"type": "number", "minimum": low, "maximum": high}, {"type": "null"}]}


def _integers(low: int, high: int) -> dict[str, Any]:
    """An enumeration, since 1.0 is an integer in JSON schema."""
    return {"enum": [None, *range(low, high + 1)]}


def _one_of(*values: Any) -> dict[str, Any]:
    return {"enum": [None, *values]}


SMALL = {
    "type": "object",
    "properties": {"a": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}
IDS = {"type": "array", "items": {"enum": [*range(300)]}, "minItems": 1, "maxItems": 9}
TEXT = {"type": "string", "minLength": 1, "maxLength": 40}
TEXTS = {"type": "array", "items": TEXT, "minItems": 1, "maxItems": 3}
# Values that are accepted; other fields keep the schema of the document or are left out.
NARROWED_FIELDS: Mapping[str, dict[str, Any]] = {
    "role": {"enum": ["system", "developer", "user", "assistant"]},
    "content": TEXT,
    "messages": {
        "type": "array",
        "items": {"$ref": "#/components/schemas/Message"},
        "minItems": 1,
        "maxItems": 3,
    },
    "prompt": {"anyOf": [TEXT, IDS, TEXTS]},
    "input": {"anyOf": [TEXT, IDS, TEXTS, {"type": "array", "items": IDS, "minItems": 1, "maxItems": 3}]},
    "tokens": IDS,
    "query": TEXT,
    "documents": TEXTS,
    "text_1": TEXT,
    "text_2": {"anyOf": [TEXT, TEXTS]},
    "max_tokens": _integers(1, 40),
    "max_completion_tokens": _integers(1, 40),
    "min_tokens": _integers(0, 1),
    "n": _integers(1, 3),
    "temperature": _numbers(0, 3),
    "top_p": _numbers(0.01, 1),
    "top_k": _integers(-1, 50),
    "min_p": _numbers(0, 1),
    "typical_p": _numbers(0.01, 1),
    "presence_penalty": _numbers(-2, 2),
    "frequency_penalty": _numbers(-2, 2),
    "repetition_penalty": _numbers(0.1, 3),
    "dry_multiplier": _numbers(0, 3),
    "xtc_probability": _numbers(0, 1),
    "xtc_threshold": _numbers(0, 0.5),
    "seed": _integers(0, 9),
    "priority": _integers(-3, 3),
    "dimensions": _integers(1, 8),
    "top_n": _integers(1, 3),
    "stop": {"anyOf": [{"type": "string", "minLength": 1, "maxLength": 3}, {"type": "null"}]},
    "bad_words": {
        "anyOf": [{"type": "array", "items": {"enum": ["a", "the", "."]}, "maxItems": 2}, {"type": "null"}]
    },
    "stream": _one_of(True, False),
    "echo": _one_of(True, False),
    "metrics": _one_of(True, False),
    "return_token_ids": _one_of(True, False),
    "ignore_eos": _one_of(True, False),
    "encoding_format": _one_of("float", "base64"),
    "speculation": _one_of({"method": "off"}, {"method": "auto", "max_tokens": 3}, {"method": "suffix"}),
    "prediction": _one_of({"type": "content", "content": "a draft is a guess"}),
    "response_format": _one_of(
        {"type": "text"},
        {"type": "json_object"},
        {"type": "json_schema", "json_schema": {"name": "x", "schema": SMALL}},
    ),
}
# Required fields, and fields that those exclude: the document cannot say either.
REQUIRED_FIELDS: Mapping[str, tuple[str, ...]] = {
    "Message": ("role", "content"),
    "ScoreBody": ("text_1", "text_2"),
    "TokenizeBody": ("messages",),
}
EXCLUDED_FIELDS: Mapping[str, tuple[str, ...]] = {
    "MessagesBody": ("n", "response_format", "return_token_ids"),
    "ScoreBody": ("documents",),
    "TokenizeBody": ("prompt",),
}


@dataclass(slots=True)
class Findings:
    """Counts of statuses by path, and failures."""

    statuses: Counter[tuple[str, int]] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def note(self, path: str, status: int, failure: str | None) -> None:
        with self.lock:
            self.statuses[path, status] += 1
            if failure is not None:
                self.failures.append(f"{path}: {failure}")


class Sender:
    """Sends requests in threads, and changed copies of each."""

    def __init__(self, url: str, findings: Findings, threads: ThreadPoolExecutor, changes: int, seed: int):
        self._url, self._findings, self._threads, self._changes = url, findings, threads, changes
        self._random = Random(seed)
        self._bodies: defaultdict[str, deque[bytes]] = defaultdict(lambda: deque(maxlen=NUM_DONORS))
        self._pending = threading.BoundedSemaphore(MAX_PENDING)

    def send(self, case: Any) -> None:
        path = case.operation.path
        self._submit(path, lambda: case.call(base_url=self._url, timeout=TIMEOUT_S), case.body)
        if not self._changes or "{" in path or case.operation.method != "post":
            return
        try:
            data = json.dumps(case.body).encode()
        except TypeError:  # no JSON
            return
        donors = self._bodies[path]
        donors.append(data)
        for _ in range(self._changes):
            changed = change_json(self._random, data, self._random.choice(donors))
            self._submit(path, partial(self._post, path, changed), changed)

    def _post(self, path: str, data: bytes) -> Any:
        headers = {"content-type": "application/json"}
        return requests.post(f"{self._url}{path}", data=data, headers=headers, timeout=TIMEOUT_S)

    def _submit(self, path: str, call: Callable[[], Any], body: object) -> None:
        self._pending.acquire()
        task = self._threads.submit(_ask, path, call, body, self._findings)
        task.add_done_callback(lambda _: self._pending.release())


def fuzz(url: str, num_requests: int, seed: int = 0, changes: int = 0) -> Findings:
    """Send about `num_requests` requests, each with as many changed copies; raises nothing."""
    document = httpx.get(f"{url}/openapi.json", timeout=TIMEOUT_S).json()
    kinds = [
        (document, GenerationMode.POSITIVE),
        (document, GenerationMode.NEGATIVE),
        (narrow_schema(document), GenerationMode.POSITIVE),
    ]
    jobs = [
        (op, mode)
        for doc, mode in kinds
        for op in _operations(doc)
        if op.method == "post" or mode is GenerationMode.POSITIVE
    ]
    posts = sum(op.method == "post" for op, _ in jobs)
    findings = Findings()
    with ThreadPoolExecutor(WORKERS) as threads:  # threads only send: bodies are generated here
        sender = Sender(url, findings, threads, changes, seed)
        for number, (operation, mode) in enumerate(jobs):
            count = -(-num_requests // posts) if operation.method == "post" else 5
            _generate_requests(operation, mode, count, seed + number, sender.send, findings)
    return findings


def narrow_schema(document: Mapping[str, Any]) -> dict[str, Any]:
    """The document with the values of NARROWED_FIELDS; bodies keep these and their required fields."""
    narrow = copy.deepcopy(dict(document))
    for kind, schema in narrow["components"]["schemas"].items():
        schema["required"] = list(
            dict.fromkeys((*schema.get("required", ()), *REQUIRED_FIELDS.get(kind, ())))
        )
        kept = {*NARROWED_FIELDS, *schema["required"]} - {*EXCLUDED_FIELDS.get(kind, ())}
        schema["properties"] = {
            name: NARROWED_FIELDS.get(name, value)
            for name, value in schema.get("properties", {}).items()
            if name in kept
        }
    return narrow


def _operations(document: Mapping[str, Any]) -> list[Any]:
    return [found.ok() for found in schemathesis.openapi.from_dict(dict(document)).get_all_operations()]


def _generate_requests(
    operation: Any, mode: GenerationMode, count: int, seed: int, ask: Callable[[Any], Any], findings: Findings
) -> None:
    """Generate `count` requests of one route and hand each to `ask`."""
    phases = [Phase.generate]

    @seeded(seed)
    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        phases=phases,
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def make_up(case: Any) -> None:
        ask(case)

    try:
        make_up()
    except Exception as error:
        findings.note(operation.path, 0, f"the document cannot be used: {error!r:.300}")


def _ask(path: str, call: Callable[[], Any], body: object, findings: Findings) -> None:
    try:
        reply = call()
        findings.note(path, reply.status_code, failure(reply))
    except Exception as error:  # no answer, or an incomplete one
        findings.note(path, 0, f"{error!r:.300} for {body!r:.500}")


def failure(reply: Any) -> str | None:
    """The failure of an answer with the request body, or None."""
    asked = f" for {reply.request.body!r:.500}"
    if reply.status_code >= 500:
        return f"{reply.status_code} {reply.text:.300}{asked}"
    if reply.status_code >= 400:
        try:
            message = reply.json()["error"]["message"]
            return None if message else f"an error without a message{asked}"
        except (ValueError, KeyError, TypeError):
            return f"{reply.status_code} without an envelope: {reply.text:.300}{asked}"
    return None


def probe(url: str) -> str:
    """An answer that must never change."""
    reply = httpx.post(f"{url}/v1/chat/completions", json=PROBE, timeout=TIMEOUT_S)
    return str(reply.json()["choices"][0]["message"]["content"])


def find_damage(url: str, before: str) -> str | None:
    """The damage to the engine after the run, or None."""
    time.sleep(IDLE_S)
    lines = httpx.get(f"{url}/metrics", timeout=TIMEOUT_S).text.splitlines()
    open_ = [
        line for line in lines if line.startswith(("foreword_requests_running", "foreword_requests_waiting"))
    ]
    if len(open_) != 2 or not all(line.endswith(" 0.0") for line in open_):
        return f"requests are still open without a client: {open_}"
    if httpx.get(f"{url}/health", timeout=TIMEOUT_S).status_code != 200:
        return "the engine is dead"
    return None if probe(url) == before else "an answer has changed"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--changes", type=int, default=0, help="changed copies of each")
    parser.add_argument("--url", default=None, help="a running Foreword server")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(arguments)
    began = time.perf_counter()
    with nullcontext(args) if args.url else ServerProcess(SERVER_CONFIG) as server:
        before = probe(server.url)
        findings = fuzz(server.url, args.requests, args.seed, args.changes)
        wrong = find_damage(server.url, before)
    failures = [*findings.failures, *([wrong] if wrong else [])]
    _show(findings, time.perf_counter() - began)
    for failure in failures:
        print(failure, file=sys.stderr)
    return 1 if failures else 0


def _show(findings: Findings, seconds: float) -> None:
    statuses = sorted({status for _, status in findings.statuses})
    paths = sorted({path for path, _ in findings.statuses})
    rows = [[path, *(str(findings.statuses[path, status]) for status in statuses)] for path in paths]
    print_table("Requests generated from the OpenAPI document", ("route", *map(str, statuses)), rows)
    total = sum(findings.statuses.values())
    print_json(
        {
            "bench": "fuzz_api",
            "requests": total,
            "failures": len(findings.failures),
            "seconds": round(seconds, 1),
        }
    )


if __name__ == "__main__":
    sys.exit(run_script(main))
