"""The process that decodes and prepares pictures, and may fall over them.

Started by `media.workers` as `python -m foreword.multimodal.decode_worker FD`. It is sent a processor and limits, then one file after the
other, each behind SIZE or PIXELS. It answers in JSON, {"size": [height, width]} or {"reason": ...}; behind a size that was asked
for with PIXELS come the pixels in a message of their own. What SIZE is answered with is in the file's head, not turned.
What takes too much processor time or memory ends the picture, or the process; the reason is in its exit code.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from multiprocessing.connection import Connection

from PIL import Image

from foreword.multimodal import limits
from foreword.multimodal.base import ImageProcessor
from foreword.multimodal.decode import ImageError, decode, read_size
from foreword.multimodal.limits import MediaLimits

__all__ = ["PIXELS", "READY", "SIZE", "main"]

READY = b"ready"
SIZE, PIXELS = b"size", b"pixels"
MAX_COMMAND_BYTES = 16
STATM = "/proc/self/statm"


def main(fd: int) -> int:
    """Serve the pool at the other end of `fd`; returns the exit code."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the pool decides when to stop
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    connection = Connection(fd)
    try:
        processor, media_limits = connection.recv()
        _confine(media_limits)
        connection.send_bytes(READY)
        while True:
            _handle_command(connection, processor, media_limits)
    except (EOFError, OSError):
        return 0  # the pool is gone


def _confine(media_limits: MediaLimits) -> None:
    """From here on: bounded memory, no core dump, no file or socket beside those that are open."""
    Image.preinit()  # which imports parts of Pillow
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # the last words of a process that is meant to die
    num_bytes = (
        _address_space()
        + limits.WORKER_BYTES
        + media_limits.max_bytes
        + limits.BYTES_PER_PIXEL * media_limits.max_pixels
    )
    resource.setrlimit(resource.RLIMIT_AS, (num_bytes, num_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))


def _address_space() -> int:
    """Bytes that this process has mapped already; 0 where nobody tells."""
    try:
        with open(STATM, encoding="ascii") as file:
            return int(file.read().split()[0]) * resource.getpagesize()
    except OSError:
        return 0


def _handle_command(connection: Connection, processor: ImageProcessor, media_limits: MediaLimits) -> None:
    question = connection.recv_bytes(MAX_COMMAND_BYTES)
    data = connection.recv_bytes(media_limits.max_bytes)
    signal.setitimer(signal.ITIMER_PROF, limits.DECODE_CPU_S)
    try:
        if question == SIZE:
            size, pixels = read_size(data, media_limits.max_pixels), None
        else:
            image = decode(data, media_limits.max_pixels)
            size, pixels = (image.height, image.width), processor.to_pixels(image)
    except ImageError as error:
        _reply(connection, {"reason": str(error)})
    except MemoryError:
        _reply(connection, {"reason": "it takes too much memory to prepare"})
    else:
        _reply(connection, {"size": size})
        if pixels is not None:
            connection.send_bytes(pixels)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _reply(connection: Connection, message: dict[str, object]) -> None:
    connection.send_bytes(json.dumps(message).encode())


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
