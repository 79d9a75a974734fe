"""`foreword reload` against a server in this process."""

from __future__ import annotations

import argparse
from pathlib import Path

import httpx
import pytest

from foreword.cli import reload
from foreword.config.options import Config
from tests.server.auth.test_keys import key_of, keyed, write
from tests.server.conftest import run_server
from tests.support.fakes import FakeEngineClient


def run_command(url: str, *words: str) -> int:
    parser = argparse.ArgumentParser()
    reload.add_arguments(parser)
    return reload.run(parser.parse_args(["--url", url, *words]))


def test_progress_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with run_server(Config(), FakeEngineClient()) as server:
        assert run_command(f"{server.url}/v1") == 0
    assert capsys.readouterr().out == "replaced\n"


def test_engine_that_does_not_come_back_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with run_server(Config(), FakeEngineClient()) as server:
        server.client.kill()
        assert run_command(server.url) == 1
    assert "the engine is not running" in capsys.readouterr().err


def test_keyed_server_asks_for_an_admin_key(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "keys.yaml"
    write(path, key_of("alice"), key_of("root", admin=True))
    with run_server(Config(api_key_file=str(path)), FakeEngineClient(), key="alice") as server:
        assert run_command(server.url) == 1
        key = keyed("alice")["Authorization"].split()[1]
        assert run_command(server.url, "--api-key", key) == 1
        assert "admin" in capsys.readouterr().err
        assert run_command(server.url, "--api-key", keyed("root")["Authorization"].split()[1]) == 0


def test_other_servers_and_no_server_are_errors(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command("http://127.0.0.1:9") == 1
    other = httpx.MockTransport(lambda request: httpx.Response(404, text="<html>"))
    args = argparse.Namespace(url="http://other", config=None)
    assert reload.run(args, other) == 1
    assert "no answer of a Foreword server" in capsys.readouterr().err
