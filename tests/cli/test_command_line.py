"""The command line: help of every command, errors of one line, light imports."""

import argparse
import importlib
import json
import os
import re
import signal
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path

import pytest

from foreword.cli import command_line
from foreword.cli import main as cli
from foreword.cli.flags import flag
from foreword.cli.listener import bind
from foreword.config.options import option_fields
from foreword.errors import CheckpointError, ConfigError
from tests.support.waiting import WAIT_S


def fake_command(monkeypatch: pytest.MonkeyPatch, error: BaseException | None = None) -> None:
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--log-level", default="info")

    def run(args: argparse.Namespace) -> int:
        if error is not None:
            raise error
        return 0

    module = types.ModuleType("foreword.cli.fake")
    module.add_arguments, module.run = add_arguments, run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    fake = command_line.Subcommand("fake", "pretend", "")
    monkeypatch.setattr(command_line, "COMMANDS", (fake,))


def exit_of(words: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[object, str, str]:
    """Exit code, stdout and stderr of a command line that argparse answers."""
    with pytest.raises(SystemExit) as caught:
        cli.main(words)
    return caught.value.code, *capsys.readouterr()


@pytest.mark.parametrize("words", [[], ["help"], ["-h"], ["--help"]])
def test_help_is_shown_without_a_command(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = exit_of(words, capsys)
    assert (code, err) == (0, "")
    assert all(re.search(rf"^    {command.name}\s", out, re.MULTILINE) for command in command_line.COMMANDS)


@pytest.mark.parametrize(
    ("words", "usage"),
    [(["help", "env"], "foreword env"), (["help", "bench", "latency"], "foreword bench latency")],
)
def test_help_of_a_command(words: list[str], usage: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = exit_of(words, capsys)
    assert code == 0 and out.startswith(f"usage: {usage} ")


def test_short_help_has_the_common_flags(capsys: pytest.CaptureFixture[str]) -> None:
    _, short, _ = exit_of(["serve", "--help"], capsys)
    _, full, _ = exit_of(["serve", "--help-all"], capsys)
    common = {flag(item.name) for item in option_fields() if item.metadata["common"]}
    shown = {line.split(",")[0].split()[0] for line in short.splitlines() if line.startswith("  --")}
    assert shown == common | {"--config", "--help-all"}
    assert all(f" {flag(item.name)}" in full for item in option_fields())
    assert "--ctx-size" not in full


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (["srve"], "unknown command 'srve'; did you mean serve?"),
        (["run", "llama3:8b"], "`foreword serve llama3:8b` serves it"),
        (["pull", "a/b"], "`foreword serve a/b` downloads a model"),
        (["list"], "there is no list of models"),
        (["./models/x.gguf"], "`foreword serve ./models/x.gguf` serves a model"),
        (["demo"], "`foreword serve demo` serves a model"),
        (["--port", "1"], "flags follow a command, such as `foreword serve --port`"),
        (["serve", "a", "--port", "1", "b"], "'b' is one word too many: names of models stand together"),
        (["generate", "hello", "world"], "put quotes around a prompt of several words"),
        (["serve", "--max-seqs", "8", "demo"], "unknown flag --max-seqs; did you mean --max-num-seqs?"),
        (["serve", "demo", "--prot=8"], "unknown flag --prot; did you mean --port?"),
        (["serve", "--dtype", "bfloat"], "--dtype must be one of auto,"),
        (["serve", "--dtype", "bfloat1"], "did you mean bfloat16?"),
        (["serve", "--port", "x"], "--port must be a whole number, got 'x'"),
        (["serve", "--port"], "--port expected one argument"),
        (["generate", "x", "--temp", "hot"], "--temperature must be a number, got 'hot'"),
        (["bench", "latncy"], "did you mean latency?"),
        (["keys"], "missing: ACTION, one of new, limit, list, revoke, usage"),
        (["generate"], "missing: PROMPT"),
        (["bench", "latency", "demo"], "'demo' is one word too many: `--model demo` names a model"),
        (["chat", "demo", "hello"], "'hello' is one word too many: messages are typed after the start"),
        (["serve", "--tensor-parallel-size", "2"], "--tensor-parallel-size can only be 1, got '2'"),
        (["serve", "-c", "many"], "--max-model-len must be a whole number, got 'many'"),
        (["serve", "--lora", "x"], "--lora: use --lora-modules name=path"),
        (["serve", "--grammar", "g"], "it is a field of each request"),
        (["generate", "x", "--host", "h"], "unknown flag --host"),
        (["generate", "x", "-p", "hello"], 'a prompt is a word of its own: `foreword generate "PROMPT"`'),
        (["serve", "-y", "x"], "unknown flag -y"),
    ],
)
def test_wrong_command_lines_are_answered_in_one_line(
    words: list[str], answer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = exit_of(words, capsys)
    assert (code, out) == (2, "")
    assert answer in err and err.count("\n") == 1


def test_mistakes_are_found_before_the_command_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    imports = importlib.import_module
    monkeypatch.setattr(
        "importlib.import_module",
        lambda name: imports(name) if name == cli.COMMAND_LINE else pytest.fail(f"imports {name}"),
    )
    source = tmp_path / "in.jsonl"
    source.touch()
    with bind("127.0.0.1", 0) as busy:
        busy.listen()
        port = busy.getsockname()[1]
        for words, reason in (
            (["serve", "--host", "127.0.0.1", "--port", str(port)], f"port {port} on 127.0.0.1 is in use"),
            (["serve", "--host", "127.0.0.1:80", "--port", "0"], "cannot listen on 127.0.0.1:80 port 0"),
            (["run-batch", "-i", f"{source}x", "-o", "out"], f"--input {source}x: No such file or directory"),
            (
                ["run-batch", "-i", str(source), "-o", str(source)],
                "--output must be another file than --input",
            ),
        ):
            assert cli.main(words) == 2
            said = capsys.readouterr().err
            assert reason in said and said.count("\n") == 1


@pytest.mark.parametrize("url", ["--url", "--base-url"])
def test_address_of_a_server_has_two_names(url: str) -> None:
    for words in (["chat"], ["generate", "x"], ["run-batch", "-i", "a", "-o", "b"], ["bench", "serve"]):
        args = command_line.build_parser(words[0]).parse_args([*words, url, "http://x"])
        assert "http://x" in vars(args).values()


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("port is odd"), 2),
        (CheckpointError("no weights"), 2),
        (KeyboardInterrupt("interrupted"), 130),
    ],
)
def test_errors_are_one_line(
    error: BaseException, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_command(monkeypatch, error)
    assert cli.main(["fake"]) == code
    printed = capsys.readouterr().err
    assert printed == f"foreword fake: {error}\n"


def test_debug_shows_the_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    fake_command(monkeypatch, ConfigError("port is odd"))
    assert cli.main(["fake", "--log-level", "debug"]) == 2
    assert "Traceback" in caplog.text


@pytest.mark.parametrize("command", [command.name for command in command_line.COMMANDS])
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main([command, "--help"])
    assert caught.value.code == 0
    assert f"foreword {command}" in capsys.readouterr().out


def test_help_names_every_kind_of_bench() -> None:
    (bench,) = (command for command in command_line.COMMANDS if command.name == "bench")
    kinds = importlib.import_module(bench.module).MODULES
    assert bench.help == f"measure: {', '.join(kinds)}"


def test_flag_without_effect_keeps_names_from_taking_the_model() -> None:
    words = ["serve", "--served-model-name", "a", "b", "--trust-remote-code", "demo"]
    args = command_line.build_parser("serve").parse_args(words)
    assert (args.model_words, args.served_model_name) == (["demo"], "a,b")


def test_server_with_a_key_of_another_server_does_not_start_open(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    assert cli.main(["serve", "--port", "0"]) == 2
    err = capsys.readouterr().err
    assert "VLLM_API_KEY is set" in err and "FOREWORD_API_KEY" in err and "secret" not in err


def imports(code: str) -> str:
    """The output of a new interpreter."""
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_command_line_imports_little() -> None:
    """It reads no table of foreign flags for our own, and needs neither torch nor the server's libraries."""
    heavy = "{'torch', 'fastapi', 'rich', 'numpy', 'tomllib'}"
    code = (
        "import sys; from foreword.cli.command_line import build_parser\n"
        "build_parser('serve').parse_args(['serve', 'demo', '--port', '0'])\n"
        f"print({heavy} & set(sys.modules))"
    )
    assert imports(code).strip() == "set()"


WRONG_WORDS = [
    ["serve", "--help"],
    ["serve", "--port", "70000"],
    ["serve", "--api-key", ""],
    ["serve", "--kv-cache-memory", "5XB"],
    ["serve", "--kv-cache-memory", "manytokens"],
    ["serve", "--image-memory", "5XB"],
    ["serve", "--suffix-corpus-memory", "5XB"],
    ["serve", "--uds", "/nowhere/socket"],
    ["serve", "--api-key-file", "/nowhere/keys.yaml"],
    ["check", "./nowhere"],
    ["run-batch"],
    ["train-head"],
    ["env", "--x"],
]


def test_wrong_words_are_answered_before_heavy_imports() -> None:
    code = (
        "import sys, contextlib; from foreword.cli.main import main\n"
        f"for words in {WRONG_WORDS}:\n"
        "    with contextlib.suppress(SystemExit): assert main(words) == 2\n"
        "    assert not {'torch', 'fastapi', 'numpy'} & set(sys.modules), words"
    )
    imports(code)


def test_light_commands_import_no_torch() -> None:
    """The health check of a container runs every few seconds, and imports no web framework either."""
    modules = ("cli.keys", "cli.serve", "cli.chat", "cli.generate", "cli.local_checks")
    modules += ("bench.command", "bench.serve")
    code = (
        "import sys, importlib, foreword.cli.container_health\n"
        "assert not {'torch', 'fastapi', 'uvicorn', 'rich'} & set(sys.modules)\n"
        f"for name in {modules}:\n"
        "    importlib.import_module(f'foreword.{name}')\n"
        "    assert 'torch' not in sys.modules, name"
    )
    imports(code)


def test_engine_process_starts_before_the_server_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[str] = []

    class FakeForkServer:
        def __enter__(self) -> "FakeForkServer":
            steps.append("started")
            return self

        def __exit__(self, *error: object) -> None:
            steps.append("ended")

    def import_module(name: str) -> object:
        if name == command_line.FORK_SERVER:
            return types.SimpleNamespace(ForkServer=FakeForkServer)
        steps.append(name)
        return types.SimpleNamespace(run=run)

    def run(args: argparse.Namespace) -> int:
        assert isinstance(args.fork_server, FakeForkServer)
        raise ConfigError("no such model")

    parser = command_line.build_parser("serve")
    monkeypatch.setattr(command_line, "build_parser", lambda chosen: parser)
    monkeypatch.setattr("importlib.import_module", import_module)
    assert command_line.run_command_line(["serve", "--port", "0"]) == 2
    assert steps == ["started", "foreword.cli.serve", "ended"]


def test_second_model_by_flag_is_answered(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve", "demo", "--model", "demo-vision"]) == 2
    assert capsys.readouterr().err == (
        "foreword serve: two models are given, demo and --model demo-vision; leave one out\n"
    )


def test_hub_model_is_fetched_before_the_start_up_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fetch(name: str, on_bytes: Callable[[int, int], None]) -> Path:
        assert startup_line.is_shown
        on_bytes(1 << 20, 4 << 20)
        shown.append(startup_line._stage)
        raise CheckpointError(f"{name} is not there")

    shown: list[str] = []
    startup_line = command_line.startup_line
    monkeypatch.setattr(command_line, "resolve_path", fetch)
    monkeypatch.setattr(command_line, "_describe_start", lambda *_: pytest.fail("too early"))
    assert command_line.run_command_line(["serve", "someone/some-model"], is_process=True) == 2
    first, last = capsys.readouterr().err.splitlines()
    assert first.endswith(": fetching someone/some-model, unless it is in the hub's cache")
    assert last == "foreword serve: someone/some-model is not there"
    assert shown == ["download, 1.0 of 4.0 MiB"] and not startup_line.is_shown


def test_unknown_variable_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FOREWORD_PROT", "1")
    assert cli.main(["check", "./nowhere"]) == 2
    warning, _ = capsys.readouterr().err.splitlines()
    assert warning.startswith(
        "foreword check: warning: unknown environment variable FOREWORD_PROT has no effect"
    )


@pytest.mark.parametrize(
    ("source", "words", "messages"),
    [
        ("flag", ["--swap-space", "4"], ["warning --swap", "warning warning: unknown env", "error there"]),
        ("environment", ["--hots", "x"], ["error unknown flag --hots; did you mean --host?"]),
        ("file", ["--lora", "x"], ["error --lora: use"]),
        ("file", ["--config", "./nowhere"], ["warning warning: unknown env", "error there"]),
    ],
)
def test_messages_of_the_command_line_are_json_lines(
    source: str,
    words: list[str],
    messages: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Wherever the option is given, and after the words that the message is about."""
    monkeypatch.setattr(command_line.startup_line, "log_format", "text")
    monkeypatch.setenv("FOREWORD_PROT", "1")
    words = ["serve", "./nowhere", *words]
    if source == "flag":
        words += ["--log-format", "json"]
    elif source == "environment":
        monkeypatch.setenv("FOREWORD_LOG_FORMAT", "json")
    else:
        (tmp_path / "options.yaml").write_text("log-format: json\n")
        words += ["--config", str(tmp_path / "options.yaml")]
    try:
        code = command_line.run_command_line(words)
    except SystemExit as ended:
        code = ended.code
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert code == 2 and {line["logger"] for line in lines} == {"foreword.serve"}
    assert len(lines) == len(messages)
    for line, message in zip(lines, messages, strict=True):
        assert f"{line['level']} {line['message']}".startswith(message)


def test_python_m_foreword_runs() -> None:
    completed = subprocess.run(
        [sys.executable, "-m", "foreword", "--version"], capture_output=True, text=True, check=True
    )
    assert completed.stdout.startswith("foreword ")


@pytest.mark.full
def test_broken_pipe_is_no_traceback() -> None:
    command = [sys.executable, "-m", "foreword", "env"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        said = process.stderr.read()
    assert process.returncode == 1
    assert all(line.startswith(b"foreword ") for line in said.splitlines()), said


@pytest.mark.parametrize(
    ("name", "number", "code", "said"),
    [
        ("serve", signal.SIGTERM, 0, b""),
        ("serve", signal.SIGINT, 130, b"foreword serve: interrupted\n"),
        ("chat", signal.SIGTERM, -signal.SIGTERM, b""),
        ("chat", signal.SIGINT, 130, b"foreword chat: interrupted\n"),
    ],
)
def test_signal_during_imports_is_one_line_at_most(
    name: str, number: int, code: int, said: bytes, tmp_path: Path
) -> None:
    """Imports take seconds, and nothing has started that needs a cleanup."""
    (tmp_path / "heavy.py").write_text("import time\nprint('importing', flush=True)\ntime.sleep(60)")
    start = (
        "import sys; from foreword.cli import main; main.COMMAND_LINE = 'heavy'; "
        f"sys.argv = ['foreword', {name!r}]; sys.exit(main.main())"
    )
    paths = os.pathsep.join((str(tmp_path), str(Path(__file__).parents[2])))
    command = [sys.executable, "-c", start]
    process = subprocess.Popen(
        command, env={**os.environ, "PYTHONPATH": paths}, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None and process.stdout.readline() == b"importing\n"
    process.send_signal(number)
    assert process.communicate(timeout=WAIT_S) == (b"", said) and process.returncode == code


def test_caller_in_python_keeps_its_signal_handlers() -> None:
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.getsignal(number) for number in numbers]
    with pytest.raises(SystemExit):
        cli.main(["serve", "--no-such-option"])
    assert [signal.getsignal(number) for number in numbers] == before


STORY = "Tell me a story about Mia, a fox and a key in the forest."
LOADING = b": loading demo ..."


@pytest.mark.full
@pytest.mark.parametrize(
    ("words", "mark", "number", "code", "last"),
    [
        (["generate", STORY], LOADING, signal.SIGINT, 130, b"foreword generate: interrupted"),
        (["generate", STORY], b"Mia", signal.SIGINT, 130, b"foreword generate: interrupted"),
        (["generate", STORY], b"Mia", signal.SIGTERM, 143, b""),
        (["check"], b"checking demo", signal.SIGINT, 130, b"foreword check: interrupted"),
        (["serve", "--port=0"], LOADING, signal.SIGINT, 130, b"foreword serve: interrupted"),
        (["serve", "--port=0"], b"loading demo:", signal.SIGINT, 130, b"foreword serve: interrupted"),
        (["serve", "--port=0"], b"loading demo:", signal.SIGTERM, 0, b""),
        (["serve", "--port=0"], b"try: ", signal.SIGINT, 130, b"shutting down: 0 open requests"),
        (["bench", "latency"], b"bench latency", signal.SIGINT, 130, b"interrupted"),
    ],
)
def test_signals_at_any_time_are_one_line(
    words: list[str], mark: bytes, number: int, code: int, last: bytes
) -> None:
    """The signal goes to the whole process group, as Ctrl-C on a terminal does."""
    command = [sys.executable, "-m", "foreword", *words]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    )
    assert process.stdout is not None
    said = b""
    while mark not in said and b"try: " not in said:
        chunk = os.read(process.stdout.fileno(), 4096)
        assert chunk, said
        said += chunk
    if mark not in said and number == signal.SIGINT:  # the start was too short for a second line
        last = b"shutting down: 0 open requests"
    os.killpg(process.pid, number)
    rest, _ = process.communicate(timeout=60)
    lines = (said + rest).splitlines()
    assert process.returncode == code, lines
    # The thread that reads the chat template may end after the last line, and logs what it found.
    assert last in b" ".join(lines[-2:]) and b"Traceback" not in said + rest
