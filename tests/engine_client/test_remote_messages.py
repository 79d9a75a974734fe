"""What crosses the network comes back equal, or is refused with the name of its field."""

from __future__ import annotations

import json
import math
from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from foreword import errors
from foreword.config.lora import AdapterInfo
from foreword.core.finish import Repetition
from foreword.core.images import PromptImage
from foreword.core.outputs import (
    BlockUpdate,
    DraftingStats,
    DraftResult,
    EmbeddingEvent,
    StepStats,
    TokenEvent,
    TokenLogprob,
)
from foreword.core.params import SEED_MASK, SamplingParams, Speculation
from foreword.core.readiness import Readiness
from foreword.core.request import Request
from foreword.core.structured_output import ConstraintScope, StructuredOutput
from foreword.engine_client.messages import LoadAdapter, RemoveRequest, SendBlocks, UnloadAdapter
from foreword.engine_client.remote_messages import (
    GREETING,
    MESSAGES,
    REPORT,
    CallResult,
    Codec,
    Greeting,
    ReloadEngine,
    RemoteError,
    SessionMessage,
    SessionReport,
    SessionStatus,
)
from foreword.errors import ForewordError, InvalidRequest, Overloaded, RequestFailed
from foreword.planning.memory import DeviceMemory
from tests.support.fakes import engine_info

IDS = st.integers(0, 2**31 - 1)
NUMBERS = st.integers(0, 2**63)
FLOATS = st.floats(allow_nan=False)
TEXTS = st.text(st.characters(exclude_categories=("Cs",)), max_size=20)
NAMES = TEXTS.filter(bool)


def tuples(values: st.SearchStrategy[Any], max_size: int = 4) -> st.SearchStrategy[tuple[Any, ...]]:
    return st.lists(values, max_size=max_size).map(tuple)


def maps(keys: st.SearchStrategy[Any], values: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[Any, Any]]:
    return st.dictionaries(keys, values, max_size=3)


