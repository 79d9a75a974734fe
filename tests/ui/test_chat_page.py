"""Conversations in Chromium: what is shown is what the API says, and what a model writes stays text."""

from __future__ import annotations

import base64
import json
import os
import signal
import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from foreword.bench.server import ServerProcess
from foreword.config.options import Config
from tests.server.conftest import RunningServer, run_server
from tests.support.fakes import FakeEngineClient, FakeOutput, engine_info
from tests.support.images import image_processor, image_tokenizer, png
from tests.support.tool_checkpoint import WEATHER
from tests.support.waiting import wait_until
from tests.ui.conftest import OpenPage

Open = Callable[..., OpenPage]
CHAT = "/v1/chat/completions"
KEY = "a-secret-key"
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln", "days": 2}}\n</tool_call>'
THOUGHT = "<think>\nIt may rain.\n</think>\n\n"
# Marks of an answer, in the form of the API's `tokens`.
MARKS = """() => [...document.querySelectorAll('.answer .text .tok')].map(token => [
    token.textContent, true, token.dataset.drafter,
    token.dataset.confidence === undefined ? null : Number(token.dataset.confidence)])"""
# Paste or drop a picture: [way, its bytes in base64].
TRANSFER = """([way, data]) => {
    const bytes = Uint8Array.from(atob(data), char => char.charCodeAt(0));
    const transfer = new DataTransfer();
    transfer.items.add(new File([bytes], "picture.png", {type: "image/png"}));
    const target = document.querySelector(way === "paste" ? ".input" : ".composer");
    target.dispatchEvent(way === "paste"
        ? new ClipboardEvent("paste", {clipboardData: transfer, bubbles: true, cancelable: true})
        : new DragEvent("drop", {dataTransfer: transfer, bubbles: true, cancelable: true}));
}"""
HOSTILE = """<script>window.hacked = 1</script><img src=x onerror="window.hacked = 2">

[click](javascript:window.hacked=3) [data](data:text/html,<script>window.hacked=4</script>)
<javascript:alert(1)> ![picture](http://other.example/x.png) <svg onload=window.hacked=5> </div></main>
<style>body{display:none}</style>

| <b>bold</b> | [x](vbscript:1) |
|---|---|

```html
<script>window.hacked = 6</script>
```

\u202eright to left override\u202c שלום עולם, مرحبا
"""


def submitted(server: RunningServer) -> Any:
    return server.client.submitted[-1]


def prompt_text(server: RunningServer) -> str:
    """The last prompt, without special tokens."""
    return bytes(token for token in submitted(server).prompt_ids if token < 256).decode()


def streamed_tokens(body: str) -> list[list[Any]]:
    """Entries of `tokens` of a recorded stream."""
    chunks = [json.loads(line[6:]) for line in body.splitlines() if line.startswith("data: {")]
    return [token for chunk in chunks for choice in chunk["choices"] for token in choice.get("tokens", ())]


def test_answer_is_shown_as_it_streams(open_page: Open, fake: RunningServer) -> None:
    fake.set_output(FakeOutput("one two three four five", delay_s=0.05))
    page = open_page(fake)
    page.send("Count")
    page.wait_for_function("() => /one/.test(document.querySelector('.answer .text')?.innerText)")
    assert page.locator(".answer.streaming").count() == 1, "shown before it is complete"
    page.wait_done()
    assert page.answer() == "one two three four five"
    assert page.locator(".msg.user .bubble").inner_text() == "Count"
    request = submitted(fake)
    assert request.params.seed is not None
    assert f"seed {request.params.seed}" in page.locator(".stats").inner_text()


@pytest.mark.parametrize("confidence", [None, 0.625])
def test_marks_are_those_of_the_api(open_page: Open, fake: RunningServer, confidence: float | None) -> None:
    fake.set_output(FakeOutput("The *quick* brown fox", (4, 1, 3), drafter="suffix", confidence=confidence))
    page = open_page(fake)
    page.button("Plain text").click()
    with page.expect_response(f"**{CHAT}") as answer:
        page.ask("Go")
    tokens = streamed_tokens(answer.value.text())
    assert page.evaluate(MARKS) == [token for token in tokens if token[1]]
    assert page.answer() == "".join(token[0] for token in tokens) == "The *quick* brown fox"
    accepted = sum(token[1] for token in tokens)
    assert f"suffix\n{accepted}" in page.locator(".legend").inner_text()
    page.locator(".tok").nth(1).hover()
    expected = "gives no confidence" if confidence is None else "63 % sure"
    assert page.locator(".tip").inner_text().split("\n")[-1].endswith(f"suffix {expected}, accepted")


