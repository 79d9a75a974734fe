"""An encoder as a process: work comes in over a socket, vectors go out.

Started by `encoders.client` as `python -m foreword.encoders.process FD`. It ends when its client does.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
from typing import IO

import torch

from foreword.config import Config
from foreword.core.logs import set_up_logging
from foreword.encoders.local import LocalEncoder, encoder_threads, load_local
from foreword.encoders.messages import Done, Failure, Ready, Refused, Work, framed, read_from
from foreword.errors import ForewordError, RequestFailed
from foreword.kernels.registry import select

__all__ = ["main"]

NICENESS = 10  # streams of the generating engine come first: of a core that both want, this process gets a tenth
LOG = logging.getLogger(__name__)


def main(fd: int) -> int:
    """Serve the client at the other end of `fd`; returns the exit code."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the client decides when to stop
    os.nice(NICENESS)
    with socket.socket(fileno=fd) as connection:
        try:
            return _run(connection.makefile("rb"), connection)
        except (EOFError, BrokenPipeError, ConnectionResetError):
            return 0  # the client is gone, and with it the reason to be


def _run(pipe: IO[bytes], connection: socket.socket) -> int:
    config: Config = read_from(pipe)
    set_up_logging(config.log_level, "%(levelname)s %(name)s: %(message)s")
    threads = encoder_threads(config)
    try:
        ops = select("cpu", threads=threads, isa=config.cpu_isa)
        torch.set_num_threads(ops.threads(threads))
        encoder = load_local(config, ops)
    except ForewordError as error:
        _send(connection, Refused(error))
        return 1
    _send(connection, Ready(encoder.info))
    while True:
        _send(connection, _done(encoder, read_from(pipe)))


def _done(encoder: LocalEncoder, work: Work) -> Done | Failure:
    try:
        return Done(work.number, tuple(encoder.compute(work.inputs)))
    except Exception as error:  # whatever it is, it belongs to this work alone
        LOG.exception("an encoding failed")
        return Failure(work.number, RequestFailed(f"the encoder failed on this input: {type(error).__name__}"))


def _send(connection: socket.socket, message: Done | Failure | Ready | Refused) -> None:
    connection.sendall(framed(message))


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
