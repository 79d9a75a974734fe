"""Checks of the Responses API's events: by the SDK's own types, strictly, and by applying them to items."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from typing import Any, get_args

import httpx
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel

# Fields that OpenAI's types lack: those of Open Responses (of a delta's logprobs: `bytes`), a call's `name`
# at its end (openai 2 demands it, 3 dropped it), and Foreword's own.
EXTENSIONS = frozenset({"bytes", "name", "store", "presence_penalty", "frequency_penalty", "metrics"})


@cache
def _event_types() -> dict[str, type[BaseModel]]:
    (union, _) = get_args(ResponseStreamEvent)
    return {get_args(kind.model_fields["type"].annotation)[0]: kind for kind in get_args(union)}


def check_event(event: dict[str, Any]) -> None:
    """The SDK's type of this event takes it, and knows all of its fields."""
    _check_fields(_event_types()[event["type"]].model_validate(event), event["type"])


def check_response(response: dict[str, Any]) -> None:
    _check_fields(Response.model_validate(response), "response")


def _check_fields(value: Any, path: str) -> None:
    if isinstance(value, BaseModel):
        assert set(value.model_extra or ()) <= EXTENSIONS, (path, value.model_extra)
        for name in type(value).model_fields:
            _check_fields(getattr(value, name), f"{path}.{name}")
    elif isinstance(value, list):
        for index, item in enumerate(value):
            _check_fields(item, f"{path}[{index}]")


def apply_events(events: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The output items that the events build, one at a time; each event must fit to the item before it."""
    items: list[dict[str, Any]] = []
    text = ""
    is_open = False
    for event in events:
        kind = event["type"].removeprefix("response.")
        if kind in ("created", "in_progress", "completed", "incomplete", "failed"):
            continue
        if kind == "output_item.added":
            assert not is_open and event["output_index"] == len(items)
            assert event["item"].get("status", "in_progress") == "in_progress"
            items.append(event["item"])
            text, is_open = "", True
            continue
        assert is_open and event["output_index"] == len(items) - 1
        item = items[-1]
        if kind == "output_item.done":
            assert event["item"]["id"] == item["id"] and event["item"]["type"] == item["type"]
            done = event["item"]
            whole = done.get("arguments", done.get("input"))
            assert text == (done["content"][0]["text"] if whole is None else whole)
            items[-1], is_open = done, False
            continue
        assert event["item_id"] == item["id"]
        if kind == "content_part.added":
            assert item["content"] == [] and event["content_index"] == 0
            item["content"].append(event["part"])
        elif kind.endswith(".delta"):
            assert "content" not in item or item["content"], "a delta before its part"
            text += event["delta"]
        elif kind != "content_part.done":
            assert kind.endswith(".done")
            whole = event.get("text", event.get("arguments", event.get("input")))
            assert whole == text
    assert not is_open
    return items


def read_stream(http: httpx.Client, **body: Any) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Checked events of a streamed response, and the response of the last one."""
    events = []
    with http.stream("POST", "/v1/responses", json={**body, "stream": True}) as reply:
        assert reply.status_code == 200, reply.read()
        for block in reply.read().decode().split("\n\n")[:-1]:
            name, data = block.split("\n")
            events.append(json.loads(data.removeprefix("data: ")))
            assert name == f"event: {events[-1]['type']}"
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    for event in events:
        check_event(event)
    last = events[-1]
    assert last["type"] == f"response.{last['response']['status']}"
    assert last["response"]["id"] == events[0]["response"]["id"]
    if last["type"] != "response.failed":
        assert apply_events(events) == last["response"]["output"]
    return events, last["response"]


def without_ids(response: dict[str, Any]) -> dict[str, Any]:
    """A response without what differs between equal requests."""
    left_out = ("id", "created_at", "completed_at", "metrics")
    bare = {name: value for name, value in response.items() if name not in left_out}
    bare["output"] = [
        {name: value for name, value in item.items() if name not in ("id", "call_id")}
        for item in response["output"]
    ]
    return bare
