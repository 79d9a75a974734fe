"""`foreword reload`: replace the engines of a running server, one after another, under open streams."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any, Final

import httpx

from foreword.cli.banner import local_url
from foreword.cli.client import connection_options
from foreword.cli.configuration import read_config
from foreword.cli.flags import add_config_options

ROUTE: Final = "/admin/reload"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--url", "--base-url", metavar="URL", help="the server (default: that of --host and --port, or --uds)"
    )
    add_config_options(parser, (), more=("api_key", "host", "port", "uds"))


def run(args: argparse.Namespace, transport: httpx.BaseTransport | None = None) -> int:
    """Print the progress; 1 if the server refuses, or an engine does not come back."""
    config = read_config(args)
    if args.url is None and config.uds is not None:
        transport = transport or httpx.HTTPTransport(uds=config.uds)
    options = connection_options(args.url or local_url(config.host, config.port), config.api_key)
    url = options["base_url"]
    try:
        with httpx.Client(**options, transport=transport) as client, client.stream("POST", ROUTE) as response:
            for line in response.iter_lines():
                if error := _print_progress(line):
                    print(f"foreword reload: {error}", file=sys.stderr)
                    return 1
            return int(not response.is_success)
    except httpx.HTTPError as error:
        print(f"foreword reload: {url}: {error or type(error).__name__}", file=sys.stderr)
        return 1


def _print_progress(line: str) -> str | None:
    """Print a line of the answer, or return its error."""
    try:
        content: Any = json.loads(line)
    except ValueError:
        return f"this is no answer of a Foreword server: {line:.200}"
    if "status" not in content:
        return str(content.get("error", {}).get("message", content))
    print(content["status"], flush=True)
    return None
