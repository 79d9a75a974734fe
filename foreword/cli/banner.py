"""The lines that `foreword serve` prints when the server is ready."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from foreword.cli.terminal import format_count
from foreword.config.drafters import HEAD_DRAFTERS
from foreword.config.options import Config
from foreword.embedding.encoder_messages import EncoderInfo
from foreword.fleet.memory import ELSEWHERE, FleetPlan
from foreword.planning.memory import format_bytes
from foreword.planning.resolve import EngineInfo

UNIX = "unix:"  # begins the address of a Unix socket
ANY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}
EXAMPLE_PROMPT = "What is speculative decoding?"
SECOND_EXAMPLE_PROMPT = "What can you do?"  # with speculation off
COMPLETION_PROMPT = "Once upon a time"  # without a chat template
IMAGE_PROMPT = "What colour is this?"
RED_PNG = (  # 32 x 32 pixels
    "iVBORw0KGgoAAAANSUhEUgAAACAAAAAgCAIAAAD8GO2jAAAAJ0lEQVR42u3NsQkA"
    "AAjAsP7/tF7hIASyp6lTCQQCgUAgEAgEgi/BAjLD/C5w/SM9AAAAAElFTkSuQmCC"
)


def local_url(host: str, port: int) -> str:
    """The base URL under which this machine reaches the server."""
    host = ANY_ADDRESS.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def banner_lines(
    config: Config,
    info: EngineInfo,
    name: str,
    url: str,
    load_s: float,
    encoder: EncoderInfo | None = None,
    sampling_defaults: str = "",  # the checkpoint's, in words
    has_chat_template: bool = True,
) -> tuple[str, ...]:
    """The lines in order; warnings last, where they are seen."""
    question = EXAMPLE_PROMPT if info.resolved.drafters else SECOND_EXAMPLE_PROMPT
    needs_key = bool(config.api_key or config.api_key_file)
    if not has_chat_template:
        example = curl_completion_line(url, name, needs_key)
    else:
        example = curl_line(url, name, needs_key, question, has_image=info.image_token_id is not None)
    return (
        loading_line(name, info, load_s),
        *((device_line(info),) if info.gpu is not None else ()),
        memory_line(info),
        *((_host_line(config),) if config.kv_cache_host_memory is not None else ()),
        *((_disk_line(config),) if config.kv_cache_dir is not None else ()),
        *((speculation_line(info),) if info.resolved.drafters else ()),
        *((_sampling_line(sampling_defaults),) if sampling_defaults else ()),
        *(() if encoder is None else (encoder_line(encoder),)),
        _address_line(config, url),
        f"try: {example}",
        *(f"warning: {text}" for text in (*_open_server_warning(config), *info.warnings)),
    )


def _address_line(config: Config, url: str) -> str:
    if url.startswith(UNIX):
        return f"address: {url.removeprefix(UNIX)}, a Unix socket"
    pages = f"open it in a browser; docs: {url}/docs, " if config.ui else ""
    return f"address: {url} ({pages}metrics: {url}/metrics)"


def _open_server_warning(config: Config) -> tuple[str, ...]:
    """Warns if other machines can reach the server and need no key."""
    if config.api_key or config.api_key_file or config.is_local:
        return ()
    return (f"anybody who reaches {config.host} may use this server; --api-key asks for a key",)


def loading_line(name: str, info: EngineInfo, load_s: float) -> str:
    """Load time by stage; `start` is the time that the engine does not measure, its process start."""
    spans = {"start": load_s - sum(info.load_seconds.values()), **info.load_seconds}
    stages = ", ".join(f"{stage} {seconds:.2f} s" for stage, seconds in spans.items())
    size = format_count(info.parameters)
    model = f"{name} ({info.architecture}, {size} parameters, {info.backend})"
    return f"loaded: {model} in {load_s:.2f} s ({stages})"


def parse_loading_line(line: str) -> dict[str, float] | None:
    """Seconds by stage of a loading_line(), or None for any other line."""
    if not line.startswith("loaded: "):
        return None
    return {stage: float(seconds) for stage, seconds in re.findall(r"(\w+) ([0-9.]+) s[,)]", line)}


def models_lines(config: Config, plan: FleetPlan, url: str) -> Iterator[str]:
    """The lines of a server of several models: each with its plan."""
    limits = {name: limit for name, limit in plan.memory_limits.items() if name != ELSEWHERE}
    room = " and ".join(f"{format_bytes(limit)} of {device} memory" for device, limit in limits.items())
    yield f"models: {len(plan.plans)}, loaded on demand" + (f" into {room}" if room else "")
    for each in plan.plans:
        entry = each.entry
        parts = [format_bytes(each.num_bytes) if each.resolved else f"on {ELSEWHERE}"]
        if entry.config.replicas > 1:
            parts.append(f"{entry.config.replicas} replicas")
        if entry.config.threads:
            parts.append(f"{entry.config.threads} thread{'s' * (entry.config.threads > 1)}")
        if entry.pinned:
            parts.append("pinned")
        elif entry.preload:
            parts.append("loaded at the start")
        if not entry.pinned and entry.keep_alive is not None:
            parts.append(f"unloaded after {entry.keep_alive:g} s without use")
        more = f" (also {', '.join(entry.names[1:])})" if entry.names[1:] else ""
        yield f"  {entry.name}{more}: {', '.join(parts)}"
    yield _address_line(config, url)
    needs_key = bool(config.api_key or config.api_key_file)
    yield f"try: {curl_line(url, plan.plans[0].entry.name, needs_key, SECOND_EXAMPLE_PROMPT)}"
    yield from (f"warning: {text}" for text in _open_server_warning(config))


def device_line(info: EngineInfo) -> str:
    """The GPU, its backend, and its CUDA graphs."""
    if info.num_cuda_graphs:
        graphs = f"{info.num_cuda_graphs} CUDA graphs in {info.load_seconds.get('graphs', 0.0):.2f} s"
    else:
        graphs = "no CUDA graphs" + (" (--enforce-eager)" if info.resolved.enforce_eager else "")
    return f"device: {info.gpu}; {info.backend}, {graphs}"


def memory_line(info: EngineInfo) -> str:
    chosen = info.resolved
    num_tokens = chosen.num_blocks * chosen.block_size
    states = ""
    if chosen.states is not None:
        kept = f"one is kept every {chosen.states.interval} tokens"
        states = f", states of requests {format_bytes(chosen.states.fixed_bytes)} ({kept})"
    return (
        f"memory: weights {format_bytes(chosen.weight_bytes)} in {chosen.weight_format}, KV cache "
        f"{format_bytes(chosen.kv_bytes)} in {chosen.kv_cache_dtype} for {num_tokens} tokens{states}; "
        f"context {chosen.max_model_len} tokens, {chosen.max_num_seqs} requests at once"
    )


def _host_line(config: Config) -> str:
    return f"host memory: KV blocks that the KV cache loses are kept in {config.kv_cache_host_memory}"


def _disk_line(config: Config) -> str:
    return f"disk: KV blocks are kept in {config.kv_cache_dir}, at most {config.kv_cache_disk} in all"


def speculation_line(info: EngineInfo) -> str:
    """The drafters, their draft length, and the flag that turns them off."""
    if not info.resolved.drafters:
        return "speculation: off; turn on with --speculate auto"
    chosen = info.resolved
    names = ", ".join(chosen.drafters)
    model = ""
    if info.draft_model:
        kind = "trained head" if {*HEAD_DRAFTERS} & {*chosen.drafters} else "draft model"
        model = f" ({kind} {info.draft_model}, {format_count(info.draft_parameters)} parameters)"
    is_adaptive = chosen.draft_length == "adaptive"
    length = "as much as pays, at most" if is_adaptive else "whenever there is a guess, up to"
    bound = f"{length} {chosen.num_speculative_tokens} tokens a request and step"
    return f"speculation: {names}{model}; {bound}; turn off with --speculate off"


def _sampling_line(defaults: str) -> str:
    return f"sampling: {defaults} by default, as in the checkpoint; turn off with --generation-config none"


def encoder_line(encoder: EncoderInfo) -> str:
    use = f"embeds texts as {encoder.hidden_size} values, pooling {encoder.pooling}"
    if encoder.task == "rank":
        use = "ranks pairs of texts"
    model = f"{encoder.name} ({encoder.architecture}, {format_count(encoder.num_parameters)} parameters)"
    return f"encoder: {model} {use}, at most {encoder.max_tokens} tokens"


def curl_line(
    url: str, name: str, needs_key: bool, question: str = EXAMPLE_PROMPT, has_image: bool = False
) -> str:
    """A request to paste into a shell; its key is in FOREWORD_API_KEY."""
    content: Any = question
    if has_image:
        image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{RED_PNG}"}}
        content = [image, {"type": "text", "text": IMAGE_PROMPT}]
    messages = [{"role": "user", "content": content}]
    return _curl(url, "/v1/chat/completions", needs_key, {"model": name, "messages": messages})


def curl_completion_line(url: str, name: str, needs_key: bool) -> str:
    """curl_line() for a model without a chat template."""
    body = {"model": name, "prompt": COMPLETION_PROMPT, "max_tokens": 32}
    return _curl(url, "/v1/completions", needs_key, body)


def _curl(url: str, route: str, needs_key: bool, body: Mapping[str, Any]) -> str:
    key = ' -H "Authorization: Bearer $FOREWORD_API_KEY"' if needs_key else ""
    if url.startswith(UNIX):
        url = f"--unix-socket {shlex.quote(url.removeprefix(UNIX))} http://localhost"
    data = shlex.quote(json.dumps(body))
    return f"curl {url}{route} -H 'Content-Type: application/json'{key} -d {data}"
