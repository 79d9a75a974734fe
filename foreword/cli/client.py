"""The model behind `chat` and `generate`: a server over HTTP, or a model in this process.

Server-sent events are parsed strictly: the server may send anything.
"""

from __future__ import annotations

import argparse
import importlib
import json
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol, cast

import httpx

from foreword.chat_formats.events import CallArguments, CallStart
from foreword.cli.configuration import read_config
from foreword.cli.flags import ENGINE_GROUPS, FLAGS, Message, add_config_options
from foreword.cli.startup import startup_line
from foreword.core.params import SamplingParams
from foreword.core.structured_output import StructuredOutput
from foreword.errors import ContextLengthExceeded, ForewordError

Tool = Mapping[str, Any]  # {"type": "function", "function": ...}, as in OpenAI's API
CONNECT_TIMEOUT_S = 10.0
REPETITION_NOTE = "the answer repeated itself and was ended; --on-runaway warn lets it go on"
MAX_EVENT_BYTES: Final = 16 << 20
DONE: Final = b"[DONE]"
MAX_SHOWN_CHARS: Final = 80  # characters of invalid data in a message

Chunk = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ChatPiece:
    """Streamed text; the last piece has the finish reason and the metrics, and may have no text."""

    text: str
    is_drafted: bool = False  # an accepted draft token
    finish_reason: str | None = None
    metrics: Mapping[str, Any] | None = None  # None: not reported
    call: CallStart | CallArguments | None = None  # a part of a call, which is no text of the answer
    is_reasoning: bool = False  # the text is no part of the answer


@dataclass(frozen=True, slots=True)
class ChatResult:
    """A whole answer; None where the backend does not report a field."""

    text: str
    finish_reason: str | None
    token_ids: tuple[int, ...] | None
    metrics: Mapping[str, Any] | None


class ChatBackend(Protocol):
    """Answers messages, or continues a text. Raises ForewordError."""

    name: str
    speculation: str | None
    drafters: Sequence[str] | None  # None: unknown

    @property
    def sampling_defaults(self) -> Mapping[str, Any]:
        """The checkpoint's, by field of SamplingParams."""

    def stream(
        self, prompt: str | Sequence[Message], params: SamplingParams, tools: Sequence[Tool] = ()
    ) -> Iterator[ChatPiece]: ...

    def answer(self, prompt: str | Sequence[Message], params: SamplingParams) -> ChatResult: ...


def add_backend_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--base-url", "--url", metavar="URL", help="use this server instead of loading a model"
    )
    add_config_options(parser, ENGINE_GROUPS, more=("api_key", "log_level"))


def server_url(base_url: str) -> str:
    """The address before /v1; http:// is added to one without a scheme."""
    url = base_url if "://" in base_url else f"http://{base_url}"
    return url.rstrip("/").removesuffix("/v1")


def connection_options(base_url: str, api_key: str | None) -> dict[str, Any]:
    """Address, key and timeouts of an httpx client, whose answers may take any time."""
    return {
        "base_url": server_url(base_url),
        "headers": {"Authorization": f"Bearer {api_key.split(',')[0]}"} if api_key else {},
        "timeout": httpx.Timeout(None, connect=CONNECT_TIMEOUT_S),
    }


@contextmanager
def open_backend(args: argparse.Namespace) -> Iterator[ChatBackend]:
    """The server at --base-url, else a model in this process; only the latter imports torch."""
    config = read_config(args)
    if args.base_url:
        given = getattr(args, "model_word", None) or getattr(args, "model", None)
        name = next(iter(config.served_names()), given)
        with closing(HTTPBackend(args.base_url, config.api_key, name)) as remote:
            startup_line.end()
            yield remote
    else:
        importlib.import_module("foreword.cli.local_checks").check_local_request(args, config)
        module = importlib.import_module("foreword.cli.local_backend")
        yield cast(ChatBackend, module.LocalBackend(config))


