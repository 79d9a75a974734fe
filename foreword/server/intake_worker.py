"""The worker process of `server.intake`: reads and validates bodies."""

from __future__ import annotations

import json
import pickle
import sys
from collections.abc import Callable, Sequence
from functools import cache
from multiprocessing.connection import Connection
from typing import Any, Final

from pydantic import TypeAdapter, ValidationError

from foreword.errors import InvalidRequest, OverBudget
from foreword.server.apis.body import StrictModel
from foreword.server.http.errors import validation_error
from foreword.workers.worker import receive_job, serve

UNREADABLE: Final = "There was an error parsing the body"  # FastAPI's words
MAX_CONTAINERS: Final = 1 << 17  # lists and objects of a body: the server makes them again at once


def read_body(body_class: type[StrictModel], data: bytes) -> StrictModel:
    """The body as FastAPI reads it. Raises InvalidRequest, OverBudget for too many lists and objects."""
    try:
        value = json.loads(data)
    except json.JSONDecodeError as error:
        details = {"type": "json_invalid", "loc": ("body", error.pos), "ctx": {"error": error.msg}}
        raise validation_error([details]) from None
    except (RecursionError, ValueError):  # too deep, or no UTF-8
        raise InvalidRequest(UNREADABLE) from None
    # Brackets are counted first, which is quick; some of them may be inside of texts.
    might_exceed = data.count(b"[") + data.count(b"{") > MAX_CONTAINERS
    if might_exceed and holds_more_containers(value, MAX_CONTAINERS):
        raise OverBudget(f"the body holds more than {MAX_CONTAINERS} lists and objects, the limit")
    try:
        body: StrictModel = _adapter(body_class).validate_python(value, from_attributes=True)
    except ValidationError as error:
        details_of = error.errors(include_url=False)
        raise validation_error([{**item, "loc": ("body", *item["loc"])} for item in details_of]) from None
    return body


def holds_more_containers(value: Any, limit: int) -> bool:
    """Whether a value of JSON, itself a list or an object, has more of them in it, counted with it."""
    count, pending = 1, [value]
    while pending and count <= limit:
        items = pending.pop()
        values = items.values() if isinstance(items, dict) else items
        inner = [item for item in values if isinstance(item, (list, dict))]
        count += len(inner)
        pending += inner
    return count > limit


@cache
def _adapter(body_class: type[StrictModel]) -> TypeAdapter[Any]:
    return TypeAdapter(body_class)


def start(body_classes: Sequence[type[StrictModel]]) -> Callable[[Connection], None]:
    """Returns the handler of bodies, each after its class and the most parts that it may hold."""
    for body_class in body_classes:
        _adapter(body_class)  # now: a job's CPU time is limited

    def handle(connection: Connection) -> None:
        body_class, max_parts = connection.recv()
        try:
            body = read_body(body_class, receive_job(connection))
            body.check_num_parts(max_parts)
            body.check_constraints()
            reply = pickle.dumps(body, pickle.HIGHEST_PROTOCOL)
        except InvalidRequest as error:
            reply = pickle.dumps(error)
        except RecursionError:  # pickle goes less deep than the parser of JSON
            reply = pickle.dumps(InvalidRequest("the body is nested too deeply"))
        connection.send_bytes(reply)

    return handle


if __name__ == "__main__":
    sys.exit(serve(int(sys.argv[1]), start))
