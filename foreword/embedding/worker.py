"""The encoder process: receives batches over a socket and returns vectors.

Started by `embedding.client` as `python -m foreword.embedding.worker FD`. It ends with its client.
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
from foreword.embedding.encoder_messages import (
    EncodeBatch,
    EncodeBatchFailed,
    EncodeBatchResult,
    pack_message,
    read_message,
)
from foreword.embedding.local import LocalEncoder, load_local_encoder, num_encoder_threads
from foreword.errors import ForewordError, RequestFailed
from foreword.kernels.registry import select_backend
from foreword.planning.hardware import apply_placement
from foreword.utils.logging import set_up_logging

NICENESS = 10  # a tenth of a core that the engine needs too
LOG = logging.getLogger(__name__)


def main(fd: int) -> int:
    """Serve the client at the other end of `fd`; returns the exit code."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the client decides when to stop
    os.nice(NICENESS)
    with socket.socket(fileno=fd) as connection:
        try:
            return _run(connection.makefile("rb"), connection)
        except (EOFError, BrokenPipeError, ConnectionResetError):
            return 0  # the client is gone


def _run(pipe: IO[bytes], connection: socket.socket) -> int:
    config: Config = read_message(pipe)
    set_up_logging(config.log_level, "%(levelname)s %(name)s: %(message)s", config.log_format)
    try:
        apply_placement(config)
        threads = num_encoder_threads(config)
        ops = select_backend("cpu", threads=threads, isa=config.cpu_isa)
        torch.set_num_threads(ops.num_torch_threads(threads))
        encoder = load_local_encoder(config, ops)
    except ForewordError as error:
        connection.sendall(pack_message(error))
        return 1
    connection.sendall(pack_message(encoder.info))
    while True:
        connection.sendall(pack_message(_compute(encoder, read_message(pipe))))


def _compute(encoder: LocalEncoder, batch: EncodeBatch) -> EncodeBatchResult | EncodeBatchFailed:
    try:
        return EncodeBatchResult(batch.batch_id, tuple(encoder.compute_batch(batch.inputs)))
    except Exception as error:  # must not hurt other batches
        LOG.exception("encoder: a batch failed")
        failure = RequestFailed(f"the encoder failed on this input: {type(error).__name__}")
        return EncodeBatchFailed(batch.batch_id, failure)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