def test_marks_of_the_bundled_model_stay_in_formatted_text(open_page: Open, demo: RunningServer) -> None:
    page = open_page(demo)
    page.ask("What is speculative decoding?")  # its answer becomes drafts of the next one
    with page.expect_response(f"**{CHAT}") as answer:
        page.button("Regenerate with the same seed").click()
        page.wait_done()
    tokens = streamed_tokens(answer.value.text())
    drafted = [token for token in tokens if token[1]]
    assert drafted, "nothing was drafted"
    assert page.evaluate(MARKS) == drafted
    assert {token[2] for token in drafted} == {"suffix"}
    assert page.answer() == "".join(token[0] for token in tokens).strip()


def test_replay_without_drafts_is_equal(open_page: Open, demo: RunningServer) -> None:
    page = open_page(demo)
    page.ask("How do I start the server?")
    page.button("Replay without drafts").click()
    page.wait_for_selector(".verdict")
    said = page.locator(".replay").inner_text()
    assert "Same answer, character by character" in said
    assert "With drafts" in said
    assert "Without" in said


def test_replay_shows_a_difference(open_page: Open, fake: RunningServer) -> None:
    def script(request: Any) -> FakeOutput:
        return FakeOutput(
            "Hello World" if request.params.speculation.method == "off" else "Hello world", (3,)
        )

    fake.set_output(script)
    page = open_page(fake)
    page.ask("Hi")
    first = submitted(fake)
    page.button("Replay without drafts").click()
    page.wait_for_selector(".verdict.bad")
    assert "the first difference is at character 6" in page.locator(".verdict").inner_text()
    assert submitted(fake).params.seed == first.params.seed
    assert submitted(fake).prompt_ids == first.prompt_ids


@pytest.mark.parametrize("key", ["Stop", "Escape"])
def test_stop_frees_the_request(open_page: Open, fake: RunningServer, key: str) -> None:
    fake.set_output(FakeOutput("abcdef" * 100, hang_after=5))
    page = open_page(fake)
    page.send("Go on")
    page.wait_for_function("() => document.querySelector('.answer .text')?.innerText.startsWith('abcde')")
    assert not fake.idle()
    if key == "Stop":
        page.button("Stop").click()
    else:
        page.keyboard.press("Escape")
    fake.wait_until_idle()
    page.wait_done()
    assert "Stopped by you" in page.locator(".answer").inner_text()
    fake.set_output(FakeOutput("again"))
    page.ask("Once more", 2)
    assert page.answer() == "again"


def test_message_is_edited_and_sent_again(open_page: Open, fake: RunningServer) -> None:
    page = open_page(fake)
    page.ask("frist")
    page.ask("second", 2)
    page.button("Edit and resend").first.click()
    page.get_by_label("Edit the message").fill("first")
    page.keyboard.press("Enter")
    page.wait_done()
    assert page.locator(".msg.user .bubble").all_inner_texts() == ["first"]
    assert page.locator(".answer").count() == 1


def test_regenerate_keeps_or_changes_the_seed(open_page: Open, fake: RunningServer) -> None:
    page = open_page(fake)
    page.ask("Hi")
    seed = submitted(fake).params.seed
    for name, same in (("Regenerate with the same seed", True), ("Regenerate with a new seed", False)):
        with page.expect_response(f"**{CHAT}"):
            page.button(name).click()
        page.wait_done()
        assert (submitted(fake).params.seed == seed) is same


def test_choices_stand_side_by_side(open_page: Open, fake: RunningServer) -> None:
    fake.set_output(lambda request: FakeOutput(f"choice {request.id[-1]}"))
    page = open_page(fake)
    page.get_by_label("n", exact=True).fill("3")
    page.ask("Choose", 3)
    assert page.locator(".answer .text").all_inner_texts() == ["choice 0", "choice 1", "choice 2"]
    boxes = [page.locator(".choice").nth(i).bounding_box() for i in range(3)]
    assert boxes[0]["y"] == boxes[1]["y"]
    assert boxes[0]["x"] < boxes[1]["x"]
    page.button("Replay without drafts").first.click()
    page.wait_for_selector(".verdict.good")
    assert "3 answers shared the server" in page.locator(".verdict").inner_text()
    page.get_by_role("radio", name="Choice 2").check()
    page.ask("Next", 6)
    assert "choice 1" in prompt_text(fake)


