"""A KV cache on disk changes no bit: restarts, small memories, damaged files, a directory that fails.

Each request is computed by an engine without a disk tier, and again by engines that find parts of its prefix
in memory, on disk, or in neither.
"""

from __future__ import annotations

import errno
import gc
import itertools
import os
import random
import shutil
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from foreword import LLM, SamplingParams
from foreword.config.options import Config
from foreword.core.images import expand_placeholders
from foreword.core.outputs import ErrorEvent
from foreword.core.request import Request
from foreword.engine.engine import Engine
from foreword.engine.loader import load
from foreword.errors import ConfigError
from foreword.kv_cache import block_files, disk_tier, tier
from foreword.kv_cache.prefix_loader import PrefixLoader
from foreword.utils.mapped_memory import MemoryFile
from tests.support.budget import some_of
from tests.support.checkpoints import write_checkpoint
from tests.support.engines import (
    DEFAULTS,
    load_engine,
    make_request,
    run,
    tier_stats,
    token_hashes,
    tokens_of,
    verified_drafts,
)
from tests.support.heads import head_config, head_tensors, train_head, write_head, write_random_head
from tests.support.vision_checkpoints import IMAGE_TOKEN_ID, random_image, write_vision_checkpoint
from tests.support.waiting import wait_until

OPTIONS: dict[str, Any] = {
    "max_model_len": 384,
    "max_num_batched_tokens": 64,
    "kv_cache_memory": "2000tokens",
}
SMALL: dict[str, Any] = {**OPTIONS, "kv_cache_memory": "400tokens"}  # holds one conversation
HEAD_OPTIONS: dict[str, Any] = {"speculate": "eagle3", "num_speculative_tokens": 3}
# Options of the engine and of the checkpoint
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "bfloat16": ("llama", {"dtype": "bfloat16"}),
    "int8": ("llama", {"dtype": "bfloat16", "kv_cache_dtype": "int8"}),
    "latent": ("deepseek_v2", {}),
    "latent int8": ("deepseek_v2", {"dtype": "bfloat16", "kv_cache_dtype": "int8"}),
    "windows": ("gemma3_text", {}),
    "convolution": ("lfm2", {}),
    "delta rule": ("qwen3_5_text", {}),
    "mamba": ("granitemoehybrid", {}),
    "trained head": ("llama", HEAD_OPTIONS),
}
Answers = dict[str, list[tuple[int, int]]]


def answers_of(engine: Engine, requests: Sequence[Request]) -> Answers:
    """Tokens and hashes of their logits, of requests that run one after another; closes the engine."""
    answers = {}
    for request in requests:
        answers[request.id] = token_hashes(run(engine, [request])[request.id])
        wait_written(engine)
    engine.close()
    return answers


def wait_written(engine: Engine) -> None:
    """Wait until the tiers have what the cache has."""
    loader = engine.prefix_loader
    for each in () if loader is None else loader.tiers:
        wait_until(lambda each=each: each.is_idle or not each.is_alive)


