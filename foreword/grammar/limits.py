"""Every limit on grammars, in one place: what a caller may ask of the machine that serves all.

Three walls stand behind each other. `grammar.compile` refuses what is too large or too deep by counting. What is left is
compiled in a worker process (`grammar.check`) under limits of time, memory and stack, so that only the worker falls.
What the worker could compile is compiled again by the engine, with the same limits of llguidance, which hold for each
token mask as well.
"""

from __future__ import annotations

from typing import Final

from llguidance import LLParserLimits

__all__ = ["parser_limits"]

# Of the text of a constraint; its size in bytes is limited by foreword.core.structured.
MAX_NESTING: Final = 100  # brackets within brackets, of a schema or a grammar
MAX_PROPERTIES: Final = 10_000  # keywords, values and names of a schema
MAX_CHOICES: Final = 10_000  # texts of a choice, values of an enum
MAX_REPEAT: Final = 10_000  # {m,n} of an expression, and the lengths that a schema names
MAX_RULES: Final = 5_000  # of a GBNF grammar
MAX_TAGS: Final = 256  # of a structural tag

# Of the worker that compiles a constraint for the first time.
COMPILE_CPU_S: Final = 1.0  # processor time for one grammar, its first masks included
COMPILE_WALL_S: Final = 8.0  # for a worker that sleeps, or a machine that is overloaded
START_WALL_S: Final = 60.0  # to start the worker and to read the vocabulary
WORKER_BYTES: Final = 2 << 30  # address space
WORKER_STACK_BYTES: Final = 1 << 20  # half of the smallest stack that runs grammars in the engine
NUM_WORKERS: Final = 2
QUEUE_TIMEOUT_S: Final = 10.0  # a grammar waits no longer for a worker
NUM_DRY_RUN_MASKS: Final = 16  # masks along a walk that the worker computes
MASK_CPU_S: Final = 0.05  # for one of them

# Of what was compiled before.
MAX_CACHED_VERDICTS: Final = 4096
MAX_REASON_CHARS: Final = 500  # characters of a reason that is kept and told
MAX_CACHED_GRAMMARS: Final = 128  # compiled grammars in the engine
RECOMPILE_CPU_S: Final = 0.02  # a grammar that compiles so fast is compiled again where that helps


def parser_limits() -> LLParserLimits:
    """What llguidance may spend. Fuel and items are counted, not timed: the same on every machine.

    initial_lexer_fuel  to build the expressions of a grammar, 50 of it take about a microsecond
    step_lexer_fuel     for one mask, 14 take about a microsecond
    step_max_items      Earley items for one mask, 20 take about a microsecond
    max_lexer_states    1 to 2 kB each
    """
    return LLParserLimits(
        max_items_in_row=600,
        initial_lexer_fuel=1_000_000,
        step_lexer_fuel=100_000,
        step_max_items=50_000,
        max_lexer_states=50_000,
        max_grammar_size=200_000,
        verbose_errors=False,
    )
