"""Fakes without weights: a byte tokenizer, and an engine client with scripted outputs."""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from foreword.config.lora import AdapterInfo
from foreword.config.options import Config
from foreword.core.outputs import (
    BlockUpdate,
    DraftResult,
    EmbeddingEvent,
    ErrorEvent,
    Event,
    StepStats,
    TokenEvent,
    TokenLogprob,
)
from foreword.core.readiness import Readiness, ReplicaState
from foreword.core.request import Request, RequestState
from foreword.errors import CheckpointError, EngineDead, ForewordError
from foreword.planning.hardware import HardwareInfo
from foreword.planning.memory import ModelInfo
from foreword.planning.resolve import EngineInfo, resolve
from foreword.tokenizer.files import TokenizerFiles
from foreword.tokenizer.tokenizer import BYTE_ALPHABET, Tokenizer

BOS, EOS, START, END = 256, 257, 258, 259
EMBEDDING_SIZE = 8
SPECIAL = ("<|bos|>", "<|eos|>", "<|im_start|>", "<|im_end|>")
CHATML = (
    "{%- for message in messages -%}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] }}"
    "{%- if not (loop.last and open_end|default(false)) -%}{{ '<|im_end|>\n' }}{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"
)
VOCAB_SIZE = 264  # padded, as of many models


