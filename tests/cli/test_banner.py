"""Lines that `foreword serve` prints at start."""

import base64
import io
import json
import shlex
from dataclasses import replace
from typing import Any

import pytest
from PIL import Image

from foreword.cli.banner import (
    banner_lines,
    curl_line,
    device_line,
    loading_line,
    local_url,
    parse_loading_line,
    speculation_line,
)
from foreword.config.options import Config
from foreword.planning.resolve import EngineInfo, ResolvedConfig

RESOLVED = ResolvedConfig(
    device="cpu", dtype="bfloat16", weight_dtype="bfloat16", quantization=None, weight_format="bfloat16",
    kv_cache_dtype="bfloat16", cpu_isa="auto",
    threads=2, max_model_len=1024, max_num_seqs=64, max_num_batched_tokens=512, block_size=16,
    num_blocks=256, kv_bytes=3 << 20, weight_bytes=9 << 20, prefix_caching=True,
    drafters=("ngram",), num_speculative_tokens=4,
    draft_length="fixed", suffix_corpus_bytes=0, image_cache_bytes=0,
    prompt_lookup_min=2, prompt_lookup_max=4, fast_math=False, test_mode=False,
)  # fmt: skip
INFO = EngineInfo(
    architecture="llama", parameters=4_800_000, vocab_size=2000, resolved=RESOLVED,
    fingerprint="fw_1", backend="reference",
    load_seconds={"import": 1.5, "weights": 0.25}, warnings=("mind the gap",),
)  # fmt: skip
URL = "http://127.0.0.1:8000"


def test_sampling_defaults_are_shown() -> None:
    text = "\n".join(banner_lines(Config(), INFO, "demo", URL, 1.0, sampling_defaults="temperature 0.7"))
    assert (
        "\nsampling: temperature 0.7 by default, as in the checkpoint; turn off with --generation-config"
        in text
    )
    assert "sampling:" not in "\n".join(banner_lines(Config(), INFO, "demo", URL, 1.0))


def test_address_names_the_page_unless_it_is_off() -> None:
    with_page, without = (
        next(
            line
            for line in banner_lines(Config(ui=ui), INFO, "demo", URL, 1.0)
            if line.startswith("address: ")
        )
        for ui in (True, False)
    )
    assert with_page == f"address: {URL} (open it in a browser; docs: {URL}/docs, metrics: {URL}/metrics)"
    assert without == f"address: {URL} (metrics: {URL}/metrics)"


def test_curl_line_is_one_command_with_valid_json() -> None:
    words = shlex.split(curl_line(URL, "it's a model", needs_key=False))
    assert words[:2] == ["curl", f"{URL}/v1/chat/completions"]
    body = json.loads(words[words.index("-d") + 1])
    assert body["model"] == "it's a model"
    assert body["messages"][0]["role"] == "user"


def body_of_example(info: EngineInfo, **options: bool) -> tuple[str, dict[str, Any]]:
    """Route and body of the line that a visitor copies."""
    lines = banner_lines(Config(), info, "m", URL, 1.0, **options)
    (line,) = [line.removeprefix("try: ") for line in lines if line.startswith("try: ")]
    words = shlex.split(line)
    return words[1].removeprefix(URL), json.loads(words[-1])


def test_example_without_chat_template_is_a_completion() -> None:
    route, body = body_of_example(INFO, has_chat_template=False)
    assert route == "/v1/completions" and body["model"] == "m" and body["prompt"]


def test_example_of_a_model_with_images_has_one() -> None:
    route, body = body_of_example(replace(INFO, image_token_id=3))
    image, text = body["messages"][0]["content"]
    assert (route, text["type"]) == ("/v1/chat/completions", "text")
    data = base64.b64decode(image["image_url"]["url"].removeprefix("data:image/png;base64,"))
    assert Image.open(io.BytesIO(data)).convert("RGB").getextrema() == ((255, 255), (0, 0), (0, 0))


def test_curl_line_never_prints_the_key() -> None:
    lines = banner_lines(Config(api_key="hush"), INFO, "demo", URL, 2.0)
    assert not any("hush" in line for line in lines)
    assert any("Authorization: Bearer $FOREWORD_API_KEY" in line for line in lines)


