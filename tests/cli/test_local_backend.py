"""LocalBackend: a model in this process, for `generate` and `chat`."""

import json
from pathlib import Path

import pytest

from foreword.cli.chat_tools import TOOLS, join_calls
from foreword.cli.local_backend import LocalBackend
from foreword.cli.main import main
from foreword.config.options import Config
from foreword.core.params import SamplingParams
from tests.support.checkpoints import write_checkpoint

PROMPT = "the thing in the thing in the thing in"
PARAMS = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("local") / "tiny")


@pytest.fixture(scope="module")
def local(tiny: Path) -> LocalBackend:
    return LocalBackend(Config(model=str(tiny), kv_cache_memory="2000tokens"))


def test_name_and_speculation_line(local: LocalBackend) -> None:
    assert local.name == "tiny"
    assert str(local.speculation).startswith(
        "speculation: grammar, prediction, suffix, text; as much as pays, at most 32"
    )


@pytest.mark.parametrize("prompt", [PROMPT, [{"role": "user", "content": PROMPT}]])
def test_streamed_pieces_make_the_answer(local: LocalBackend, prompt: str | list[dict[str, str]]) -> None:
    answer_result = local.answer(prompt, PARAMS)
    assert "".join(piece.text for piece in local.stream(prompt, PARAMS)) == answer_result.text
    assert answer_result.finish_reason == "length"
    assert answer_result.token_ids is not None and len(answer_result.token_ids) == 24
    assert answer_result.metrics is not None and answer_result.metrics["cached_tokens"] >= 0


def test_demo_calls_tools() -> None:
    local = LocalBackend(Config(kv_cache_memory="2000tokens"))
    messages = [{"role": "user", "content": "What is 12 * (7 + 3)?"}]
    pieces = list(local.stream(messages, SamplingParams(temperature=0.0), TOOLS))
    (call,) = join_calls([piece.call for piece in pieces if piece.call])
    assert (call.name, call.arguments) == ("calculate", '{"expression": "12 * (7 + 3)"}')
    assert pieces[-1].finish_reason == "tool_calls" and not "".join(piece.text for piece in pieces)


def test_generate_from_the_command_line(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--model", str(tiny), "--raw", "--max-tokens", "5", "--kv-cache-memory", "2000tokens"]
    assert main(["generate", PROMPT, "--json", *words]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert main(["generate", PROMPT, *words]) == 0
    assert capsys.readouterr().out == answer["text"] + "\n"


def test_too_long_prompt_is_one_line(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["generate", "x" * 600, "--raw", "--model", str(tiny), "--kv-cache-memory", "2000tokens"]) == 1
    )
    stderr = capsys.readouterr().err
    assert stderr.startswith("foreword generate: the prompt has 6")
    assert stderr.count("\n") == 1
