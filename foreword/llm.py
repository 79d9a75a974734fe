"""Offline inference with an engine in this process.

from foreword import LLM, SamplingParams

llm = LLM("path/to/checkpoint")
for output in llm.generate(["Once upon a time"], SamplingParams(max_tokens=50)):
    print(output.text)
"""

from __future__ import annotations

import itertools
import logging
import signal
import threading
import time
import uuid
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from rich.progress import Progress

from foreword.chat_formats.events import CallArguments, CallStart, ChatEvent, ReasoningText
from foreword.chat_formats.parser import ChatParser
from foreword.chat_formats.tool_validation import check_tools, parse_choice
from foreword.chat_formats.tools import DEFAULT_REASONING, ReasoningOptions, Tool, ToolUse
from foreword.checkpoint import prepare_checkpoint
from foreword.config.foreign_flags import translate_keywords
from foreword.config.lora import AdapterInfo, LoRARequest
from foreword.config.options import Config
from foreword.core.outputs import EmbeddingEvent, ErrorEvent, Event, StepStats, TokenEvent
from foreword.core.params import SamplingParams
from foreword.core.readiness import OnLoadProgress
from foreword.core.request import Request
from foreword.embedding.local import LocalEncoder, load_local_encoder
from foreword.embedding.sentence_transformers import read_decoder_pooling_config
from foreword.embedding.vectors import FLOAT_BYTES, cosine, normalize_embedding
from foreword.engine_client.local import LocalClient
from foreword.errors import AdapterConflict, InvalidRequest
from foreword.grammar.check import GrammarChecker
from foreword.grammar.tool_calls import may_follow_space, tool_constraint
from foreword.metrics.recorder import MetricsRecorder
from foreword.outputs import CompletionOutput, EmbeddingOutput, RequestOutput, StreamPiece, ToolCall
from foreword.planning.resolve import EngineInfo
from foreword.tokenizer.input_processor import (
    ChatInputProcessor,
    SamplingDefaults,
    check_input,
    has_seed,
    image_source,
    make_embedding_requests,
    make_requests,
    open_image_loader,
)
from foreword.tokenizer.messages import ImagePart
from foreword.tokenizer.output_processor import ChoiceOutput, OutputDelta, TokenPiece
from foreword.tokenizer.tokenizer import Tokenizer

MESSAGES_HELP = 'messages are a list such as [{"role": "user", "content": "Hello"}], or several such lists'
PROMPT_HELP = "a prompt is a text, {'prompt': ...} or {'prompt_token_ids': [...]}, optionally with 'images'"

logger = logging.getLogger("foreword")

PromptInput = str | Mapping[str, Any]
Message = Mapping[str, Any]
EmbedInput = str | Sequence[int]
LoraInput = str | LoRARequest


@dataclass(frozen=True, slots=True)
class _Chat:
    """How an answer is constrained and parsed."""

    tools: ToolUse
    reasoning: ReasoningOptions


@dataclass(frozen=True, slots=True)
class _Prompt:
    """A tokenized prompt."""

    text: str | None  # None if the prompt was token ids
    token_ids: list[int]  # with one placeholder per image
    image_parts: Sequence[ImagePart] = ()
    chat: _Chat | None = None


@dataclass(slots=True)
class _PromptRequests:
    """The requests of one prompt, one per choice."""

    text: str | None
    requests: list[Request]
    make_parser: Callable[[], ChatParser] | None = None  # of chat; None: all text is content

    def make_output(self, tokenizer: Tokenizer, request: Request) -> ChoiceOutput:
        return ChoiceOutput(tokenizer, request, self.make_parser() if self.make_parser else None)


