"""Generations without HTTP: submission, ends and faults, and the queue of deltas of a slow reader."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from functools import partial
from itertools import product
from typing import Any

import pytest

from foreword.chat_formats.events import CallArguments, ChatEvent, ContentText, ReasoningText
from foreword.config.options import Config
from foreword.core.outputs import DraftResult, ErrorEvent, TokenEvent
from foreword.core.params import SamplingParams
from foreword.errors import EngineDead, InvalidRequest, Overloaded, RequestFailed
from foreword.server.answering.generation import MERGE_AFTER, DeltaQueue, Generation, build_requests
from foreword.server.apis.chat.routes import ChatWriter
from foreword.server.apis.choices_writer import ChoicesWriter, ResponseHeader, ResponseOptions
from foreword.server.apis.completions import CompletionWriter
from foreword.server.auth.keys import RequestContext
from foreword.server.http.responses import sse_event
from foreword.server.loaded_model import LoadedModel
from foreword.tokenizer.output_processor import ChoiceOutput, OutputDelta, TokenPiece
from tests.support.apps import open_app
from tests.support.fakes import FakeEngineClient, FakeOutput
from tests.support.waiting import wait_until_async


async def server_of(resources: AsyncExitStack, client: FakeEngineClient, **config: Any) -> LoadedModel:
    app = await resources.enter_async_context(open_app(client, Config(**config)))
    model: LoadedModel
    (model,) = app.state.models.loaded
    return model


def generation(server: LoadedModel, n: int = 2) -> Generation:
    context = RequestContext("", 0)
    return Generation(server, build_requests(server, [1, 2], SamplingParams(n=n), "r", context), context)


async def test_unstarted_generation_is_freed(resources: AsyncExitStack) -> None:
    client = FakeEngineClient()
    server = await server_of(resources, client)
    begun = generation(server)
    begun.start()
    begun.close()
    assert client.aborted == ["r-0", "r-1"] and not client.live
    assert server.admission.num_open == 0
    begun.close()
    assert server.admission.num_open == 0


async def test_refused_choice_aborts_the_others(
    resources: AsyncExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = FakeEngineClient()
    server = await server_of(resources, client)
    listen = client.listen

    def fail_listen(request: Any, on_event: Any) -> None:
        if request.id == "r-1":
            raise EngineDead("gone")
        listen(request, on_event)

    monkeypatch.setattr(client, "listen", fail_listen)
    with pytest.raises(EngineDead):
        generation(server).start()
    assert client.aborted == ["r-0"] and server.admission.num_open == 0


async def test_queue_is_bounded(resources: AsyncExitStack) -> None:
    server = await server_of(resources, FakeEngineClient(), max_waiting=3)
    first, second = generation(server), generation(server)
    first.start()
    with pytest.raises(Overloaded):
        second.start()
    second.close()
    assert server.admission.num_open == 2
    first.close()


async def test_incomplete_engine_answer_is_an_error(
    resources: AsyncExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = FakeEngineClient(FakeOutput("abc", hang_after=1))
    begun = generation(await server_of(resources, client), n=1)
    begun.start()
    asyncio.get_running_loop().call_later(0.03, client.live.discard, "r-0")
    with pytest.raises(RequestFailed, match="without an answer"):
        await begun.collect()
    begun.close()


async def test_server_fault_ends_only_its_choice(
    resources: AsyncExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = FakeEngineClient()
    begun = generation(await server_of(resources, client))

    def broken(event: Any) -> Any:
        raise ZeroDivisionError

    class Broken:
        def __getattr__(self, name: str) -> Any:
            return broken if name == "feed" else getattr(healthy, name)

    healthy = begun.outputs[0]
    begun.outputs[0] = Broken()  # type: ignore[call-overload]
    begun.start()
    ends = [
        (index, item)
        async for index, item in begun.deltas()
        if isinstance(item, RequestFailed) or item.finish_reason
    ]
    assert sorted(index for index, _ in ends) == [0, 1]
    assert begun.outputs[1].text == "Hello world" and client.aborted == ["r-0"]
    begun.close()


async def test_only_the_first_choice_has_a_queue_deadline(resources: AsyncExitStack) -> None:
    """The others wait for the first choice alone."""
    client = FakeEngineClient()
    begun = generation(await server_of(resources, client, queue_timeout=5.0), n=3)
    begun.start()
    assert [request.queue_deadline_s is None for request in client.submitted] == [False, True, True]
    begun.close()


def late_request(index: int, others: FakeOutput) -> Any:
    error = Overloaded("it waited too long", retry_after_s=1)
    return lambda request: (
        FakeOutput(fail_after=0, error=error) if request.id.endswith(f"-{index}") else others
    )


async def test_queue_timeout_fails_all_waiting_choices(resources: AsyncExitStack) -> None:
    client = FakeEngineClient(late_request(0, FakeOutput(delay_s=1000)))
    server = await server_of(resources, client)
    begun = generation(server, n=3)
    begun.start()
    ends = [item async for _, item in begun.deltas()]
    assert len(ends) == 3 and all(isinstance(item, Overloaded) for item in ends)
    assert client.aborted == ["r-1", "r-2"] and not client.live
    assert b'requests_rejected_total{model="m",reason="queue_timeout"} 1.0' in server.recorder.render()
    begun.close()


@pytest.mark.parametrize("choice", [0, 1])
@pytest.mark.parametrize("builder_type", [ChatWriter, CompletionWriter])
async def test_repeated_events_equal_their_chunks(
    resources: AsyncExitStack, builder_type: type[ChoicesWriter], choice: int
) -> None:
    server = await server_of(resources, FakeEngineClient())
    begun = generation(server)
    header = ResponseHeader("id", 1, "model", "fingerprint", 7)
    more: tuple[Any, ...] = (None, 2) if builder_type is CompletionWriter else ()
    fast, plain = (
        builder_type(server, begun, 2, header, ResponseOptions(usage=True), *more) for _ in range(2)
    )
    texts = ["first", "", 'quotes " and \\', "lines\n\x00", "ä 漢 🙂", "last"]
    kinds: list[Callable[[str], ChatEvent]] = [ContentText, ReasoningText, partial(CallArguments, 0)]
    for index, (text, kind) in enumerate(product(texts, kinds)):
        reason = "stop" if index == len(texts) * len(kinds) - 1 else None
        event = TokenEvent("r", index, (index,), finish_reason=reason)
        delta = OutputDelta(text, event, reason, events=(kind(text),) if text else ())
        chunk = plain.chunk(choice, delta)
        assert fast.event(choice, delta) == (None if chunk is None else sse_event(chunk))
    begun.close()


def logprob_generation(server: LoadedModel, name: str, n: int = 1) -> Generation:
    """Four log-probabilities a token."""
    context, params = RequestContext("", 0), SamplingParams(n=n, logprobs=3)
    return Generation(server, build_requests(server, [1, 2], params, name, context), context)


async def test_answer_with_the_most_logprobs_ends_where_all_have_too_many(resources: AsyncExitStack) -> None:
    """They wait for the end of an answer, or for a client that does not read its stream."""
    texts = {"small": "ab", "large": "x" * 20, "last": "abcd"}
    client = FakeEngineClient(lambda request: FakeOutput(texts[request.id.split("-")[0]], delay_s=0.001))
    server = await server_of(resources, client, max_waiting_tokens=4 * 100)
    held = server.admission.held_logprobs
    small, large = (logprob_generation(server, name) for name in ("small", "large"))
    for each in (small, large):
        each.start()
    await small.collect()
    assert held.num_held >= 3 * 4 and len(small.outputs[0].logprobs) == 3
    await large.collect()
    assert held.num_held == 24 * 4
    last = logprob_generation(server, "last")
    last.start()
    with pytest.raises(Overloaded, match=r"hold 104 log-probabilities of at most 100, this one 8;") as error:
        await last.collect()
    assert error.value.param == "logprobs" and client.aborted == ["last-0"]
    for each in (small, large, last):
        each.close()
    assert held.num_held == 0


async def test_answer_with_too_many_logprobs_of_its_own_ends(resources: AsyncExitStack) -> None:
    client = FakeEngineClient(lambda request: FakeOutput("x" * (20 if "large" in request.id else 5)))
    server = await server_of(resources, client, max_waiting_tokens=4 * 100)
    large, small = logprob_generation(server, "large", n=2), logprob_generation(server, "small")
    large.start()
    with pytest.raises(InvalidRequest, match="more than 100 log-probabilities; a stream of"):
        await large.collect()
    small.start()
    await small.collect()
    assert len(small.outputs[0].logprobs) == 6 and client.aborted == ["large-0", "large-1"]
    assert not any(output.logprobs for output in large.outputs)
    while len(large._delta_queue):
        _, item = await large._delta_queue.get()
        assert not isinstance(item, OutputDelta) or not (item.logprobs or item.event.logprobs)
    assert server.admission.held_logprobs.num_held == 24
    large.close()
    small.close()


async def test_finished_answer_that_is_not_read_ends_where_all_have_too_many(
    resources: AsyncExitStack,
) -> None:
    """Its client gets an error as the last event, and no other answer fails for it."""
    client = FakeEngineClient(lambda request: FakeOutput("x" * (10 if "unread" in request.id else 5)))
    server = await server_of(resources, client, max_waiting_tokens=4 * 100)
    unread, victim = logprob_generation(server, "unread", n=2), logprob_generation(server, "victim")
    unread.start()
    first = await anext(deltas := unread.deltas())
    await wait_until_async(lambda: all(output.finished for output in unread.outputs))
    assert server.admission.held_logprobs.num_held == 2 * 11 * 4
    victim.start()
    await victim.collect()
    assert len(victim.outputs[0].logprobs) == 6 and server.admission.held_logprobs.num_held == 6 * 4
    rest = [item async for _, item in deltas]
    assert isinstance(first[1], OutputDelta) and len(rest) == 2
    assert all(isinstance(item, Overloaded) and item is unread.error for item in rest)
    assert not any(output.logprobs for output in unread.outputs) and not client.aborted
    assert not victim.end(Overloaded("it is being written"))
    unread.close()
    assert not unread.end(Overloaded("it has ended"))
    victim.close()
    assert server.admission.held_logprobs.num_held == 0


class CountedOutputs(list[ChoiceOutput]):
    """Counts the choices that are read."""

    num_read = 0

    def __iter__(self) -> Iterator[ChoiceOutput]:
        for output in super().__iter__():
            self.num_read += 1
            yield output

    def __getitem__(self, index: Any) -> Any:
        self.num_read += 1
        return super().__getitem__(index)


@pytest.mark.parametrize("end", ["close", "error", "queue_timeout"])
async def test_end_of_many_choices_reads_each_a_few_times_and_logs_a_line(
    resources: AsyncExitStack, caplog: pytest.LogCaptureFixture, end: str
) -> None:
    caplog.set_level("INFO", "foreword")
    client = FakeEngineClient(FakeOutput(hang_after=0))
    server = await server_of(resources, client)
    context = RequestContext("", 0)
    prompts = (build_requests(server, [1], SamplingParams(), f"r-{i}", context) for i in range(200))
    begun = Generation(server, [request for (request,) in prompts], context)
    begun.start()
    outputs = begun.outputs = CountedOutputs(begun.outputs)
    error = Overloaded("it waited too long", retry_after_s=1)
    caplog.clear()
    if end == "close":
        begun.close()
    elif end == "error":
        assert begun.end(error)
    else:
        begun._on_event(0, outputs[0], ErrorEvent("r-0-0", error))
    assert outputs.num_read < 10 * len(outputs)
    assert len(client.aborted) == len(outputs) - (end == "queue_timeout")
    assert len(caplog.messages) == (1 if end == "close" else 2)  # of the error, and of the request
    if end != "close":
        assert len([item async for _, item in begun.deltas()]) == len(outputs)
    begun.close()


async def test_stream_that_is_read_holds_no_logprobs(resources: AsyncExitStack) -> None:
    client = FakeEngineClient(FakeOutput("x" * 60, delay_s=0.001))
    server = await server_of(resources, client, max_waiting_tokens=4 * 100)
    begun = logprob_generation(server, "r")
    begun.start()
    async for index, item in begun.deltas():
        assert isinstance(item, OutputDelta) and len(item.logprobs) == 1
        begun.drop_logprobs(index, item)
    assert begun.outputs[0].num_tokens == 61 and server.admission.held_logprobs.num_held == 0
    begun.close()


COUNT = 10 * MERGE_AFTER + 3


def delta(index: int, end: str | None = None) -> OutputDelta:
    event = TokenEvent("r", index, (index,), draft=DraftResult("ngram", 2, 1), finish_reason=end)
    return OutputDelta(f"{index} ", event, end, pieces=(TokenPiece(f"{index} ", "ngram"),))


async def taken(backlog: DeltaQueue) -> list[tuple[int, OutputDelta]]:
    found = []
    while len(backlog):
        index, item = await backlog.get()
        assert isinstance(item, OutputDelta)
        found.append((index, item))
    return found


async def test_fast_reader_gets_each_delta() -> None:
    backlog = DeltaQueue()
    for index in range(COUNT):
        backlog.put(0, delta(index))
        assert await backlog.get() == (0, delta(index))


async def test_waiting_deltas_are_merged() -> None:
    backlog = DeltaQueue()
    for index in range(COUNT):
        for choice in (0, 1):
            backlog.put(choice, delta(index, "stop" if index == COUNT - 1 else None))
    assert len(backlog) < 2 * (COUNT / MERGE_AFTER + MERGE_AFTER)
    found = await taken(backlog)
    assert [choice for choice, _ in found[:4]] == [0, 1, 0, 1], "choices alternate"
    for choice in (0, 1):
        deltas = [one for index, one in found if index == choice]
        assert "".join(one.text for one in deltas) == "".join(
            piece.text for one in deltas for piece in one.pieces
        )
        assert "".join(one.text for one in deltas) == "".join(f"{index} " for index in range(COUNT))
        tokens = [token for one in deltas for token in one.event.token_ids]
        assert tokens == list(range(COUNT))
        assert all(one.event.index == one.event.token_ids[0] for one in deltas)
        assert sum(one.event.draft.num_accepted for one in deltas if one.event.draft) == COUNT
        assert [one.finish_reason for one in deltas if one.finish_reason] == ["stop"] and deltas[
            -1
        ].finish_reason


async def test_taken_deltas_are_not_merged() -> None:
    backlog = DeltaQueue()
    for index in range(MERGE_AFTER - 1):
        backlog.put(0, delta(index))
    assert await backlog.get() == (0, delta(0))
    for index in range(MERGE_AFTER - 1, COUNT):
        backlog.put(0, delta(index))
    assert [token for _, one in await taken(backlog) for token in one.event.token_ids] == list(
        range(1, COUNT)
    )


async def test_error_is_last_and_wakes_the_reader() -> None:
    backlog, error = DeltaQueue(), RequestFailed("broken")
    waiting = asyncio.create_task(backlog.get())
    await asyncio.sleep(0)
    for index in range(MERGE_AFTER - 1):
        backlog.put(3, delta(index))
    backlog.put(3, error)
    first = await waiting
    rest = [await backlog.get() for _ in range(len(backlog))]
    assert first == (3, delta(0)) and rest[-1] == (3, error) and len(rest) == MERGE_AFTER - 1
