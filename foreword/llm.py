"""Offline inference with an engine in this process.

from foreword import LLM, SamplingParams

llm = LLM("path/to/checkpoint")
for output in llm.generate(["Once upon a time"], SamplingParams(max_tokens=50)):
    print(output.text)
"""

from __future__ import annotations

import itertools
import logging
import time
import weakref
from collections import deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from types import NoneType
from typing import Any

from rich.progress import Progress

from foreword.chat_formats.tool_validation import read_tools
from foreword.chat_formats.tools import DEFAULT_REASONING, ReasoningOptions
from foreword.checkpoint import prepare_checkpoint
from foreword.config.foreign_flags import translate_keywords
from foreword.config.lora import LoRARequest
from foreword.config.options import Config
from foreword.core.outputs import EmbeddingEvent, ErrorEvent, Event, StepStats, TokenEvent
from foreword.core.params import SamplingParams
from foreword.core.readiness import OnLoadProgress
from foreword.core.request import Request
from foreword.embedding.encoder_messages import FLOAT_BYTES, cosine, normalize_embedding
from foreword.embedding.local import LocalEncoder, load_local_encoder
from foreword.embedding.sentence_transformers import read_decoder_pooling_config
from foreword.engine_client.local import LocalAdapters, LocalClient, LoraInput, defer_interrupt
from foreword.errors import InvalidRequest, shown
from foreword.grammar.check import GrammarChecker
from foreword.metrics.recorder import MetricsRecorder
from foreword.multimodal.image_source import ImageSource, read_image
from foreword.outputs import EmbeddingOutput, RequestOutput, StreamPiece, make_output, stream_pieces
from foreword.planning.resolve import EngineInfo
from foreword.tokenizer.chat_processor import (
    ChatInputProcessor,
    ChatPlan,
    ChatTask,
    open_image_loader,
)
from foreword.tokenizer.input_processor import (
    SamplingDefaults,
    check_input,
    has_seed,
    make_embedding_requests,
    make_requests,
)
from foreword.tokenizer.output_processor import ChoiceOutput, OutputDelta

MESSAGES_HELP = 'messages are a list such as [{"role": "user", "content": "Hello"}], or several such lists'
PROMPT_HELP = "a prompt is a text, {'prompt': ...} or {'prompt_token_ids': [...]}, optionally with 'images'"
logger = logging.getLogger("foreword")
PromptInput = str | Mapping[str, Any]
Message = Mapping[str, Any]
EmbedInput = str | Sequence[int]


@dataclass(frozen=True, slots=True)
class _Prompt:
    """A tokenized prompt."""

    text: str | None  # None if the prompt was token ids
    token_ids: Sequence[int]  # one placeholder per image
    params: SamplingParams
    images: Sequence[ImageSource] = ()
    task: ChatTask | None = None  # the conversation; None: a plain prompt


