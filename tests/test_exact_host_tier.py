"""Answers are equal in bits with KV blocks from host memory. The engines run on a CPU."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from foreword.config.options import Config
from foreword.core.outputs import ErrorEvent
from foreword.core.request import Request
from foreword.engine import kv_tiers
from foreword.engine.engine import Engine
from foreword.errors import ConfigError
from foreword.kv_cache.host_tier import HostImages
from foreword.kv_cache.prefix_loader import PrefixLoader
from tests import test_exact_tiers
from tests.support.budget import some_of
from tests.support.checkpoints import write_checkpoint
from tests.support.engines import load_engine, make_request, run, tier_stats, token_hashes
from tests.support.heads import write_random_head
from tests.support.waiting import wait_until
from tests.test_exact_tiers import CASES, OPTIONS, SMALL, Answers, answers_of, conversations, wait_written

HOST: dict[str, Any] = {**SMALL, "kv_cache_host_memory": "64MiB"}
checkpoint, expected = test_exact_tiers.checkpoint, test_exact_tiers.expected
reading_is_faster = test_exact_tiers.reading_is_faster


def host_images(engine: Engine) -> HostImages:
    assert engine.prefix_loader is not None
    images = engine.prefix_loader.tiers[0].blocks
    assert isinstance(images, HostImages)
    return images


def answers_together(engine: Engine, requests: Sequence[Request]) -> Answers:
    """Answers of requests that run beside each other, twice: what they left is read."""
    first, again = (
        {name: token_hashes(events) for name, events in run(engine, requests).items()}
        for _ in range(2)
        if wait_written(engine) is None
    )
    assert first == again
    engine.close()
    return first


@pytest.mark.parametrize(
    "case", some_of([*CASES][::-1], 2)
)  # by default those that the disk's test leaves out
def test_answers_are_equal_with_blocks_from_host_memory(case: str, tmp_path: Path) -> None:
    family, options = CASES[case]
    checkpoint = write_checkpoint(tmp_path / "model", family, seed=3)
    requests = conversations(seed=len(case))
    requests += [replace(request, id=f"{request.id} again") for request in requests]
    if options.get("speculate") == "eagle3":
        options = {**options, "draft_model": str(write_random_head(tmp_path / "head", checkpoint))}
    expected = answers_of(load_engine(checkpoint, **OPTIONS, **options), requests)
    engine = load_engine(checkpoint, **HOST, **options)
    assert answers_of(engine, requests) == expected
    stats, num_prompt = tier_stats(engine, "host"), sum(len(request.prompt_ids) for request in requests)
    assert 0.2 * num_prompt < stats.hit_tokens < num_prompt, num_prompt
    assert stats.read_bytes and stats.written_bytes and not stats.refused and not stats.dropped_blocks


@pytest.mark.parametrize("family", ["llama", "qwen3_5_text"])
def test_host_memory_without_room_for_all_blocks_gives_up_the_oldest(tmp_path: Path, family: str) -> None:
    """Memory has the beginning of the first prompt, host memory its end."""
    checkpoint, (first, second) = write_checkpoint(tmp_path / "model", family, seed=3), conversations(1)[-2:]
    requests = [first, second, replace(first, id="again")]
    expected = answers_of(load_engine(checkpoint, **OPTIONS), requests)
    options = {**HOST, "kv_cache_memory": "440tokens"}
    whole = load_engine(checkpoint, **options)
    answers_of(whole, requests[:2])
    states = whole.info.resolved.states
    share = 0 if states is None else states.block_share(16)
    num_bytes = 30 * (host_images(whole).entry_bytes + share)
    assert len(host_images(whole).stored) > 30
    small = load_engine(checkpoint, **{**options, "kv_cache_host_memory": str(num_bytes)})
    assert answers_of(small, requests) == expected and tier_stats(small, "host").hit_tokens > 0
    images = host_images(small)
    assert len(images.stored) == images._memory.nbytes // images.entry_bytes == 30


def test_disk_below_host_memory_is_read_for_what_that_lacks(
    checkpoint: Path, expected: Answers, tmp_path: Path
) -> None:
    requests, both = conversations(1), {**HOST, "kv_cache_dir": str(tmp_path / "kv")}
    engine = load_engine(checkpoint, **both)
    assert answers_of(engine, requests) == expected
    host, disk = tier_stats(engine, "host"), tier_stats(engine, "disk")
    assert host.hit_tokens > 0 == disk.read_bytes and disk.written_bytes > 0
    restarted = load_engine(checkpoint, **both)
    assert answers_of(restarted, requests[-2:]) == {r.id: expected[r.id] for r in requests[-2:]}
    assert tier_stats(restarted, "disk").hit_tokens > 0 == tier_stats(restarted, "host").read_bytes
    few = load_engine(
        checkpoint, **{**both, "kv_cache_host_memory": str(12 * host_images(engine).entry_bytes)}
    )
    answers = answers_of(
        few, [*requests, *(replace(request, id=f"{request.id} again") for request in requests)]
    )
    assert answers == expected | {f"{name} again": answer for name, answer in expected.items()}
    assert tier_stats(few, "host").hit_tokens > 0 and tier_stats(few, "disk").hit_tokens > 0


def test_states_read_from_disk_reach_host_memory(tmp_path: Path) -> None:
    """Without them the blocks there would be of no use."""
    checkpoint = write_checkpoint(tmp_path / "model", "qwen3_5_text", seed=3)
    request, both = conversations(1)[-1], {**HOST, "kv_cache_dir": str(tmp_path / "kv")}
    first = load_engine(checkpoint, **both)
    answers_of(first, [request])
    restarted = load_engine(checkpoint, **both)
    answers_of(restarted, [request])
    assert tier_stats(restarted, "disk").hit_tokens > 0
    assert restarted.prefix_loader is not None
    anchors = restarted.prefix_loader.tiers[0].anchors
    assert isinstance(anchors, HostImages) and anchors.stored


def test_choices_of_a_prompt_read_it_once(checkpoint: Path) -> None:
    request, filler = conversations(1)[2], conversations(9)[-1]
    choices = [replace(request, id=f"choice {i}", seed=i) for i in range(4)]
    plain = {n: token_hashes(e) for n, e in run(load_engine(checkpoint, **OPTIONS), choices).items()}
    engine = load_engine(checkpoint, **{**HOST, "kv_cache_memory": "384tokens"})
    for each in (request, filler):
        run(engine, [each])
        wait_written(engine)
    assert {n: token_hashes(e) for n, e in run(engine, choices).items()} == plain
    assert 100 < tier_stats(engine, "host").hit_tokens <= len(request.prompt_ids)
    engine.close()


@pytest.mark.parametrize("options", [{}, {"speculate": "ngram", "num_speculative_tokens": 3}], ids=str)
def test_preempted_requests_have_the_same_answers(checkpoint: Path, options: dict[str, Any]) -> None:
    requests = [
        make_request(
            f"{i}",
            [(7 * i + j * (1 + i % 3)) % 240 for j in range(90)],
            seed=i,
            max_tokens=60,
            temperature=0.8,
        )
        for i in range(6)
    ]
    expected = answers_together(load_engine(checkpoint, **OPTIONS, **options), requests)
    engine = load_engine(checkpoint, **HOST, **options)
    assert answers_together(engine, requests) == expected
    assert engine.scheduler.num_preemptions > 0 and tier_stats(engine, "host").hit_tokens > 0


@pytest.mark.parametrize("family", ["llama", "qwen3_5_text"])
def test_blocks_of_a_failed_request_leave_host_memory(tmp_path: Path, family: str) -> None:
    """A fault damages its blocks after they are written; later requests of the engine compute them again."""
    checkpoint = write_checkpoint(tmp_path / "model", family, seed=3)
    request, _, longer = conversations(1)[:3]
    expected = answers_of(load_engine(checkpoint, **OPTIONS), [request, longer])
    engine = load_engine(checkpoint, **HOST)
    engine.submit(request)
    engine.step()
    host = host_images(engine)
    wait_until(lambda: len(host.stored) > 2)
    for block in engine.scheduler.states[request.id].blocks:
        host.images.write(block, host.images.new_image().fill_(255))  # NaN
    (error,) = run(engine)[request.id][-1:]
    assert isinstance(error, ErrorEvent)
    wait_written(engine)
    assert engine.prefix_loader is not None
    assert not any(pool.stored for pool in engine.prefix_loader.tiers[0].pools)
    assert answers_of(engine, [request, longer]) == expected


def test_another_salt_finds_nothing(checkpoint: Path) -> None:
    request, filler = conversations(1)[0], conversations(9)[-1]
    engine = load_engine(checkpoint, **{**HOST, "kv_cache_memory": "384tokens"})
    salted = [replace(each, id=f"{i}", cache_salt="one") for i, each in enumerate((request, filler, request))]
    for each in (*salted[:2], replace(request, cache_salt="two")):
        run(engine, [each])
        wait_written(engine)
    assert not tier_stats(engine, "host").hit_tokens
    run(engine, [salted[1], salted[2]])
    assert tier_stats(engine, "host").hit_tokens > 0
    engine.close()


def test_slower_reading_computes(
    checkpoint: Path, expected: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = load_engine(checkpoint, **HOST)
    assert engine.prefix_loader is not None
    monkeypatch.setattr(engine.prefix_loader, "_row_seconds", 1e-12)
    (tier,) = engine.prefix_loader.tiers
    tier.copy_seconds, tier.counts.read_bytes = 1.0, 1
    assert answers_of(engine, conversations(1)) == expected
    assert not tier_stats(engine, "host").hit_tokens and tier_stats(engine, "host").written_bytes


@pytest.mark.parametrize("family", ["llama", "qwen3_5_text"])
def test_host_memory_without_room_for_a_block_is_refused(tmp_path: Path, family: str) -> None:
    checkpoint = write_checkpoint(tmp_path / "model", family, seed=3)
    with pytest.raises(
        ConfigError, match=r"kv_cache_host_memory 1KiB holds no block: a block of 16 tokens has"
    ):
        load_engine(checkpoint, **{**HOST, "kv_cache_host_memory": "1KiB"})


def test_host_memory_of_one_block_and_one_state_is_enough(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "model", "qwen3_5_text", seed=3)
    engine = load_engine(checkpoint, **HOST)
    assert engine.prefix_loader is not None
    sizes = [images.entry_bytes for images in engine.prefix_loader.tiers[0].pools]
    least = load_engine(checkpoint, **{**HOST, "kv_cache_host_memory": str(sum(sizes))})
    assert len(host_images(least)._free) == 1
    with pytest.raises(ConfigError, match="holds no block"):
        load_engine(checkpoint, **{**HOST, "kv_cache_host_memory": str(sum(sizes) - 1)})


def test_tier_that_fails_half_way_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver pins the blocks' memory, and not that of the states: a restart goes on without the tier."""
    checkpoint = write_checkpoint(tmp_path / "model", "qwen3_5_text", seed=3)
    made: list[weakref.ref[HostImages]] = []

    class Failing(HostImages):
        def __init__(self, *arguments: Any) -> None:
            if made:
                raise RuntimeError("no more memory can be pinned")
            super().__init__(*arguments)
            made.append(weakref.ref(self))

    monkeypatch.setattr(kv_tiers, "HostImages", Failing)
    engine = load_engine(checkpoint, **OPTIONS)
    config = Config(model=str(checkpoint), kv_cache_host_memory="64MiB")
    assert kv_tiers.make_prefix_loader(config, engine, is_restart=True) is None
    gc.collect()
    assert len(made) == 1 and made[0]() is None


def test_rows_of_a_gpu_take_what_its_results_are_waited_for(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The forward pass only launches there."""
    recorded: list[float] = []
    monkeypatch.setattr(
        PrefixLoader, "record_step", lambda loader, num_rows, seconds: recorded.append(seconds)
    )
    for device, least in (("cpu", 0.0), ("cuda", 1.0)):
        engine = load_engine(checkpoint, **HOST)
        engine.info = replace(engine.info, resolved=replace(engine.info.resolved, device=device))
        monkeypatch.setitem(engine.timer.seconds, "sample", 1.0)
        engine.submit(conversations(1)[0])
        engine.step()
        assert least <= recorded[-1] < least + 1.0
