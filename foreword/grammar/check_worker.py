"""The worker process of `grammar.check`: writes constraints, compiles them, follows some of their output."""

from __future__ import annotations

import pickle
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

from llguidance import LLMatcher

from foreword.chat_formats import families  # noqa: F401 - the parts of all formats: no file is opened later
from foreword.core.structured_output import StructuredOutput, Vocabulary
from foreword.errors import InvalidRequest
from foreword.grammar import limits
from foreword.grammar.compiler import CompiledGrammar, error_reason
from foreword.grammar.tool_calls import ConstraintTask
from foreword.grammar.vocab import GrammarVocab
from foreword.workers.worker import receive_job, serve


def start(vocabulary: Vocabulary) -> Callable[[Connection], None]:
    """Returns the handler of two jobs.

    A task is answered by its constraint or an InvalidRequest, a constraint by the reason to reject it, or "".
    """
    vocab = GrammarVocab(vocabulary, len(vocabulary.tokens))
    for for_tools in (False, True):
        vocab.tokenizer(for_tools)  # now: a job's CPU time is limited

    def handle(connection: Connection) -> None:
        job: StructuredOutput | ConstraintTask = pickle.loads(receive_job(connection))
        reply: object
        try:
            reply = job.constrain() if isinstance(job, ConstraintTask) else check_grammar(job, vocab) or ""
        except InvalidRequest as error:
            reply = error
        connection.send_bytes(pickle.dumps(reply))

    return handle


def check_grammar(structured: StructuredOutput, vocab: GrammarVocab) -> str | None:
    """The reason to reject a constraint; None to accept it."""
    try:
        llg = CompiledGrammar(structured, vocab, for_check=True).lexer().new_matcher()
    except InvalidRequest as error:
        return error.message.removeprefix(f"{structured.field}: ")
    return _dry_run(llg, vocab)


def _dry_run(llg: LLMatcher, vocab: GrammarVocab) -> str | None:
    """Follow an output of the grammar as the engine does: masks, rollback of drafts, jump-forward text."""
    for step in range(limits.NUM_DRY_RUN_MASKS):
        begin = time.thread_time()
        mask = int.from_bytes(llg.compute_bitmask(), "little") & ~(1 << vocab.end_id)
        if llg.is_error():
            is_empty = step == 0 and "NoExtensionBias" in error_reason(llg)
            return "no text conforms" if is_empty else error_reason(llg)
        if time.thread_time() - begin > limits.MASK_CPU_S:
            return f"its mask for one token takes more than {limits.MASK_CPU_S:g} s"
        for token_id in vocab.eos_ids:
            mask &= ~(1 << token_id)
        if not mask or llg.is_stopped():
            return None
        token_id = _pick_bit(mask, step, vocab.vocab_size)
        if not (llg.consume_token(token_id) and llg.rollback(1) and llg.consume_token(token_id)):
            return error_reason(llg) or "its matcher cannot roll back a token, which drafts need"
        llg.deep_copy().compute_ff_bytes()
    return None


def _pick_bit(mask: int, step: int, size: int) -> int:
    """Index of a set bit; varies with the step."""
    begin = step * 40_503 % size
    above = mask >> begin
    bits, offset = (above, begin) if above else (mask, 0)
    return (bits & -bits).bit_length() - 1 + offset


if __name__ == "__main__":
    sys.exit(serve(int(sys.argv[1]), start))
