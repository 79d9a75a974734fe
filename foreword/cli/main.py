"""The entry of the `foreword` command: signals are answered before anything is imported that takes time."""

from __future__ import annotations

import gc
import importlib
import signal
import sys
from collections.abc import Sequence

from foreword.cli.startup import startup_line

COMMAND_LINE = "foreword.cli.command_line"
EXIT_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 130 after Ctrl-C, the others in command_line.py.

    argv  None: the words of this process, which then answers signals, and shows what it waits for
    """
    if argv is not None:
        return int(importlib.import_module(COMMAND_LINE).run_command_line(argv))
    gc.disable()  # imports make little garbage; run_command_line() enables it after them
    words = sys.argv[1:]
    name = next((word for word in words[:1] if not word.startswith("-")), "")
    interrupted = " ".join(["foreword", *filter(None, [name])]) + ": interrupted\n"
    signal.signal(signal.SIGINT, lambda *_: startup_line.exit(interrupted, EXIT_INTERRUPTED))
    if name == "serve":  # nothing has started that needs a cleanup
        signal.signal(signal.SIGTERM, lambda *_: startup_line.exit("", 0))
    try:
        code = int(importlib.import_module(COMMAND_LINE).run_command_line(words, is_process=True))
        if code == EXIT_INTERRUPTED:
            interrupted = ""  # the command has said it
        return code
    except KeyboardInterrupt:  # while an error was printed
        startup_line.exit(interrupted, EXIT_INTERRUPTED)
        raise
    finally:
        # The exit of the interpreter takes a moment, too.
        signal.signal(signal.SIGINT, lambda *_: startup_line.exit(interrupted, EXIT_INTERRUPTED))
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        startup_line.end()
