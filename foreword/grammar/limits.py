"""All limits on grammars.

Three checks follow each other. `grammar.compiler` rejects texts that are too large or too deep.
`grammar.check` compiles the rest in a worker process with limits on time, memory and stack. The engine
compiles it again with the same limits of llguidance, which hold for each token mask as well.
"""

from __future__ import annotations

from typing import Final

from llguidance import LLParserLimits

# Text of a constraint; core.structured_output limits its size in bytes.
MAX_NESTING: Final = 100  # nested brackets
MAX_PROPERTIES: Final = 10_000  # keywords, values and names of a schema
MAX_CHOICES: Final = 10_000  # texts of a choice, values of an enum
MAX_REPEAT: Final = 10_000  # {m,n} of a regex; lengths in a schema
MAX_RULES: Final = 5_000  # rules of a GBNF grammar
MAX_TAGS: Final = 256  # tags of a structural tag

# Worker that compiles a grammar for the first time.
COMPILE_CPU_S: Final = 1.0  # CPU time of one grammar and its dry run, or of writing one
COMPILE_CPU_S_PER_MB: Final = 2.0  # more for each MB of the job, as for bodies
COMPILE_WALL_S: Final = 30.0  # bounds stalls on an overloaded machine
WORKER_BYTES: Final = 2 << 30  # address space beyond the vocabulary
WORKER_STACK_BYTES: Final = 1 << 20  # half of the smallest stack that runs grammars in the engine
NUM_WORKERS: Final = 3
QUEUE_TIMEOUT_S: Final = 30.0  # wait for a worker
NUM_DRY_RUN_MASKS: Final = 16  # masks of the dry run
MASK_CPU_S: Final = 0.05  # CPU time of one mask of the dry run

# Caches.
MAX_CACHED_VERDICTS: Final = 4096
MAX_CACHED_CONSTRAINTS: Final = 16  # one of 512 tools has about 1 MB
MAX_REASON_CHARS: Final = 500  # length of a cached reason
MAX_CACHED_GRAMMARS: Final = 128  # compiled grammars in the engine
RECOMPILE_CPU_S: Final = 0.02  # below this compile time, a grammar gets more lexers


# Cost of the lexer states of one row: of its tokens and its mask, computed by a lexer without any. It decides
# whether an answer fails. 25 to 40 units of llguidance's fuel take about 1 us; so a row takes 0.2 s at most.
MAX_ROW_COST: Final = 5_000_000
# A shared lexer is replaced at this cost, below that of a row: a row that it serves would not fail alone.
MAX_LEXER_COST: Final = 4_000_000
# Upper bound, so that a lexer's cost is rarely read. Fast processors reach 160,000,000 with cheap states.
MAX_COST_PER_S: Final = 1_000_000_000


def parser_limits(kind: str, for_check: bool = False) -> LLParserLimits:
    """Limits of llguidance. Fuel and items are counted, not timed: equal on every machine.

    Fuel pays for states that a lexer has not cached, so what a mask spends depends on the masks before it.
    Only the check, whose lexer is new, limits each mask; Matcher decides about rows.
    """
    # 512 tools, whose names may stand anywhere in an answer, need more.
    check_fuel = 1_000_000 if kind == "tools" else 100_000
    return LLParserLimits(
        max_items_in_row=600,
        initial_lexer_fuel=1_000_000,  # pays for building the lexer; 50 units take about 1 us
        step_lexer_fuel=check_fuel if for_check else MAX_ROW_COST,
        step_max_items=50_000,  # Earley items for one mask; 20 take about 1 us
        max_lexer_states=50_000,  # 1 to 2 kB each
        max_grammar_size=200_000,
        verbose_errors=True,  # hold the lexer's cost
    )