def test_directory_of_kv_blocks_is_named_with_its_limit() -> None:
    config = Config(kv_cache_dir="/var/cache/foreword", kv_cache_disk="50GiB")
    line = "disk: KV blocks are kept in /var/cache/foreword, at most 50GiB in all"
    assert line in banner_lines(config, INFO, "demo", URL, 1.0)
    assert not any(line.startswith("disk:") for line in banner_lines(Config(), INFO, "demo", URL, 1.0))


def test_host_memory_for_kv_blocks_is_named() -> None:
    line = "host memory: KV blocks that the KV cache loses are kept in 8GiB"
    assert line in banner_lines(Config(kv_cache_host_memory="8GiB"), INFO, "demo", URL, 1.0)


def test_speculation_line_names_drafters_length_and_flag() -> None:
    assert speculation_line(INFO) == (
        "speculation: ngram; whenever there is a guess, up to 4 tokens a request and step; "
        "turn off with --speculate off"
    )
    several = replace(
        RESOLVED,
        drafters=("prediction", "suffix", "draft"),
        draft_length="adaptive",
        num_speculative_tokens=32,
    )
    assert speculation_line(
        replace(INFO, resolved=several, draft_model="small", draft_parameters=400_000)
    ) == (
        "speculation: prediction, suffix, draft (draft model small, 400.0 k parameters); "
        "as much as pays, at most 32 tokens a request and step; turn off with --speculate off"
    )
    with_head = replace(INFO, resolved=replace(RESOLVED, drafters=("suffix", "mtp")), draft_model="small")
    assert "speculation: suffix, mtp (trained head small, 0 parameters); " in speculation_line(with_head)
    off = replace(INFO, resolved=replace(RESOLVED, drafters=()))
    assert speculation_line(off) == "speculation: off; turn on with --speculate auto"


def test_banner_lines() -> None:
    lines = banner_lines(Config(), INFO, "demo", URL, 2.0)
    assert (
        lines[0] == "loaded: demo (llama, 4.8 M parameters, reference) in 2.00 s "
        "(start 0.25 s, import 1.50 s, weights 0.25 s)"
    )
    assert lines[1].startswith(
        "memory: weights 9.0 MiB in bfloat16, KV cache 3.0 MiB in bfloat16 for 4096 tokens; context 1024"
    )
    assert lines[3].startswith(f"address: {URL} ")
    assert lines[-1] == "warning: mind the gap"


def test_loading_line_is_parsed() -> None:
    assert parse_loading_line(loading_line("demo", INFO, 2.0)) == {
        "start": 0.25,
        "import": 1.5,
        "weights": 0.25,
    }
    assert parse_loading_line("address: somewhere 2.00 s)") is None


@pytest.mark.parametrize(
    ("host", "url"),
    [("127.0.0.1", URL), ("0.0.0.0", URL), ("::", "http://[::1]:8000"), ("box", "http://box:8000")],
)
def test_local_url(host: str, url: str) -> None:
    assert local_url(host, 8000) == url


@pytest.mark.parametrize(
    ("host", "key", "warned"),
    [("0.0.0.0", None, True), ("0.0.0.0", "k", False), ("127.0.0.1", None, False), ("10.0.0.5", None, True)],
)
def test_open_server_warns(host: str, key: str | None, warned: bool) -> None:
    lines = banner_lines(Config(host=host, api_key=key), INFO, "demo", URL, 2.0)
    assert any("--api-key" in line for line in lines) == warned


def test_device_line_names_gpu_and_graphs() -> None:
    seconds = {"weights": 4.0, "memory": 1.0, "graphs": 3.25}
    info = replace(
        INFO,
        gpu="NVIDIA X (compute capability 9.0)",
        backend="triton",
        num_cuda_graphs=24,
        load_seconds=seconds,
    )
    lines = banner_lines(Config(), info, "demo", URL, 9.0)
    assert lines[1] == "device: NVIDIA X (compute capability 9.0); triton, 24 CUDA graphs in 3.25 s"
    eager = replace(info, num_cuda_graphs=0, resolved=replace(RESOLVED, enforce_eager=True))
    assert device_line(eager).endswith("; triton, no CUDA graphs (--enforce-eager)")
    assert device_line(replace(info, backend="reference", num_cuda_graphs=0)).endswith(
        "; reference, no CUDA graphs"
    )
    assert not any(line.startswith("device:") for line in banner_lines(Config(), INFO, "demo", URL, 2.0))
