"""The worker process of `tokenizer.chat_template`: compiles and renders chat templates in Jinja's sandbox."""

from __future__ import annotations

import json
import re
import sys
from collections import deque
from collections.abc import Callable
from datetime import datetime
from functools import lru_cache
from multiprocessing.connection import Connection
from traceback import walk_tb
from typing import Any, Final, NoReturn

import jinja2
import jinja2.debug  # a lazy import of Jinja, which could not be read later
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from foreword.errors import shown
from foreword.workers.worker import serve

RENDERED, REFUSED, NOT_COMPILED = b"rendered", b"refused ", b"compile "  # 8 bytes before the text of a reply
MAX_RENDERED_CHARACTERS: Final = 32_000_000
MAX_REASON_CHARACTERS: Final = 500
MAX_CACHED_TEMPLATES: Final = 16
# Jinja and Python import modules for these on first use, when no file can be opened any more.
LAZY_IMPORTS: Final = r"""{{ strftime_now('%Y') }}{{ '\N{EM DASH}' }}
{{ 'a' | wordwrap(9) | striptags }}{{ lipsum(1) }}{{ raise_exception('') }}"""
WIDE_FIELD: Final = re.compile(r"\d{3}")


class _Generation(Extension):
    """`{% generation %}` marks the assistant's tokens for training; a prompt ignores it."""

    tags = {"generation"}  # noqa: RUF012 - as jinja2 declares it

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def render(source: str, variables: dict[str, Any]) -> bytes:
    """The reply to a job: the text, or why the template does not compile or refuses the variables."""
    try:
        template = _compile(source)
    except jinja2.TemplateSyntaxError as error:
        return NOT_COMPILED + f"has a syntax error in line {error.lineno}: {error}".encode("utf-8", "replace")
    except Exception as error:  # nesting that is too deep fails in Jinja or in Python's compiler
        return NOT_COMPILED + f"cannot be compiled ({type(error).__name__})".encode()
    try:
        text = template.render(**variables)
        if len(text) > MAX_RENDERED_CHARACTERS:
            raise jinja2.TemplateError(f"it renders more than {MAX_RENDERED_CHARACTERS} characters")
    except Exception as error:  # a template may fail in any way on unexpected messages
        reason = str(error)[:MAX_REASON_CHARACTERS] or type(error).__name__
        if type(error) is not jinja2.TemplateError:  # not the template's own raise_exception()
            reason += f" (line {_error_line(error)} of the template)"
        return REFUSED + reason.encode("utf-8", "replace")
    return RENDERED + text.encode("utf-8", "surrogatepass")


def _error_line(error: Exception) -> int:
    """Line of the template in which the error was raised: Jinja rewrites tracebacks."""
    lines = (line for frame, line in walk_tb(error.__traceback__) if frame.f_code.co_filename == "<template>")
    return max(deque(lines, maxlen=1), default=0)


@lru_cache(MAX_CACHED_TEMPLATES)
def _compile(source: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment.from_string(source)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    if WIDE_FIELD.search(pattern):  # strftime would pad without a limit
        raise jinja2.TemplateError(f"strftime_now writes a date, got the format {shown(pattern)}")
    return datetime.now().strftime(pattern)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """As in transformers: Jinja's own filter escapes `<` and `&` for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def start(_: None) -> Callable[[Connection], None]:
    render(LAZY_IMPORTS, {})

    def handle(connection: Connection) -> None:
        try:
            source, variables = connection.recv()
        except EOFError:  # the pool is gone
            raise
        except Exception as error:  # an object whose class this process cannot import
            reason = f"messages and chat_template_kwargs must be plain values: {error}"[
                :MAX_REASON_CHARACTERS
            ]
            connection.send_bytes(REFUSED + reason.encode("utf-8", "replace"))
        else:
            connection.send_bytes(render(source, variables))

    return handle


if __name__ == "__main__":
    sys.exit(serve(int(sys.argv[1]), start))
