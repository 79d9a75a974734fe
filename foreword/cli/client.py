"""Where `chat` and `generate` get their answers: a model in this process, or a server.

A model in this process, as a source of answers.
"""

from __future__ import annotations

import argparse
import importlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol, cast

import httpx

from foreword.cli.banner import model_name, speculation_line
from foreword.cli.options import ENGINE_GROUPS, Message, add_config_options, engine_fields, read_config
from foreword.cli.sse_reader import Chunk, choices_of, iter_chunks, text_of
from foreword.cli.terminal import loading_bar
from foreword.config.options import Config
from foreword.core.params import SamplingParams
from foreword.core.structured import StructuredOutput
from foreword.errors import ForewordError
from foreword.llm import LLM

__all__ = [
    "FINISH_NOTES",
    "ChatBackend",
    "ChatPiece",
    "ChatResult",
    "HTTPBackend",
    "LocalBackend",
    "add_backend_options",
    "open_backend",
    "request_body",
]

CONNECT_TIMEOUT_S = 10.0
FINISH_NOTES: Mapping[str, str] = MappingProxyType(  # what a user should know about the end of an answer
    {"repetition": "the answer repeated itself and was ended; --on-runaway warn lets it go on"}
)


@dataclass(frozen=True, slots=True)
class ChatPiece:
    """Text of an answer, as it comes; `guessed`: a drafter had guessed it and the model agreed. The last may be empty: it has
    the reason of the end."""

    text: str
    is_drafted: bool = False
    finish_reason: str | None = None


@dataclass(frozen=True, slots=True)
class ChatResult:
    """A whole answer. Fields that the source does not tell are None."""

    text: str
    finish_reason: str | None
    token_ids: tuple[int, ...] | None
    metrics: Mapping[str, Any] | None


class ChatBackend(Protocol):
    """Answers a conversation (messages) or continues a text (str). Raises ForewordError."""

    name: str
    speculation: str | None

    def stream(self, prompt: str | Sequence[Message], params: SamplingParams) -> Iterator[ChatPiece]: ...

    def answer(self, prompt: str | Sequence[Message], params: SamplingParams) -> ChatResult: ...


def add_backend_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--base-url", metavar="URL", help="ask this server instead of loading a model here")
    add_config_options(parser, ENGINE_GROUPS, more=("api_key", "log_level"))


@contextmanager
def open_backend(args: argparse.Namespace) -> Iterator[ChatBackend]:
    """The server at --base-url, else a model in this process: only then is torch imported."""
    config = read_config(args)
    if args.base_url:
        with closing(HTTPBackend(args.base_url, config.api_key, config.served_model_name)) as remote:
            yield remote
    else:
        yield cast(ChatBackend, importlib.import_module("foreword.cli.client").Local(config))