class LLM:
    """A loaded model: a checkpoint directory, a GGUF file, a hub id, or the bundled demo. Not thread-safe.

    speculate    "auto", "off", or comma-separated drafters
    draft_model  a smaller checkpoint with the same tokenizer
    options      any other field of `foreword.config.options.Config`, by name; an `embedding_model` is used by
                 embed() or score() instead of the model; `speculative_config` may be a mapping; arguments of
                 vLLM's LLM are answered like its flags (docs/migrating.md)
    Raises ConfigError or CheckpointError.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        speculate: str = "auto",
        draft_model: str | None = None,
        on_progress: OnLoadProgress | None = None,
        **options: Any,
    ) -> None:
        started = time.perf_counter()
        path = None if model is None else str(model)
        fields, notes = translate_keywords(options)
        for note in notes:
            logger.warning("%s", note)
        prepared = prepare_checkpoint(
            Config(model=path, speculate=speculate, draft_model=draft_model, **fields)
        )
        self.config = config = prepared.config
        self.tokenizer = prepared.tokenizer
        self.stats = StepStats()
        self._sampling_defaults = SamplingDefaults.from_config(config, self.tokenizer)
        self._client = LocalClient(
            config, prepared.never_sampled_ids, prepared.tokenizer.vocabulary, on_progress
        )
        self._encoder = load_local_encoder(config) if config.embedding_model else None
        self._pooling_config = read_decoder_pooling_config(prepared.path)
        is_multimodal = self.info.image_token_id is not None
        self._recorder = MetricsRecorder(self.info.resolved.drafters, multimodal=is_multimodal)
        self._chat_input = ChatInputProcessor(
            self.tokenizer, prepared.processor, config.max_images, config.tool_format
        )
        self._grammar_checker = GrammarChecker(self.tokenizer.vocabulary)
        weakref.finalize(self, self._grammar_checker.close)
        self._image_loader = None
        if prepared.processor is not None:
            self._image_loader = open_image_loader(config, prepared.processor)
            weakref.finalize(self, self._image_loader.close)
        self._request_counter = itertools.count()
        self._event_queues: dict[str, deque[Event]] = {}
        # By name, or by path; the last was used most recently
        self._adapters: dict[str, AdapterInfo] = {
            module.name: info for module, info in zip(config.adapters, self.info.adapters, strict=True)
        }
        self.load_seconds = time.perf_counter() - started
        for warning in self.info.warnings:
            logger.warning("%s", warning)

    @property
    def info(self) -> EngineInfo:
        """Properties of the loaded engine."""
        return self._client.info

    def get_default_sampling_params(self) -> SamplingParams:
        """Parameters of calls without `params`: the checkpoint's, from generation_config.json."""
        return SamplingParams(**self.tokenizer.generation_config.params)  # type: ignore[arg-type]

    def generate(
        self,
        prompts: PromptInput | Sequence[PromptInput],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        lora_request: LoraInput | Sequence[LoraInput | None] | None = None,
        progress: bool = False,
    ) -> list[RequestOutput]:
        """Complete prompts in one batch: texts, or {"prompt_token_ids": [...]}; one output each, in order.

        lora_request  an adapter, or one for each prompt: a name of `lora_modules`, or a LoRARequest with a
                      path, which is loaded and may take the place of the one not used for longest

        With images a prompt is {"prompt": text, "images": [...]}: paths, bytes of files, or PIL images, each
        with a placeholder in the text or token ids.

        Raises InvalidRequest, before anything runs, for an invalid prompt or parameter.
        """
        prompt_list = [prompts] if isinstance(prompts, str | Mapping) else prompts
        parsed = [self._parse_prompt(prompt) for prompt in prompt_list]
        return self._generate(self._build_all_requests(parsed, params, lora_request), progress)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        tool_choice: str | Mapping[str, Any] = "auto",
        parallel_tool_calls: bool = True,
        reasoning: ReasoningOptions = DEFAULT_REASONING,
        lora_request: LoraInput | Sequence[LoraInput | None] | None = None,
        progress: bool = False,
    ) -> list[RequestOutput]:
        """Answer one or several conversations with the checkpoint's chat template.

        tools        functions as in OpenAI's chat: {"type": "function", "function": {"name": ..., ...}}
        tool_choice  "auto", "none", "required", or one tool or several, as in OpenAI's chat
        reasoning    whether the model reasons, and the limit of it
        lora_request as in generate()

        Images are parts of user messages: {"type": "image_url", ...} as over HTTP, with the same limits, or
        {"type": "image", "image": ...}: a path, the bytes of a file, or a PIL image.
        """
        is_one = isinstance(messages, str | Mapping) or (messages and isinstance(messages[0], Mapping))
        conversations: Any = [messages] if is_one else messages
        chat = _Chat(_read_tool_use(tools, tool_choice, parallel_tool_calls), reasoning)
        parsed = [
            self._render_chat(conversation, chat, self._is_seeded(params, index))
            for index, conversation in enumerate(conversations)
        ]
        return self._generate(self._build_all_requests(parsed, params, lora_request), progress)

    def stream(
        self,
        prompt: PromptInput | Sequence[Message],
        params: SamplingParams | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        lora_request: LoraInput | None = None,
    ) -> Iterator[StreamPiece]:
        """Stream the answer to a prompt or a list of messages. Leaving the loop aborts the request.

        The pieces are all of the model's text: reasoning is not separated from content. With tools, which are
        those of chat() and need messages, each piece has the event whose text it continues.
        """
        if isinstance(prompt, str | Mapping):
            parsed = self._parse_prompt(prompt)
        else:
            use = _read_tool_use(tools, "auto", True)
            parsed = self._render_chat(
                prompt, _Chat(use, ReasoningOptions()) if tools else None, self._is_seeded(params, 0)
            )
        (built,) = self._build_all_requests([parsed], params, lora_request)
        if len(built.requests) != 1:
            raise InvalidRequest("a stream has one choice: n must be 1", "n")
        (request,) = built.requests
        for _, delta in self._run([built.make_output(self.tokenizer, request)]):
            yield from _stream_pieces(delta) if tools else map(_stream_piece, delta.pieces)
            if delta.finish_reason is not None:
                yield StreamPiece("", False, delta.finish_reason, self._recorder.answer_metrics(request.id))
        self._recorder.on_response(1)

    def embed(
        self,
        inputs: EmbedInput | Sequence[EmbedInput],
        *,
        pooling: str | None = None,
        normalize: bool = True,
        dimensions: int | None = None,
        prompt_name: str | None = None,
    ) -> list[EmbeddingOutput]:
        """Embed texts or token ids, one vector each, in order: with the embedding model, or else the model.

        pooling      "last", "mean" or "cls"; default: the checkpoint's, or "last" for the model
        normalize    scale vectors to length 1
        dimensions   truncate vectors to this size before they are scaled
        prompt_name  name of a prefix in the checkpoint that is put before each text
        Raises InvalidRequest, before anything runs, for an invalid input.
        """
        is_single = isinstance(inputs, str) or (bool(inputs) and isinstance(inputs[0], int))
        ids = [
            self._input_ids(f"inputs[{i}]", item, prompt_name)  # type: ignore[arg-type]
            for i, item in enumerate([inputs] if is_single else inputs)
        ]
        embedder, started = self._embedder, time.perf_counter()
        self._recorder.on_embedding_start()
        reason = "error"
        try:
            vectors = embedder.encode(ids, pooling) if embedder else self._embed_with_model(ids, pooling)
            reason = "done"
        finally:
            num_tokens, elapsed_s = sum(map(len, ids)), time.perf_counter() - started
            self._recorder.on_embedding_finish("embed", reason, len(ids), num_tokens, elapsed_s)
        size = min((len(vector) // FLOAT_BYTES for vector in vectors), default=0)
        if dimensions is not None and vectors and not 1 <= dimensions <= size:
            raise InvalidRequest(f"dimensions must be between 1 and {size}, got {dimensions}", "dimensions")
        return [
            EmbeddingOutput(normalize_embedding(vector, dimensions, normalize), tuple(item))
            for vector, item in zip(vectors, ids, strict=True)
        ]

    def score(self, query: str, documents: str | Sequence[str]) -> list[float]:
        """Relevance of each document to the query: by the ranking model, or else the cosine of embeddings."""
        texts = [documents] if isinstance(documents, str) else list(documents)
        if self._encoder is not None and self._embedder is None:
            pairs = [self._encoder.tokenizer.encode_pair(query, text) for text in texts]
            info = self._encoder.info
            for index, (ids, _) in enumerate(pairs):
                check_input(f"documents[{index}]", ids, info.max_tokens, info.vocab_size)
            return self._encoder.score(pairs)
        query_vector, *vectors = (output.vector for output in self.embed([query, *texts]))
        return [cosine(query_vector, vector) for vector in vectors]

    def render_metrics(self) -> bytes:
        """Metrics of this engine in Prometheus' text format, as `/metrics` of the server."""
        return self._recorder.render()

    def check(self) -> None:
        """Assert the integrity of the engine's state."""
        self._client.check()

    def _is_seeded(self, params: SamplingParams | Sequence[SamplingParams] | None, index: int) -> bool:
        """Whether prompt `index` has a seed that its caller chose."""
        is_single = params is None or isinstance(params, SamplingParams)
        chosen: Any = [params] if is_single else params[index : index + 1]  # type: ignore[index]
        return any(has_seed(each and each.seed, self.config.seed) for each in chosen)

    def _render_chat(
        self, messages: Sequence[Message], chat: _Chat | None = None, is_seeded: bool = False
    ) -> _Prompt:
        if not all(isinstance(message, Mapping) for message in messages):
            raise InvalidRequest(f"{MESSAGES_HELP}, got {messages!r:.80}", "messages")
        text_messages, parts = self._chat_input.split_images(messages, local=True)
        tools = self._chat_input.described_tools(chat.tools) if chat is not None else ()
        ids = self._chat_input.render_ids(
            text_messages,
            {},
            len(parts),
            tools=tools,
            reasoning=chat.reasoning if chat is not None else None,
            is_seeded=is_seeded,
        )
        return _Prompt(self.tokenizer.decode(ids, skip_special_tokens=False), ids, parts, chat)

    def _parse_prompt(self, prompt: PromptInput) -> _Prompt:
        if isinstance(prompt, str):
            return _Prompt(prompt, self.tokenizer.encode(prompt))
        text, token_ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
        if isinstance(token_ids, Sequence) and not isinstance(token_ids, str):
            ids = list(token_ids)
        elif token_ids is None and isinstance(text, str):
            ids = self.tokenizer.encode(text)
        else:
            raise InvalidRequest(f"{PROMPT_HELP}, got {prompt!r:.80}", "prompt")
        images = prompt.get("images") or ()
        parts = [ImagePart(f"images[{index}]", image=image) for index, image in enumerate(images)]
        self._chat_input.check_num_images(len(parts), "images")
        if parts:
            ids = self._chat_input.check_placeholders(ids, len(parts), "prompt")
        return _Prompt(text, ids, parts)

    def _build_all_requests(
        self,
        prompts: Sequence[_Prompt],
        params: Any,
        lora_request: LoraInput | Sequence[LoraInput | None] | None = None,
    ) -> list[_PromptRequests]:
        is_single = params is None or isinstance(params, SamplingParams)
        default = params or self.get_default_sampling_params()
        params_list = [default] * len(prompts) if is_single else list(params)
        if len(params_list) != len(prompts):
            raise InvalidRequest(f"{len(prompts)} prompts, but {len(params_list)} params", "params")
        if lora_request is None or isinstance(lora_request, str | LoRARequest):
            adapters = [lora_request] * len(prompts)
        else:
            adapters = list(lora_request)
        if len(adapters) != len(prompts):
            problem = f"{len(prompts)} prompts, but {len(adapters)} of lora_request"
            raise InvalidRequest(problem, "lora_request")
        digests = self._load_adapters(adapters)
        return [self._build_requests(*each) for each in zip(prompts, params_list, digests, strict=True)]

    def _load_adapters(self, adapters: Sequence[LoraInput | None]) -> list[str]:
        """Digests, empty for the base. Those of one call are in memory together."""
        needed: list[str] = []
        for adapter in adapters:
            digest = "" if adapter is None else self._load_adapter(adapter, needed)
            needed.append(digest)
        return needed

    def _load_adapter(self, adapter: LoraInput, needed: Sequence[str]) -> str:
        request = LoRARequest(adapter) if isinstance(adapter, str) else adapter
        key = request.lora_path or request.lora_name
        if key not in self._adapters and not request.lora_path:
            names = ", ".join(sorted(self._adapters)) or "none"
            raise InvalidRequest(
                f"no adapter is named {key!r:.200}; loaded: {names}; lora_path loads another", "lora_request"
            )
        info = self._adapters.pop(key, None)
        while info is None:
            try:
                info = self._client.load_adapter(request.lora_path)
            except AdapterConflict:
                self._evict_adapter(needed)
        self._adapters[key] = info  # last: used most recently
        return info.digest

    def _evict_adapter(self, needed: Sequence[str]) -> None:
        """Unload the adapter of a path that was not used for longest. Raises AdapterConflict."""
        pinned = {*needed, *(info.digest for info in self.info.adapters)}
        for oldest in self._adapters.values():
            if oldest.digest not in pinned:
                self._client.unload_adapter(oldest.digest)
                self._adapters = {  # also its other paths
                    key: info for key, info in self._adapters.items() if info.digest != oldest.digest
                }
                return
        limit = self.info.resolved.max_loras
        raise AdapterConflict(f"more adapters are needed at a time than --max-loras {limit}", "lora_request")

    def _build_requests(self, parsed: _Prompt, params: SamplingParams, adapter: str = "") -> _PromptRequests:
        self.info.resolved.check_method(params.speculation.method)
        make_parser = None
        if parsed.chat is not None and self._chat_input.format is not None:
            params, make_parser = self._plan_chat(parsed.chat, parsed.token_ids, params)
        if params.structured is not None:
            self._grammar_checker.check_sync(params.structured)
        sources = [image_source(part) for part in parsed.image_parts]
        images = self._image_loader.load(sources) if self._image_loader and sources else ()
        prompt = self._chat_input.insert_images(parsed.token_ids, images)
        requests = make_requests(
            prompt.token_ids,
            params,
            self.tokenizer,
            f"req-{next(self._request_counter)}",
            self.info.resolved.max_model_len,
            self._sampling_defaults,
            vocab_size=self.info.vocab_size,
            images=prompt.images,
            image_token_id=self._chat_input.placeholder_id,
            adapter=adapter,
        )
        return _PromptRequests(parsed.text, requests, make_parser)

    def _plan_chat(
        self, chat: _Chat, prompt_ids: Sequence[int], params: SamplingParams
    ) -> tuple[SamplingParams, Callable[[], ChatParser]]:
        """The parameters with the constraint on calls and reasoning, and the parser of an answer."""
        bound = self._chat_input.format
        assert bound is not None, "the model's format is not known"
        starts_in_reasoning = self._chat_input.starts_in_reasoning(prompt_ids)
        drops_space = may_follow_space(params.structured)
        if params.structured is None or params.structured.after is None:
            constraint = tool_constraint(
                bound, chat.tools, chat.reasoning, starts_in_reasoning, params.structured
            )
            for text in constraint.dropped:
                logger.warning("not enforced: %s", text)
            params = replace(params, structured=constraint.structured)
        elif chat.tools.callable_tools:
            raise InvalidRequest(
                "structured.after cannot be used with tools that may be called", "structured"
            )
        make_parser = partial(ChatParser, bound, chat.tools, starts_in_reasoning, _new_call_id, drops_space)
        return params, make_parser

    def _generate(self, prompts: list[_PromptRequests], progress: bool) -> list[RequestOutput]:
        outputs = [
            prompt.make_output(self.tokenizer, request) for prompt in prompts for request in prompt.requests
        ]
        answers: dict[str, ChoiceOutput] = {}
        hashes: dict[str, list[int]] = {output.request.id: [] for output in outputs}
        with Progress(disable=not progress, transient=True) as bar:
            task = bar.add_task("generating", total=len(outputs))
            for answer, delta in self._run(outputs):
                answers[answer.request.id] = answer
                hashes[answer.request.id] += delta.event.logits_hashes
                bar.advance(task, int(answer.finished))
        return [self._make_output(prompt, answers, hashes) for prompt in prompts]

    @property
    def _embedder(self) -> LocalEncoder | None:
        """The embedding model, if it embeds and does not rank."""
        return self._encoder if self._encoder is not None and self._encoder.info.task == "embed" else None

    def _input_ids(self, name: str, item: EmbedInput, prompt_name: str | None) -> list[int]:
        """Token ids of an input of embed(). Raises InvalidRequest."""
        encoder, max_tokens, vocab_size = (
            self._embedder,
            self.info.resolved.max_model_len,
            self.info.vocab_size,
        )
        if encoder is not None:
            max_tokens, vocab_size = encoder.info.max_tokens, encoder.info.vocab_size
        if not isinstance(item, str):
            ids = list(item)
        elif encoder is not None:
            ids = encoder.tokenizer.encode(item, prompt=prompt_name)
        else:
            prefix = self._pooling_config.find_prompt(prompt_name, Path(str(self.config.model)).name)
            ids = self.tokenizer.encode(prefix + item)
        check_input(name, ids, max_tokens, vocab_size)
        return ids

    def _embed_with_model(self, ids: Sequence[Sequence[int]], pooling: str | None) -> list[bytes]:
        """Embed with the model itself. An error of one request is raised and aborts the others."""
        requests = make_embedding_requests(
            ids,
            pooling or self._pooling_config.pooling,
            f"embd-{next(self._request_counter)}",
            image_token_id=self._chat_input.placeholder_id,
        )
        vectors: dict[str, bytes] = {}
        try:
            for request in requests:
                self._event_queues[request.id] = deque()
                self._client.submit(request)
            while len(vectors) < len(requests):
                self._step()
                for request in requests:
                    if queue := self._event_queues[request.id]:
                        vectors[request.id] = _embedding_vector(queue.popleft())
        finally:
            for request in requests:
                del self._event_queues[request.id]
                if request.id not in vectors:
                    self._client.abort(request.id)
        return [vectors[request.id] for request in requests]

    def _run(self, outputs: Sequence[ChoiceOutput]) -> Iterator[tuple[ChoiceOutput, OutputDelta]]:
        """Step until all requests end. An error of one is raised and aborts the others.

        Several iterators may be open at once: events wait in the queue of their request.
        """
        live = {output.request.id: output for output in outputs}
        try:
            for request in [output.request for output in outputs]:
                self._event_queues[request.id] = deque()
                self._recorder.on_submit(request)
                self._client.submit(request)
            while live:
                if not any(self._event_queues[request_id] for request_id in live):
                    self._step()
                for answer in list(live.values()):
                    yield from self._process_events(answer, live)
        finally:
            for request_id, answer in live.items():
                self._client.abort(request_id)
                self._recorder.on_abort(answer.request)
                self._event_queues.pop(request_id, None)

    def _step(self) -> None:
        with _defer_interrupt():
            report = self._client.step()
            self.stats = report.stats
            self._recorder.on_step(report.stats)
            for event in report.events:
                if event.request_id in self._event_queues:
                    self._event_queues[event.request_id].append(event)

    def _process_events(
        self, answer: ChoiceOutput, live: dict[str, ChoiceOutput]
    ) -> Iterator[tuple[ChoiceOutput, OutputDelta]]:
        """Process the events of one request; remove it from `live` when it ends."""
        request = answer.request
        while request.id in live and self._event_queues[request.id]:
            event = self._event_queues[request.id].popleft()
            if isinstance(event, ErrorEvent):
                self._recorder.on_error(request, event.error)
                raise event.error
            assert isinstance(event, TokenEvent)
            delta = answer.feed(event)
            self._recorder.on_tokens(request, delta.event, time.monotonic())
            if delta.hit_stop_string:
                self._client.finish(request.id, answer.num_tokens)
            if answer.finished:
                self._recorder.on_parsed(answer.parser)
                if answer.parser is not None:
                    self._chat_input.remember(request, answer.token_ids, answer.events)
                del live[request.id], self._event_queues[request.id]
            yield answer, delta

    def _make_output(
        self, prompt: _PromptRequests, answers: Mapping[str, ChoiceOutput], hashes: Mapping[str, list[int]]
    ) -> RequestOutput:
        self._recorder.on_response(len(prompt.requests))
        first = answers[prompt.requests[0].id]
        return RequestOutput(
            request_id=prompt.requests[0].id.rsplit("-", 1)[0],
            prompt=prompt.text,
            prompt_token_ids=prompt.requests[0].prompt_ids,
            outputs=tuple(
                self._make_choice(index, answers[request.id], hashes[request.id])
                for index, request in enumerate(prompt.requests)
            ),
            prompt_logprobs=first.prompt_logprobs or None,
            metrics=self._recorder.answer_metrics(*(request.id for request in prompt.requests)),
        )

    def _make_choice(self, index: int, answer: ChoiceOutput, hashes: Sequence[int]) -> CompletionOutput:
        assert answer.finish_reason is not None
        has_logprobs = answer.request.params.logprobs is not None
        return CompletionOutput(
            index=index,
            text=answer.text,
            token_ids=tuple(answer.token_ids),
            finish_reason=answer.finish_reason,
            stop_reason=answer.stop_reason,
            logprobs=tuple(entry.logprob for entry in answer.logprobs) if has_logprobs else None,
            seed=answer.request.seed,
            metrics=self._recorder.answer_metrics(answer.request.id),
            logits_hashes=tuple(hashes),
            reasoning="".join(event.text for event in answer.events if isinstance(event, ReasoningText)),
            tool_calls=_read_calls(answer.events),
        )


@contextmanager
def _defer_interrupt() -> Iterator[None]:
    """Delay Ctrl-C to the end: a step that it cuts short would leave the engine's state inconsistent.

    The second Ctrl-C is not delayed: own drafters may hang.
    """
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    frames: list[FrameType | None] = []

    def interrupt(number: int, frame: FrameType | None) -> None:
        if frames:
            handler(number, frame)
        frames.append(frame)

    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
    if frames:
        handler(signal.SIGINT, frames[0])


def _read_tool(index: int, tool: Mapping[str, Any]) -> tuple[str, Tool]:
    """A tool of OpenAI's chat and its field. Raises InvalidRequest."""
    field = f"tools[{index}].function"
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise InvalidRequest(f"{field} must be an object with a name, got {function!r:.80}", field)
    parameters = function.get("parameters") or None
    if parameters is not None and not isinstance(parameters, Mapping):
        name = f"{field}.parameters"
        raise InvalidRequest(f"{name} must be a JSON schema, got {parameters!r:.80}", name)
    description = str(function.get("description") or "")
    return field, Tool(function["name"], description, parameters, bool(function.get("strict")))


def _read_tool_use(
    tools: Sequence[Mapping[str, Any]], tool_choice: str | Mapping[str, Any], parallel: bool
) -> ToolUse:
    choice, allowed = parse_choice(tool_choice, "tool_choice")
    return check_tools(list(map(_read_tool, range(len(tools)), tools)), choice, allowed, parallel)


def _new_call_id(index: int) -> str:
    """Calls of other answers stand in the same conversation."""
    return f"call_{uuid.uuid4().hex[:24]}"


def _stream_piece(piece: TokenPiece, event: ChatEvent | None = None) -> StreamPiece:
    return StreamPiece(
        piece.text, piece.is_draft, event=event, drafter=piece.drafter, confidence=piece.confidence
    )


def _stream_pieces(delta: OutputDelta) -> Iterator[StreamPiece]:
    for event, pieces in delta.pieces_by_event():
        for piece in pieces or (TokenPiece(""),):
            yield _stream_piece(piece, event)


def _read_calls(events: Sequence[ChatEvent]) -> tuple[ToolCall, ...]:
    texts: dict[int, str] = {event.index: event.text for event in events if isinstance(event, CallArguments)}
    return tuple(
        ToolCall(event.id, event.name, texts.get(event.index, ""))
        for event in events
        if isinstance(event, CallStart)
    )


def _embedding_vector(event: Event) -> bytes:
    if isinstance(event, ErrorEvent):
        raise event.error
    assert isinstance(event, EmbeddingEvent)
    return event.vector
