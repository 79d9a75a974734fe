"""A fuzzer of growth: does any place of a request's body cost more than in proportion to its size?

    python -m benchmarks.growth [--seconds 600] [--only TEXT,...] [--servers demo,...] [--sizes 64,...,65536]

Takes every list, map, text, number and nesting of the bodies in the server's own OpenAPI document
(`growth_places`), with histories, schemas, grammars and parts that it leaves open (`growth_forms`), and
doubles it. Servers: the bundled demo; the same with tagged arguments of tools; the same with a long
context, on routes that only count tokens; and the demo with images. A series ends early where it is refused
at a constant cost, or where a request costs more than MAX_CPU_S. Then the costliest accepted places of
different fields are put in one body, two at a time.

A finding is an exponent above 1.3 of CPU time or peak memory against the number of elements, over the last
two doublings; a silence of /live above 250 ms, at most the API process's CPU time in it, so that a busy
machine is no finding; two places that together take more than twice the sum of their CPU time or memory; no
answer; and a status of 500 or above. Each is measured again before it counts. CPU time and memory are those
of the API process and of its workers (engine, templates, grammars, images) apart, beyond those of the first
request of the series with the same status. Progress on stderr; prints a table and then one JSON line; exit
code 1 with a finding.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import math
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from pathlib import Path
from typing import Any, Protocol

import httpx

from benchmarks.growth_forms import FORMS, STORED_ITEM, together
from benchmarks.growth_places import DocumentWalk, Place
from benchmarks.script import print_json, run_script, track_progress
from benchmarks.server_cost import ServerCost, ServerMeter
from foreword.bench.server import ServerProcess
from foreword.bench.tables import print_table
from foreword.config.options import Config
from foreword.demo import MODEL

SIZES = (8, *(64 << i for i in range(11)))  # the first is what the others are compared with
MAX_EXPONENT, MAX_SILENCE_S, MAX_INTERPLAY = 1.3, 0.25, 2.0
MIN_CPU_S, MIN_MIB = 0.01, 16.0  # below these, a cost is noise
MIN_GROWTH_S = 0.05  # growth of CPU time, which is counted in ticks of 10 ms and slows with the caches' size
MIN_PRODUCT_S, MIN_PRODUCT_MIB = 0.1, 64.0  # of products
MAX_CPU_S, TIMEOUT_S = 2.0, 20.0
MAX_BODY_BYTES = 32_000_000
MAX_FACTOR_S = 0.5  # CPU seconds of a place in a product
PAID_FIELDS = (
    "max_tokens",
    "max_completion_tokens",
    "max_output_tokens",
    "min_tokens",
)  # tokens of the answer
LONG_CONTEXT = 65_536
COUNTING_ROUTES = ("/tokenize", "/v1/messages/count_tokens", "/v1/responses/input_tokens")
SINGLE_SHARE = 0.8  # share of a server's time for single places


class Meter(Protocol):
    """Sends a request and measures its cost."""

    def measure(self, route: str, body: bytes) -> tuple[str, ServerCost]:
        """The status, "none" without an answer, and the cost."""


@dataclass(frozen=True, slots=True)
class Point:
    """One request."""

    sizes: tuple[int, ...]
    num_bytes: int
    status: str
    cost: ServerCost

    @property
    def cpu_s(self) -> float:
        return self.cost.api_s + self.cost.workers_s

    @property
    def mib(self) -> float:
        return self.cost.api_mib + self.cost.workers_mib


@dataclass(slots=True)
class Series:
    """The requests of a place by size, and its findings."""

    place: Place
    points: list[Point] = field(default_factory=list)
    findings: list[str] = field(default_factory=list)

    @property
    def factor(self) -> Point | None:
        """The largest accepted request, if it costs more than the smallest."""
        accepted = [p for p in self.points if p.status.startswith("2") and p.cpu_s <= MAX_FACTOR_S]
        return accepted[-1] if accepted and accepted[-1].cpu_s > accepted[0].cpu_s + MIN_CPU_S else None


class GrowthFuzzer:
    """Measures series of one server."""

    def __init__(self, meter: Meter, sizes: Sequence[int] = SIZES) -> None:
        self._meter = meter
        self._sizes = sizes

    def grow(self, place: Place) -> Series:
        """Double a place until it costs too much, or is refused at a constant cost."""
        series = Series(place)
        sizes = list(self._sizes)
        while sizes:
            if len(place.body(sizes[0])) > MAX_BODY_BYTES:
                break
            point = self._measure(place, sizes.pop(0))
            series.points.append(point)
            if point.status == "none" or point.cpu_s > MAX_CPU_S:
                break
            cheap = [p.status[0] == "4" and p.cpu_s < MIN_CPU_S for p in series.points[-2:]]
            if cheap == [True, True]:
                sizes = sizes[-3:]
        series.findings = self._confirm(series)
        return series

    def multiply(self, first: Series, second: Series) -> Series:
        """Two places at their largest accepted sizes in one body."""
        factors = [factor for series in (first, second) if (factor := series.factor) is not None]
        place = first.place.times(second.place)
        series = Series(place)
        sizes = tuple(size for factor in factors for size in factor.sizes)
        series.points = [self._measure(place, *sizes)]
        if find_interplay(series.points[0], factors):
            series.points = [_cheaper(series.points[0], self._measure(place, *sizes))]
            series.findings = find_interplay(series.points[0], factors)
        return series

    def _confirm(self, series: Series) -> list[str]:
        """The findings that stay when their requests are sent again."""
        points = series.points
        found = find_growth(points)
        if not found or points[-1].status == "none":
            return found
        for i in range(max(0, len(points) - 3), len(points)):
            points[i] = _cheaper(points[i], self._measure(series.place, *points[i].sizes))
        worst = max(range(len(points)), key=lambda i: points[i].cost.silent_s)
        points[worst] = _cheaper(points[worst], self._measure(series.place, *points[worst].sizes))
        return find_growth(points)

    def _measure(self, place: Place, *sizes: int) -> Point:
        body = place.body(*sizes)
        status, cost = self._meter.measure(place.route, body)
        return Point(sizes, len(body), status, cost)


def _as_tuple(cost: ServerCost) -> tuple[float, ...]:
    return cost.api_s, cost.workers_s, cost.api_mib, cost.workers_mib, cost.silent_s


def _cheaper(one: Point, other: Point) -> Point:
    """The smaller of each figure: noise only adds."""
    return replace(one, cost=ServerCost(*map(min, _as_tuple(one.cost), _as_tuple(other.cost))))


def find_growth(points: Sequence[Point]) -> list[str]:
    """Reasons why a series is a finding."""
    found = []
    kinds: Mapping[str, tuple[Callable[[ServerCost], float], float]] = {
        "API process": (lambda cost: cost.api_s, MIN_GROWTH_S),
        "workers": (lambda cost: cost.workers_s, MIN_GROWTH_S),
        "memory of the API process": (lambda cost: cost.api_mib, MIN_MIB),
        "memory of workers": (lambda cost: cost.workers_mib, MIN_MIB),
    }
    for name, (read, least) in kinds.items():
        same = [point for point in points if point.status == points[-1].status]
        slope = exponent([(point.sizes[0], read(point.cost)) for point in same], least)
        if slope is not None and slope > MAX_EXPONENT:
            found.append(f"{name} ^{slope:.1f}")
    silent_s = max(min(point.cost.silent_s, point.cost.api_s) for point in points)
    if silent_s > MAX_SILENCE_S:
        found.append(f"silent {silent_s:.2f} s")
    found += ["no answer"] if points[-1].status == "none" else []
    found += [
        f"status {point.status}" for point in points if point.status >= "500" and point.status != "none"
    ][:1]
    return found


def find_interplay(product: Point, factors: Sequence[Point]) -> list[str]:
    """Reasons why a product is a finding: alone, or beside the sum of its factors' costs."""
    found = find_growth([product])
    for name, cost, costs, least_factor, least in (
        ("CPU time", product.cpu_s, [factor.cpu_s for factor in factors], MIN_CPU_S, MIN_PRODUCT_S),
        ("memory", product.mib, [factor.mib for factor in factors], MIN_MIB, MIN_PRODUCT_MIB),
    ):
        ratio = cost / sum(max(least_factor, each) for each in costs)
        if cost > least and ratio > MAX_INTERPLAY:
            found.append(f"{name} {ratio:.1f} times the sum")
    return found