MARKERS = tuples(TEXTS | IDS)
GATES = st.builds(
    ConstraintScope,
    reasoning_begin=MARKERS,
    reasoning_end=MARKERS,
    starts_in_reasoning=st.booleans(),
    max_reasoning_tokens=st.none() | IDS,
    trigger=MARKERS,
    opening=TEXTS,
    early_begin=st.none() | IDS,
    constrains=st.booleans(),
    usual=MARKERS,
)
STRUCTURED = st.builds(
    StructuredOutput,
    st.sampled_from(("json_schema", "regex", "lark", "tools")),
    NAMES,
    st.booleans(),
    st.none() | NAMES,
    scope=st.none() | GATES,
)
PARAMS = st.builds(
    SamplingParams,
    temperature=st.floats(0, 100),
    top_p=st.floats(1e-300, 1),
    top_k=st.integers(-1, 1000),
    presence_penalty=st.floats(-2, 2),
    dry_sequence_breakers=tuples(NAMES),
    logit_bias=maps(IDS, st.floats(-100, 100)),
    bad_words=tuples(NAMES),
    allowed_token_ids=st.none() | tuples(IDS).filter(bool),
    max_tokens=st.none() | st.integers(1, 2**31),
    stop=tuples(NAMES),
    stop_token_ids=tuples(IDS),
    ignore_eos=st.booleans(),
    logprobs=st.none() | st.integers(0, 20),
    logprob_token_ids=tuples(IDS),
    prompt_logprobs=st.none() | st.integers(0, 20),
    seed=st.none() | st.integers(-(2**63), SEED_MASK),
    speculation=st.builds(Speculation, NAMES, st.none() | IDS),
    prediction=st.none() | TEXTS,
    structured=st.none() | STRUCTURED,
    on_runaway=st.sampled_from((None, "warn", "stop")),
)
SIZES = st.integers(1, 4)
IMAGES = st.builds(
    PromptImage,
    digest=st.binary(min_size=16, max_size=16),
    num_tokens=IDS,
    grid_thw=st.tuples(SIZES, SIZES, SIZES),
    original_size=st.tuples(SIZES, SIZES),
    shape=st.tuples(SIZES, SIZES, SIZES, SIZES),
    pixels=st.none() | st.binary(max_size=64),
    start=IDS,
)
REQUESTS = st.builds(
    Request,
    id=TEXTS,
    prompt_ids=tuples(IDS),
    params=PARAMS,
    seed=st.integers(0, SEED_MASK),
    eos_token_ids=tuples(IDS),
    bad_words_ids=tuples(tuples(IDS)),
    dry_breakers=tuples(tuples(IDS)),
    resume_output_ids=tuples(IDS),
    priority=st.integers(-(2**40), 2**40),
    cache_salt=TEXTS,
    prediction_ids=tuples(IDS),
    reasoning_end_ids=tuples(tuples(IDS)),
    pooling=st.none() | st.just("mean"),
    arrival_s=FLOATS,
    queue_deadline_s=st.none() | FLOATS,
    deadline_s=st.none() | FLOATS,
    fairness_key=TEXTS,
    is_resumed=st.booleans(),
    images=tuples(IMAGES, 2),
    adapter=TEXTS,
    adapter_name=TEXTS,
)
MESSAGE_LISTS = st.lists(
    st.builds(SessionMessage, request=REQUESTS)
    | st.builds(SessionMessage, remove=st.builds(RemoveRequest, TEXTS, st.none() | IDS))
    | st.builds(SessionMessage, load_adapter=st.builds(LoadAdapter, IDS, TEXTS))
    | st.builds(SessionMessage, unload_adapter=st.builds(UnloadAdapter, IDS, TEXTS))
    | st.builds(SessionMessage, reload=st.builds(ReloadEngine, IDS))
    | st.just(SessionMessage(send_blocks=SendBlocks())),
    max_size=3,
)
TOPS = tuples(st.tuples(IDS, FLOATS))
LOGPROBS = st.builds(TokenLogprob, IDS, FLOATS, IDS, TOPS, TOPS)
TOKEN_EVENTS = st.builds(
    TokenEvent,
    request_id=TEXTS,
    index=IDS,
    token_ids=tuples(IDS),
    logprobs=tuples(LOGPROBS),
    prompt_logprobs=tuples(st.none() | LOGPROBS),
    draft=st.none() | st.builds(DraftResult, TEXTS, IDS, IDS),
    finish_reason=st.none() | TEXTS,
    stop_id=st.none() | IDS,
    num_cached=IDS,
    scheduled_s=FLOATS,
    logits_hashes=tuples(st.integers(0, 2**64 - 1)),
    repetition=st.none() | st.builds(Repetition, IDS, IDS),
)
EVENTS = (
    TOKEN_EVENTS
    | st.builds(EmbeddingEvent, TEXTS, st.binary(max_size=32), IDS, FLOATS)
    | st.builds(RemoteError, NAMES, TEXTS, st.none() | TEXTS, st.none() | FLOATS, TEXTS)
)
STATS = st.builds(
    StepStats,
    step=NUMBERS,
    requests_running=IDS,
    kv_cache_usage_ratio=FLOATS,
    device_memory_bytes=NUMBERS,
    stage_seconds=maps(TEXTS, FLOATS),
    drafter_errors=maps(TEXTS, IDS),
    drafting=st.builds(
        DraftingStats, maps(TEXTS, maps(IDS, NUMBERS)), maps(TEXTS, NUMBERS), FLOATS, FLOATS, FLOATS, FLOATS
    ),
    faults=maps(TEXTS, IDS),
)
ADAPTERS = st.builds(AdapterInfo, TEXTS, TEXTS, IDS, IDS, NUMBERS)
HASHES = tuples(st.binary(max_size=16))
READINESS = st.builds(Readiness, NAMES, TEXTS, st.none() | st.floats(0, 1), IDS)
REPORTS = st.builds(
    SessionReport,
    events=tuples(EVENTS),
    steps=tuples(STATS, 2),
    blocks=tuples(st.builds(BlockUpdate, NUMBERS, HASHES, HASHES, st.booleans()), 2),
    calls=tuples(
        st.builds(CallResult, IDS, st.none() | ADAPTERS, st.none() | st.builds(RemoteError, NAMES, TEXTS)),
        2,
    ),
    status=st.none() | st.builds(SessionStatus, READINESS, STATS, FLOATS),
)


