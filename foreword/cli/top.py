"""`foreword top`: the models, the load, the drafters and the keys of a running server, in the terminal.

It reads /v1/models, /metrics, and with the key of an admin /admin/keys and /admin/usage.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from foreword.cli.client import connection_options
from foreword.cli.configuration import environment_name
from foreword.cli.terminal import format_count, show_controls
from foreword.errors import ConfigError, ForewordError
from foreword.metrics.definitions import MODEL_LABEL, PREFIX

DEFAULT_URL = "http://127.0.0.1:8000"
KEY_VARIABLE = environment_name("api_key")
TIMEOUT_S = 5.0
WINDOW_S = 10.0  # rates are means over this time
MAX_KEYS = 10  # rows of keys: those with most tokens today
UNKNOWN = "-"
BROKEN_STATUS = ("failed",)

Card = Mapping[str, Any]
Labels = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A server at one moment. Fields that it does not report are empty."""

    at_s: float  # monotonic
    models: Sequence[Card] = ()
    samples: Mapping[str, Sequence[tuple[Mapping[str, str], float]]] = field(default_factory=dict)
    keys: Sequence[Card] = ()  # rows of /admin/keys
    usage: Sequence[Card] = ()  # rows of /admin/usage: today, by key

    def sums(self, name: str, *labels: str) -> dict[Labels, float]:
        """Sums of a metric, without PREFIX, by the values of these labels."""
        sums: dict[Labels, float] = {}
        for found, value in self.samples.get(name, ()):
            group = tuple(found.get(label, "") for label in labels)
            sums[group] = sums.get(group, 0.0) + value
        return sums


def parse_metrics(text: str) -> dict[str, list[tuple[Mapping[str, str], float]]]:
    """Samples by name, without PREFIX. Raises ValueError."""
    samples: dict[str, list[tuple[Mapping[str, str], float]]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            samples.setdefault(sample.name.removeprefix(PREFIX), []).append((sample.labels, sample.value))
    return samples


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        *("--url", "--base-url"),
        default=DEFAULT_URL,
        metavar="URL",
        help=f"the server (default: {DEFAULT_URL})",
    )
    parser.add_argument(
        "--api-key",
        default=os.environ.get(KEY_VARIABLE),
        metavar="KEY",
        help=f"a key of the server; that of an admin shows all keys (default: ${KEY_VARIABLE})",
    )
    parser.add_argument(
        "--interval", type=float, default=2.0, metavar="S", help="seconds between updates (default: 2)"
    )
    parser.add_argument("--once", action="store_true", help="print once, as in a pipe")


def run(args: argparse.Namespace) -> int:
    if not 0.1 <= args.interval <= 3600:
        raise ConfigError(f"interval must be from 0.1 to 3600 seconds, got {args.interval:g}", "interval")
    console = Console(file=sys.stdout, highlight=False)
    with contextlib.closing(ServerReader(args.url, args.api_key)) as reader:
        if args.once or not console.is_terminal:
            first = reader.read()
            time.sleep(args.interval)
            console.print(render(reader.url, first, reader.read()))
            return 0
        with contextlib.suppress(KeyboardInterrupt):
            _watch(console, reader, args.interval)
    return 0


def _watch(console: Console, reader: ServerReader, interval_s: float) -> None:
    """Show the server until Ctrl-C, also while it does not answer."""
    history: deque[Snapshot] = deque()
    gone_since_s: float | None = None
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            note = None
            try:
                history.append(reader.read())
                gone_since_s = None
            except ForewordError as error:
                gone_since_s = gone_since_s or time.monotonic()
                note = f"{error.message}; asked for {time.monotonic() - gone_since_s:.0f} s"
            while len(history) > 2 and history[-1].at_s - history[1].at_s >= WINDOW_S:
                history.popleft()
            if history:
                live.update(render(reader.url, history[0], history[-1], note), refresh=True)
            else:
                live.update(Text(note or ""), refresh=True)
            time.sleep(interval_s)


