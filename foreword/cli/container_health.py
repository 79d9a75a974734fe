"""Docker's health check, `python -m foreword.cli.container_health`: asks the server's /health.

The server is process 1, whose command line has its flags; environment and config file are the same here.
Exit codes: 0 for 200, while the server replaces its engine or drains, or if process 1 is no server; else 1.
While it loads the exit code is 1: Docker counts no failure in the start period, which the first success ends.
"""

from __future__ import annotations

import argparse
import http.client
import json
import socket
import sys
from pathlib import Path

from foreword.cli.configuration import read_config
from foreword.cli.flags import add_serve_arguments

TIMEOUT_S = 4.0
TRANSIENT = ("restarting", "draining")  # a supervisor that kills the container would only lose answers


def check(command_line: Path) -> int:
    """The exit code for the server with this command line, a file as in /proc."""
    words = command_line.read_text(encoding="utf-8", errors="replace").removesuffix("\0").split("\0")
    if "serve" not in words:
        return 0
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_serve_arguments(parser)
    args, _ = parser.parse_known_args(words[words.index("serve") + 1 :])
    config = read_config(args)
    connection = http.client.HTTPConnection(config.host, config.port, timeout=TIMEOUT_S)
    try:
        if config.uds is not None:
            connection.sock = socket.socket(socket.AF_UNIX)
            connection.sock.settimeout(TIMEOUT_S)
            connection.sock.connect(config.uds)
        connection.request("GET", "/health")
        response = connection.getresponse()
        return int(response.status != 200 and json.loads(response.read()).get("status") not in TRANSIENT)
    except (OSError, http.client.HTTPException, ValueError) as error:
        print(f"no answer from {config.uds or f'{config.host} port {config.port}'}: {error}")
        return 1
    finally:
        connection.close()


if __name__ == "__main__":
    sys.exit(check(Path("/proc/1/cmdline")))
