"""benchmarks/growth.py on applications in this process, by counted lines: proportion, and planted squares."""

import asyncio
import json
import sys
import threading
from collections.abc import Iterator
from contextlib import AsyncExitStack
from dataclasses import replace
from types import FrameType
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, HTTPException
from pydantic import BaseModel

from benchmarks import growth
from benchmarks.growth import (
    COUNTING_ROUTES,
    GrowthFuzzer,
    Point,
    Server,
    exponent,
    factor_pairs,
    find_growth,
    find_interplay,
    places_of,
)
from benchmarks.growth_forms import SCHEMAS
from benchmarks.growth_places import MAPS, DocumentWalk, Place
from benchmarks.server_cost import ServerCost
from foreword.config.options import Config
from foreword.demo import MODEL
from foreword.server import intake
from foreword.tokenizer.tokenizer import Tokenizer
from tests.support.apps import open_app
from tests.support.fakes import FakeEngineClient, engine_info

pytestmark = pytest.mark.full

SIZES = (32, 64, 128, 256)
CONTEXT = 1 << 20  # tokens, so that the context refuses nothing
LINE_S = 1e-5  # so that a thousand lines are above the noise
ADMIN = ("/models/", "/v1/load", "/v1/unload", "/slots")  # and slots need a directory of the KV cache
CHAT = "/v1/chat/completions"
# Fields whose work is that of grammar workers, or tokens of the answer.
ELSEWHERE = (
    "response_format",
    "structured_outputs",
    "guided_",
    "grammar",
    "json_schema",
    "regex",
    "ebnf",
    "max_",
)
ATOMS = ("number", "digits", "digits of a fraction", "letters", "words", *list(MAPS)[1:])


class LineMeter:
    """Counts lines of Python that an application in this process runs for a request, in every thread."""

    def __init__(self, app: FastAPI, runner: asyncio.Runner, line_s: float = LINE_S) -> None:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        self._client = httpx.AsyncClient(transport=transport, base_url="http://app", timeout=None)
        self._runner = runner
        self._line_s = line_s  # counted for each line
        self._num_lines = 0

    def measure(self, route: str, body: bytes) -> tuple[str, ServerCost]:
        self._num_lines = 0
        reply = self._runner.run(self._post(route, body))
        return str(reply.status_code), ServerCost(self._line_s * self._num_lines, 0.0, 0.0, 0.0, 0.0)

    async def _post(self, route: str, body: bytes) -> httpx.Response:
        threading.settrace(self._count)
        sys.settrace(self._count)
        try:
            headers = {"Content-Type": "application/json"}
            return await self._client.post(route, content=body, headers=headers)
        finally:
            sys.settrace(None)
            threading.settrace(None)  # type: ignore[arg-type]

    def _count(self, frame: FrameType, event: str, argument: object) -> Any:
        self._num_lines += 1
        return self._count


@pytest.fixture(scope="module")
def apis() -> Iterator[tuple[LineMeter, dict[str, Any]]]:
    """A meter of the real application with a fake engine, and its OpenAPI document."""
    info = replace(engine_info(CONTEXT), vocab_size=1536)

    async def start(stack: AsyncExitStack) -> FastAPI:
        client = FakeEngineClient(info=info)
        app = await stack.enter_async_context(open_app(client, tokenizer=Tokenizer.from_directory(MODEL)))
        await stack.enter_async_context(app.router.lifespan_context(app))
        return app

    stack = AsyncExitStack()
    with asyncio.Runner() as runner:
        app = runner.run(start(stack))
        yield LineMeter(app, runner), app.openapi()
        runner.run(stack.aclose())


@pytest.fixture(autouse=True)
def exact_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts have no noise, so that small sizes do."""
    monkeypatch.setattr(growth, "MAX_EXPONENT", 1.2)
    monkeypatch.setattr(growth, "MAX_CPU_S", float("inf"))
    for name in ("INLINE_BYTES", "INLINE_OBJECTS", "INLINE_WORK_BYTES"):  # a worker's lines are not counted
        monkeypatch.setattr(intake, name, 1 << 40)


def test_smallest_bodies_are_accepted_and_places_are_json(apis: tuple[LineMeter, dict[str, Any]]) -> None:
    meter, document = apis
    for route, body in DocumentWalk(document, {}).bodies().items():
        status, _ = meter.measure(route, json.dumps(body).encode())
        assert status == "200" or route.startswith(ADMIN), route
    places = places_of(document, Server("all", Config(), 1.0))
    assert len(places) > 1000 and len({(place.route, place.name) for place in places}) == len(places)
    for place in places:
        assert isinstance(json.loads(place.body(3)), dict), place


def test_cost_is_in_proportion_in_every_api(apis: tuple[LineMeter, dict[str, Any]]) -> None:
    meter, document = apis
    fuzzer = GrowthFuzzer(meter, SIZES)
    places = [p for p in places_of(document, Server("all", Config(), 1.0)) if is_measured(p)]
    found = {
        (place.route, place.name): series.findings
        for place in places
        if (series := fuzzer.grow(place)).findings
    }
    assert found == {}


def is_measured(place: Place) -> bool:
    """Lists, maps and histories of routes that answer, and the schemas of chat's tools."""
    if place.route.startswith(ADMIN) or place.field.startswith(ELSEWHERE) or place.name.endswith(ATOMS):
        return False
    if place.route in COUNTING_ROUTES or place.name.startswith("prompts x"):
        return False  # the same conversations; many answers
    is_schema = place.parts[0][1] in SCHEMAS.values()
    return not is_schema or (place.route == CHAT and place.field == "tools")


