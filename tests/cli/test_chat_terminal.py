"""`foreword chat` on a pseudo-terminal: keys, colours, wrapped lines, and how it ends."""

import json
import os
import pty
import re
import select
import subprocess
import sys
import termios
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.support.waiting import wait_until_asleep

LIMIT_S = 120  # for a machine that is busy; the tests wait for texts
CTRL_C, CTRL_D, UP = "\x03", "\x04", "\x1b[A"
PROMPT = "> "
LONG = "the quick brown fox jumps over the lazy dog and runs away"


class Handler(BaseHTTPRequestHandler):
    """A model that repeats the last message, or does as it says: wait, count, full, die.

    With tools it calculates each message of the user.
    """

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._send(200, json.dumps({"data": [{"id": "parrot"}]}))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        messages = body["messages"]
        match text := messages[-1]["content"]:
            case str() if "tools" in body and messages[-1]["role"] == "user":
                function = {"name": "calculate", "arguments": json.dumps({"expression": text})}
                delta = {"tool_calls": [{"index": 0, "id": "a", "function": function}]}
                self._send(200, f"data: {json.dumps({'choices': [{'delta': delta}]})}\n\n")
            case "full":
                error = {"message": "the prompt has 99 tokens", "code": "context_length_exceeded"}
                self._send(400, json.dumps({"error": error}))
            case "die":
                pass
            case "wait":
                self._send(
                    200, "data: " + json.dumps({"choices": [{"delta": {"content": "patience"}}]}) + "\n\n"
                )
                self.rfile.read(1)  # until the client closes the connection
            case "count":
                self._answer(f"{len(messages)}-messages")
            case _:
                self._answer(text)

    def _answer(self, text: str) -> None:
        """Every second word is drafted."""
        words = [[word, index % 2 == 1] for index, word in enumerate(re.findall(r"\S+\s*", text))]
        metrics = {"tokens_per_second": 50.0, "draft_tokens": 4, "draft_tokens_acceptance": 0.5}
        choices = [{"delta": {}, "tokens": words}, {"delta": {}, "finish_reason": "stop", "metrics": metrics}]
        self._send(200, "".join(f"data: {json.dumps({'choices': [choice]})}\n\n" for choice in choices))

    def _send(self, status: int, body: str) -> None:
        self.send_response(status)
        self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(body.encode())
        self.wfile.flush()


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


# Lets the terminal send Ctrl-C, in a process of its own: the tests have threads and must not fork.
LOGIN = "import os, sys; os.login_tty(0); os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"


class Terminal:
    """A Python command on a terminal of 40 columns."""

    def __init__(self, *words: str, env: dict[str, str]) -> None:
        self._fd, child_fd = pty.openpty()
        termios.tcsetwinsize(child_fd, (24, 40))
        inherited = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
        self.process = subprocess.Popen(
            [sys.executable, "-c", LOGIN, *words],
            env={**inherited, "TERM": "xterm-256color", **env},
            stdin=child_fd, stdout=child_fd, stderr=child_fd,
        )  # fmt: skip
        os.close(child_fd)
        self.output = ""

    def press(self, keys: str) -> None:
        os.write(self._fd, keys.encode())

    def interrupt(self) -> None:
        """Ctrl-C at the prompt. readline notices no signal between two keys, only while it waits for one."""
        wait_until_asleep(self.process.pid)
        self.press(CTRL_C)

    def read_until(self, text: str) -> str:
        """Output up to `text`, without what was read before."""
        while text not in self.output:
            assert self._read(), f"{text!r} is not in {self.output!r}"
        before, _, self.output = self.output.partition(text)
        return before + text

    def read_all(self) -> str:
        """The rest of the output, after the command's end."""
        while self._read():
            pass
        return self.output

    def _read(self) -> bool:
        assert select.select([self._fd], [], [], LIMIT_S)[0], f"silent after {self.output!r}"
        try:
            received = os.read(self._fd, 65536)
        except OSError:  # Linux, after the command's end
            received = b""
        self.output += received.decode(errors="replace")
        return bool(received)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._fd)


@contextmanager
def chat_terminal(state: Path, *words: str, **env: str) -> Iterator[Terminal]:
    env |= {"XDG_STATE_HOME": str(state)}
    terminal = Terminal("-m", "foreword", "chat", *words, env=env)
    try:
        yield terminal
    finally:
        terminal.close()


def without_colors(text: str) -> str:
    return re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", text).replace("\r", "")