def exponent(points: Sequence[tuple[int, float]], least: float) -> float | None:
    """Slope of log cost over log size, beyond the first point, by least squares over the last two doublings.

    points  (elements, cost) of one status, whose constant the first point has
    least   smallest cost that is no noise; None unless the last three points are above it
    """
    last = [(size - points[0][0], cost - points[0][1]) for size, cost in points[1:]][-3:]
    if len(last) < 3 or min(cost for _, cost in last) < least:
        return None
    logs = [(math.log(size), math.log(cost)) for size, cost in last]
    return statistics.linear_regression(*zip(*logs, strict=True)).slope


@dataclass(frozen=True)
class Server:
    """A server under test."""

    name: str
    config: Config
    share: float  # of the time
    flags: tuple[str, ...] = ()
    routes: tuple[str, ...] = ()  # (): all
    words: tuple[str, ...] = ()  # one of these is in the name of a place; (): all
    stored_chars: int = 600  # of the stored item that others refer to


def servers(folder: Path) -> Iterator[Server]:
    base = Config(model="demo", kv_cache_memory="20000tokens", log_level="error", log_interval=0)
    yield Server("demo", base, 0.6)
    tools = ("tools", "tool_calls", "calls")
    yield Server("tagged", base, 0.15, ("--tool-format=qwen3-coder",), ("/v1/chat/completions",), tools)
    path = folder / "long"
    shutil.copytree(MODEL, path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "max_position_embeddings": LONG_CONTEXT}))
    long = replace(base, model=str(path), kv_cache_memory=f"{2 * LONG_CONTEXT}tokens")
    yield Server("long", long, 0.2, (), COUNTING_ROUTES, (), 60_000)
    yield Server("vision", replace(base, model="demo-vision"), 0.05, (), (), ("images",))