def test_settings_are_fields_of_the_request(open_page: Open, fake: RunningServer) -> None:
    page = open_page(fake)
    for label, value in (("temperature", "0.5"), ("top_k", "7"), ("max_tokens", "9"), ("seed", "42")):
        page.get_by_label(label, exact=True).fill(value)
    page.get_by_label("System prompt").fill("Be brief.")
    page.get_by_label("stop", exact=True).fill("END\nSTOP")
    page.ask("Hi")
    params = submitted(fake).params
    assert (params.temperature, params.top_k, params.max_tokens, params.seed) == (0.5, 7, 9, 42)
    assert params.stop == ("END", "STOP")
    assert "system\nBe brief." in prompt_text(fake)
    page.get_by_label("temperature", exact=True).fill("")
    page.ask("Hi", 2)
    assert submitted(fake).params.temperature != 0.5
    # What a field does is the API's own sentence.
    assert "flattens (above 1)" in page.locator("#help-temperature").inner_text()


def test_schema_constrains_the_answer(open_page: Open, demo: RunningServer) -> None:
    page = open_page(demo)
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 8}},
        "required": ["name"],
    }
    page.get_by_label("response_format").fill(json.dumps(schema | {"additionalProperties": False}))
    page.get_by_label("max_tokens", exact=True).fill("60")
    page.ask("A name as JSON")
    assert list(json.loads(page.answer())) == ["name"]
    page.get_by_label("response_format").fill("{")
    page.send("Hi")
    page.wait_for_selector(".toast.bad")
    assert "The schema is not JSON" in page.locator(".toast.bad").inner_text()


def test_files_are_sent_as_text(open_page: Open, fake: RunningServer) -> None:
    page = open_page(fake)
    with page.expect_file_chooser() as chooser:
        page.button("Attach a picture or a text file").click()
    chooser.value.set_files({"name": "a.txt", "mimeType": "text/plain", "buffer": b"contents of a file"})
    page.wait_for_selector(".chip")
    page.ask("Read it")
    assert "File a.txt:\n```\ncontents of a file\n```\n\nRead it" in prompt_text(fake)


@pytest.fixture(scope="module")
def seeing() -> Iterator[RunningServer]:
    client = FakeEngineClient(FakeOutput("A red picture."), engine_info(512))
    with run_server(None, client, tokenizer=image_tokenizer(), processor=image_processor()) as server:
        yield server
        server.wait_until_idle()


@pytest.mark.parametrize("way", ["paste", "drop"])
def test_picture_is_pasted_or_dropped(open_page: Open, seeing: RunningServer, way: str) -> None:
    page = open_page(seeing)
    page.wait_for_function("() => document.querySelector('.model-name')?.textContent")
    page.evaluate(TRANSFER, [way, base64.b64encode(png("red")).decode()])
    page.wait_for_selector(".chip img")
    page.ask("What is it?")
    assert page.answer() == "A red picture."
    assert len(submitted(seeing).images) == 1
    assert page.evaluate("() => document.querySelector('.bubble img').naturalWidth") == 40


def test_model_without_eyes_refuses_pictures(open_page: Open, fake: RunningServer) -> None:
    page = open_page(fake)
    page.wait_for_function("() => document.querySelector('.model-name')?.textContent")
    page.evaluate(TRANSFER, ["paste", base64.b64encode(b"x").decode()])
    page.wait_for_selector(".toast.bad")
    assert page.locator(".toast").inner_text() == "This model takes no pictures"


def test_tool_call_is_a_card_that_grows(open_page: Open, tooled: RunningServer) -> None:
    tooled.set_output(FakeOutput(f"{THOUGHT}Let me see.\n{CALL}", (4,), delay_s=0.02))
    page = open_page(tooled)
    page.get_by_label("tools", exact=True).fill(json.dumps([WEATHER]))
    page.send("Weather?")
    page.wait_for_function("() => /city/.test(document.querySelector('.call .raw-text')?.innerText)")
    assert page.locator(".answer.streaming").count() == 1, "arguments are shown while they grow"
    page.wait_done()
    assert page.locator(".call strong").inner_text() == "get_weather"
    assert json.loads(page.locator(".call .raw-text").inner_text()) == {"city": "Köln", "days": 2}
    assert page.locator(".call .tok").count() > 3, "drafts of arguments are marked too"
    assert page.answer() == "Let me see."
    reasoning = page.locator("details.reasoning")
    assert reasoning.get_attribute("open") is None, "reasoning is folded"
    reasoning.locator("summary").click()
    assert reasoning.locator(".raw-text").inner_text() == "It may rain."
    tooled.set_output(FakeOutput("It is 5 degrees."))
    page.get_by_label("Result").fill('{"degrees": 5}')
    page.button("Send the results").click()
    page.wait_done(2)
    assert page.answer() == "It is 5 degrees."
    assert '{"degrees": 5}' in prompt_text(tooled)