def test_colours_figures_wrapped_words_and_history(url: str, tmp_path: Path) -> None:
    with chat_terminal(tmp_path, "--base-url", url) as terminal:
        assert "\x1b[32maccepted draft tokens\x1b[0m and other tokens" in terminal.read_until(PROMPT)
        terminal.press(f"{LONG}\r")
        shown = terminal.read_until("2 accepted\x1b[0m")
        assert "the \x1b[32mquick \x1b[0mbrown" in shown
        answer = (
            "the quick brown fox jumps over the lazy \ndog and runs away\n50 tokens/s, 4 drafted, 2 accepted"
        )
        assert without_colors(shown).endswith(answer)
        terminal.press("\x1b[200~one\ntwo\x1b[201~\r")  # a paste, as terminals mark it
        assert "\none\ntwo\n50" in without_colors(terminal.read_until("2 accepted"))
        terminal.read_until(PROMPT)
        terminal.press(CTRL_D)
        assert terminal.process.wait(LIMIT_S) == 0
    with chat_terminal(tmp_path, "--base-url", url, NO_COLOR="1") as terminal:
        greeting = terminal.read_until(PROMPT)
        terminal.press(f"{UP}{UP}\r")
        shown = terminal.read_until("2 accepted")
        assert "fox jumps over the lazy \ndog and runs away" in without_colors(shown)
        assert "\x1b[32m" not in greeting + shown and "\x1b[2m" not in greeting + shown
        terminal.press("/quit\r")
        assert terminal.process.wait(LIMIT_S) == 0


def test_interrupts(url: str, tmp_path: Path) -> None:
    with chat_terminal(tmp_path, "--base-url", url, "--no-history") as terminal:
        terminal.read_until(PROMPT)
        terminal.press("wait\r")
        terminal.read_until("patience")
        terminal.press(CTRL_C)
        terminal.read_until("stopped; what was said stays")
        terminal.read_until(PROMPT)
        terminal.press("half a line")
        terminal.read_until("half a line")
        terminal.interrupt()
        terminal.read_until("Ctrl-C again, Ctrl-D or /quit leaves")
        terminal.read_until(PROMPT)
        terminal.press("count\r")
        terminal.read_until("3-messages")  # the interrupted answer is one, the cleared line is none
        terminal.read_until(PROMPT)
        terminal.interrupt()
        terminal.read_until(PROMPT)
        terminal.interrupt()
        assert "Traceback" not in terminal.read_all()
        assert terminal.process.wait(LIMIT_S) == 0
    assert not list(tmp_path.iterdir())


def test_full_context_and_a_lost_connection_do_not_end_the_conversation(url: str, tmp_path: Path) -> None:
    with chat_terminal(tmp_path, "--base-url", url, TERM="dumb") as terminal:
        terminal.read_until(PROMPT)
        terminal.press("full\r")
        error = "the server answered 400: the prompt has 99 tokens; /clear starts a new conversation"
        assert error in " ".join(terminal.read_until("keeps this one").split())
        terminal.press("die\r")
        terminal.read_until("disconnected")
        terminal.press("one\r")
        assert "\x1b[32m" not in terminal.read_until("2 accepted")


def test_questions_of_tools(url: str, tmp_path: Path) -> None:
    with chat_terminal(tmp_path, "--base-url", url, "--tools") as terminal:
        terminal.read_until(PROMPT)
        terminal.press("6*7\r")
        terminal.read_until('calculate {"expression": "6*7"}')
        terminal.read_until("[y/N/a] ")
        terminal.press("y\r")
        shown = without_colors(terminal.read_until(" accepted"))
        assert "\ncalculate 42\n42\n" in shown
        terminal.read_until(PROMPT)
        terminal.press("8*9\r")
        terminal.read_until("[y/N/a] ")
        terminal.press(CTRL_D)
        terminal.read_until("stopped;")
        terminal.read_until(PROMPT)
        terminal.press(UP)
        assert "8*9" in terminal.read_until("8*9")  # answers to questions are no messages
        terminal.interrupt()
        terminal.read_until(PROMPT)
        terminal.press("1/0\r")
        terminal.read_until("[y/N/a] ")
        terminal.interrupt()
        terminal.read_until("stopped;")
        terminal.read_until(PROMPT)
        terminal.press(CTRL_D)
        assert "Traceback" not in terminal.read_all()
        assert terminal.process.wait(LIMIT_S) == 0


@pytest.mark.full
def test_the_demo_model_on_a_terminal(tmp_path: Path) -> None:
    with chat_terminal(tmp_path, "--draft-model", "demo") as terminal:
        terminal.read_until("accepted draft tokens")
        terminal.read_until(PROMPT)
        terminal.press("What is speculative decoding?\r")
        shown = terminal.read_until(" accepted")
        assert "\x1b[32m" in shown and "Speculative decoding drafts" in without_colors(shown)
        terminal.read_until(PROMPT)
        terminal.press("/compare\r")
        terminal.read_until("the texts are equal")
        terminal.read_until(PROMPT)
        terminal.press(CTRL_D)
        assert "Traceback" not in terminal.read_all()
        assert terminal.process.wait(LIMIT_S) == 0