@given(MESSAGE_LISTS)
def test_messages_of_the_client_come_back_equal(messages: list[SessionMessage]) -> None:
    assert repr(MESSAGES.loads(MESSAGES.dumps(messages))) == repr(messages)


@given(REPORTS)
def test_reports_come_back_equal(report: SessionReport) -> None:
    line = REPORT.dumps(report)
    assert b"\n" not in line
    assert repr(REPORT.loads(line)) == repr(report)


def test_every_field_of_a_request_is_tried() -> None:
    """A field that is added to a type needs a strategy here."""
    generated = REQUESTS.wrapped_strategy.kwargs  # type: ignore[attr-defined]
    assert {field.name for field in fields(Request)} == set(generated)


def test_greeting_comes_back_equal() -> None:
    memory = DeviceMemory(2**40, 0.9, 1, 2**39, 3, 4, 5, is_measured=True)
    info = engine_info()
    adapters = (AdapterInfo("/a", "digest", 8, 4, 100),)
    info = replace(info, resolved=replace(info.resolved, memory=memory), adapters=adapters, gpu="H100")
    greeting = Greeting("0.1.0", "abc", info, 12.5)
    assert GREETING.loads(GREETING.dumps(greeting)) == greeting


@pytest.mark.parametrize("value", [-math.inf, math.inf, 5e-324, 0.1, 1.7976931348623157e308])
def test_floats_keep_all_bits(value: float) -> None:
    event = TokenEvent("a", 0, (1,), (TokenLogprob(1, value, 1, ()),))
    back = REPORT.loads(REPORT.dumps(SessionReport((event,)))).events[0]
    assert back == event


def test_nan_comes_back() -> None:
    codec: Codec[list[float]] = Codec(list[float])
    assert math.isnan(codec.loads(codec.dumps([math.nan]))[0])


ERROR_CLASSES = [
    each for each in vars(errors).values() if isinstance(each, type) and issubclass(each, ForewordError)
]


@pytest.mark.parametrize("error_class", ERROR_CLASSES)
def test_errors_keep_class_text_and_field(error_class: type[ForewordError]) -> None:
    error = error_class("why", "field")
    back = RemoteError.from_error(error).to_error()
    assert type(back) is error_class
    assert (back.message, back.param, back.retry_after_s) == ("why", "field", error.retry_after_s)


def test_retry_time_of_an_error_is_kept() -> None:
    back = RemoteError.from_error(Overloaded("full", retry_after_s=7.5), "r").to_error()
    assert back.retry_after_s == 7.5


@pytest.mark.parametrize("name", ["Nonsense", "Any", "Terminated", "did_you_mean", "__builtins__"])
def test_error_of_an_unknown_class_is_a_failed_request(name: str) -> None:
    assert type(RemoteError(name, "why").to_error()) is RequestFailed


def submission(**changes: Any) -> str:
    request = {"id": "x", "prompt_ids": [1], "params": {}, "seed": 1} | changes
    return json.dumps([{"request": request}])


@pytest.mark.parametrize(
    ("body", "place"),
    [
        ("[{", ()),
        ("{}", ()),
        ('[{"requst":{}}]', (0, "requst")),
        ('[{"request":{}}]', (0, "request", "id")),
        (submission(sneed=2), (0, "request", "sneed")),
        (submission(priority="1"), (0, "request", "priority")),
        (submission(priority=1.5), (0, "request", "priority")),
        (submission(is_resumed=1), (0, "request", "is_resumed")),
        (submission(params={"top_pp": 1}), (0, "request", "params", "top_pp")),
        ('[{"remove":{"request_id":7}}]', (0, "remove", "request_id")),
    ],
)
def test_invalid_body_names_the_field(body: str, place: tuple[Any, ...]) -> None:
    with pytest.raises(ValidationError) as caught:
        MESSAGES.loads(body.encode())
    assert caught.value.errors()[0]["loc"] == place


def test_value_beyond_its_limit_names_the_field() -> None:
    with pytest.raises(InvalidRequest, match="temperature must be between 0 and 100"):
        MESSAGES.loads(submission(params={"temperature": -1}).encode())
