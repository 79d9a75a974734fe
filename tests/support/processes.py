"""Processes of a machine that dies."""

from __future__ import annotations

import os
import signal
from pathlib import Path


def kill_tree(pid: int) -> None:
    """SIGKILL for a process and all its descendants, from the root."""
    children = [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    os.kill(pid, signal.SIGKILL)
    for child in children:
        kill_tree(child)
