"""Memory while requests with images wait: bounded by --image-memory.

    python -m benchmarks.image_memory [--requests 64] [--image-memory 16MiB] [--side 1200]

Regime: a tiny random LLaVA whose encoder takes 336 x 336 pixels (0.32 MiB each when prepared), one
running request (--max-num-seqs 1) with a long answer. Every request has an image of its own:
incompressible noise, --side squared pixels. All are sent at once; a refused request (429) is sent again
after Retry-After, until --requests wait or the memory is full. RSS is that of the server, of the engine,
and of the decoders: before, while they wait, and after all clients have disconnected.

Prints a table and one JSON line. Exit code 1 if held pixels exceed the flag, or if memory while they wait
grew by more than twice the flag (two processes keep them) plus --slack.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import io
import json
import os
import re
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import httpx
from PIL import Image

from benchmarks.script import print_json, run_script
from foreword.bench.server import ServerProcess
from foreword.bench.tables import print_table
from foreword.config.options import Config
from foreword.config.units import parse_bytes
from tests.support.vision_checkpoints import write_vision_checkpoint

MIB = 1 << 20
SIDE, PATCH, MAX_MODEL_LEN = 336, 28, 65_536
TIMEOUT_S = 120.0
SETTLE_S = 2.0
CHAT = "/v1/chat/completions"


@dataclass
class Clients:
    """Waiting clients, and refusals of the others."""

    url: str
    bodies: list[bytes]
    statuses: Counter[int] = field(default_factory=Counter)
    waiting: int = 0

    async def ask(self, http: httpx.AsyncClient, body: bytes) -> None:
        """Send until admitted, then hold the connection."""
        while True:
            async with http.stream(
                "POST", CHAT, content=body, headers={"Content-Type": "application/json"}
            ) as reply:
                self.statuses[reply.status_code] += 1
                if reply.status_code == 200:
                    self.waiting += 1
                    await reply.aread()
                    return
            await asyncio.sleep(float(reply.headers.get("Retry-After", "1")))


def _noise(side: int) -> bytes:
    """A PNG of about three bytes a pixel."""
    file = io.BytesIO()
    Image.frombytes("RGB", (side, side), os.urandom(3 * side * side)).save(file, "PNG", compress_level=0)
    return file.getvalue()


def _body(side: int) -> bytes:
    url = "data:image/png;base64," + base64.b64encode(_noise(side)).decode()
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What is it?"}]
    fields = {"max_tokens": 100_000, "ignore_eos": True, "stream": True, "temperature": 1.0}
    return json.dumps({"messages": [{"role": "user", "content": content}], **fields}).encode()


def _tree(pid: int) -> list[int]:
    """A process and its descendants."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *(below for child in children for below in _tree(int(child)))]


def _memory(pid: int) -> dict[str, float]:
    """MiB of the server process, of the largest other one (the engine), and of all."""
    sizes = {one: _rss(one) for one in _tree(pid)}
    others = [size for one, size in sizes.items() if one != pid]
    return {"server": sizes[pid], "engine": max(others, default=0.0), "all": sum(sizes.values())}


def _rss(pid: int) -> float:
    match = re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    return int(match[1]) / 1024 if match else 0.0


async def _measure_waiting(
    server: ServerProcess, bodies: list[bytes], expected: int
) -> tuple[dict[str, float], Clients]:
    """Memory when all requests are sent; all clients disconnect afterwards."""
    clients = Clients(server.url, bodies)
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=server.url, timeout=None, limits=limits) as http:
        tasks = [asyncio.create_task(clients.ask(http, body)) for body in bodies]
        deadline = time.monotonic() + TIMEOUT_S
        while (await _num_open(http)) < expected and time.monotonic() < deadline:
            await asyncio.sleep(0.2)
        await asyncio.sleep(SETTLE_S)
        found = _memory(server.pid) | {"open": await _num_open(http)}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return found, clients


async def _num_open(http: httpx.AsyncClient) -> float:
    """Running and waiting requests."""
    text = (await http.get("/metrics")).text
    return sum(
        float(value)
        for value in re.findall(r"^foreword_requests_(?:running|waiting){.*} (\S+)$", text, re.MULTILINE)
    )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--image-memory", default="16MiB")
    parser.add_argument("--side", type=int, default=1200, help="of each picture, in pixels")
    parser.add_argument("--slack", type=float, default=48.0, help="MiB that may come beside the pictures")
    args = parser.parse_args(arguments)
    limit = parse_bytes("image_memory", args.image_memory)
    each = 3 * SIDE * SIDE
    expected = min(args.requests, limit // each)
    with tempfile.TemporaryDirectory() as folder:
        sizes = {
            "vision_config": {"image_size": SIDE, "patch_size": PATCH},
            "text_config": {"max_position_embeddings": MAX_MODEL_LEN},
        }
        path = write_vision_checkpoint(Path(folder) / "model", "llava", **sizes)
        options = Config(
            model=str(path),
            max_num_seqs=1,
            image_memory=args.image_memory,
            max_model_len=MAX_MODEL_LEN,
            on_runaway="warn",
        )
        with ServerProcess(options, ["--queue-timeout", "0", "--max-body-mb", "64"]) as server:
            bodies = [_body(args.side) for _ in range(args.requests)]
            asyncio.run(_measure_waiting(server, bodies[:2], 2))
            time.sleep(SETTLE_S)
            before = _memory(server.pid)
            waiting, clients = asyncio.run(_measure_waiting(server, bodies, expected))
            time.sleep(SETTLE_S)
            after = _memory(server.pid)
    moments = {"before": before, "waiting": waiting, "after": after}
    rows = [
        (name, *(f"{one[key]:.0f}" for key in ("server", "engine", "all"))) for name, one in moments.items()
    ]
    size = len(bodies[0]) / MIB
    title = f"{args.requests} requests of {size:.1f} MiB, each with a picture of {each / MIB:.2f} MiB"
    print_table(title, ("MiB", "server", "engine", "all"), rows)
    grown, allowed = waiting["all"] - before["all"], 2 * limit / MIB + args.slack
    figures = {
        "requests": args.requests,
        "open": waiting["open"],
        "statuses": dict(clients.statuses),
        "body_mib": size,
    }
    print_json({"bench": "image_memory", **figures, **moments, "grown_mib": grown, "allowed_mib": allowed})
    return int(grown > allowed or waiting["open"] > expected)


if __name__ == "__main__":
    sys.exit(run_script(main))