class ServerReader:
    """Takes snapshots of a server."""

    def __init__(self, url: str, api_key: str | None) -> None:
        options = connection_options(url, api_key)
        self.url = str(options["base_url"])
        self._http = httpx.Client(**options | {"timeout": TIMEOUT_S})
        self._may_be_admin = bool(api_key)

    def close(self) -> None:
        self._http.close()

    def read(self) -> Snapshot:
        """Raises ForewordError if there is no answer, or none of such a server."""
        try:
            models = self._get("/v1/models")["data"]
            samples = parse_metrics(self._http.get("/metrics").raise_for_status().text)
            keys, usage = self._read_keys() if self._may_be_admin else ((), ())
        except httpx.HTTPError as error:
            raise ForewordError(f"{self.url} does not answer: {error or type(error).__name__}") from None
        except (ValueError, KeyError, TypeError):
            raise ForewordError(f"{self.url} answers otherwise than foreword does") from None
        return Snapshot(time.monotonic(), models, samples, keys, usage)

    def _read_keys(self) -> tuple[Sequence[Card], Sequence[Card]]:
        """Keys and their usage of today; nothing for a key that is no admin's."""
        response = self._http.get("/admin/keys")
        if response.status_code in (403, 404):
            self._may_be_admin = False
            return (), ()
        today = datetime.now(UTC).date().isoformat()
        usage = self._http.get("/admin/usage", params={"by": "key", "since": today})
        return response.json()["keys"], usage.json()["usage"] if usage.status_code == 200 else ()

    def _get(self, path: str) -> Any:
        response = self._http.get(path)
        if response.status_code == 401:
            raise ForewordError(f"{self.url} wants an API key: --api-key KEY or {KEY_VARIABLE}")
        if response.status_code == 503:  # it loads, or shuts down
            raise ForewordError(f"{self.url}: {response.json()['error']['message']}")
        return response.raise_for_status().json()


@dataclass(frozen=True, slots=True)
class _Rates:
    """Growth of counters between two snapshots."""

    before: Snapshot
    now: Snapshot

    def growth(self, name: str, *labels: str) -> dict[Labels, float]:
        """By the values of these labels. A counter that began anew counts from zero."""
        before = self.before.sums(name, *labels)
        return {
            group: value - (before.get(group, 0.0) if before.get(group, 0.0) <= value else 0.0)
            for group, value in self.now.sums(name, *labels).items()
        }

    def per_second(self, name: str, *labels: str) -> dict[Labels, float]:
        seconds = self.now.at_s - self.before.at_s
        return {
            group: growth / seconds for group, growth in self.growth(name, *labels).items() if seconds > 0
        }

    def share(self, part: str, whole: str, *labels: str) -> dict[Labels, float]:
        """`part` by `whole` over the time between, or since the server started if nothing happened in it."""
        shares: dict[Labels, float] = {}
        totals = self.now.sums(whole, *labels)
        grown, grown_parts = self.growth(whole, *labels), self.growth(part, *labels)
        parts = self.now.sums(part, *labels)
        for group, total in totals.items():
            if grown[group]:
                shares[group] = grown_parts.get(group, 0.0) / grown[group]
            elif total:
                shares[group] = parts.get(group, 0.0) / total
        return shares


def render(url: str, before: Snapshot, now: Snapshot, note: str | None = None) -> RenderableType:
    """The server between two snapshots; `note` tells why there is no newer one."""
    rates = _Rates(before, now)
    parts: list[RenderableType] = [_heading(url, rates)]
    if note is not None:
        parts.append(Text(show_controls(note), style="bold red"))
    parts += [Text(), _models_table(rates)]
    if now.samples.get("spec_draft_tokens_total"):
        parts += [Text(), _drafters_table(rates)]
    if (tiers := _tiers_table(now)).row_count:
        parts += [Text(), tiers]
    if now.keys:
        parts += [Text(), _keys_table(now)]
    return Group(*parts)


def _heading(url: str, rates: _Rates) -> Text:
    versions = [labels.get("version", "") for labels, _ in rates.now.samples.get("info", ())]
    started_s = rates.now.sums("process_start_time_seconds").get(())
    facts = [] if started_s is None else [f"up {_format_time(time.time() - started_s)}"]
    facts.append(f"{sum(rates.per_second('http_requests_total').values()):.1f} requests/s")
    memory = rates.now.sums("process_resident_memory_bytes").get(())
    facts += [] if memory is None else [f"API process {_format_bytes(memory)}"]
    version = f" {versions[0]}" if versions else ""
    return Text(f"foreword{version} at {url}\n{', '.join(facts)}", style="bold")