class Line(BaseModel):
    line: list[int] = []
    other_line: list[int] = []


class Square(BaseModel):
    square: list[int] = []


class Product(BaseModel):
    factor: list[int] = []
    other_factor: list[int] = []


def planted_app() -> FastAPI:
    app = FastAPI()

    @app.post("/line")
    async def line(body: Line) -> int:
        return sum(1 for _ in (*body.line, *body.other_line))

    @app.post("/square")
    async def square(body: Square) -> int:
        return sum(1 for a in body.square for b in body.square if a == b)

    @app.post("/refused-square")
    async def refused_square(body: Square) -> None:
        raise HTTPException(400, str(sum(1 for a in body.square for b in body.square if a == b)))

    @app.post("/product")
    async def product(body: Product) -> int:
        return sum(1 for a in (0, *body.factor) for b in (0, *body.other_factor) if a == b)

    return app


def test_planted_squares_and_products_are_found() -> None:
    app = planted_app()
    with asyncio.Runner() as runner:
        fuzzer = GrowthFuzzer(LineMeter(app, runner, line_s=1e-4), SIZES)
        places = list(DocumentWalk(app.openapi(), {}).places())
        series = [fuzzer.grow(place) for place in places]
        products = {a.place.route: fuzzer.multiply(a, b).findings for a, b in factor_pairs(series)}
        [square] = [place for place in places if place.name == "square: numbers alike"]
        refused = fuzzer.grow(replace(square, route="/refused-square"))
    assert {of.place.field for of in series if of.findings} == {"square"}
    assert refused.findings and refused.points[-1].status == "400"
    assert products["/product"] and not products["/line"]


def test_growth_is_judged_by_the_last_doublings_of_one_status() -> None:
    assert exponent([(n, 0.5 + 1e-3 * n) for n in SIZES], 0.01) == pytest.approx(1.0)
    assert exponent([(n, 0.5 + 1e-5 * n * n) for n in SIZES], 0.0) == pytest.approx(1.56, abs=0.01)
    assert exponent([(n, 1e-6 * n * n) for n in SIZES], 0.1) is None, "noise"
    square = [point(n, api_s=1e-3 * n * n) for n in (*SIZES, 512)]
    assert find_growth(square) == ["API process ^1.8"]
    assert find_growth([*square[:-1], point(512, status="400", api_s=9.0)]) == [], (
        "refused at a constant cost"
    )
    assert find_growth([point(1, silent_s=0.3, api_s=0.4)]) == ["silent 0.30 s"]
    assert find_growth([point(1, silent_s=9.0, api_s=0.1)]) == [], "the machine was busy"
    assert find_growth([point(1, status="none")]) == ["no answer"]
    assert find_growth([point(1, status="500")]) == ["status 500"]


def test_product_is_judged_by_the_sum_of_its_factors() -> None:
    factors = [point(1, api_s=0.1), point(1, workers_s=0.1, workers_mib=40.0)]
    assert find_interplay(point(1, api_s=0.2, workers_mib=60.0), factors) == []
    assert find_interplay(point(1, api_s=0.3, workers_s=0.3), factors) == ["CPU time 3.0 times the sum"]
    assert find_interplay(point(1, api_mib=68.0, workers_mib=100.0), factors) == ["memory 3.0 times the sum"]
    assert find_interplay(point(1, api_s=0.2, silent_s=0.3), factors) == []
    assert find_interplay(point(1, status="none"), factors) == ["no answer"]


def point(size: int, status: str = "200", **cost: float) -> Point:
    zero = ServerCost(0.0, 0.0, 0.0, 0.0, 0.0)
    return Point((size,), 100, status, replace(zero, **cost))