def byte_backend() -> tokenizers.Tokenizer:
    """Ids 0 to 255 are the bytes, then the special tokens."""
    backend = tokenizers.Tokenizer(models.BPE(vocab=dict(BYTE_ALPHABET), merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    return backend


def byte_tokenizer(chat_template: str | None = CHATML) -> Tokenizer:
    """A tokenizer whose token ids are bytes: encode("a") == [97]."""
    named = {"bos_token": "<|bos|>", "eos_token": "<|eos|>"}
    return Tokenizer(
        byte_backend(),
        TokenizerFiles(special_tokens=named, eos_token_ids=(EOS, END), chat_template=chat_template),
    )


def engine_info(max_model_len: int = 2048, config: Config | None = None) -> EngineInfo:
    hardware = HardwareInfo(device="cpu", cores=1, free_bytes=1 << 30, supports_bfloat16=True)
    model_info = ModelInfo("fake", max_model_len, "float32", 1000, VOCAB_SIZE, 8)
    resolved = resolve(config or Config(), hardware, model_info)
    return EngineInfo(
        "fake", 1000, VOCAB_SIZE, resolved, "fp_fake", "reference", {"weights": 0.0}, EMBEDDING_SIZE
    )


@dataclass(frozen=True, slots=True)
class FakeOutput:
    """The fake engine's output for one request."""

    text: str | bytes = "Hello world"  # followed by the EOS token
    bursts: tuple[int, ...] = (1,)  # tokens per event, cycled; all but the last of a burst are drafted
    drafter: str = "suffix"
    confidence: float | None = None  # of every draft token
    fail_after: int | None = None  # tokens before `error`
    error: ForewordError = field(default_factory=lambda: ForewordError("the script says so"))
    hang_after: int | None = None  # tokens before the engine hangs
    delay_s: float = 0.0  # before each event
    num_cached: int = 0
    eos: int = EOS
    logprob: float = -0.5  # of every token


class FakeEngineClient:
    """Implements EngineClient; requests finish by the engine's own rules."""

    def __init__(
        self,
        script: FakeOutput | Callable[[Request], FakeOutput] | None = None,
        info: EngineInfo | None = None,
    ) -> None:
        self.script = script or FakeOutput()
        self.info: EngineInfo | None = None
        self.stats = StepStats()
        self.alive = False
        self.dead = asyncio.Event()
        self.pids: Mapping[str, int] = {}
        self.on_step: Callable[[StepStats], None] | None = None
        self.on_restart: Callable[[str | None], None] | None = None
        self.on_blocks: Callable[[BlockUpdate], None] | None = None
        self.submitted: list[Request] = []
        self.finished: list[tuple[str, int]] = []
        self.aborted: list[str] = []
        self.live: set[str] = set()
        self.adapters: dict[str, AdapterInfo] = {}  # loaded at run time, by path
        self._deliveries: list[asyncio.Task[None]] = []
        self._info = info or engine_info()

    @property
    def readiness(self) -> Readiness:
        if self.alive:
            return Readiness("ok")
        return (
            Readiness("loading", "the engine is still loading")
            if self.info is None
            else Readiness("dead", "the engine is gone")
        )

    async def start(self) -> EngineInfo:
        self.info, self.alive = self._info, True
        return self._info

    def submit(self, request: Request) -> AsyncIterator[Event]:
        if not self.alive:
            raise EngineDead("the engine is not running")
        self.submitted.append(request)
        self.live.add(request.id)
        return self._events(request)

    def listen(self, request: Request, on_event: Callable[[Event | None], None]) -> None:
        events = self.submit(request)

        async def deliver() -> None:
            async for event in events:
                on_event(event)
            on_event(None)

        self._deliveries.append(asyncio.create_task(deliver()))

    def replica_states(self) -> Sequence[ReplicaState]:
        return ()

    async def reload(self) -> AsyncIterator[str]:
        if not self.alive:
            raise EngineDead("the engine is not running")
        yield "replaced"

    def request_blocks(self) -> None:
        """It has no prefix cache."""

    def set_threads(self, num_threads: int) -> None:
        self.num_threads = num_threads

    async def load_adapter(self, path: str) -> AdapterInfo:
        """Each path has content of its own; a path that ends in "broken" is none."""
        if path.endswith("broken"):
            raise CheckpointError(f"the adapter {path}: rank 99", "lora_modules")
        self.adapters[path] = AdapterInfo(path, f"digest of {path}", 8, 4, 1000)
        return self.adapters[path]

    async def wait_unused(self, digest: str) -> None:
        while any(request.adapter == digest for request in self.submitted if request.id in self.live):
            await asyncio.sleep(0.01)

    async def unload_adapter(self, digest: str) -> None:
        self.adapters = {path: info for path, info in self.adapters.items() if info.digest != digest}

    def finish(self, request_id: str, num_tokens: int) -> None:
        self.finished.append((request_id, num_tokens))
        self.live.discard(request_id)

    def abort(self, request_id: str) -> None:
        if request_id in self.live:
            self.aborted.append(request_id)
            self.live.discard(request_id)

    async def close(self) -> None:
        self.alive = False

    def skip_drain(self) -> None:
        """It has no process."""

    def die(self) -> None:
        """The engine is gone for good."""
        self.kill()
        self.dead.set()

    def kill(self) -> None:
        """Simulate a crash: every open stream fails with its next event."""
        self.alive = False

    async def _events(self, request: Request) -> AsyncIterator[Event]:
        script = self.script if isinstance(self.script, FakeOutput) else self.script(request)
        try:
            for event in _play(script, request, self._info.resolved.max_model_len):
                await asyncio.sleep(script.delay_s)
                if request.id not in self.live:
                    return  # ended or aborted
                if not self.alive:
                    event = ErrorEvent(
                        request.id, EngineDead("the engine died while it was working on this request")
                    )
                self._step()
                if not isinstance(event, TokenEvent) or event.finish_reason is not None:
                    self.live.discard(request.id)
                yield event
            while request.id in self.live and self.alive:
                await asyncio.sleep(0.01)
            if request.id in self.live:
                self.live.discard(request.id)
                yield ErrorEvent(
                    request.id, EngineDead("the engine died while it was working on this request")
                )
        finally:
            self.abort(request.id)

    def _step(self) -> None:
        self.stats = StepStats(step=self.stats.step + 1, requests_running=len(self.live))
        if self.on_step is not None:
            self.on_step(self.stats)


def _play(script: FakeOutput, request: Request, max_model_len: int) -> Iterator[Event]:
    """Events of a script; no finish event if it hangs."""
    if request.pooling is not None:
        if script.hang_after is None:
            yield (
                ErrorEvent(request.id, script.error)
                if script.fail_after is not None
                else EmbeddingEvent(request.id, vector_of(request))
            )
        return
    text = script.text.encode() if isinstance(script.text, str) else script.text
    ids = [*text, *([] if request.params.ignore_eos else [script.eos])]
    if request.params.ignore_eos:
        ids = [ids[i % len(ids)] for i in range(max_model_len)]
    state = RequestState(request, 0, max_model_len)
    for size in cycle(script.bursts):
        if script.fail_after is not None and state.num_output >= script.fail_after:
            yield ErrorEvent(request.id, script.error)
            return
        if script.hang_after is not None and state.num_output >= script.hang_after:
            return
        event = _burst(script, state, ids, size)
        yield event
        state.append(event.token_ids)
        if event.finish_reason is not None:
            return


def _burst(script: FakeOutput, state: RequestState, ids: list[int], size: int) -> TokenEvent:
    request, index = state.request, state.num_output
    end = state.check_finish(ids[index : index + size])
    chosen = ids[index : index + end.num_kept]
    num_accepted = min(size - 1, len(chosen))
    confidence = () if script.confidence is None else (script.confidence,) * num_accepted
    return TokenEvent(
        request_id=request.id,
        index=index,
        token_ids=tuple(chosen),
        logprobs=tuple(_logprob(i, request, script) for i in chosen)
        if request.params.logprobs is not None
        else (),
        prompt_logprobs=_prompt_logprobs(request) if index == 0 else (),
        draft=DraftResult(script.drafter, size, num_accepted, confidence) if size > 1 else None,
        finish_reason=end.finish_reason,
        stop_id=end.stop_id,
        repetition=end.repetition,
        num_cached=script.num_cached,
        scheduled_s=time.monotonic(),
    )


def vector_of(request: Request) -> bytes:
    """Counts of the letters a to h in the prompt: texts that share letters are similar."""
    letters = range(ord("a"), ord("a") + EMBEDDING_SIZE)
    return array("f", [request.prompt_ids.count(letter) for letter in letters]).tobytes()


def logprob_of(token_id: int, count: int | None) -> TokenLogprob:
    """A simple distribution: -0.5 for the token, then one less for each alternative."""
    others = [(token_id + 1 + i) % 256 for i in range(max((count or 0) - 1, 0))]
    top = [(token_id, -0.5), *((other, -1.5 - i) for i, other in enumerate(others))]
    return TokenLogprob(token_id, -0.5, 1, tuple(top[: count or 0]))


def _logprob(token_id: int, request: Request, script: FakeOutput) -> TokenLogprob:
    requested = tuple((other, -float(other)) for other in request.params.logprob_token_ids)
    return replace(logprob_of(token_id, request.params.logprobs), logprob=script.logprob, requested=requested)


def _prompt_logprobs(request: Request) -> tuple[TokenLogprob | None, ...]:
    count = request.params.prompt_logprobs
    if count is None:
        return ()
    return (None, *(logprob_of(token, count) for token in request.prompt_ids[1:]))


def extended(state: RequestState, run: Sequence[int]) -> RequestState:
    """The request after a step that emitted `run`."""
    state.append(run)
    return state
