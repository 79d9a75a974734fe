"""An encoder as a process: work comes in over a socket, vectors go out.

Started by `encoders.client` as `python -m foreword.embedding.worker FD`. It ends when its client does.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
from typing import IO

import torch

from foreword.config.options import Config
from foreword.embedding.local import LocalEncoder, load_local_encoder, num_encoder_threads
from foreword.embedding.messages import (
    EncodeBatch,
    EncodeBatchFailed,
    EncodeBatchResult,
    EncoderReady,
    EncoderStartFailed,
    pack_message,
    read_message,
)
from foreword.errors import ForewordError, RequestFailed
from foreword.kernels.registry import select_backend
from foreword.utils.logging import set_up_logging

__all__ = ["main"]

NICENESS = (
    10  # streams of the generating engine come first: of a core that both want, this process gets a tenth
)
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
    config: Config = read_message(pipe)
    set_up_logging(config.log_level, "%(levelname)s %(name)s: %(message)s")
    threads = num_encoder_threads(config)
    try:
        ops = select_backend("cpu", threads=threads, isa=config.cpu_isa)
        torch.set_num_threads(ops.num_torch_threads(threads))
        encoder = load_local_encoder(config, ops)
    except ForewordError as error:
        _send(connection, EncoderStartFailed(error))
        return 1
    _send(connection, EncoderReady(encoder.info))
    while True:
        _send(connection, _compute(encoder, read_message(pipe)))


def _compute(encoder: LocalEncoder, batch: EncodeBatch) -> EncodeBatchResult | EncodeBatchFailed:
    try:
        return EncodeBatchResult(batch.batch_id, tuple(encoder.compute_batch(batch.inputs)))
    except Exception as error:  # whatever it is, it belongs to this work alone
        LOG.exception("an encoding failed")
        return EncodeBatchFailed(
            batch.batch_id, RequestFailed(f"the encoder failed on this input: {type(error).__name__}")
        )


def _send(
    connection: socket.socket,
    message: EncodeBatchResult | EncodeBatchFailed | EncoderReady | EncoderStartFailed,
) -> None:
    connection.sendall(pack_message(message))


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