# What a model writes


@pytest.mark.parametrize("plain", [False, True])
def test_hostile_output_stays_text(open_page: Open, fake: RunningServer, plain: bool) -> None:
    fake.set_output(FakeOutput(HOSTILE, (7,)))
    page = open_page(fake)
    if plain:
        page.button("Plain text").click()
    page.ask("Attack")
    page.wait_for_function("() => /مرحبا/.test(document.querySelector('.answer .text').innerText)")
    assert page.evaluate("() => window.hacked") is None
    for tag in ("script", "img", "svg", "style", "iframe", "b"):
        assert page.locator(f".answer .text {tag}").count() == (1 if tag == "svg" and not plain else 0), tag
    links = page.locator(".answer .text a").evaluate_all("links => links.map(link => link.href)")
    assert all(link.startswith(("http:", "https:", "mailto:")) for link in links)
    shown = page.answer()
    for text in (
        "<script>window.hacked = 1</script>",
        "javascript:window.hacked=3",
        "שלום עולם",
        "<b>bold</b>",
    ):
        assert text in shown
    assert page.locator("body").is_visible()
    reloaded = page.url
    page.goto("about:blank")
    page.goto(reloaded)
    page.wait_for_selector(".answer .text > *")
    assert page.evaluate("() => window.hacked") is None


def test_links_are_safe(open_page: Open, fake: RunningServer) -> None:
    fake.set_output(
        FakeOutput(
            "[a](https://example.org/x_(y)) and https://example.org/z. **[b](mailto:a@b.c)** [no](ftp://x)"
        )
    )
    page = open_page(fake)
    page.ask("Links")
    links = page.locator(".answer .text a")
    assert links.evaluate_all(
        "links => links.map(link => [link.textContent, link.getAttribute('href')])"
    ) == [
        ["a", "https://example.org/x_(y)"],
        ["https://example.org/z", "https://example.org/z"],
        ["b", "mailto:a@b.c"],
    ]
    assert links.first.get_attribute("rel") == "noopener noreferrer nofollow"
    assert links.first.get_attribute("target") == "_blank"


@pytest.mark.parametrize("fence", ["", "```\n"])
def test_line_of_a_megabyte_is_shown(open_page: Open, fake: RunningServer, fence: str) -> None:
    """In elements of bounded length, so that its end is not laid out together with its beginning."""
    line = "0123456789" * 100_000
    delta = {"index": 0, "delta": {"content": fence + line}, "finish_reason": "stop"}
    body = f"data: {json.dumps({'choices': [delta]})}\n\ndata: [DONE]\n\n"
    page = open_page(fake)
    page.route(f"**{CHAT}", lambda route: route.fulfill(body=body, content_type="text/event-stream"))
    page.ask("Long")
    text = page.locator(".answer .text")
    assert text.locator("code, p").evaluate_all("all => all.map(each => each.textContent).join('')") == line
    leaves = "all => Math.max(...all.map(each => each.textContent.length))"
    assert text.locator("code > .part" if fence else "p").evaluate_all(leaves) <= 4000


MARKDOWN = """# Title

First *line*
second **bold** and `code` ~~gone~~ 2*3*4 snake_case_name

- one
- two
  - nested
1. first

> quoted

| a | b |
|---|---|
| 1 | `2` |

```python
def f():
    return "*"
```
last"""