def _models_table(rates: _Rates) -> Table:
    now = rates.now
    running, waiting, full, memory = (
        now.sums(name, MODEL_LABEL)
        for name in (
            "requests_running",
            "requests_waiting",
            "kv_cache_usage_ratio",
            "engine_process_resident_memory_bytes",
        )
    )
    generated = rates.per_second("generation_tokens_total", MODEL_LABEL)
    prompts = rates.per_second("prompt_tokens_total", MODEL_LABEL)
    accepted = rates.share("spec_accepted_tokens_total", "spec_draft_tokens_total", MODEL_LABEL)
    hits = rates.share("prefix_cache_hits_total", "prefix_cache_queries_total", MODEL_LABEL)
    first = rates.share("time_to_first_token_seconds_sum", "time_to_first_token_seconds_count", MODEL_LABEL)
    columns = ("status", "memory", "run", "wait", "tok/s", "prompt/s", "first", "accept", "kv", "cached")
    table = _table("model", *columns)
    cards = [card for card in now.models if _is_main_name(card)]
    for card in cards:
        # A server of one model may have no label for it.
        name = str(card["id"])
        group = (name,) if (name,) in running or len(cards) > 1 else next(iter(running), ("",))
        status = str(card.get("status") or "loaded")
        table.add_row(
            _name(name),
            Text(_describe_status(card, status), style="red" if status in BROKEN_STATUS else ""),
            _format_bytes(card.get("memory_bytes") or memory.get(group) or memory.get(("",))),
            _format(running.get(group)),
            _format(_add(waiting.get(group), card.get("waiting_requests"))),
            _format(generated.get(group), 1),
            _format(prompts.get(group), 1),
            _format_seconds(first.get(group)),
            _format_share(accepted.get(group)),
            _format_share(full.get(group)),
            _format_share(hits.get(group)),
        )
    return table


def _is_main_name(card: Card) -> bool:
    """Whether it is a model's first name, and no alias, variant or adapter."""
    return card.get("root", card["id"]) == card["id"] and not (card.get("parent") or card.get("variant_of"))


def _describe_status(card: Card, status: str) -> str:
    progress, replicas = card.get("progress"), card.get("replicas") or ()
    if progress is not None and status == "loading":
        return f"{status} {progress:.0%}"
    if len(replicas) > 1:
        status = f"{status} {sum(each.get('status') == 'ok' for each in replicas)}/{len(replicas)}"
    return f"{status}, pinned" if card.get("pinned") and card.get("status") == "loaded" else status


def _drafters_table(rates: _Rates) -> Table:
    labels = MODEL_LABEL, "drafter"
    drafted = rates.per_second("spec_draft_tokens_total", *labels)
    accepted = rates.per_second("spec_accepted_tokens_total", *labels)
    shares = rates.share("spec_accepted_tokens_total", "spec_draft_tokens_total", *labels)
    lengths = rates.share("spec_emitted_tokens_total", "spec_drafts_total", *labels)
    table = _table("drafter", "model", "drafted/s", "accepted/s", "accept", "tokens/step", num_left=2)
    for group, total in sorted(rates.now.sums("spec_draft_tokens_total", *labels).items()):
        if total:
            length = lengths.get(group)
            table.add_row(
                _name(group[1]),
                _name(group[0]),
                _format(drafted.get(group), 1),
                _format(accepted.get(group), 1),
                _format_share(shares.get(group)),
                _format(length, 2),
            )
    return table


def _tiers_table(now: Snapshot) -> Table:
    """Where the KV of prompts came from since the start, of models with tiers or KV taken over."""
    queries, hits, adopted = (
        now.sums(name, MODEL_LABEL)
        for name in ("prefix_cache_queries_total", "prefix_cache_hits_total", "kv_adopted_tokens_total")
    )
    table = _table(
        "kv from", "model", "tokens", "cached", "taken over", "read", "written", "saved", num_left=2
    )
    for group, total in sorted(queries.items()):
        tiers = [row for tier in ("host", "disk") for row in _tier_rows(now, tier, group)]
        if not (tiers or adopted.get(group)):
            continue
        from_memory = max(hits.get(group, 0.0) - sum(tokens for _, tokens, *_ in tiers), 0.0)
        taken_over = format_count(adopted.get(group, 0.0))
        rows = [("memory", from_memory, taken_over, UNKNOWN, UNKNOWN, UNKNOWN), *tiers]
        for tier, tokens, *cells in rows:
            share = _format_share(tokens / total if total else None)
            table.add_row(_name(tier), _name(group[0]), format_count(tokens), share, *cells)
    return table