@pytest.fixture(autouse=True)
def reading_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Computing takes an unknown time: blocks are read, however fast this machine computes them."""
    monkeypatch.setattr(PrefixLoader, "record_step", lambda loader, num_rows, seconds: None)


def conversations(seed: int, num_tokens: int = 300) -> list[Request]:
    """Two conversations in turns of each other: a prompt begins with the earlier one of its conversation."""
    rng = random.Random(seed)
    prompts: list[list[int]] = [[], []]
    requests = []
    for turn in range(6):
        prompt = prompts[turn % 2]
        prompt += [rng.randrange(5, 250) for _ in range(num_tokens // 3 + rng.randrange(-9, 9))]
        params = {"temperature": rng.choice([0.0, 0.9]), "max_tokens": 8}
        requests.append(make_request(f"turn {turn}", list(prompt), seed=turn, **params))
    return requests


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("tiers") / "model", "llama", seed=3)


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> Answers:
    """Answers to conversations(1) without a tier."""
    return answers_of(load_engine(checkpoint, **OPTIONS), conversations(1))


@pytest.mark.parametrize("case", some_of(CASES, 2))
def test_answers_are_equal_with_blocks_from_disk(case: str, tmp_path: Path) -> None:
    family, options = CASES[case]
    checkpoint = write_checkpoint(tmp_path / "model", family, seed=3)
    requests = conversations(seed=len(case))
    if options.get("speculate") == "eagle3":
        options = {**options, "draft_model": str(write_random_head(tmp_path / "head", checkpoint))}
    expected = answers_of(load_engine(checkpoint, **OPTIONS, **options), requests)
    stored = {**options, "kv_cache_dir": str(tmp_path / "kv")}
    small = load_engine(checkpoint, **SMALL, **stored)
    assert answers_of(small, requests) == expected, "blocks that memory has lost are read"
    assert tier_stats(small, "disk").hit_tokens > 0
    restarted = load_engine(checkpoint, **OPTIONS, **stored)
    assert answers_of(restarted, requests[-2:]) == {r.id: expected[r.id] for r in requests[-2:]}
    stats, num_prompt = (
        tier_stats(restarted, "disk"),
        sum(len(request.prompt_ids) for request in requests[-2:]),
    )
    assert stats.hit_tokens > 0.8 * num_prompt and not stats.refused


@pytest.mark.parametrize("family", ["llama", "qwen3_5_text"])
def test_blocks_of_a_failed_request_leave_the_disk(tmp_path: Path, family: str) -> None:
    """A fault in the first step damages a block, which is written before the request fails."""
    checkpoint = write_checkpoint(tmp_path / "model", family, seed=3)
    (request,) = conversations(1)[:1]
    expected = answers_of(load_engine(checkpoint, **OPTIONS), [request])
    stored = {**OPTIONS, "kv_cache_dir": str(tmp_path / "kv")}
    engine = load_engine(checkpoint, **stored)
    engine.submit(request)
    engine.step()
    wait_until(lambda: any(tmp_path.glob("kv/*/blocks/*/*")))
    for part, _ in engine.model_runner.kv.block_images()._parts:
        part.fill_(255)  # NaN
    (error,) = run(engine)[request.id][-1:]
    assert isinstance(error, ErrorEvent)
    wait_written(engine)
    assert not list(tmp_path.glob("kv/*/blocks/*/*")) and not list(tmp_path.glob("kv/*/states/*/*"))
    engine.close()
    assert answers_of(load_engine(checkpoint, **stored), [request]) == expected


@pytest.mark.parametrize("family", ["llava", "qwen2_vl"])
def test_blocks_with_images_are_read(tmp_path: Path, family: str) -> None:
    """Also a prefix that ends within an image, which is encoded again; another image finds none."""
    checkpoint = write_vision_checkpoint(tmp_path / "model", family, seed=5)
    options = {"kv_cache_memory": "1000tokens", "max_model_len": 239, "max_num_batched_tokens": 64}
    text = [40 + i % 7 for i in range(70)]
    requests = []
    for number, (images, length) in enumerate([((1,), 70), ((1, 2), 70), ((2,), 70), ((1,), 9)]):
        ids = [token for _ in images for token in (*text[:30], IMAGE_TOKEN_ID)] + text[:length]
        shown = [random_image(checkpoint, image) for image in images]
        prompt, placed = expand_placeholders(ids, IMAGE_TOKEN_ID, shown)
        request = make_request(f"turn {number}", prompt, seed=number, max_tokens=6)
        requests.append(replace(request, images=placed))
    expected = answers_of(load_engine(checkpoint, **options), requests)
    options["kv_cache_dir"] = str(tmp_path / "kv")
    assert answers_of(load_engine(checkpoint, **options), requests) == expected
    restarted = load_engine(checkpoint, **options)
    assert answers_of(restarted, requests) == expected and tier_stats(restarted, "disk").hit_tokens > 150
    other = load_engine(checkpoint, **options)
    replaced = [replace(random_image(checkpoint, 3), start=image.start) for image in requests[0].images]
    answers_of(other, [replace(requests[0], images=tuple(replaced))])
    assert tier_stats(other, "disk").hit_tokens <= 30


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) * 2 // 3] ^= 4
    path.write_bytes(data)


def empty(path: Path) -> None:
    path.write_bytes(b"")


def zero(path: Path) -> None:
    """As a file whose blocks were never written before the power went."""
    path.write_bytes(bytes(path.stat().st_size))


def swap(path: Path) -> None:
    """Another block under this name."""
    other = next(each for each in sorted(path.parent.parent.glob("*/*")) if each != path)
    path.write_bytes(other.read_bytes())


def remove(path: Path) -> None:
    path.unlink()


def forbid(path: Path) -> None:
    """A link to another file: it is not followed."""
    path.unlink()
    path.symlink_to("/etc/passwd")


DAMAGE = {
    "size": (cut, empty),
    "checksum": (flip,),
    "header": (zero, swap),
    "missing": (remove,),
    "unreadable": (forbid,),
}


@pytest.mark.parametrize(
    "damage, reason", [(each, name) for name, damages in DAMAGE.items() for each in damages]
)
def test_damaged_file_costs_a_hit_and_is_counted(
    checkpoint: Path,
    expected: Answers,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    damage: Callable[[Path], None],
    reason: str,
) -> None:
    monkeypatch.setattr(disk_tier, "REFRESH_S", 3600.0)  # a refresh would forget removed files uncounted
    requests, options = conversations(1), {**OPTIONS, "kv_cache_dir": str(tmp_path)}
    assert answers_of(load_engine(checkpoint, **options), requests) == expected
    engine = load_engine(checkpoint, **options)
    paths = list(tmp_path.glob("model-*/blocks/*/*"))
    for path in random.Random(5).sample(paths, len(paths) // 4):
        damage(path)
    num_restarts = 0
    while True:
        assert answers_of(engine, requests) == expected
        refused, num_restarts = tier_stats(engine, "disk").refused, num_restarts + 1
        assert set(refused) == {reason} if num_restarts == 1 else set(refused) <= {reason}
        if not refused:
            break  # each of them was removed and written again
        assert num_restarts <= len(paths)
        engine = load_engine(checkpoint, **options)


def test_failing_disk_costs_hits_only(
    checkpoint: Path, expected: Answers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writes = itertools.count()

    def write(fd: int, header: bytes, image: bytes) -> None:
        """A disk that is full now and then, in the middle of a file."""
        os.write(fd, header)
        if next(writes) % 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.write(fd, image)

    monkeypatch.setattr(block_files, "_write_all", write)
    monkeypatch.setattr(tier, "WRITE_PAUSE_S", 0.0)
    options = {**SMALL, "kv_cache_dir": str(tmp_path)}
    engine = load_engine(checkpoint, **options)
    assert answers_of(engine, conversations(1)) == expected
    assert tier_stats(engine, "disk").write_errors > 0
    assert not list(tmp_path.glob("**/*.tmp"))


def test_limit_of_the_directory_is_kept(checkpoint: Path, expected: Answers, tmp_path: Path) -> None:
    engine = load_engine(checkpoint, **SMALL, kv_cache_dir=str(tmp_path), kv_cache_disk="100KiB")
    assert answers_of(engine, conversations(1)) == expected
    size = sum(path.stat().st_size for path in tmp_path.glob("model-*/blocks/*/*"))
    assert 50 << 10 < size < 110 << 10
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared").chmod(0o777)
    with pytest.raises(ConfigError, match="shared must be a directory of this user that no one else may"):
        load_engine(checkpoint, **SMALL, kv_cache_dir=str(tmp_path / "shared"))
    with pytest.raises(ConfigError, match=r"kv_cache_disk 1KiB holds no block: a block of \d+ tokens has "):
        load_engine(checkpoint, **SMALL, kv_cache_dir=str(tmp_path), kv_cache_disk="1KiB")


@pytest.mark.parametrize(
    "change", [{"kv_cache_dtype": "int8"}, {"block_size": 8}, {"dtype": "bfloat16"}, {"cpu_isa": "reference"}]
)
def test_another_engine_finds_nothing(
    checkpoint: Path, expected: Answers, tmp_path: Path, change: dict[str, Any]
) -> None:
    requests, options = conversations(1), {**OPTIONS, "kv_cache_dir": str(tmp_path)}
    assert answers_of(load_engine(checkpoint, **options), requests) == expected
    other = load_engine(checkpoint, **options, **change)
    answers = answers_of(other, requests[:1])
    assert not tier_stats(other, "disk").hit_tokens and len(list(tmp_path.glob("model-*"))) == 2
    assert answers == answers_of(load_engine(checkpoint, **OPTIONS, **change), requests[:1])


def test_another_checkpoint_of_the_same_name_finds_nothing(
    checkpoint: Path, expected: Answers, tmp_path: Path
) -> None:
    requests, options = conversations(1)[:1], {**OPTIONS, "kv_cache_dir": str(tmp_path / "kv")}
    answers_of(load_engine(checkpoint, **options), requests)
    copy = shutil.copytree(checkpoint, tmp_path / "model")
    weights = copy / "model.safetensors"
    os.utime(weights, (1, 1))
    engine = load_engine(copy, **options)
    assert answers_of(engine, requests) == {requests[0].id: expected[requests[0].id]}
    assert not tier_stats(engine, "disk").hit_tokens


def test_another_head_finds_nothing(checkpoint: Path, tmp_path: Path) -> None:
    """A block has the memory of its head too, which drafts as if it had computed the prompt itself."""
    request = make_request("one", [(7 * i) % 240 for i in range(300)], temperature=0.0, max_tokens=30)
    text = [*request.prompt_ids, *tokens_of(run(load_engine(checkpoint, **OPTIONS), [request])["one"])]
    trained = train_head(tmp_path / "trained", checkpoint, [text[200:]], steps=60)
    other = write_random_head(tmp_path / "other", checkpoint)
    figures = []
    for head, store in ((trained, None), (trained, "kv"), (trained, "kv"), (other, "kv")):
        options = {**OPTIONS, "draft_model": str(head), "speculate": "eagle3", "num_speculative_tokens": 3}
        engine = load_engine(checkpoint, **options, kv_cache_dir=store and str(tmp_path / store))
        drafts = verified_drafts(run(engine, [request])["one"])
        wait_written(engine)
        engine.close()
        figures.append((store is not None and tier_stats(engine, "disk").hit_tokens > 250, drafts))
    drafts = figures[0][1]
    assert sum(accepted for _, accepted in drafts) > 0
    assert figures[:3] == [(False, drafts), (False, drafts), (True, drafts)]
    assert not figures[3][0] and figures[3][1] != drafts


def test_another_head_with_the_same_names_and_times_finds_nothing(checkpoint: Path, tmp_path: Path) -> None:
    request, hits = conversations(1)[0], []
    for seed in (0, 0, 1):
        head = write_random_head(tmp_path / "head", checkpoint, seed=seed)
        for file in head.iterdir():
            os.utime(file, (1, 1))
        options = {**OPTIONS, "draft_model": str(head), "speculate": "eagle3", "num_speculative_tokens": 3}
        engine = load_engine(checkpoint, **options, kv_cache_dir=str(tmp_path / "kv"))
        answers_of(engine, [request])
        hits.append(tier_stats(engine, "disk").hit_tokens)
    assert hits[0] == hits[2] == 0 < hits[1]


def test_another_salt_finds_nothing(checkpoint: Path, tmp_path: Path) -> None:
    request, options = conversations(1)[0], {**OPTIONS, "kv_cache_dir": str(tmp_path)}
    answers_of(load_engine(checkpoint, **options), [replace(request, cache_salt="one")])
    engine = load_engine(checkpoint, **options)
    answers_of(engine, [replace(request, cache_salt="two"), replace(request, cache_salt="")])
    assert not tier_stats(engine, "disk").hit_tokens
    engine = load_engine(checkpoint, **options)
    answers_of(engine, [replace(request, cache_salt="one")])
    assert tier_stats(engine, "disk").hit_tokens


def test_replicas_read_what_another_one_has_written(
    checkpoint: Path, expected: Answers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All have the same files: for the router a prefix on disk is as near to each of them."""
    monkeypatch.setattr(disk_tier, "REFRESH_S", 0.01)
    requests, options = conversations(1), {**OPTIONS, "kv_cache_dir": str(tmp_path), "replicas": 2}
    first, second = load_engine(checkpoint, **options), load_engine(checkpoint, **options)
    assert answers_of(first, requests) == expected, "it is gone now"
    written = {bytes.fromhex(path.name) for path in tmp_path.glob("model-*/blocks/*/*")}
    assert second.prefix_loader is not None
    wait_until(
        lambda: second.prefix_loader is not None and second.prefix_loader.tiers[-1].blocks.stored >= written
    )
    assert answers_of(second, requests[-2:]) == {r.id: expected[r.id] for r in requests[-2:]}
    num_prompt = sum(len(request.prompt_ids) for request in requests[-2:])
    assert tier_stats(second, "disk").hit_tokens > 0.8 * num_prompt
    assert len(list(tmp_path.glob("model-*"))) == 1