class HTTPBackend:
    """A server with OpenAI's API; a Foreword server also reports which tokens were drafted."""

    def __init__(
        self,
        base_url: str,
        api_key: str | None,
        model: str | None = None,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        self._http = httpx.Client(**connection_options(base_url, api_key), transport=transport)
        self.name = model or self._first_model()
        self._sampling_defaults: Mapping[str, Any] | None = None  # not read yet
        self.speculation: str | None = None
        self.drafters: Sequence[str] | None = None

    def close(self) -> None:
        self._http.close()

    def stream(
        self, prompt: str | Sequence[Message], params: SamplingParams, tools: Sequence[Tool] = ()
    ) -> Iterator[ChatPiece]:
        path, body = request_body(self.name, prompt, params, self._sampling_defaults or ())
        if tools:
            body["tools"] = list(tools)
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
        path, body = request_body(self.name, prompt, params, self._sampling_defaults or ())
        with self._translate_http_errors():
            response = _check_status(self._http.post(path, json=body | {"metrics": True}))
        with _translate_parse_errors(response):
            result = response.json()
            choice = result["choices"][0]
            text = choice["message"]["content"] if "message" in choice else choice["text"]
            return ChatResult(str(text or ""), choice["finish_reason"], None, result.get("metrics"))

    @property
    def sampling_defaults(self) -> Mapping[str, Any]:
        """The server's, by its list of models; none without one. Later requests send these fields always."""
        if self._sampling_defaults is None:
            try:
                card = self._model_card(self.name)
            except ForewordError:
                card = {}
            given = card.get("sampling_defaults")
            known = {item.name: given.get(item.name) for item in FLAGS} if isinstance(given, dict) else {}
            self._sampling_defaults = {k: v for k, v in known.items() if isinstance(v, int | float)}
        return self._sampling_defaults

    def _first_model(self) -> str:
        return str(self._model_card(None)["id"])

    def _model_card(self, name: str | None) -> Mapping[str, Any]:
        """The model of this name, or the first, in the server's list. Raises ForewordError."""
        with self._translate_http_errors():
            response = _check_status(self._http.get("/v1/models"))
        with _translate_parse_errors(response):
            cards: Sequence[Mapping[str, Any]] = response.json()["data"]
            card = cards[0] if name is None else {each["id"]: each for each in cards}[name]
            str(card["id"]).encode()  # refuses a lone surrogate, which no request could send back
            return {**card}

    @contextmanager
    def _translate_http_errors(self) -> Iterator[None]:
        try:
            yield
        except httpx.ConnectError as error:
            hint = "no server answers there; `foreword serve` starts one"
            raise ForewordError(f"{self._http.base_url}: {error or type(error).__name__}: {hint}") from None
        except httpx.HTTPError as error:
            raise ForewordError(f"{self._http.base_url}: {error or type(error).__name__}") from None
        except UnicodeEncodeError:
            raise ForewordError("the request is not valid Unicode: it has a lone surrogate") from None


def finish_note(finish_reason: str | None, params: SamplingParams, defaults: Mapping[str, Any]) -> str | None:
    """A note for the user about an answer that ended early; `defaults`: sampling defaults of the backend."""
    if finish_reason != "length":
        return REPETITION_NOTE if finish_reason == "repetition" else None
    limit = f"--max-tokens {params.max_tokens} or "
    if params.max_tokens is None:
        limit = ""
    elif params.max_tokens == defaults.get("max_tokens"):
        limit = f"the checkpoint's max_new_tokens {params.max_tokens} (--max-tokens N sets another) or "
    return f"the answer was cut off at {limit}the end of the context"


def request_body(
    model: str, prompt: str | Sequence[Message], params: SamplingParams, explicit: Iterable[str] = ()
) -> tuple[str, dict[str, Any]]:
    """Path and JSON body of a request with these parameters.

    Values equal to OpenAI's defaults are left out, but for the temperature and `explicit` fields, of which
    the server has its own defaults.
    """
    body: dict[str, Any] = {"model": model, **params.non_default_fields()}
    body |= {name: getattr(params, name) for name in ("temperature", *explicit)}
    if "speculation" in body:
        given = {"method": params.speculation.method, "max_tokens": params.speculation.max_draft_tokens}
        body["speculation"] = {name: value for name, value in given.items() if value is not None}
    if params.structured is not None:
        body["structured_outputs"] = _structured_outputs(body.pop("structured"))
    if params.prediction is not None:
        body["prediction"] = {"type": "content", "content": params.prediction}
    if isinstance(prompt, str):
        return "/v1/completions", body | {"prompt": prompt}
    return "/v1/chat/completions", body | {"messages": list(prompt)}


def _structured_outputs(structured: StructuredOutput) -> dict[str, Any]:
    """The constraint as the server's `structured_outputs`."""
    kind = structured.constraint_type
    name = {"json_schema": "json", "lark": "grammar", "gbnf": "grammar"}.get(kind, kind)
    value: Any = structured.text
    if kind == "json_object":
        value = True
    elif kind == "choice":
        value = json.loads(structured.text)
    body = {name: value}
    if structured.after is not None:
        body["after"] = structured.after
    if not structured.whitespace:
        body["disable_any_whitespace"] = True
    return body


def _stream_pieces(chunk: Chunk) -> Iterator[ChatPiece]:
    for choice in choices_of(chunk):
        calls = list(call_events(choice))
        tokens = list(_drafted_pieces(choice.get("tokens")))
        match calls:
            case [CallArguments() as arguments] if tokens:
                yield from (
                    replace(each, text="", call=replace(arguments, text=each.text)) for each in tokens
                )
            case [_, *_]:
                yield from (ChatPiece("", call=call) for call in calls)
            case _ if reasoning := reasoning_of(choice):
                yield from (replace(each, is_reasoning=True) for each in tokens or [ChatPiece(reasoning)])
            case _ if "tokens" in choice:
                yield from tokens
            case _ if text := text_of(choice):
                yield ChatPiece(text)
        if isinstance(reason := choice.get("finish_reason"), str):
            metrics = choice.get("metrics")
            yield ChatPiece("", False, reason, metrics if isinstance(metrics, dict) else None)


def _drafted_pieces(tokens: Any) -> Iterator[ChatPiece]:
    """From lists of a text, whether it was drafted, and how."""
    for token in tokens if isinstance(tokens, list) else ():
        match token:
            case [str(text), bool(is_drafted), *_]:
                if text:
                    yield ChatPiece(text, is_drafted)
            case _:
                raise ForewordError(f"the server's stream holds an invalid token: {token!r:.80}")


@contextmanager
def _translate_parse_errors(response: httpx.Response) -> Iterator[None]:
    """An invalid answer raises ForewordError."""
    try:
        yield
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        raise ForewordError(
            f"{response.url}: the server's answer cannot be read: {response.text[:80]!r}"
        ) from None


def _check_status(response: httpx.Response) -> httpx.Response:
    """Raises ForewordError with the server's own message."""
    if response.is_success:
        return response
    code = None
    try:
        error = response.json()["error"]
        message, code = error["message"], error.get("code")
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        message = response.text[:200]
    if response.status_code == httpx.codes.UNAUTHORIZED:
        message += "; the key is that of --api-key or FOREWORD_API_KEY, not OPENAI_API_KEY"
    error_class = ContextLengthExceeded if code == ContextLengthExceeded.code else ForewordError
    raise error_class(f"the server answered {response.status_code}: {message}")


class EventReader:
    """Incremental parser: bytes in any pieces become the JSON objects of complete events.

    Raises ForewordError for data that is not a JSON object, and for an event that is too long.
    """

    __slots__ = ("_after_cr", "_data", "_line", "_size")

    def __init__(self) -> None:
        self._line: list[bytes] = []  # pieces of an incomplete line
        self._data: list[bytes] = []  # data lines of an incomplete event
        self._size = 0  # bytes of the incomplete event
        self._after_cr = False  # the last piece ended in CR, so a leading LF belongs to it

    def feed(self, received: bytes) -> Iterator[Chunk]:
        """Objects that are complete now."""
        if received and self._after_cr:
            received, self._after_cr = received.removeprefix(b"\n"), False
        self._size += len(received)
        if self._size > MAX_EVENT_BYTES:
            raise ForewordError(f"the server's stream holds an event of more than {MAX_EVENT_BYTES} bytes")
        self._line.append(received)
        if b"\n" not in received and b"\r" not in received:
            return
        self._after_cr = received.endswith(b"\r")
        lines = b"".join(self._line).splitlines(keepends=True)
        self._line = [] if lines[-1].endswith((b"\n", b"\r")) else [lines.pop()]
        for line in lines:
            yield from self._process_line(line.rstrip(b"\r\n"))

    def _process_line(self, line: bytes) -> Iterator[Chunk]:
        """A line without its end; an empty line ends the event."""
        name, _, value = line.partition(b":")
        if name == b"data":
            self._data.append(value.removeprefix(b" "))
        if line:
            return
        data, self._data = b"\n".join(self._data), []
        self._size = sum(map(len, self._line))
        if data and data != DONE:
            yield _parse_object(data)


def iter_chunks(response: httpx.Response) -> Iterator[Chunk]:
    """The JSON objects of a stream. Raises httpx.HTTPError, and ForewordError for invalid data."""
    reader = EventReader()
    for received in response.iter_bytes():
        yield from reader.feed(received)


async def iter_chunks_async(response: httpx.Response) -> AsyncIterator[Chunk]:
    """See iter_chunks()."""
    reader = EventReader()
    async for received in response.aiter_bytes():
        for chunk in reader.feed(received):
            yield chunk


def choices_of(chunk: Chunk) -> Sequence[Mapping[str, Any]]:
    """Raises ForewordError for an error event, and for invalid choices."""
    if "error" in chunk:
        error = chunk["error"]
        message = error.get("message") if isinstance(error, dict) else error
        raise ForewordError(
            str(message or f"the server's stream holds an error without a message: {_shown(error)}")
        )
    choices = chunk.get("choices") or ()
    if not isinstance(choices, list | tuple) or not all(isinstance(choice, dict) for choice in choices):
        raise ForewordError(f"the server's stream holds invalid choices: {_shown(choices)}")
    return choices


def text_of(choice: Mapping[str, Any]) -> str:
    """New text of a chat or completion choice; often empty."""
    delta = choice.get("delta")
    text = delta.get("content") if isinstance(delta, dict) else choice.get("text")
    return text if isinstance(text, str) else ""


def reasoning_of(choice: Mapping[str, Any]) -> str:
    """New reasoning of a chat choice, under either of the names that servers use; often empty."""
    delta = choice.get("delta")
    fields = delta if isinstance(delta, dict) else {}
    text = fields.get("reasoning_content") or fields.get("reasoning")
    return text if isinstance(text, str) else ""


def call_events(choice: Mapping[str, Any]) -> Iterator[CallStart | CallArguments]:
    """New parts of calls of a chat choice. Raises ForewordError for invalid ones."""
    delta = choice.get("delta")
    calls = (delta.get("tool_calls") if isinstance(delta, dict) else None) or []
    if not isinstance(calls, list):
        raise ForewordError(f"the server's stream holds invalid calls: {_shown(calls)}")
    for call in calls:
        match call:
            case {"index": int(index), "function": {**function}}:
                name, arguments = function.get("name"), function.get("arguments")
            case _:
                raise ForewordError(f"the server's stream holds an invalid call: {_shown(call)}")
        if isinstance(name, str) and name:
            yield CallStart(index, str(call.get("id") or f"call_{index}"), name)
        if isinstance(arguments, str) and arguments:
            yield CallArguments(index, arguments)


def token_ids_of(choice: Mapping[str, Any]) -> Sequence[int]:
    """`token_ids`, which a Foreword server sends on request."""
    ids = choice.get("token_ids") or ()
    if not isinstance(ids, list | tuple) or not all(isinstance(token_id, int) for token_id in ids):
        raise ForewordError(f"the server's stream holds invalid token ids: {_shown(ids)}")
    return ids


def _parse_object(data: bytes) -> Chunk:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        shown = data[:MAX_SHOWN_CHARS]
        raise ForewordError(f"the server's stream holds data that is not a JSON object: {shown!r}")
    return value


def _shown(value: object) -> str:
    return repr(value)[:MAX_SHOWN_CHARS]