@pytest.mark.parametrize("bursts", [(1,), (3, 7), (500,)])
def test_markdown_is_the_same_however_it_streams(
    open_page: Open, fake: RunningServer, bursts: tuple[int, ...]
) -> None:
    fake.set_output(
        FakeOutput(MARKDOWN, bursts, delay_s=0.004 if len(bursts) == 1 and bursts[0] < 500 else 0)
    )
    page = open_page(fake)
    page.ask("Format")
    page.wait_for_function("() => /last$/.test(document.querySelector('.answer .text').innerText)")
    text = page.locator(".answer .text")
    assert text.locator(":scope > *").evaluate_all("items => items.map(item => item.localName)") == (
        ["h3", "p", "ul", "ol", "blockquote", "div", "figure", "p"]
    )
    assert text.locator("strong").all_inner_texts() == ["bold"]
    assert text.locator("em").all_inner_texts() == ["line"]
    assert text.locator("p code").all_inner_texts() == ["code"]
    assert text.locator("del").all_inner_texts() == ["gone"]
    assert "snake_case_name" in text.inner_text()
    assert text.locator("ul ul li").all_inner_texts() == ["nested"]
    assert text.locator("td").all_inner_texts() == ["a", "b", "1", "2"]
    assert text.locator("td.head").count() == 2
    assert text.locator("figure code").text_content() == 'def f():\n    return "*"\n'


# Keys, failures, and what is kept


def test_wrong_key_asks_for_another(open_page: Open) -> None:
    with run_server(Config(api_key=KEY), key=KEY) as server:
        page = open_page(server, allowed="401")
        dialog = page.get_by_role("dialog", name="API key")
        dialog.wait_for()
        dialog.get_by_label("API key").fill("wrong")
        dialog.get_by_role("button", name="Use this key").click()
        page.wait_for_function("() => /not known/.test(document.querySelector('dialog').innerText)")
        dialog.get_by_label("API key").fill(KEY)
        dialog.get_by_role("button", name="Use this key").click()
        dialog.wait_for(state="detached")
        page.ask("Hi")
        assert page.answer() == "Hello world"
        assert KEY not in page.url
        assert page.evaluate("() => [sessionStorage.length, localStorage.getItem('foreword.key')]") == [
            1,
            None,
        ]
        page.reload()
        page.ask("Again", 2)
        page.button("API key").click()
        dialog.get_by_label("Keep it in this browser").check()
        dialog.get_by_role("button", name="Use this key").click()
        dialog.wait_for(state="detached")
        assert page.evaluate("() => [sessionStorage.length, localStorage.getItem('foreword.key')]") == [
            0,
            KEY,
        ]
        page.close()


def test_error_of_the_server_is_shown(open_page: Open, fake: RunningServer) -> None:
    fake.set_output(FakeOutput("abcdef", fail_after=3))
    page = open_page(fake)
    page.ask("Fail")
    assert page.answer() == "abc"
    assert "The script says so" in page.locator(".note.bad").inner_text()
    page.watch.allowed = "400"
    page.fill_other_fields('{"no_such_field": 1}')
    page.ask("Fail", 2)
    assert "no_such_field" in page.locator(".note.bad").last.inner_text()


def test_answer_goes_on_when_the_engine_is_killed(open_page: Open, demo: RunningServer) -> None:
    page = open_page(demo)
    page.send_long(700)
    restarts = demo.http.get("/health").json()["restarts"]
    os.kill(demo.client.pids[""], signal.SIGKILL)
    assert page.locator(".answer.streaming").count() == 1, "killed in mid-stream"
    page.wait_done()
    wait_until(lambda: demo.http.get("/health").json()["restarts"] == restarts + 1)
    first = page.locator(".answer .text").text_content()
    assert "700 tokens" in page.locator(".stats").inner_text()
    page.button("Regenerate with the same seed").click()
    page.wait_done()
    assert page.locator(".answer .text").text_content() == first


