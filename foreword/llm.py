"""Offline inference: an engine in this process.

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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.progress import Progress

from foreword.checkpoint import prepare_checkpoint
from foreword.config.options import Config
from foreword.config.resolve import EngineInfo
from foreword.core.outputs import EmbeddingEvent, ErrorEvent, Event, StepStats, TokenEvent
from foreword.core.params import SamplingParams
from foreword.core.request import Request
from foreword.embedding.local import LocalEncoder, load_local_encoder
from foreword.embedding.sentence_transformers import read_decoder_pooling_config
from foreword.embedding.vectors import FLOAT_BYTES, cosine, normalize_embedding
from foreword.engine_client.local import LocalClient
from foreword.errors import InvalidRequest
from foreword.grammar.check import GrammarChecker
from foreword.metrics.recorder import MetricsRecorder
from foreword.outputs import CompletionOutput, EmbeddingOutput, RequestOutput, StreamPiece
from foreword.tokenizer.input_processor import (
    ChatInputProcessor,
    SamplingDefaults,
    check_input,
    image_source,
    make_embedding_requests,
    make_requests,
    open_image_loader,
)
from foreword.tokenizer.messages import ImagePart
from foreword.tokenizer.output_processor import ChoiceOutput, OutputDelta

__all__ = ["LLM", "CompletionOutput", "EmbeddingOutput", "RequestOutput", "StreamPiece"]

PROMPT_HELP = (
    "a prompt is a text, {'prompt': ...} or {'prompt_token_ids': [...]}, the latter two perhaps with 'images'"
)

logger = logging.getLogger("foreword")

PromptInput = str | Mapping[str, Any]
Message = Mapping[str, Any]
EmbedInput = str | Sequence[int]


@dataclass(frozen=True, slots=True)
class _Prompt:
    """A prompt as token ids, with one placeholder for each picture; the text of ids that were given is not known."""

    text: str | None
    token_ids: list[int]
    image_parts: Sequence[ImagePart] = ()


@dataclass(slots=True)
class _PromptRequests:
    """A prompt on its way."""

    text: str | None
    requests: list[Request]


class LLM:
    """Loads a checkpoint (a directory, a hub id, or the bundled demo) and answers prompts with it.

    speculate    "auto", "off", or drafters joined by commas
    draft_model  a smaller checkpoint with the same tokenizer
    options      any other field of `foreword.config.options.Config`, by name; an `embedding_model` embeds, or ranks, in the model's place
    Raises ConfigError or CheckpointError. Not thread-safe.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        speculate: str = "auto",
        draft_model: str | None = None,
        on_progress: Callable[[int, int], None] | None = None,
        **options: Any,
    ) -> None:
        started = time.perf_counter()
        config = Config(
            model=None if model is None else str(model),
            speculate=speculate,
            draft_model=draft_model,
            **options,
        )
        prepared = prepare_checkpoint(config)
        self.config = prepared.config
        self.tokenizer = prepared.tokenizer
        self.stats = StepStats()
        self._sampling_defaults = SamplingDefaults(
            self.config.seed, self.config.default_max_tokens, self.config.on_runaway
        )
        self._client = LocalClient(
            prepared.config, prepared.never_sampled_ids, prepared.tokenizer.vocabulary, on_progress
        )
        self._encoder = load_local_encoder(prepared.config) if prepared.config.embedding_model else None
        self._pooling_config = read_decoder_pooling_config(prepared.path)
        self._recorder = MetricsRecorder(
            self.info.resolved.drafters, multimodal=self.info.image_token_id is not None
        )
        self._chat_input = ChatInputProcessor(self.tokenizer, prepared.processor, self.config.max_images)
        self._image_loader = (
            None if prepared.processor is None else open_image_loader(self.config, prepared.processor)
        )
        self._grammar_checker = GrammarChecker(self.tokenizer.vocabulary)
        weakref.finalize(self, self._grammar_checker.close)
        if self._image_loader is not None:
            weakref.finalize(self, self._image_loader.close)
        self._request_counter = itertools.count()
        self._event_queues: dict[str, deque[Event]] = {}
        self.load_seconds = time.perf_counter() - started
        for text in self.info.warnings:
            logger.warning("%s", text)

    @property
    def info(self) -> EngineInfo:
        """Facts of the loaded engine."""
        return self._client.info

    def generate(
        self,
        prompts: PromptInput | Sequence[PromptInput],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = False,
    ) -> list[RequestOutput]:
        """Answer prompts, all at once: texts, or {"prompt_token_ids": [...]}; one output each, in order.

        With pictures a prompt is {"prompt": text, "images": [...]}: paths, bytes of files, or pictures of PIL's, each with a
        placeholder in the text (or in the ids), as the model's template would write it.

        Raises InvalidRequest before anything runs if a prompt or a parameter is impossible.
        """
        listed = [prompts] if isinstance(prompts, str | Mapping) else prompts
        return self._generate(
            self._build_all_requests([self._parse_prompt(prompt) for prompt in listed], params), progress
        )

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = False,
    ) -> list[RequestOutput]:
        """Answer one conversation, or each of several, by the checkpoint's chat template.

        Pictures are parts of the user's messages: {"type": "image_url", ...} as over HTTP, within the same limits, or
        {"type": "image", "image": ...}: a path, the bytes of a file, or a picture of PIL's.
        """
        conversations: Any = [messages] if messages and isinstance(messages[0], Mapping) else messages
        return self._generate(
            self._build_all_requests([self._render_chat(one) for one in conversations], params), progress
        )

    def stream(
        self, prompt: PromptInput | Sequence[Message], params: SamplingParams | None = None
    ) -> Iterator[StreamPiece]:
        """Answer a text, or a list of messages, piece by piece. Leaving the loop ends the request."""
        asked = self._parse_prompt(prompt) if isinstance(prompt, str | Mapping) else self._render_chat(prompt)
        (job,) = self._build_all_requests([asked], params)
        if len(job.requests) != 1:
            raise InvalidRequest("a stream has one choice: n must be 1", "n")
        for _, delta in self._run(job.requests):
            yield from (StreamPiece(piece, guessed) for piece, guessed in delta.pieces)
            if delta.finish_reason is not None:
                yield StreamPiece("", False, delta.finish_reason)
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
        """Vectors of texts, or of token ids, one each, in order: by the encoder if it embeds, or else by the model.

        pooling      "last", "mean" or "cls"; None: what the checkpoint says, or "last" for the model
        normalize    scale them to length 1
        dimensions   only their first so many values, cut before they are scaled
        prompt_name  purpose whose text stands in front of each text, where the checkpoint names any
        Raises InvalidRequest before anything runs if an input is impossible.
        """
        one = isinstance(inputs, str) or (bool(inputs) and isinstance(inputs[0], int))
        ids = [
            self._input_ids(f"inputs[{i}]", item, prompt_name)  # type: ignore[arg-type]
            for i, item in enumerate([inputs] if one else inputs)
        ]
        started = time.perf_counter()
        self._recorder.on_embedding_start()
        reason = "error"
        try:
            vectors = (
                self._embed_with_model(ids, pooling)
                if self._embedder is None
                else self._embedder.encode(ids, pooling)
            )
            reason = "done"
        finally:
            self._recorder.on_embedding_finish(
                "embed", reason, len(ids), sum(map(len, ids)), time.perf_counter() - started
            )
        size = min((len(vector) // FLOAT_BYTES for vector in vectors), default=0)
        if dimensions is not None and vectors and not 1 <= dimensions <= size:
            raise InvalidRequest(f"dimensions must be between 1 and {size}, got {dimensions}", "dimensions")
        return [
            EmbeddingOutput(normalize_embedding(vector, dimensions, normalize), tuple(item))
            for vector, item in zip(vectors, ids, strict=True)
        ]

    def score(self, query: str, documents: str | Sequence[str]) -> list[float]:
        """How well each document goes with the query: as the encoder ranks them, or else the cosine of their vectors."""
        texts = [documents] if isinstance(documents, str) else list(documents)
        if self._encoder is not None and self._embedder is None:
            pairs = [self._encoder.tokenizer.encode_pair(query, text) for text in texts]
            for index, (ids, _) in enumerate(pairs):
                check_input(
                    f"documents[{index}]", ids, self._encoder.info.max_tokens, self._encoder.info.vocab_size
                )
            return self._encoder.score(pairs)
        first, *others = (output.vector for output in self.embed([query, *texts]))
        return [cosine(first, other) for other in others]

    def render_metrics(self) -> bytes:
        """What `/metrics` would show of this engine, in Prometheus text."""
        return self._recorder.render()

    def check(self) -> None:
        """Assert the integrity of the engine's bookkeeping."""
        self._client.check()

    # The way of a prompt

    def _render_chat(self, messages: Sequence[Message]) -> _Prompt:
        bare, parts = self._chat_input.split_images(messages, local=True)
        text = self._chat_input.template.render(bare)
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        return _Prompt(
            text, self._chat_input.check_placeholders(ids, len(parts), "messages", "the chat template"), parts
        )

    def _parse_prompt(self, prompt: PromptInput) -> _Prompt:
        if isinstance(prompt, str):
            return _Prompt(prompt, self.tokenizer.encode(prompt))
        text, given = prompt.get("prompt"), prompt.get("prompt_token_ids")
        if isinstance(given, Sequence) and not isinstance(given, str):
            ids = list(given)
        elif given is None and isinstance(text, str):
            ids = self.tokenizer.encode(text)
        else:
            raise InvalidRequest(f"{PROMPT_HELP}, got {prompt!r:.80}", "prompt")
        parts = [
            ImagePart(f"images[{index}]", image=image)
            for index, image in enumerate(prompt.get("images") or ())
        ]
        self._chat_input.check_num_images(len(parts), "images")
        return _Prompt(
            text, self._chat_input.check_placeholders(ids, len(parts), "prompt") if parts else ids, parts
        )

    def _build_all_requests(self, prompts: Sequence[_Prompt], params: Any) -> list[_PromptRequests]:
        single = params is None or isinstance(params, SamplingParams)
        each = [params or SamplingParams()] * len(prompts) if single else list(params)
        if len(each) != len(prompts):
            raise InvalidRequest(f"{len(prompts)} prompts, but {len(each)} params", "params")
        return [self._build_requests(asked, one) for asked, one in zip(prompts, each, strict=True)]

    def _build_requests(self, parsed: _Prompt, params: SamplingParams) -> _PromptRequests:
        self.info.resolved.check_method(params.speculation.method)
        if params.structured is not None:
            self._grammar_checker.check_sync(params.structured)
        sources = [image_source(part) for part in parsed.image_parts]
        prompt = self._chat_input.insert_images(
            parsed.token_ids, self._image_loader.load(sources) if self._image_loader and sources else ()
        )
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
        )
        return _PromptRequests(parsed.text, requests)

    def _generate(self, prompts: list[_PromptRequests], progress: bool) -> list[RequestOutput]:
        requests = [request for job in prompts for request in job.requests]
        answers: dict[str, ChoiceOutput] = {}
        hashes: dict[str, list[int]] = {request.id: [] for request in requests}
        with Progress(disable=not progress, transient=True) as bar:
            task = bar.add_task("generating", total=len(requests))
            for answer, delta in self._run(requests):
                answers[answer.request.id] = answer
                hashes[answer.request.id] += delta.event.logits_hashes
                bar.advance(task, int(answer.finished))
        return [self._make_output(job, answers, hashes) for job in prompts]

    @property
    def _embedder(self) -> LocalEncoder | None:
        """The encoder, if it is one that embeds."""
        return self._encoder if self._encoder is not None and self._encoder.info.task == "embed" else None

    def _input_ids(self, name: str, item: EmbedInput, prompt_name: str | None) -> list[int]:
        """Token ids of what is to be embedded. Raises InvalidRequest."""
        encoder, limit, known = self._embedder, self.info.resolved.max_model_len, self.info.vocab_size
        if encoder is not None:
            limit, known = encoder.info.max_tokens, encoder.info.vocab_size
        if not isinstance(item, str):
            ids = list(item)
        elif encoder is not None:
            ids = encoder.tokenizer.encode(item, prompt=prompt_name)
        else:
            ids = self.tokenizer.encode(
                self._pooling_config.find_prompt(prompt_name, Path(str(self.config.model)).name) + item
            )
        check_input(name, ids, limit, known)
        return ids

    def _embed_with_model(self, ids: Sequence[Sequence[int]], pooling: str | None) -> list[bytes]:
        """Of the model itself: step until all are there; an error of one is raised, and frees all of them."""
        name, placeholder = f"embd-{next(self._request_counter)}", self._chat_input.placeholder_id
        requests = make_embedding_requests(
            ids, pooling or self._pooling_config.pooling, name, image_token_id=placeholder
        )
        found: dict[str, bytes] = {}
        try:
            for request in requests:
                self._event_queues[request.id] = deque()
                self._client.submit(request)
            while len(found) < len(requests):
                self._step()
                found |= {
                    request.id: _embedding_vector(inbox.popleft())
                    for request in requests
                    if (inbox := self._event_queues[request.id])
                }
        finally:
            for request in requests:
                del self._event_queues[request.id]
                if request.id not in found:
                    self._client.abort(request.id)
        return [found[request.id] for request in requests]

    def _run(self, requests: Sequence[Request]) -> Iterator[tuple[ChoiceOutput, OutputDelta]]:
        """Step until every request ended; an error of one is raised, and frees all of them.

        Several of these may be open at once: a step's events wait in the inbox of their request.
        """
        live = {request.id: ChoiceOutput(self.tokenizer, request) for request in requests}
        try:
            for request in requests:
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
        report = self._client.step()
        self.stats = report.stats
        self._recorder.on_step(report.stats)
        for event in report.events:
            if event.request_id in self._event_queues:
                self._event_queues[event.request_id].append(event)

    def _process_events(
        self, answer: ChoiceOutput, live: dict[str, ChoiceOutput]
    ) -> Iterator[tuple[ChoiceOutput, OutputDelta]]:
        """What has come for one answer; an answer that is over leaves `live`."""
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
                self._make_choice(i, answers[r.id], hashes[r.id]) for i, r in enumerate(prompt.requests)
            ),
            prompt_logprobs=first.prompt_logprobs or None,
            metrics=self._recorder.answer_metrics(*(request.id for request in prompt.requests)),
        )

    def _make_choice(self, index: int, answer: ChoiceOutput, hashes: Sequence[int]) -> CompletionOutput:
        assert answer.finish_reason is not None
        asked = answer.request.params.logprobs is not None
        return CompletionOutput(
            index=index,
            text=answer.text,
            token_ids=tuple(answer.token_ids),
            finish_reason=answer.finish_reason,
            stop_reason=answer.stop_reason,
            logprobs=tuple(shown.logprob for shown in answer.logprobs) if asked else None,
            seed=answer.request.seed,
            metrics=self._recorder.answer_metrics(answer.request.id),
            logits_hashes=tuple(hashes),
        )


def _embedding_vector(event: Event) -> bytes:
    if isinstance(event, ErrorEvent):
        raise event.error
    assert isinstance(event, EmbeddingEvent)
    return event.vector