@pytest.mark.full
def test_head_of_another_width_between_leaves_nothing_in_memory(checkpoint: Path, tmp_path: Path) -> None:
    """Its blocks lie elsewhere in the memory of the engine before, over blocks of that one's index."""
    for name, num_heads in (("a", 2), ("b", 1)):
        head = head_config(checkpoint, num_key_value_heads=num_heads)
        write_head(tmp_path / name, head, head_tensors(head, head["hidden_size"]))
    config = Config(
        model=str(checkpoint), draft_model=str(tmp_path / "head"), **(DEFAULTS | OPTIONS), **HEAD_OPTIONS
    )
    resolved, timings, adopted, all_answers = None, None, [], []
    memory = os.memfd_create("kv")
    for name in "aaba":
        (tmp_path / "head").unlink(missing_ok=True)
        (tmp_path / "head").symlink_to(tmp_path / name)
        engine = load(config, (), resolved, timings=timings, kv_memory=MemoryFile(memory))
        resolved, timings = engine.info.resolved, engine.proposer.timings
        adopted.append(engine.num_adopted_tokens > 0)
        all_answers.append(answers_of(engine, conversations(2 if name == "b" else 1)))
        del engine
        gc.collect()
    os.close(memory)
    assert adopted == [False, True, False, False]
    assert all_answers[0] == all_answers[1] == all_answers[3]