def test_page_outlives_its_server(open_page: Open) -> None:
    """The whole server is killed in mid-stream; another goes on at the same address."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        flags = ["--port", str(listener.getsockname()[1])]
    config = Config(threads=1, kv_cache_memory="8000tokens", log_level="warning")
    with ServerProcess(config, flags) as first:
        page = open_page(first, allowed="ERR_|503")  # refused, broken off, still loading
        page.send_long(900)
        os.kill(first.pid, signal.SIGKILL)
        page.wait_done()
    assert "connection broke" in page.locator(".answer .note.bad").inner_text()
    begun = page.locator(".answer .text").text_content()
    page.wait_for_selector(".state[data-status=offline]")
    with ServerProcess(config, flags):
        page.wait_for_selector(".state[data-status=ok]")
        page.button("Regenerate with the same seed").click()
        page.wait_for_function("() => document.querySelector('.stats')?.innerText.includes('900 tokens')")
        assert page.locator(".answer .text").text_content().startswith(begun)


def test_page_works_without_its_server(open_page: Open, fake: RunningServer) -> None:
    page = open_page(fake)
    page.ask("Before")
    page.watch.allowed = "ERR_INTERNET_DISCONNECTED"
    page.context.set_offline(True)
    page.send("While offline")
    page.wait_for_function("() => /cannot be reached/.test(document.querySelector('.banner').innerText)")
    page.wait_done(2)
    assert "cannot be reached" in page.locator(".answer .note.bad").inner_text()
    assert page.answer(0) == "Hello world", "the conversation is still there"
    page.context.set_offline(False)
    page.wait_for_selector(".state[data-status=ok]")
    page.button("Regenerate with the same seed").last.click()
    page.wait_done(2)
    assert page.answer() == "Hello world"


# Whether the browser has stored an answer: a reload before that would lose it
IS_STORED = """async text => {
    const result = asked => new Promise(resolve => { asked.onsuccess = () => resolve(asked.result); });
    const db = await result(indexedDB.open("foreword", 1));
    const all = await result(db.transaction("conversations").objectStore("conversations").getAll());
    db.close();
    return JSON.stringify(all).includes(text);
}"""


def test_conversations_are_kept_exported_and_imported(open_page: Open, fake: RunningServer) -> None:
    fake.set_output(FakeOutput("Hello world", (3,), confidence=0.5))
    page = open_page(fake)
    page.ask("Remember me")
    page.wait_for_function(IS_STORED, arg="Hello world")
    address = page.url
    page.reload()
    page.wait_for_selector(".answer .tok")
    assert page.url == address
    marks = page.evaluate(MARKS)
    with page.expect_download() as saved:
        page.button("Export all").click()
    exported = json.loads(saved.value.path().read_text())
    assert exported["format"] == "foreword-conversations"
    page.button("Delete Remember me").click()
    page.wait_for_function("() => !document.querySelector('.conversations li')")
    with page.expect_file_chooser() as chooser:
        page.button("Import").click()
    chooser.value.set_files(saved.value.path())
    page.wait_for_selector(".conversations a")
    page.locator(".conversations a").click()
    page.wait_for_selector(".answer .tok")
    assert page.evaluate(MARKS) == marks
    assert page.answer() == "Hello world"


@pytest.mark.parametrize(
    "content",
    [
        b"no JSON",
        b"[]",
        b'{"format": "foreword-conversations", "conversations": [{"messages": [{"role": 1}]}, null, 5]}',
    ],
)
def test_hostile_import_harms_nothing(open_page: Open, fake: RunningServer, content: bytes) -> None:
    page = open_page(fake)
    with page.expect_file_chooser() as chooser:
        page.button("Import").click()
    chooser.value.set_files({"name": "x.json", "mimeType": "application/json", "buffer": content})
    page.wait_for_selector(".toast")
    assert page.locator(".conversations li").count() == 0
    page.ask("Still there?")


def test_link_fills_in_a_prompt_and_sends_nothing(open_page: Open, fake: RunningServer) -> None:
    page = open_page(fake, "/#/new?prompt=Hello%20there&system=Be%20kind")
    page.wait_for_function("() => document.querySelector('.input').value === 'Hello there'")
    assert page.get_by_label("System prompt").input_value() == "Be kind"
    assert not fake.client.submitted
    page.get_by_label("Message", exact=True).press("Enter")
    page.wait_done()
    assert "Be kind" in prompt_text(fake)


# Keyboard


def test_everything_works_by_keyboard(open_page: Open, fake: RunningServer) -> None:
    fake.set_output(FakeOutput("Hello world", (4,), confidence=0.5))
    page = open_page(fake)
    page.keyboard.type("By hand")
    page.keyboard.press("Enter")
    page.wait_done()
    page.button("Next drafted token").focus()
    page.keyboard.press("Enter")
    focused = "() => [document.activeElement.className, document.activeElement.textContent]"
    assert page.evaluate(focused)[1] == "H"
    assert "50 % sure" in page.locator(".tip").inner_text()
    page.keyboard.press("ArrowRight")
    assert page.evaluate(focused)[1] == "e"
    page.keyboard.press("Escape")
    assert page.locator(".tip").is_hidden()
    page.get_by_label("Message", exact=True).focus()
    page.keyboard.press("ArrowUp")
    assert page.get_by_label("Edit the message").input_value() == "By hand"
    page.keyboard.press("Escape")
    assert page.get_by_label("Edit the message").count() == 0
