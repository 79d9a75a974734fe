"""`foreword env`: versions, hardware and kernel backends, for a bug report."""

from __future__ import annotations

import argparse
import json
import platform
import re
import sys
from importlib.metadata import PackageNotFoundError, requires, version

from foreword.cli.startup import startup_line
from foreword.kernels.registry import list_backends
from foreword.planning.hardware import probe_hardware


def run(args: argparse.Namespace) -> int:
    sections = collect()
    startup_line.end()
    if args.json:
        print(json.dumps(sections))
        return 0
    for section, lines in sections.items():
        print(f"{section}:")
        for name, value in lines.items():
            print(f"  {name:<20} {value}")
    return 0


def collect() -> dict[str, dict[str, str]]:
    """Values by section and name."""
    machine = probe_hardware("auto")
    hardware = {name: _text(getattr(machine, name)) for name in type(machine).__dataclass_fields__}
    hardware["capability"] = ".".join(map(str, machine.capability)) if machine.gpu else "none"
    backends = {
        backend.name: ("available" if backend.available else "no") + f": {backend.reason}"
        for backend in list_backends()
    }
    return {"versions": _versions(), "hardware": hardware, "backends": backends}


def _versions() -> dict[str, str]:
    names = ["foreword", *_dependencies(), "triton"]
    return {
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        **{name: _version(name) for name in names},
    }


def _dependencies() -> list[str]:
    """Names of foreword's run-time dependencies, from its metadata."""
    try:
        lines = requires("foreword") or []
    except PackageNotFoundError:
        return ["torch"]
    return [re.split(r"[^\w.-]", line)[0] for line in lines if "extra ==" not in line]


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def _text(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
