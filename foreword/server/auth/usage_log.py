"""Usage by key and model: counted in memory, written to the usage database before an answer ends."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sqlite3
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from operator import attrgetter
from pathlib import Path

from foreword.core.outputs import DraftResult
from foreword.server.auth.usage_db import Usage, UsageDatabase, UsageId, utc_day

logger = logging.getLogger("foreword.serve")

COMMIT_TIMEOUT_S = 1.0  # how long the end of an answer waits for the database
DAY_S = 86_400
_values = attrgetter(*Usage._fields)


class UsageCounter:
    """Usage of one model by one key since the server started; the fields are those of Usage."""

    __slots__ = ("_collected", "key", "model", *Usage._fields)

    def __init__(self, key: str, model: str) -> None:
        self.key = key
        self.model = model
        self.requests = self.errors = 0
        self.prompt_tokens = self.cached_tokens = self.generated_tokens = 0
        self.drafted_tokens = self.accepted_tokens = 0
        self._collected = Usage()

    def count_tokens(self, num_tokens: int, draft: DraftResult | None) -> None:
        """Tokens were delivered, after stop conditions, and `draft` was verified for them."""
        self.generated_tokens += num_tokens
        if draft is not None and not draft.is_forced:
            self.drafted_tokens += draft.num_drafted
            self.accepted_tokens += min(draft.num_accepted, num_tokens)

    def take_new(self) -> Usage | None:
        """The usage since the last call; None if there is none."""
        now = Usage(*_values(self))
        if now == self._collected:
            return None
        before, self._collected = self._collected, now
        return Usage(*(new - old for new, old in zip(now, before, strict=True)))


class UsageLog:
    """The counters of all keys, and the database. Used from one event loop.

    A database that fails stops no answer: what was not written stays in memory, and is written as soon as
    a write succeeds.

    path      of the database; None: usage is counted but not kept
    on_usage  called with key, model, and their new requests, prompt tokens and generated tokens
    on_error  called for every write that failed
    """

    def __init__(
        self,
        path: Path | None = None,
        on_usage: Callable[[str, str, int, int, int], None] | None = None,
        on_error: Callable[[], None] | None = None,
        now: Callable[[], float] = time.time,  # Unix time
    ) -> None:
        self.path = path
        self._on_usage = on_usage
        self._on_error = on_error
        self._now = now
        self._counters: dict[str, dict[str, UsageCounter]] = {}  # by key, model
        self._pending: dict[UsageId, Usage] = {}  # not yet written
        # Of the quotas: tokens of `_day` that this process has not counted (of other servers, and from
        # before its start), less those that it counted on earlier days.
        self._day = utc_day(now())
        self._others: dict[str, int] = {}
        self._written: dict[str, int] = {}  # tokens of this process in the database, by key
        self._database = None if path is None else UsageDatabase(path)
        self._executor = ThreadPoolExecutor(1, "usage") if path is not None else None
        self._lock = asyncio.Lock()  # held while the database writes
        self._next_write: asyncio.Task[None] | None = None  # waits for the lock
        self._is_failing = False

    def counter(self, key: str, model: str) -> UsageCounter:
        """The counter of requests of this key to this model (its name in answers)."""
        by_model = self._counters.setdefault(key, {})
        if model not in by_model:
            by_model[model] = UsageCounter(key, model)
        return by_model[model]

    def tokens_today(self, key: str) -> int:
        """Tokens of this UTC day, also those of other servers with the same database up to a second ago."""
        self._start_day()
        return self._others.get(key, 0) + self._counted(key)

    def seconds_left_today(self) -> float:
        """Until midnight, UTC."""
        return DAY_S - self._now() % DAY_S

    async def commit(self, counter: UsageCounter) -> None:
        """Write what the counter has counted. Returns also if the database fails, or takes too long."""
        self._collect((counter,))
        if self._database is None or self._is_failing:
            return
        await self._wait_written()

    async def flush(self) -> None:
        """Write what all counters have counted, also after a failure. Returns as commit()."""
        self._collect(counter for by_model in self._counters.values() for counter in by_model.values())
        if self._database is not None:
            await self._wait_written()

    async def close(self) -> None:
        """Write the rest and close the database."""
        if self._database is not None and self._executor is not None:
            await self.flush()
            await asyncio.get_running_loop().run_in_executor(self._executor, self._database.close)
            self._executor.shutdown()
            if self._pending:
                logger.error("usage database %s: %d rows are lost", self.path, len(self._pending))

    def _collect(self, counters: Iterable[UsageCounter]) -> None:
        day = utc_day(self._now())
        for counter in counters:
            new = counter.take_new()
            if new is None:
                continue
            if self._on_usage is not None:
                tokens = new.prompt_tokens, new.generated_tokens
                self._on_usage(counter.key, counter.model, new.requests, *tokens)
            if self._database is not None:
                self._add_pending({UsageId(day, counter.key, counter.model): new})

    def _add_pending(self, rows: Mapping[UsageId, Usage]) -> None:
        for row_id, usage in rows.items():
            self._pending[row_id] = self._pending.get(row_id, Usage()).plus(usage)

    async def _wait_written(self) -> None:
        """Write everything pending. Requests that end during a write share the next one."""
        if self._next_write is None:
            self._next_write = asyncio.create_task(self._write())
        # Unlike `await`, a cancel of this request leaves the write alone.
        done, _ = await asyncio.wait((self._next_write,), timeout=COMMIT_TIMEOUT_S)
        if not done:
            self._fail(f"a write takes longer than {COMMIT_TIMEOUT_S:g} s")

    async def _write(self) -> None:
        async with self._lock:
            self._next_write = None
            self._start_day()
            batch, self._pending, day = self._pending, {}, self._day
            try:
                loop = asyncio.get_running_loop()
                tokens = await loop.run_in_executor(self._executor, self._run_write, batch, day)
            except Exception as error:  # whatever it is, answers go on and the batch waits
                self._add_pending(batch)
                return self._fail(str(error))
            for row_id, usage in batch.items():
                self._written[row_id.key] = self._written.get(row_id.key, 0) + usage.tokens
            if tokens is not None and day == self._day:
                names = tokens.keys() | self._written.keys()
                self._others = {key: tokens.get(key, 0) - self._written.get(key, 0) for key in names}
            if self._is_failing:
                self._is_failing = False
                logger.info("usage database %s works again: %d rows are caught up", self.path, len(batch))

    def _run_write(self, batch: Mapping[UsageId, Usage], day: str) -> Mapping[str, int] | None:
        """In the thread of the database. An error means that nothing of the batch was written."""
        assert self._database is not None
        if not batch:
            return self._database.changed_tokens(day)
        self._database.add(batch)
        with contextlib.suppress(sqlite3.Error):
            return self._database.changed_tokens(day)
        return None

    def _fail(self, problem: str) -> None:
        if self._on_error is not None:
            self._on_error()
        if not self._is_failing:
            self._is_failing = True
            logger.error(
                "usage database %s: %s; answers go on, and their usage waits in memory", self.path, problem
            )

    def _start_day(self) -> None:
        """At midnight nothing is used; the next write tells what other servers have used since."""
        day = utc_day(self._now())
        if day != self._day:
            self._day = day
            self._others = {key: -self._counted(key) for key in self._counters}

    def _counted(self, key: str) -> int:
        """Tokens of this process since its start."""
        counters = self._counters.get(key, {}).values()
        return sum(counter.prompt_tokens + counter.generated_tokens for counter in counters)