class LiveServer:
    """A server process that is replaced when it does not answer."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._running = contextlib.ExitStack()
        self.restarts = 0

    def __enter__(self) -> LiveServer:
        self._start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._running.close()

    def _start(self) -> None:
        process = self._running.enter_context(ServerProcess(self._server.config, self._server.flags))
        self._meter = self._running.enter_context(ServerMeter(process.url, process.pid))
        self.url = process.url
        stored = {"role": "user", "id": STORED_ITEM, "content": "a " * (self._server.stored_chars // 2)}
        body = {"input": [stored], "max_output_tokens": 1, "store": True}
        httpx.post(f"{self.url}/v1/responses", json=body, timeout=None).raise_for_status()

    def measure(self, route: str, body: bytes) -> tuple[str, ServerCost]:
        self._meter.begin()
        address = httpx.URL(self.url)
        connection = http.client.HTTPConnection(address.host, address.port, timeout=TIMEOUT_S)
        try:
            connection.request("POST", route, body, {"Content-Type": "application/json"})
            reply = connection.getresponse()
            reply.read()
            status = str(reply.status)
        except (OSError, http.client.HTTPException):
            status = "none"
        finally:
            connection.close()
        cost = self._meter.end()
        if status == "none":
            self._running.close()
            self.restarts += 1
            self._start()
        return status, cost


def places_of(document: Mapping[str, Any], server: Server) -> list[Place]:
    """The places of a server's routes."""
    paths = {route: of for route, of in document["paths"].items() if route in (server.routes or (route,))}
    walk = DocumentWalk({**document, "paths": paths}, FORMS)
    places = [*walk.places(), *together(walk.bodies())]
    return [place for place in places if any(word in place.name for word in server.words or ("",))]


def fuzz(
    server: Server, places: Sequence[Place], fuzzer: GrowthFuzzer, end_s: float
) -> tuple[list[Series], int]:
    """The series of places and products, and the number of those for which there was no time."""
    began_s = time.monotonic()
    singles: list[Series] = []
    left = 0
    for place in track_progress(places, server.name, len(places)):
        if time.monotonic() > began_s + SINGLE_SHARE * (end_s - began_s):
            left += 1
            continue
        singles.append(fuzzer.grow(place))
        _report(server, singles[-1])
    products = []
    pairs = factor_pairs(singles)
    for first, second in track_progress(pairs, f"{server.name}, products", len(pairs)):
        if time.monotonic() > end_s:
            left += 1
            continue
        products.append(fuzzer.multiply(first, second))
        _report(server, products[-1])
    return [*singles, *products], left


