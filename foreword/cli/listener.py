"""The socket of a server: bound before the model is loaded. Imports nothing that takes time."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from foreword.errors import ConfigError

SOCKET_MODE = 0o660  # the owner and group of a Unix socket may connect


def bind(host: str, port: int) -> socket.socket:
    """A bound socket, before the model is loaded. Raises ConfigError if the address is not available."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio sends at once (TCP_NODELAY) only on a socket that names its protocol. Otherwise an answer's body
    # waits for the client to acknowledge its head, some 45 ms on a kept connection.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise bind_error(error, host, port) from None
    return listener


@contextmanager
def bind_unix(path: Path) -> Iterator[socket.socket]:
    """A bound Unix socket, whose file is removed at the end; one that no server listens on is replaced.

    Raises ConfigError.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        try:
            _remove_stale_socket(path)
            before = os.umask(0o777 & ~SOCKET_MODE)
            try:
                listener.bind(str(path))
            finally:
                os.umask(before)
            listener.listen()  # at once: _remove_stale_socket() deletes sockets without a listener
            created = path.stat()
        except OSError as error:
            raise ConfigError(f"cannot listen on uds {path}: {error.strerror or error}", "uds") from None
        try:
            yield listener
        finally:
            with contextlib.suppress(OSError):
                if os.path.samestat(path.lstat(), created):  # not another server's
                    path.unlink()


def _remove_stale_socket(path: Path) -> None:
    """Remove the socket of a server that is gone. Raises ConfigError for any other file, OSError."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise ConfigError(f"uds {path} exists and is no socket; choose another path", "uds")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.setblocking(False)
        try:
            client.connect(str(path))
        except ConnectionRefusedError:
            return path.unlink()
        except BlockingIOError:  # its queue of connections is full
            pass
    raise ConfigError(f"uds {path} is in use by another server; choose another path", "uds")


def bind_error(error: OSError, host: str, port: int) -> ConfigError:
    """The error of a failed bind() or listen() in the user's words."""
    if error.errno == errno.EADDRINUSE:
        return ConfigError(
            f"port {port} on {host} is in use; choose another with --port (0 takes a free one)", "port"
        )
    return ConfigError(f"cannot listen on {host} port {port}: {error.strerror or error}", "host")
