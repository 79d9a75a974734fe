"""What a server says of itself when it is ready."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

from foreword.cli.terminal import format_bytes, format_count
from foreword.config.options import Config
from foreword.config.resolve import EngineInfo
from foreword.demo import BUNDLED
from foreword.embedding.client import EncoderInfo

__all__ = [
    "banner_lines",
    "curl_line",
    "encoder_line",
    "loading_line",
    "local_url",
    "model_name",
    "parse_loading_line",
    "speculation_line",
]

ANY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}
EXAMPLE_PROMPT = "What is speculative decoding?"
SECOND_EXAMPLE_PROMPT = "What can you do?"  # where nobody asked for the former, not a word is said of it


def model_name(config: Config, path: Path) -> str:
    """The name in the API: as asked for, or the last part of what was asked for."""
    if config.served_model_name:
        return config.served_model_name
    bundled = next((name for name, (model, _) in BUNDLED.items() if model == path), None)
    return bundled or (config.model or path.name).rstrip("/").rsplit("/", 1)[-1]


def local_url(host: str, port: int) -> str:
    """The base URL under which this machine reaches the server."""
    host = ANY_ADDRESS.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def banner_lines(
    config: Config, info: EngineInfo, name: str, url: str, load_s: float, encoder: EncoderInfo | None = None
) -> tuple[str, ...]:
    """The lines, in order; warnings last, so that they are seen."""
    question = EXAMPLE_PROMPT if info.resolved.drafters else SECOND_EXAMPLE_PROMPT
    return (
        loading_line(name, info, load_s),
        *((device_line(info),) if info.gpu is not None else ()),
        memory_line(info),
        *((speculation_line(info),) if info.resolved.drafters else ()),
        *(() if encoder is None else (encoder_line(encoder),)),
        f"address: {url} (docs: {url}/docs, metrics: {url}/metrics)",
        f"try: {curl_line(url, name, bool(config.api_key or config.api_key_file), question)}",
        *(f"warning: {text}" for text in (*open_without_key_warning(config), *info.warnings)),
    )


def open_without_key_warning(config: Config) -> tuple[str, ...]:
    """A server that others can reach without a key should say so."""
    if (
        config.api_key
        or config.api_key_file
        or config.host in ("localhost", "::1")
        or config.host.startswith("127.")
    ):
        return ()
    return (f"anybody who reaches {config.host} may use this server; --api-key asks for a key",)


def loading_line(name: str, info: EngineInfo, load_s: float) -> str:
    """Where the time went; what the engine did not measure itself is the start of its process."""
    spans = {"start": load_s - sum(info.load_seconds.values()), **info.load_seconds}
    stages = ", ".join(f"{stage} {seconds:.2f} s" for stage, seconds in spans.items())
    size = format_count(info.parameters)
    return f"loaded: {name} ({info.architecture}, {size} parameters, {info.backend}) in {load_s:.2f} s ({stages})"


def parse_loading_line(line: str) -> dict[str, float] | None:
    """Seconds by stage of a loading_line(), or None for any other line."""
    if not line.startswith("loaded: "):
        return None
    return {stage: float(seconds) for stage, seconds in re.findall(r"(\w+) ([0-9.]+) s[,)]", line)}


def device_line(info: EngineInfo) -> str:
    """The GPU, who computes on it, and whether Python stands between its kernels."""
    if info.num_cuda_graphs:
        graphs = f"{info.num_cuda_graphs} CUDA graphs in {info.load_seconds.get('graphs', 0.0):.2f} s"
    else:
        graphs = "no CUDA graphs" + (" (--enforce-eager)" if info.resolved.enforce_eager else "")
    return f"device: {info.gpu}; {info.backend}, {graphs}"


def memory_line(info: EngineInfo) -> str:
    chosen = info.resolved
    return (
        f"memory: weights {format_bytes(chosen.weight_bytes)} in {chosen.weight_format}, "
        f"KV cache {format_bytes(chosen.kv_bytes)} in {chosen.kv_cache_dtype} for {chosen.num_blocks * chosen.block_size} tokens; "
        f"context {chosen.max_model_len} tokens, {chosen.max_num_seqs} requests at once"
    )


def speculation_line(info: EngineInfo) -> str:
    """Which drafters run, their bound, and how to turn them off."""
    if not info.resolved.drafters:
        return "speculation: off; turn on with --speculate auto"
    chosen = info.resolved
    names = ", ".join(chosen.drafters)
    model = (
        f" (draft model {info.draft_model}, {format_count(info.draft_parameters)} parameters)"
        if info.draft_model
        else ""
    )
    length = (
        "as much as pays, at most"
        if chosen.draft_length == "adaptive"
        else "whenever there is a guess, up to"
    )
    bound = f"{length} {chosen.num_speculative_tokens} tokens a request and step"
    return f"speculation: {names}{model}; {bound}; turn off with --speculate off"


def encoder_line(encoder: EncoderInfo) -> str:
    """What the encoder beside the model is for."""
    use = (
        "ranks pairs of texts"
        if encoder.task == "rank"
        else f"embeds texts as {encoder.hidden_size} values, pooling {encoder.pooling}"
    )
    size = format_count(encoder.num_parameters)
    return f"encoder: {encoder.name} ({encoder.architecture}, {size} parameters) {use}, at most {encoder.max_tokens} tokens"


def curl_line(url: str, name: str, needs_key: bool, question: str = EXAMPLE_PROMPT) -> str:
    """A request that works when pasted into a shell (with a key, where FOREWORD_API_KEY is set)."""
    body = json.dumps({"model": name, "messages": [{"role": "user", "content": question}]})
    key = ' -H "Authorization: Bearer $FOREWORD_API_KEY"' if needs_key else ""
    return f"curl {url}/v1/chat/completions -H 'Content-Type: application/json'{key} -d {shlex.quote(body)}"