def test_choices_of_a_prompt_read_it_once(checkpoint: Path, tmp_path: Path) -> None:
    request, options = conversations(1)[0], {**OPTIONS, "kv_cache_dir": str(tmp_path)}
    choices = [replace(request, id=f"choice {i}", seed=i) for i in range(4)]
    plain = {
        name: token_hashes(events)
        for name, events in run(load_engine(checkpoint, **OPTIONS), choices).items()
    }
    answers_of(load_engine(checkpoint, **options), [request])
    engine = load_engine(checkpoint, **options)
    assert {name: token_hashes(events) for name, events in run(engine, choices).items()} == plain
    assert tier_stats(engine, "disk").hit_tokens == (len(request.prompt_ids) - 1) // 16 * 16
    engine.close()


def test_removed_request_frees_what_it_waited_for(checkpoint: Path, tmp_path: Path) -> None:
    request, options = conversations(1)[0], {**OPTIONS, "kv_cache_dir": str(tmp_path)}
    answers_of(load_engine(checkpoint, **options), [request])
    engine = load_engine(checkpoint, **options)
    assert engine.prefix_loader is not None
    engine.submit(request)
    engine.step()
    assert engine.prefix_loader.is_busy
    engine.remove(request.id)
    assert engine.idle and not engine.prefix_loader.is_busy, "no step comes to notice it"
    wait_written(engine)
    engine.submit(replace(request, id="other", prompt_ids=request.prompt_ids[50:]))
    run(engine)
    assert not engine.prefix_loader.is_busy
    engine.close()


def test_engine_in_the_callers_process_writes_at_its_end(checkpoint: Path, tmp_path: Path) -> None:
    options = {
        "max_model_len": 256,
        "threads": 1,
        "kv_cache_memory": "600tokens",
        "kv_cache_dir": str(tmp_path),
        "speculate": "off",  # nothing is timed at the start: blocks are read however fast they are computed
    }
    prompt, params = list(range(5, 205)), SamplingParams(max_tokens=4, temperature=0.0)
    answers = []
    for _ in range(2):
        llm = LLM(str(checkpoint), **options)
        (answer,) = llm.generate([{"prompt_token_ids": prompt}], params)
        answers.append((answer.outputs[0].token_ids, llm.stats.prefix_cache_hits_total))
        del llm
        gc.collect()
        assert not any(thread.name == "kv-disk" for thread in threading.enumerate())
    (first, none), (again, cached) = answers
    assert first == again and (none, cached) == (0, 192)
    assert len(list(tmp_path.glob("model-*/blocks/*/*"))) == 12