@dataclass(frozen=True, slots=True)
class _Answers:
    """The answers to one prompt, one per choice."""

    text: str | None  # the prompt's
    outputs: Sequence[ChoiceOutput]


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
            config, prepared.never_sampled_ids, prepared.tokenizer.engine_vocabulary, on_progress
        )
        self._encoder = load_local_encoder(config) if config.embedding_model else None
        self._pooling_config = read_decoder_pooling_config(prepared.path)
        is_multimodal = self.info.image_token_id is not None
        self._recorder = MetricsRecorder(self.info.resolved.drafters, multimodal=is_multimodal)
        self._chat_processor = ChatInputProcessor(
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
        self._adapters = LocalAdapters(self._client, [module.name for module in config.adapters])
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
        each = self._params_of_each(params, len(prompt_list))
        parsed = list(map(self._parse_prompt, prompt_list, each))
        return self._generate(self._build_all_requests(parsed, lora_request), progress)

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
        use = read_tools(tools, tool_choice, parallel_tool_calls)
        each = self._params_of_each(params, len(conversations))
        parsed = [
            self._render_chat(ChatTask(conversation, own_params, tools=use, reasoning=reasoning))
            for conversation, own_params in zip(conversations, each, strict=True)
        ]
        return self._generate(self._build_all_requests(parsed, lora_request), progress)

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
        params = params or self.get_default_sampling_params()
        if isinstance(prompt, str | Mapping):
            parsed = self._parse_prompt(prompt, params)
        else:
            task = ChatTask(prompt, params, tools=read_tools(tools), separate_reasoning=bool(tools))
            parsed = self._render_chat(task)
        (built,) = self._build_all_requests([parsed], lora_request)
        if len(built.outputs) != 1:
            raise InvalidRequest("a stream has one choice: n must be 1", "n")
        request = built.outputs[0].request
        for _, delta in self._run(built.outputs):
            yield from stream_pieces(delta, with_events=bool(tools))
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

    def _params_of_each(
        self, params: SamplingParams | Sequence[SamplingParams] | None, count: int
    ) -> list[SamplingParams]:
        default = self.get_default_sampling_params() if params is None else params
        return _one_for_each(default, SamplingParams, count, "params")

    def _render_chat(self, task: ChatTask) -> _Prompt:
        if not all(isinstance(message, Mapping) for message in task.messages):
            raise InvalidRequest(f"{MESSAGES_HELP}, got {shown(task.messages)}", "messages")
        is_seeded = has_seed(task.params.seed, self.config.seed)
        ids, images = self._chat_processor.render(task, is_seeded=is_seeded, allow_local=True)
        text = self.tokenizer.decode(ids, skip_special_tokens=False)
        return _Prompt(text, ids, task.params, images, task)

    def _parse_prompt(self, prompt: PromptInput, params: SamplingParams) -> _Prompt:
        if isinstance(prompt, str):
            return _Prompt(prompt, self.tokenizer.encode(prompt), params)
        text, token_ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
        if isinstance(token_ids, Sequence) and not isinstance(token_ids, str):
            ids = list(token_ids)
        elif token_ids is None and isinstance(text, str):
            ids = self.tokenizer.encode(text)
        else:
            raise InvalidRequest(f"{PROMPT_HELP}, got {shown(prompt)}", "prompt")
        images = prompt.get("images") or ()
        self._chat_processor.check_num_images(len(images), "images")
        if images:
            ids = self._chat_processor.check_placeholders(ids, len(images), "prompt")
        sources = [read_image(image, f"images[{i}]") for i, image in enumerate(images)]
        return _Prompt(text, ids, params, sources)

    def _build_all_requests(
        self, prompts: Sequence[_Prompt], lora_request: LoraInput | Sequence[LoraInput | None] | None
    ) -> list[_Answers]:
        kinds = (str, LoRARequest, NoneType)
        adapters = self._adapters.load(_one_for_each(lora_request, kinds, len(prompts), "lora_request"))
        return list(map(self._build_requests, prompts, adapters))

    def _build_requests(self, prompt: _Prompt, adapter: str) -> _Answers:
        """adapter  digest; empty: the base model"""
        self.info.resolved.check_method(prompt.params.speculation.method)
        plan = ChatPlan(prompt.params)
        if prompt.task is not None:
            plan = self._chat_processor.plan(prompt.task, prompt.token_ids, self._grammar_checker)
        elif prompt.params.structured is not None:
            self._grammar_checker.check(prompt.params.structured)
        for text in plan.dropped:
            logger.warning("not enforced: %s", text)
        images = self._image_loader.load(prompt.images) if self._image_loader and prompt.images else ()
        expanded = self._chat_processor.insert_images(prompt.token_ids, images)
        requests = make_requests(
            expanded.token_ids,
            plan.params,
            self.tokenizer,
            f"req-{next(self._request_counter)}",
            self.info.resolved.max_model_len,
            self._sampling_defaults,
            vocab_size=self.info.vocab_size,
            images=expanded.images,
            image_token_id=self._chat_processor.placeholder_id,
        )
        make_parser = self._chat_processor.make_parser
        outputs = [
            ChoiceOutput(self.tokenizer, replace(request, adapter=adapter), make_parser(plan.parsing))
            for request in requests
        ]
        return _Answers(prompt.text, outputs)

    def _generate(self, prompts: list[_Answers], progress: bool) -> list[RequestOutput]:
        outputs = [output for prompt in prompts for output in prompt.outputs]
        hashes: dict[str, list[int]] = {output.request.id: [] for output in outputs}
        with Progress(disable=not progress, transient=True) as bar:
            task = bar.add_task("generating", total=len(outputs))
            for answer, delta in self._run(outputs):
                hashes[answer.request.id] += delta.event.logits_hashes
                bar.advance(task, int(answer.finished))
        self._recorder.on_response(len(outputs))
        return [make_output(prompt.text, prompt.outputs, hashes, self._recorder) for prompt in prompts]

    @property
    def _embedder(self) -> LocalEncoder | None:
        """The embedding model, if it embeds and does not rank."""
        return self._encoder if self._encoder is not None and self._encoder.info.task == "embed" else None

    def _input_ids(self, name: str, item: EmbedInput, prompt_name: str | None) -> list[int]:
        """Token ids of an input of embed(). Raises InvalidRequest."""
        encoder = self._embedder
        max_tokens = encoder.info.max_tokens if encoder else self.info.resolved.max_model_len
        if not isinstance(item, str):
            ids = list(item)
        elif encoder is not None:
            ids = encoder.tokenizer.encode(item, prompt=prompt_name)
        else:
            prefix = self._pooling_config.find_prompt(prompt_name, Path(str(self.config.model)).name)
            ids = self.tokenizer.encode(prefix + item)
        check_input(name, ids, max_tokens, (encoder or self).info.vocab_size)
        return ids

    def _embed_with_model(self, ids: Sequence[Sequence[int]], pooling: str | None) -> list[bytes]:
        """Embed with the model itself. An error of one request is raised and aborts the others."""
        requests = make_embedding_requests(
            ids,
            pooling or self._pooling_config.pooling,
            f"embd-{next(self._request_counter)}",
            image_token_id=self._chat_processor.placeholder_id,
        )
        vectors: dict[str, bytes] = {}
        live = {request.id for request in requests}
        with closing(self._receive(requests, live)) as events:
            for event in events:
                if isinstance(event, ErrorEvent):
                    raise event.error
                assert isinstance(event, EmbeddingEvent)
                vectors[event.request_id] = event.vector
                live.remove(event.request_id)
        return [vectors[request.id] for request in requests]

    def _run(self, outputs: Sequence[ChoiceOutput]) -> Iterator[tuple[ChoiceOutput, OutputDelta]]:
        """Step until all answers end. An error of one is raised and aborts the others."""
        answers = {output.request.id: output for output in outputs}
        live = set(answers)
        for output in outputs:
            self._recorder.on_submit(output.request)
        try:
            with closing(self._receive([output.request for output in outputs], live)) as events:
                for event in events:
                    answer = answers[event.request_id]
                    delta = self._feed(answer, event)
                    if answer.finished:
                        live.remove(event.request_id)
                    yield answer, delta
        finally:
            self._recorder.on_abort([answers[request_id].request for request_id in live])

    def _receive(self, requests: Sequence[Request], live: set[str]) -> Generator[Event, None, None]:
        """Events of `requests` until the caller has removed all from `live`; the rest is aborted at the end.

        Several iterators may be open at once: events wait in the queue of their request.
        """
        try:
            for request in requests:
                self._event_queues[request.id] = deque()
                self._client.submit(request)
            while live:
                if not any(self._event_queues[request_id] for request_id in live):
                    self._step()
                for request in requests:
                    while request.id in live and self._event_queues[request.id]:
                        yield self._event_queues[request.id].popleft()
        finally:
            for request in requests:
                self._event_queues.pop(request.id, None)
                if request.id in live:
                    self._client.abort(request.id)

    def _step(self) -> None:
        with defer_interrupt():
            report = self._client.step()
            self.stats = report.stats
            self._recorder.on_step(report.stats)
            for event in report.events:
                if event.request_id in self._event_queues:
                    self._event_queues[event.request_id].append(event)

    def _feed(self, answer: ChoiceOutput, event: Event) -> OutputDelta:
        """Raises the error of an event."""
        request = answer.request
        if isinstance(event, ErrorEvent):
            self._recorder.on_error([request], event.error)
            raise event.error
        assert isinstance(event, TokenEvent)
        delta = answer.feed(event)
        self._recorder.on_tokens(request, delta.event, time.monotonic())
        if delta.hit_stop_string:
            self._client.finish(request.id, answer.num_tokens)
        if answer.finished:
            self._recorder.on_parsed(answer.parser)
            self._chat_processor.remember(answer)
        return delta


def _one_for_each(values: Any, single: type | tuple[type, ...], count: int, name: str) -> list[Any]:
    """One value for each prompt, from a single value or a list of them. Raises InvalidRequest."""
    if isinstance(values, single):
        return [values] * count
    if len(values) != count:
        raise InvalidRequest(f"{count} prompts, but {len(values)} of {name}", name)
    return list(values)