def factor_pairs(singles: Sequence[Series]) -> list[tuple[Series, Series]]:
    """Pairs of the costliest accepted place of each field, by route."""
    costliest: dict[tuple[str, str], Series] = {}
    costs: dict[tuple[str, str], float] = {}
    for series in singles:
        key, point = (series.place.route, series.place.field), series.factor
        is_single = len(series.place.parts) == 1 and series.place.field not in PAID_FIELDS
        if point is not None and is_single and point.cpu_s > costs.get(key, 0.0):
            costliest[key], costs[key] = series, point.cpu_s
    return [(a, b) for a, b in combinations(costliest.values(), 2) if a.place.route == b.place.route]


def _report(server: Server, series: Series) -> None:
    if series.findings:
        point = series.points[-1]
        print(
            f"{server.name} {series.place.route} {series.place.name} at {point.sizes}: "
            f"{', '.join(series.findings)}; {point.cpu_s:.2f} s of CPU, {point.status}",
            file=sys.stderr,
            flush=True,
        )


def as_row(server: str, series: Series) -> dict[str, Any]:
    worst = max(series.points, key=lambda point: point.cpu_s)
    return {
        "server": server,
        "route": series.place.route,
        "place": series.place.name,
        "elements": "x".join(map(str, worst.sizes)),
        "kb": round(worst.num_bytes / 1000, 1),
        "status": worst.status,
        "api_s": round(worst.cost.api_s, 3),
        "workers_s": round(worst.cost.workers_s, 3),
        "mib": round(max(point.mib for point in series.points)),
        "silent_s": round(max(point.cost.silent_s for point in series.points), 3),
        "findings": series.findings,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seconds", type=float, default=math.inf, help="no series begins later")
    parser.add_argument("--only", default="", help="texts of which a route or place has one, after commas")
    parser.add_argument("--servers", default="", help="demo, tagged, long, vision; default: all")
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)))
    parser.add_argument("--seed", type=int, default=0, help="of the order of the places")
    args = parser.parse_args(arguments)
    sizes, only = list(map(int, args.sizes.split(","))), args.only.split(",")
    rows: list[dict[str, Any]] = []
    num_series = num_left = num_requests = 0
    with tempfile.TemporaryDirectory() as folder:
        for server in servers(Path(folder)):
            if args.servers and server.name not in args.servers.split(","):
                continue
            end_s = time.monotonic() + server.share * args.seconds
            with LiveServer(server) as live:
                places = places_of(httpx.get(f"{live.url}/openapi.json", timeout=None).json(), server)
                places = [p for p in places if any(text in f"{p.route} {p.name}" for text in only)]
                random.Random(args.seed).shuffle(places)
                series, left = fuzz(server, places, GrowthFuzzer(live, sizes), end_s)
            rows += [as_row(server.name, of) for of in series]
            num_series, num_left = num_series + len(series), num_left + left
            num_requests += sum(len(of.points) for of in series)
    return show(rows, {"series": num_series, "not_measured": num_left, "requests": num_requests})


def show(rows: list[dict[str, Any]], counts: Mapping[str, int]) -> int:
    rows.sort(key=lambda row: (not row["findings"], -row["api_s"] - row["workers_s"]))
    findings = [row for row in rows if row["findings"]]
    shown = rows[: len(findings) + 20]  # and the costliest others
    header = (
        "server",
        "route",
        "place",
        "elements",
        "kB",
        "status",
        "API s",
        "workers s",
        "MiB",
        "silent s",
        "",
    )
    cells = [[", ".join(v) if isinstance(v, list) else str(v) for v in row.values()] for row in shown]
    print_table("Growth of a request's cost", header, cells)
    print_json({"benchmark": "growth", **counts, "findings": findings})
    return int(bool(findings))


if __name__ == "__main__":
    sys.exit(run_script(main))