def _tier_rows(
    now: Snapshot, tier: str, group: tuple[str, ...]
) -> Iterator[tuple[str, float, str, str, str, str]]:
    """The row of a tier that has read or written: its name, tokens read from it, and further cells."""

    def total(name: str, *direction: str) -> float:
        labels = (MODEL_LABEL, *(["direction"] if direction else []))
        return now.sums(f"kv_{tier}_{name}_total", *labels).get((*group, *direction), 0.0)

    read, written = total("bytes", "read"), total("bytes", "write")
    if read + written:
        saved = _format_seconds(max(total("avoided_seconds") - total("seconds", "read"), 0.0))
        yield tier, total("hit_tokens"), UNKNOWN, _format_bytes(read), _format_bytes(written), saved


def _keys_table(now: Snapshot) -> Table:
    """The keys with most tokens today."""
    used = {str(row["key"]): row for row in now.usage}
    table = _table("key", "open", "requests", "prompt", "cached", "generated", "today", "of")
    rows = list(_key_rows(now.keys, used))
    for _, cells in sorted(rows, key=lambda row: -row[0])[:MAX_KEYS]:
        table.add_row(*cells)
    if len(rows) > MAX_KEYS:
        table.add_row(f"and {len(rows) - MAX_KEYS} more")
    return table


def _key_rows(keys: Sequence[Card], used: Mapping[str, Card]) -> Iterator[tuple[int, Sequence[str | Text]]]:
    """(tokens today, cells); without a usage database tokens since the server started."""
    for key in keys:
        meter = key["usage"]
        row = used.get(str(key["name"]), {}) if used else meter
        prompt, generated = (int(row.get(name, 0)) for name in ("prompt_tokens", "generated_tokens"))
        today, limit = meter.get("tokens_today", prompt + generated), key.get("tokens_per_day")
        over = limit is not None and today >= limit
        cells = (
            _name(str(key["name"])),
            _format(meter["open"]),
            _format(row.get("requests", 0)),
            format_count(prompt),
            format_count(row["cached_tokens"]) if "cached_tokens" in row else UNKNOWN,
            format_count(generated),
            Text(format_count(today), style="red" if over else ""),
            UNKNOWN if limit is None else format_count(limit),
        )
        yield today, cells


def _table(*columns: str, num_left: int = 1) -> Table:
    """Names on the left, which are cut where the terminal is narrow; numbers on the right."""
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="reverse")
    for index, column in enumerate(columns):
        if index < num_left:
            table.add_column(column, no_wrap=True, overflow="ellipsis", min_width=8, max_width=40)
        elif column == "status":
            table.add_column(column, no_wrap=True)
        else:
            table.add_column(column, justify="right", no_wrap=True)
    return table


def _name(text: str) -> Text:
    return Text(show_controls(text) or UNKNOWN)


def _format(value: float | None, digits: int = 0) -> str:
    return UNKNOWN if value is None else f"{value:.{digits}f}"


def _add(*values: float | None) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _format_share(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.0%}"


def _format_seconds(value: float | None) -> str:
    if value is None:
        return UNKNOWN
    return f"{value * 1000:.0f}ms" if value < 1 else f"{value:.1f}s"


def _format_bytes(value: float | None) -> str:
    return UNKNOWN if value is None else format_count(value).replace(" ", "") + "B"


def _format_time(seconds: float) -> str:
    """ "42 s", "17 min", "3.5 h", "12.0 d"."""
    if seconds >= 2 * 86_400:
        return f"{seconds / 86_400:.1f} d"
    if seconds >= 3600:
        return f"{seconds / 3600:.1f} h"
    return f"{seconds / 60:.0f} min" if seconds >= 60 else f"{max(seconds, 0):.0f} s"
