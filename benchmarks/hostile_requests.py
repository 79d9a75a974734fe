"""Requests and files that cost without a bound once: their cost, and whether others are served beside them.

    python -m benchmarks.hostile_requests [--only NAME,...] [--timeout 60]

Starts the bundled demo on the loopback, with keys of two clients, and with other tool formats for schemas.
Sends each request as it was found and with twice its size, and waits for its answer. Meanwhile GET /live is
asked a hundred times a second, and another key asks for one short answer. Prints the status, CPU seconds of
the API process, growth of its peak memory, the longest silence of /live, and the
other key's status and seconds, then one JSON line. A cost in proportion is at most about twice as large in
the second line of a pair. Times are those of a machine that may be busy: compare pairs, not machines.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

import foreword.demo
from benchmarks.script import print_json, run_script
from benchmarks.server_cost import ServerMeter
from foreword.bench.server import ServerProcess
from foreword.bench.tables import print_table
from foreword.config.options import Config
from foreword.server.auth.key_file import Key, dump_keys, hash_key

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
HI = {"role": "user", "content": "Hi"}
HEAD_START_S = 0.1  # of the request before the other key's
SALT = b"hostile requests"
DEMO = Path(foreword.demo.__file__).parent


@dataclass(frozen=True)
class Case:
    name: str  # with the number of the finding in front
    send: Callable[[str, int], str]  # (url, size) -> status; size 1 is as it was found
    tool_format: str = "auto"


def post(path: str, body: Callable[[int], Any]) -> Callable[[str, int], str]:
    def send(url: str, size: int) -> str:
        reply = httpx.post(url + path, json=body(size), headers=bearer("mallory"), timeout=None)
        return str(reply.status_code)

    return send


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def tools_of(parameters: dict[str, Any], **fields: Any) -> dict[str, Any]:
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    return {"messages": [HI], "tools": [tool], "max_tokens": 64, **fields}


def wide_schema(width: int) -> dict[str, Any]:
    return {"type": "object", "properties": {"a": {"anyOf": [{"$ref": "#/properties/a"}] * width}}}


def python_schema(width: int) -> dict[str, Any]:
    entries = [{"type": "integer"}, *[{"$ref": "#/properties/a"}] * width]
    return {"type": "object", "properties": {"a": {"anyOf": entries}}, "required": ["a"]}


def foreign_refs(size: int) -> dict[str, Any]:
    refs = {f"p{i}": {"$ref": "x"} for i in range(3000)}
    return {"type": "object", "properties": refs, "examples": [0] * (200_000 * size)}


def references(size: int) -> dict[str, Any]:
    tool = {"name": "t", "description": "x" * 1_000_000, "input_schema": {"type": "object"}}
    refs = [{"type": "tool_reference", "tool_name": "t"}] * (2000 * size)
    use = {"type": "tool_use", "id": "a", "name": "t", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "a", "content": refs}
    messages = [HI, {"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
    return {"messages": messages, "tools": [{**tool, "defer_loading": True}], "max_tokens": 4}


def turns(size: int) -> dict[str, Any]:
    pair = [HI, {"role": "assistant", "content": "Hi"}]
    return {"input": pair * (6000 * size), "truncation": "auto", "max_output_tokens": 4}


def stops(size: int) -> dict[str, Any]:
    stop = [f"{i:02}" + "ab" * 511 for i in range(64)]
    return {"prompt": ["Hi"] * (4 * size), "n": 128, "stop": stop, "max_tokens": 1}


def allowed_stops(size: int) -> dict[str, Any]:
    stop = [f"{i:02}" + "ab" * 31 for i in range(64)]
    return {"prompt": ["Hi"] * size, "n": 128, "stop": stop, "max_tokens": 1}


def tiny_chunks(key: str) -> Callable[[str, int], str]:
    def send(url: str, size: int) -> str:
        """Chunks of one byte until they are sent, or the connection is closed."""
        head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n"
        head += "".join(f"{name}: {value}\r\n" for name, value in bearer(key).items() if key)
        with socket.create_connection((httpx.URL(url).host, httpx.URL(url).port or 80)) as raw:
            try:
                raw.sendall(head.encode() + b"\r\n")
                for _ in range(80 * size):
                    raw.sendall(b"1\r\nx\r\n" * 17_000)
            except OSError:
                pass
            raw.settimeout(10)
            try:
                return raw.recv(64).split()[1].decode()
            except (OSError, IndexError):
                return "closed"

    return send


def items(size: int) -> dict[str, Any]:
    return {"input": [{"role": "assistant", "content": "Hi"}] * (80_000 * size)}


def calls(size: int) -> dict[str, Any]:
    ids = [f"c{i}" for i in range(12_000 * size)]
    function = {"name": "f", "arguments": "{}"}
    asked = [{"id": name, "type": "function", "function": function} for name in ids]
    results = [{"role": "tool", "tool_call_id": name, "content": "x"} for name in ids]
    return {"messages": [HI, {"role": "assistant", "tool_calls": asked}, *results]}


CASES = (
    Case("1 schema, 20 entries", post(CHAT, lambda size: tools_of(wide_schema(20 * size))), "qwen3-coder"),
    Case(
        "1 schema, Python arguments",
        post(CHAT, lambda size: tools_of(python_schema(6 * size), tool_choice="required")),
        "pythonic",
    ),
    Case("2 foreign $refs", post(CHAT, lambda size: tools_of(foreign_refs(size)))),
    Case("3 tool references", post(MESSAGES, references)),
    Case(
        "3 tool references, counted", post(f"{MESSAGES}/count_tokens", lambda size: without(references(size)))
    ),
    Case("4 truncation: auto", post(RESPONSES, turns)),
    Case("5 stop strings", post("/v1/completions", stops)),
    Case("5 stop strings within the limit", post("/v1/completions", allowed_stops)),
    Case("6 tiny chunks, no key", tiny_chunks("")),
    Case("6 tiny chunks, a key", tiny_chunks("mallory")),
    Case("8 neighbouring items", post(RESPONSES, items)),
    Case("8 calls and results", post(CHAT, calls)),
    Case("8 detokenize", post("/detokenize", lambda size: {"tokens": [5] * (2_000_000 * size)})),
)


def without(body: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in body.items() if name != "max_tokens"}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", default="", help="names that a case begins with, after commas")
    parser.add_argument("--timeout", type=float, default=60, help="seconds to wait for an answer")
    args = parser.parse_args(arguments)
    prefixes = tuple(args.only.split(","))
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        keys = Path(folder) / "keys.yaml"
        keys.write_text(dump_keys([Key(n, SALT, hash_key(n.encode(), SALT)) for n in ("mallory", "alice")]))
        for tool_format in dict.fromkeys(case.tool_format for case in CASES):
            cases = [c for c in CASES if c.tool_format == tool_format and c.name.startswith(prefixes)]
            flags = [f"--api-key-file={keys}", f"--tool-format={tool_format}"]
            todo = [(case, size) for case in cases for size in (1, 2)]
            while todo:  # a server that does not answer is replaced
                with ServerProcess(Config(model="demo"), flags) as server:
                    while todo:
                        rows.append(measure(*todo.pop(0), server, args.timeout))
                        if rows[-1]["status"].startswith("none"):
                            break
        if "7".startswith(prefixes) or prefixes == ("",):
            rows += [load_config(Path(folder), size) for size in (1600, 1_600_000, 3_200_000)]
    header = ["request", "size", "status", "CPU s", "peak MiB", "/live silent s", "other key"]
    print_table("Hostile requests", header, [[str(value) for value in row.values()] for row in rows])
    print_json({"benchmark": "hostile_requests", "rows": rows})
    return 0


def measure(case: Case, size: int, server: ServerProcess, timeout_s: float) -> dict[str, Any]:
    """One request beside polls of /live and another key's chat."""
    with ThreadPoolExecutor(2) as threads, ServerMeter(server.url, server.pid) as meter:
        ask(server.url)
        meter.begin()
        request = threads.submit(case.send, server.url, size)
        time.sleep(HEAD_START_S)
        other = ask(server.url)
        try:
            status = request.result(timeout_s)
        except (TimeoutError, httpx.HTTPError) as error:
            status = f"none ({type(error).__name__})"
        cost = meter.end()
        if not request.done():
            server.stop()  # its thread ends with the connection
    used, grown, silent_s = cost.api_s, cost.api_mib, cost.silent_s
    row = [case.name, f"x{size}", status, round(used, 2), round(grown), round(silent_s, 2), other]
    print("  ".join(map(str, row)), file=sys.stderr)
    return dict(
        zip(("request", "size", "status", "cpu_s", "peak_mib", "silent_s", "other"), row, strict=True)
    )


def ask(url: str) -> str:
    """Another key's chat: status and seconds."""
    started = time.monotonic()
    body = {"messages": [HI], "max_tokens": 4}
    try:
        status = str(httpx.post(url + CHAT, json=body, headers=bearer("alice"), timeout=30).status_code)
    except httpx.HTTPError as error:
        status = type(error).__name__
    return f"{status} in {time.monotonic() - started:.2f} s"


def load_config(folder: Path, vocab_size: int) -> dict[str, Any]:
    """Load the vision demo with another `vocab_size` at the top of its config.json."""
    path = folder / f"vision-{vocab_size}"
    shutil.copytree(DEMO / "vision", path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"vocab_size": vocab_size}))
    command = [sys.executable, "-m", "foreword", "generate", "Hi", "--model", str(path), "--max-tokens=2"]
    started = os.times()
    code = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode
    used = os.times().children_user - started.children_user
    row = ("7 config.json, vocab_size", str(vocab_size), f"exit {code}", round(used, 2), "", "", "")
    return dict(
        zip(("request", "size", "status", "cpu_s", "peak_mib", "silent_s", "other"), row, strict=True)
    )


if __name__ == "__main__":
    sys.exit(run_script(main))
