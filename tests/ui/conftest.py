"""Chromium and pages that fail a test for an error in the console or a request to another origin."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from foreword.bench.server import ServerProcess
from tests.server.conftest import RunningServer, run_server
from tests.server.conftest import demo as demo  # a fixture: the bundled model
from tests.support.fakes import FakeOutput, byte_tokenizer
from tests.support.tool_checkpoint import chat_template

CHROMIUM_NAMES = ("chromium", "chromium-browser", "google-chrome")
TIMEOUT_MS = 120_000  # reached only by a hang
DESKTOP = {"width": 1320, "height": 860}


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Chromium of the system; nothing is downloaded.

    It ends with the file: playwright keeps an event loop running, beside which no other can.
    """
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    path = os.environ.get("FOREWORD_CHROMIUM") or next(filter(None, map(shutil.which, CHROMIUM_NAMES)), None)
    if path is None:
        pytest.skip("no Chromium: apt-get install chromium, or FOREWORD_CHROMIUM=PATH")
    with api.sync_playwright() as playwright:
        # The sandbox wants rights that a container does not give; all pages are of these tests.
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


@dataclass
class Watch:
    """Errors of a page, and its requests to other origins."""

    origin: str
    problems: list[str] = field(default_factory=list)
    allowed: str = "$^"  # console messages that the test provokes, as a pattern

    def attach(self, page: Any) -> None:
        page.on("pageerror", lambda error: self.problems.append(f"error: {error}"))
        page.on("console", self.on_console)
        page.on("request", self.on_request)

    def on_console(self, message: Any) -> None:
        if message.type in ("error", "warning") and not re.search(self.allowed, message.text):
            self.problems.append(f"console: {message.text}")

    def on_request(self, request: Any) -> None:
        if not request.url.startswith((self.origin, "blob:", "data:")):
            self.problems.append(f"request: {request.url}")


@dataclass
class OpenPage:
    """A page of a server, with shortcuts of what users do."""

    page: Any
    server: RunningServer | ServerProcess
    watch: Watch

    def __getattr__(self, name: str) -> Any:
        return getattr(self.page, name)

    def send(self, text: str) -> None:
        self.page.get_by_label("Message", exact=True).fill(text)
        self.page.keyboard.press("Enter")

    def wait_done(self, count: int = 1) -> None:
        """Until `count` choices are complete and shown."""
        self.page.wait_for_function(
            "count => document.querySelectorAll('.answer[aria-busy=false]').length >= count"
            " && !document.querySelector('.answer[aria-busy=true]')",
            arg=count,
        )

    def ask(self, text: str, count: int = 1) -> None:
        self.send(text)
        self.wait_done(count)

    def button(self, name: str) -> Any:
        return self.page.get_by_role("button", name=name, exact=True)

    def answer(self, index: int = -1) -> str:
        return str(self.page.locator(".answer .text").nth(index).inner_text())

    def fill_other_fields(self, body: str) -> None:
        """Further fields of the body, as JSON, in the settings."""
        field = self.page.get_by_label("Other fields of the body, as JSON")
        field.evaluate("field => { field.closest('details').open = true; }")
        field.fill(body)

    def send_long(self, num_tokens: int) -> None:
        """Ask for a long answer without drafts and wait until it has begun."""
        self.page.get_by_label("speculation", exact=True).select_option("off")
        self.page.get_by_label("max_tokens", exact=True).fill(str(num_tokens))
        self.fill_other_fields('{"ignore_eos": true}')
        self.send("What is speculative decoding?")
        self.page.wait_for_function("() => document.querySelector('.answer .text')?.innerText.length > 20")


@pytest.fixture
def open_page(browser: Any) -> Iterator[Callable[..., OpenPage]]:
    """Open the page of a server in a browser profile of its own; at the end nothing may have gone wrong."""
    opened: list[tuple[Any, Watch]] = []

    def open_(
        server: RunningServer | ServerProcess, path: str = "/", allowed: str = "$^", **options: Any
    ) -> OpenPage:
        context = browser.new_context(**{"viewport": DESKTOP, **options})
        context.set_default_timeout(TIMEOUT_MS)
        page, watch = context.new_page(), Watch(server.url, allowed=allowed)
        watch.attach(page)
        opened.append((context, watch))
        page.goto(server.url + path)
        page.wait_for_selector("body :is(.state[data-status], .route, .noscript)")
        return OpenPage(page, server, watch)

    yield open_
    for context, _ in opened:
        context.close()
    assert [problem for _, watch in opened for problem in watch.problems] == []


@pytest.fixture(scope="session")
def fake_server() -> Iterator[RunningServer]:
    with run_server() as server:
        yield server


@pytest.fixture
def fake(fake_server: RunningServer) -> Iterator[RunningServer]:
    """A server with an engine that writes what a test says."""
    fake_server.client.script = FakeOutput()
    fake_server.client.submitted.clear()
    yield fake_server
    fake_server.wait_until_idle()


@pytest.fixture(scope="session")
def tooled() -> Iterator[RunningServer]:
    """A fake engine behind a template in the format hermes."""
    with run_server(tokenizer=byte_tokenizer(chat_template("hermes"))) as server:
        yield server
        server.wait_until_idle()


@pytest.fixture(scope="session")
def screenshots() -> Path | None:
    """Folder for screenshots, if FOREWORD_SCREENSHOTS names one."""
    folder = os.environ.get("FOREWORD_SCREENSHOTS")
    if folder is None:
        return None
    Path(folder).mkdir(parents=True, exist_ok=True)
    return Path(folder)
