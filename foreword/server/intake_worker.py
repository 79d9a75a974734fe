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

from foreword.errors import InvalidRequest
from foreword.server.apis.body import StrictModel
from foreword.server.http.errors import validation_error
from foreword.workers.worker import receive_job, serve

UNREADABLE: Final = "There was an error parsing the body"  # FastAPI's words


def read_body(body_class: type[StrictModel], data: bytes) -> StrictModel:
    """The body as FastAPI reads it. Raises InvalidRequest."""
    try:
        value = json.loads(data)
    except json.JSONDecodeError as error:
        details = {"type": "json_invalid", "loc": ("body", error.pos), "ctx": {"error": error.msg}}
        raise validation_error([details]) from None
    except (RecursionError, ValueError):  # too deep, or no UTF-8
        raise InvalidRequest(UNREADABLE) from None
    try:
        body: StrictModel = _adapter(body_class).validate_python(value, from_attributes=True)
    except ValidationError as error:
        details_of = error.errors(include_url=False)
        raise validation_error([{**item, "loc": ("body", *item["loc"])} for item in details_of]) from None
    return body


@cache
def _adapter(body_class: type[StrictModel]) -> TypeAdapter[Any]:
    return TypeAdapter(body_class)


def start(body_classes: Sequence[type[StrictModel]]) -> Callable[[Connection], None]:
    """Returns the handler of bodies, each after its class and the most parts that it may hold."""
    for body_class in body_classes:
        _adapter(body_class)  # now: a job's CPU time is limited

    def handle(connection: Connection) -> None:
        body_class, max_parts = connection.recv()
        reply: StrictModel | InvalidRequest
        try:
            reply = body = read_body(body_class, receive_job(connection))
            body.check_num_parts(max_parts)
        except InvalidRequest as error:
            reply = error
        connection.send_bytes(pickle.dumps(reply, pickle.HIGHEST_PROTOCOL))

    return handle


if __name__ == "__main__":
    sys.exit(serve(int(sys.argv[1]), start))
