"""Programs that speak OpenAI's protocol give the answers that plain HTTP gives: docs/clients.md.

Each script under scripts/ is named after its package and runs in every interpreter of FOREWORD_CLIENTS_PYTHON
(separated as in PATH) that has it, Node's with the node_modules of the folder FOREWORD_CLIENTS_NODE.
`make test-clients` sets up both. No script may reach beyond the loopback.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from foreword.bench.server import ServerProcess
from foreword.config.options import Config
from foreword.demo import MODEL
from tests.clients import case
from tests.support.waiting import WAIT_S
from tests.test_docs import DOCS, read, table

HERE = Path(__file__).parent
# By package, with the suffix: langchain-openai.py, @langchain/openai.cjs.
SCRIPTS = {
    path.relative_to(HERE / "scripts").as_posix(): path
    for path in sorted((HERE / "scripts").rglob("*"))
    if path.suffix in (".py", ".cjs")
}
# Rows of the page by script: client, version, what is run, note.
ROWS = {re.findall(r"scripts/(.*?)\)", row[0])[0]: row for row in table(DOCS / "clients.md", "client")}
# Absolute, since scripts run in folders of their own.
PYTHONS = [
    os.path.abspath(python)
    for python in os.environ.get("FOREWORD_CLIENTS_PYTHON", sys.executable).split(os.pathsep)
]
NODE_MODULES = Path(os.environ.get("FOREWORD_CLIENTS_NODE", HERE)).absolute() / "node_modules"

# No model, price list or telemetry is fetched; an attempt is refused at once.
OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "HAYSTACK_TELEMETRY_ENABLED": "False",
    "DO_NOT_TRACK": "1",
    **dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), "http://127.0.0.1:9"),
    **dict.fromkeys(("no_proxy", "NO_PROXY"), "127.0.0.1"),
}


def normalize(package: str) -> str:
    return package.lower().replace("_", "-")


def installed_packages(python: str) -> set[str]:
    code = "import importlib.metadata as m; print(*(item.name for item in m.distributions()))"
    return {normalize(name) for name in subprocess.check_output([python, "-c", code], text=True).split()}


def runs() -> Iterator[Any]:
    """A script and the program that runs it, once for each interpreter that has its package."""
    packages = {python: installed_packages(python) for python in PYTHONS}
    for name, script in SCRIPTS.items():
        package = name.removesuffix(script.suffix)
        if script.suffix == ".py":
            programs = [python for python, installed in packages.items() if normalize(package) in installed]
        else:
            programs = ["node"] if shutil.which("node") and (NODE_MODULES / package).exists() else []
        if not programs:
            kind = " for Node" if script.suffix == ".cjs" else ""
            missing = pytest.mark.skip(f"{package}{kind} is not installed")
            yield pytest.param(script, "", id=name, marks=missing)
        for i, program in enumerate(programs):
            yield pytest.param(script, program, id=name + f"-{i}" * (i > 0))


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess(Config(threads=1, kv_cache_memory="60000tokens")) as running:
        yield running


@pytest.fixture(scope="module")
def plain(server: ServerProcess) -> dict[str, Any]:
    """Answers over plain HTTP, by the names that scripts report."""

    def ask(path: str, **fields: Any) -> Any:
        response = httpx.post(f"{server.url}/v1/{path}", json={"model": case.MODEL, **fields}, timeout=WAIT_S)
        return response.raise_for_status().json()

    limits = {"temperature": 0, "max_tokens": case.MAX_TOKENS}

    def chat(messages: list[dict[str, Any]], **fields: Any) -> str:
        return ask("chat/completions", messages=messages, **fields)["choices"][0]["message"]["content"]

    text = chat(case.USER, **limits)
    follow_up = [*case.HISTORY, {"role": "assistant", "content": text}, *case.USER]
    job = chat([{"role": "user", "content": case.JOB_PROMPT}], temperature=0, max_tokens=case.JOB_MAX_TOKENS)
    question = [{"role": "user", "content": case.TOOL_PROMPT}]
    first = ask("chat/completions", messages=question, tools=[case.TOOL], temperature=0)["choices"][0][
        "message"
    ]
    calls = [
        (call["function"]["name"], json.loads(call["function"]["arguments"])) for call in first["tool_calls"]
    ]
    results = [
        {"role": "tool", "tool_call_id": call["id"], "content": case.TOOL_RESULT}
        for call in first["tool_calls"]
    ]
    loop = {
        "calls": [list(call) for call in calls],
        "text": chat([*question, first, *results], tools=[case.TOOL], temperature=0),
    }
    echoed = ask("completions", prompt=case.PROMPT, echo=True, logprobs=1, max_tokens=1, temperature=0)
    logprobs = echoed["choices"][0]["logprobs"]
    last_word = range(case.PROMPT.rindex(" "), len(case.PROMPT))
    return {
        "text": text,
        "stream": text,
        "openai_chat": text,
        "usage": case.MAX_TOKENS,
        "with_system": chat([{"role": "system", "content": case.SYSTEM}, *case.USER], temperature=0),
        "tool_history": chat(case.HISTORY, **limits),
        "follow_up": chat(follow_up, **limits),
        "completion": ask("completions", prompt=case.STORY, **limits)["choices"][0]["text"],
        "structured": json.loads(job),
        "structured_stream": json.loads(job),
        "structured_outputs": json.loads(job),
        "responses": text,
        "responses_stream": text,
        "responses_structured": json.loads(job),
        "messages": text,
        "messages_stream": text,
        **dict.fromkeys(("tool_loop", "tool_loop_stream", "responses_tool_loop", "messages_tool_loop"), loop),
        "embeddings": [
            pytest.approx(item["embedding"], abs=1e-5)
            for item in ask("embeddings", input=case.TEXTS, encoding_format="float")["data"]
        ],
        "ranking": [
            pytest.approx([item["index"], item["relevance_score"]], abs=1e-5)
            for item in ask("rerank", query=case.PROMPT, documents=case.TEXTS)["results"]
        ],
        "loglikelihood": pytest.approx(
            sum(
                logprob
                for logprob, offset in zip(logprobs["token_logprobs"], logprobs["text_offset"], strict=True)
                if offset in last_word
            ),
            abs=1e-4,
        ),
        "benchmark": {"successful": case.NUM_REQUESTS, "errored": 0, "output_tokens": case.OUTPUT_TOKENS},
        "models": [case.MODEL],
    }


@pytest.mark.parametrize(("script", "program"), list(runs()))
def test_client_gives_the_plain_answers(
    script: Path, program: str, server: ServerProcess, plain: dict[str, Any], tmp_path: Path
) -> None:
    constants = {name: value for name, value in vars(case).items() if name.isupper()}
    urls = {"BASE": server.url, "V1": server.url + "/v1"}
    environ = {
        **{name: value for name, value in os.environ.items() if not name.startswith("FOREWORD_")},
        **OFFLINE,
        "HOME": str(tmp_path),
        "PYTHONPATH": str(HERE),
        "NODE_PATH": f"{NODE_MODULES}{os.pathsep}{HERE}",
        "FOREWORD_CLIENTS_URL": server.url,
        "FOREWORD_CLIENTS_MODEL": str(MODEL),
        "FOREWORD_CLIENTS_CASE": json.dumps(constants | urls),
    }
    # -P: a script named openai.py must not be what `import openai` finds.
    command = [program, "-P", script] if script.suffix == ".py" else [program, script]
    done = subprocess.run(command, env=environ, cwd=tmp_path, capture_output=True, text=True, timeout=WAIT_S)
    assert done.returncode == 0, done.stderr[-2000:]
    results = json.loads(done.stdout.splitlines()[-1])
    assert results == {name: plain[name] for name in results}
    assert list(results) == ROWS[script.relative_to(HERE / "scripts").as_posix()][2].split(", ")


def test_page_has_every_script_with_its_pinned_version() -> None:
    lines = [line for path in (HERE / "requirements").glob("*.txt") for line in read(path).splitlines()]
    pins = [re.fullmatch(r"([\w-]+)(?:\[.*\])?==([\d.]+)", line) for line in lines]
    versions: dict[str, list[str]] = {}
    for pin in pins:
        assert pin is not None
        versions.setdefault(f"{pin[1]}.py", []).append(pin[2])
    for package, version in json.loads(read(HERE / "package.json"))["dependencies"].items():
        versions[f"{package}.cjs"] = [version]
    assert set(ROWS) == set(SCRIPTS)
    assert {name: row[1] for name, row in ROWS.items()} == {
        name: ", ".join(sorted(versions[name])) for name in SCRIPTS
    }
    # Companions of a package are named with their version.
    for row in ROWS.values():
        for package, version in re.findall(r"(\S+) (\d+\.[\d.]+\d)", row[0]):
            assert [version] in (versions.get(f"{package}.py"), versions.get(f"{package}.cjs"))
