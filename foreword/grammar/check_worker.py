"""The process that compiles a grammar for the first time, and may fall over it.

Started by `grammar.check` as `python -m foreword.grammar.check_worker FD`. It is sent a vocabulary, then one constraint after the
other, and answers each with the reason against it, empty if there is none. What takes too much processor time, memory or
stack ends the process; the reason is in its exit code.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
import threading
import time
from multiprocessing.connection import Connection

from llguidance import LLMatcher

from foreword.core.structured import StructuredOutput, Vocabulary
from foreword.errors import InvalidRequest
from foreword.grammar import limits
from foreword.grammar.compiler import CompiledGrammar, error_reason
from foreword.grammar.vocab import GrammarVocab

__all__ = ["READY", "check_grammar", "main"]

READY = b"ready"


def main(fd: int) -> int:
    """Serve the checker at the other end of `fd`; returns the exit code."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the checker decides when to stop
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    threading.stack_size(limits.WORKER_STACK_BYTES)
    thread = threading.Thread(target=_serve, args=(Connection(fd),))
    thread.start()
    thread.join()
    return 0


def _serve(connection: Connection) -> None:
    try:
        vocabulary: Vocabulary = connection.recv()
        tokens = GrammarVocab(vocabulary, len(vocabulary.tokens))
        resource.setrlimit(resource.RLIMIT_AS, (limits.WORKER_BYTES, limits.WORKER_BYTES))
        connection.send_bytes(READY)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # the last words of a process that is meant to die
        while True:
            connection.send_bytes(_with_cpu_limit(connection.recv(), tokens).encode())
    except (EOFError, OSError):
        return  # the checker is gone


def _with_cpu_limit(structured: StructuredOutput, vocab: GrammarVocab) -> str:
    """The objection, or the death of this process."""
    signal.setitimer(signal.ITIMER_PROF, limits.COMPILE_CPU_S)
    try:
        return check_grammar(structured, vocab) or ""
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def check_grammar(structured: StructuredOutput, vocab: GrammarVocab) -> str | None:
    """Why a constraint cannot be served; None: it can."""
    try:
        llg = CompiledGrammar(structured, vocab).new_matcher()
    except InvalidRequest as error:
        return error.message.removeprefix(f"{structured.field}: ")
    return _dry_run(llg, vocab)


def _dry_run(llg: LLMatcher, vocab: GrammarVocab) -> str | None:
    """Follow some output of the grammar, as the engine would: masks, drafts that are rolled back, text that is forced."""
    for step in range(limits.NUM_DRY_RUN_MASKS):
        begin = time.thread_time()
        mask = int.from_bytes(llg.compute_bitmask(), "little") & ~(1 << vocab.end_id)
        if llg.is_error():
            return (
                "no text conforms"
                if step == 0 and "NoExtensionBias" in error_reason(llg)
                else error_reason(llg)
            )
        if time.thread_time() - begin > limits.MASK_CPU_S:
            return f"a token of the answer may take more than {limits.MASK_CPU_S:g} s to constrain"
        for token_id in vocab.eos_ids:
            mask &= ~(1 << token_id)
        if not mask or llg.is_stopped():
            return None
        token_id = _pick_bit(mask, step, vocab.vocab_size)
        if not (llg.consume_token(token_id) and llg.rollback(1) and llg.consume_token(token_id)):
            return error_reason(llg) or "the grammar cannot go back by a token, which it must"
        llg.deep_copy().compute_ff_bytes()
    return None


def _pick_bit(mask: int, step: int, size: int) -> int:
    """One of the bits that are set, another one in each step."""
    begin = step * 40_503 % size
    above = mask >> begin
    bits, offset = (above, begin) if above else (mask, 0)
    return (bits & -bits).bit_length() - 1 + offset


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
