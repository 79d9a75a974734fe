"""Verdicts of the overload benchmark on fake findings; its clients against a fake server."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable

import pytest

from benchmarks.overload import LoadGenerator, OverloadFindings, _body, proportional_bytes, verdicts
from benchmarks.raw_http import ConnectionBroken, RawConnection
from benchmarks.soak import SoakReading
from foreword.config.options import Config

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def good() -> OverloadFindings:
    readings = [SoakReading(size, 0, 0) for size in (50, 90, 100, 100, 100, 104)]
    return OverloadFindings(
        asked=900,
        answered=90,
        refused=700,
        seconds=10,
        first_s=[0.1, 11.0],
        health_s=[0.1],
        readings=readings,
    )


def test_good_findings_pass_every_verdict() -> None:
    assert all(holds for holds, _ in verdicts(good(), 10, 10.0, 10.0).values())


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("load", {"asked": 700}),
        ("answered or refused with 429", {"wrong": Counter({"500": 1})}),
        ("answered or refused with 429", {"refused": 0}),
        ("first token in time", {"first_s": [15.1]}),
        ("/health says yes", {"unhealthy": Counter({"status 503": 1})}),
        ("memory flat", {"readings": [SoakReading(size, 0, 0) for size in (50, 90, 100, 100, 106, 107)]}),
    ],
)
def test_bad_figure_fails_its_verdict(name: str, changed: dict[str, object]) -> None:
    found = good()
    for key, value in changed.items():
        setattr(found, key, value)
    assert [check for check, (holds, _) in verdicts(found, 10, 10.0, 10.0).items() if not holds] == [name]


def test_proportional_bytes_of_this_process() -> None:
    assert proportional_bytes(1 << 30) == 0


def test_bodies_are_mixed() -> None:
    bodies = [_body("m", number) for number in range(200)]
    assert {body["stream"] for body in bodies} == {True, False}
    assert {body.get("n", 1) for body in bodies} == {1, 2} and any(
        "response_format" in body for body in bodies
    )


def response(status: str, body: bytes, headers: str = "") -> bytes:
    return f"HTTP/1.1 {status}\r\n{headers}Content-Length: {len(body)}\r\n\r\n".encode() + body


def streamed(*pieces: bytes) -> bytes:
    chunks = b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces)
    return b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n"


async def asked(*replies: bytes) -> OverloadFindings:
    """Findings of a client that gets these replies in turn, one for each request."""
    left = list(replies)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while left:
            head = await reader.readuntil(b"\r\n\r\n")
            size = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
            await reader.readexactly(size)
            reply = left.pop(0)
            writer.write(reply)
            if not reply:
                break
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    load = LoadGenerator.__new__(LoadGenerator)
    load._findings, load._config, load._model = OverloadFindings(), Config(), "m"
    connection = RawConnection(*server.sockets[0].getsockname()[:2])
    for number in range(len(replies)):
        await load._ask(connection, 2 * number)  # even ones are streams
    connection.close()
    server.close()
    await server.wait_closed()
    return load._findings


EVENT = b'data: {"choices": [{"delta": {"content": "a"}, "finish_reason": %s}]}\n\n'


async def test_complete_stream_is_answered() -> None:
    found = await asked(streamed(EVENT % b"null", EVENT % b'"stop"'), streamed(EVENT % b'"length"'))
    assert (found.answered, found.refused, len(found.first_s)) == (2, 0, 2) and not sum(found.wrong.values())


async def test_refusal_has_retry_after() -> None:
    found = await asked(
        response("429 Too Many", b"{}", "Retry-After: 1\r\n"), response("429 Too Many", b"{}")
    )
    assert found.refused == 2 and found.wrong == {"429 without Retry-After": 1}


@pytest.mark.parametrize(
    ("reply", "complaint"),
    [
        (response("500 No", b"broken"), "500 b'broken'"),
        (streamed(EVENT % b"null"), "without a finish_reason"),
        (streamed(b'data: {"error": {"message": "gone"}}\n\n'), "gone"),
        (b"", "IncompleteReadError"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n", "ValueError"),
    ],
)
async def test_invalid_reply_is_a_failure(reply: bytes, complaint: str) -> None:
    found = await asked(reply)
    assert found.answered == 0 and any(complaint in what for what in found.wrong)


async def test_unreachable_server_is_a_failure() -> None:
    server = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    server.close()
    await server.wait_closed()
    with pytest.raises((ConnectionBroken, OSError)):
        await RawConnection("127.0.0.1", port).request("GET", "/health")