class HTTPBackend:
    """A server that speaks OpenAI's API. One of ours also tells which tokens were guessed."""

    def __init__(
        self,
        base_url: str,
        api_key: str | None,
        model: str | None = None,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        headers = {"Authorization": f"Bearer {api_key.split(',')[0]}"} if api_key else {}
        url = base_url.rstrip("/").removesuffix("/v1")
        timeout = httpx.Timeout(None, connect=CONNECT_TIMEOUT_S)
        self._http = httpx.Client(base_url=url, headers=headers, timeout=timeout, transport=transport)
        self.name = model or self._first_model()
        self.speculation: str | None = None

    def close(self) -> None:
        self._http.close()

    def stream(self, prompt: str | Sequence[Message], params: SamplingParams) -> Iterator[ChatPiece]:
        path, body = request_body(self.name, prompt, params)
        with (
            self._translate_http_errors(),
            self._http.stream("POST", path, json=body | {"stream": True, "metrics": True}) as response,
        ):
            if response.is_error:
                response.read()
            _check_status(response)
            for chunk in iter_chunks(response):
                yield from _stream_pieces(chunk)

    def answer(self, prompt: str | Sequence[Message], params: SamplingParams) -> ChatResult:
        path, body = request_body(self.name, prompt, params)
        with self._translate_http_errors():
            response = _check_status(self._http.post(path, json=body | {"metrics": True}))
        with _translate_parse_errors(response):
            got = response.json()
            choice = got["choices"][0]
            text = choice["message"]["content"] if "message" in choice else choice["text"]
            return ChatResult(str(text or ""), choice["finish_reason"], None, got.get("metrics"))

    def _first_model(self) -> str:
        with self._translate_http_errors():
            response = _check_status(self._http.get("/v1/models"))
        with _translate_parse_errors(response):
            name = str(response.json()["data"][0]["id"])
            name.encode()  # half of a surrogate pair cannot be asked for
            return name

    @contextmanager
    def _translate_http_errors(self) -> Iterator[None]:
        try:
            yield
        except httpx.HTTPError as error:
            raise ForewordError(f"{self._http.base_url}: {error or type(error).__name__}") from None


def request_body(
    model: str, prompt: str | Sequence[Message], params: SamplingParams
) -> tuple[str, dict[str, Any]]:
    """Path and JSON body that ask a server for the same; defaults are spelled out only where they differ."""
    body: dict[str, Any] = {"model": model, **params.non_default_fields(), "temperature": params.temperature}
    if "speculation" in body:
        body["speculation"] = {
            name: value for name, value in asdict(params.speculation).items() if value is not None
        }
    if params.structured is not None:
        body["structured_outputs"] = _structured_outputs(body.pop("structured"))
    if params.prediction is not None:
        body["prediction"] = {"type": "content", "content": params.prediction}
    if isinstance(prompt, str):
        return "/v1/completions", body | {"prompt": prompt}
    return "/v1/chat/completions", body | {"messages": list(prompt)}


def _structured_outputs(structured: StructuredOutput) -> dict[str, Any]:
    """The constraint as the server's `structured_outputs`."""
    names = {"json_schema": "json", "lark": "grammar", "gbnf": "grammar"}
    values = {
        "json_object": True,
        "choice": json.loads(structured.text) if structured.constraint_type == "choice" else None,
    }
    body = {
        names.get(structured.constraint_type, structured.constraint_type): values.get(
            structured.constraint_type, structured.text
        )
    }
    given = {"after": structured.after, "disable_any_whitespace": not structured.whitespace or None}
    return body | {name: value for name, value in given.items() if value is not None}


def _stream_pieces(chunk: Chunk) -> Iterator[ChatPiece]:
    for choice in choices_of(chunk):
        if "tokens" in choice:
            yield from _drafted_pieces(choice["tokens"])
        elif text := text_of(choice):
            yield ChatPiece(text)
        if isinstance(reason := choice.get("finish_reason"), str):
            yield ChatPiece("", finish_reason=reason)


def _drafted_pieces(tokens: Any) -> Iterator[ChatPiece]:
    """Pairs of a text and whether it was guessed."""
    for pair in tokens if isinstance(tokens, list) else ():
        match pair:
            case [str(text), bool(guessed)]:
                yield from (ChatPiece(text, guessed),) if text else ()
            case _:
                raise ForewordError(f"the server's stream holds a token that is none: {pair!r:.80}")


@contextmanager
def _translate_parse_errors(response: httpx.Response) -> Iterator[None]:
    """An answer that is not OpenAI's is an error in words."""
    try:
        yield
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        raise ForewordError(
            f"{response.url}: what the server answered cannot be read: {response.text[:80]!r}"
        ) from None


def _check_status(response: httpx.Response) -> httpx.Response:
    """The response, or the server's own words as an error."""
    if response.is_success:
        return response
    try:
        message = response.json()["error"]["message"]
    except (ValueError, LookupError, TypeError, RecursionError):
        message = response.text[:200]
    raise ForewordError(f"the server answered {response.status_code}: {message}")


class LocalBackend:
    """Loads the model of `config` and answers with it."""

    def __init__(self, config: Config) -> None:
        with loading_bar("loading") as progress:
            self._llm = LLM(on_progress=progress, **engine_fields(config))
        self.name = model_name(config, Path(str(self._llm.config.model)))
        self.speculation: str | None = speculation_line(self._llm.info)

    def stream(self, prompt: str | Sequence[Message], params: SamplingParams) -> Iterator[ChatPiece]:
        asked: Any = prompt if isinstance(prompt, str) else [dict(message) for message in prompt]
        for piece in self._llm.stream(asked, params):
            yield ChatPiece(piece.text, piece.is_draft, piece.finish_reason)

    def answer(self, prompt: str | Sequence[Message], params: SamplingParams) -> ChatResult:
        if isinstance(prompt, str):
            output = self._llm.generate([prompt], params, progress=False)[0]
        else:
            output = self._llm.chat([dict(message) for message in prompt], params)[0]
        metrics = output.metrics.as_dict() if output.metrics is not None else None
        return ChatResult(output.text, output.finish_reason, tuple(output.token_ids), metrics)
