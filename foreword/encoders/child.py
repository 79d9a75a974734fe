"""The encoder's process as its parent sees it. No torch."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys

from foreword.config import Config
from foreword.encoders.messages import EncodeBatchResult, EncoderInfo, EncodeBatchFailed, EncoderReady, EncoderStartFailed, EncodeBatch, pack_message, read_message_async
from foreword.errors import ConfigError

__all__ = ["EncoderProcess"]

CLOSE_TIMEOUT_S = 10.0
ENVIRONMENT = {"OMP_WAIT_POLICY": "PASSIVE"}  # torch's threads that spin take the cores from those they wait for


class EncoderProcess:
    """One process, from its start to its end."""

    def __init__(self, process: subprocess.Popen[bytes], reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._process = process
        self._reader = reader
        self._writer = writer

    @classmethod
    async def launch(cls, config: Config) -> EncoderProcess:
        """Start a process that loads `config.embedding_model`."""
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-m", "foreword.encoders.process", str(theirs.fileno())]
        environment = {**ENVIRONMENT, **os.environ}
        with theirs:
            process = subprocess.Popen(
                command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, process_group=0, env=environment
            )
        reader, writer = await asyncio.open_connection(sock=ours)
        writer.write(pack_message(config))
        return cls(process, reader, writer)

    async def wait_ready(self) -> EncoderInfo:
        """Wait until it takes work. Raises ConfigError or CheckpointError if it never will."""
        try:
            message: EncoderReady | EncoderStartFailed = await read_message_async(self._reader)
        except (EOFError, OSError):
            raise ConfigError("the encoder's process ended while it was loading; its last words are above") from None
        if isinstance(message, EncoderStartFailed):
            raise message.error
        return message.info

    def send(self, batch: EncodeBatch) -> None:
        """Never waits: what it does not take yet lies in a buffer."""
        self._writer.write(pack_message(batch))

    async def receive(self) -> EncodeBatchResult | EncodeBatchFailed:
        """Raises EOFError or OSError once it is gone."""
        message: EncodeBatchResult | EncodeBatchFailed = await read_message_async(self._reader)
        return message

    async def stop(self) -> None:
        """Make an end of it, whatever it does, and wait until it is gone."""
        self._writer.transport.abort()
        self._process.terminate()  # it has nothing to lose
        try:
            await asyncio.to_thread(self._process.wait, CLOSE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            await asyncio.to_thread(self._process.wait)
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()
