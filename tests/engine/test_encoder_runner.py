"""Pictures through a whole engine: the same tokens however they are encoded, cut, shared, lost and found again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from foreword.config.options import Config
from foreword.core.images import PromptImage, expand_placeholders
from foreword.core.outputs import ErrorEvent, Event, TokenEvent
from foreword.core.params import SamplingParams
from foreword.core.request import Request
from foreword.engine.encoder_runner import VisionEncoderRunner
from foreword.engine.engine import Engine
from foreword.engine.loader import load
from foreword.engine.trace import replay
from foreword.errors import InvalidRequest, RequestFailed
from foreword.models.loader import read_model_info
from tests.support.checkpoints import EOS, write_checkpoint
from tests.support.fault_injection import Fault, FaultInjector
from tests.support.forward_helpers import ForwardHelper
from tests.support.vision_checkpoints import (
    IMAGE_TOKEN_ID,
    VISION_FAMILIES,
    random_image,
    write_vision_checkpoint,
)

TEXT = (40, 41, 42, 43, 44)
SIZES = ((40, 30), (30, 60), (56, 56))
Told = list[tuple[int, int]]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_vision_checkpoint(tmp_path_factory.mktemp("encoding") / "model", "llava", seed=5)


def engine_of(checkpoint: Path, **options: Any) -> Engine:
    defaults = {
        "kv_cache_memory": "1000tokens", "max_model_len": 160, "max_num_batched_tokens": 64, "max_num_seqs": 8, "threads": 1,
        "test_mode": True, "draft_length": "fixed",
    }  # fmt: skip
    return load(
        Config(model=str(checkpoint), **(defaults | options)),
        never_sampled_ids=(read_model_info(checkpoint).image_token_id or 0,),
    )


def seeing(
    checkpoint: Path, name: str, pictures: Sequence[int] = (1,), seed: int = 1, **options: Any
) -> Request:
    """A request that begins with text, and shows the random pictures of these numbers with some text behind each."""
    ids, placeholder = [*TEXT], read_model_info(checkpoint).image_token_id
    assert placeholder is not None
    for number in pictures:
        ids += [placeholder, 50 + number, 51]
    prompt, shown = expand_placeholders(
        ids, placeholder, [random_image(checkpoint, number, *SIZES[number % 3]) for number in pictures]
    )
    fields = {key: options.pop(key) for key in ("tenant", "delivered_ids", "priority") if key in options}
    sampling = SamplingParams(**{"max_tokens": 10, "ignore_eos": True, "temperature": 0.0, **options})
    return Request(name, prompt, sampling, seed, (EOS,), images=shown, **fields)


def reading(name: str, length: int = 30, seed: int = 1, **params: Any) -> Request:
    sampling = SamplingParams(**{"max_tokens": 10, "ignore_eos": True, **params})
    return Request(name, tuple(30 + 7 * i % 190 for i in range(length)), sampling, seed, (EOS,))


def hear(engine: Engine, requests: Sequence[Request], apart: int = 0) -> dict[str, list[Event]]:
    """Serve them, each `apart` steps after the one before; the events by request."""
    heard: dict[str, list[Event]] = {
        request_id: [] for request_id in (*engine.scheduler.states, *(one.id for one in requests))
    }
    to_come, num_steps = list(requests), 0
    while to_come or not engine.idle:
        if to_come and num_steps >= apart * (len(requests) - len(to_come)):
            engine.submit(to_come.pop(0))
            continue
        for event in engine.step().events:
            heard[event.request_id].append(event)
        engine.check()
        num_steps += 1
    assert (
        engine.scheduler.pool.num_used == 0
        and engine.encoder.cache.num_bytes <= engine.encoder.cache.max_bytes
    )
    return heard


def told(events: Sequence[Event]) -> Told:
    """Tokens with the hashes of their logits."""
    assert all(isinstance(event, TokenEvent) for event in events), events
    return [
        pair
        for event in events
        if isinstance(event, TokenEvent)
        for pair in zip(event.token_ids, event.logits_hashes, strict=True)
    ]


def alone(checkpoint: Path, request: Request, **options: Any) -> Told:
    """What it is told by an engine of its own, without anything that could be shared or cut."""
    engine = engine_of(
        checkpoint, **{"max_num_batched_tokens": 512, "speculate": "off", "prefix_caching": False, **options}
    )
    return told(hear(engine, [request])[request.id])


def test_another_picture_another_answer(checkpoint: Path) -> None:
    one, two = (alone(checkpoint, seeing(checkpoint, "a", [number])) for number in (1, 2))
    assert one != two and len(one) == 10


@pytest.mark.parametrize("rows", [8, 9, 13, 23, 64])
def test_however_prompts_are_cut(checkpoint: Path, rows: int) -> None:
    """Also in the middle of pictures; beside text; with the cache, and without any memory for features."""
    requests = [
        seeing(checkpoint, "a", [1, 2]),
        reading("t"),
        seeing(checkpoint, "b", [3], temperature=0.8),
        reading("u", 3),
    ]
    expected = {one.id: alone(checkpoint, one) for one in requests}
    for memory in ("256MiB", "0"):
        engine = engine_of(checkpoint, max_num_batched_tokens=rows, max_num_seqs=4, image_cache_memory=memory)
        heard = hear(engine, requests, apart=2)
        assert {name: told(events) for name, events in heard.items()} == expected


@pytest.mark.parametrize("family", VISION_FAMILIES)
def test_every_family(family: str, tmp_path: Path) -> None:
    """Pictures of odd sizes, cut, drafted behind, beside others, and once more from the caches; as the model says without an
    engine."""
    path = write_vision_checkpoint(tmp_path / "model", family, seed=3)
    requests = [
        seeing(path, "a", [1, 2, 3]),
        seeing(path, "b", [4, 2], temperature=0.8, max_tokens=30),
        reading("t"),
    ]
    expected = {one.id: alone(path, one, max_model_len=256) for one in requests}
    assert len({tuple(one) for one in expected.values()}) == 3
    driver, first = ForwardHelper(path, max_len=256), requests[0]
    assert [token_id for token_id, _ in expected["a"]] == driver.greedy(first.prompt_ids, 10, first.images)
    common = {
        "max_model_len": 256,
        "kv_cache_memory": "330tokens",
        "block_size": 4,
        "speculate": "suffix,ngram",
    }
    for rows in (11, 64):
        engine = engine_of(path, max_num_batched_tokens=rows, **common)
        for _ in range(2):
            assert {
                name: told(events) for name, events in hear(engine, requests, apart=1).items()
            } == expected


def test_choices_share_their_picture(checkpoint: Path) -> None:
    """Eight choices, of which each is the answer to one request with its seed; one picture is encoded, once."""
    requests = [seeing(checkpoint, f"x-{seed}", [1], seed, temperature=1.0, top_p=0.9) for seed in range(8)]
    expected = [alone(checkpoint, one) for one in requests]
    assert len({tuple(one) for one in expected}) > 4
    for options in ({}, {"prefix_caching": False}, {"max_num_seqs": 3}, {"block_size": 64}):
        engine = engine_of(checkpoint, **options)
        heard = hear(engine, requests)
        assert [told(heard[one.id]) for one in requests] == expected
        assert engine.encoder.num_encoded == 1


def test_a_beginning_that_is_cached_needs_no_picture(checkpoint: Path) -> None:
    """All rows of both pictures are found: without their features, and without their pixels."""
    request = seeing(checkpoint, "a", [1, 2])
    engine = engine_of(checkpoint, block_size=1, image_cache_memory="0")
    first = told(hear(engine, [request])["a"])
    bare = replace(request, pictures=tuple(picture.without_pixels() for picture in request.images))
    (event, *_), again = (heard := hear(engine, [bare])["a"]), told(heard)
    assert again == first and engine.encoder.num_encoded == 2
    assert isinstance(event, TokenEvent) and event.num_cached == len(request.prompt_ids) - 1


def test_only_the_same_pictures_at_the_same_places_are_found(checkpoint: Path) -> None:
    """The same ids in every prompt."""

    def swapped(name: str, first: int, second: int, **options: Any) -> Request:
        request = seeing(checkpoint, name, [1, 2], **options)
        shown = [random_image(checkpoint, number) for number in (first, second)]
        places = [replace(one, start=old.start) for one, old in zip(shown, request.images, strict=True)]
        return replace(request, pictures=tuple(places))

    engine = engine_of(checkpoint, block_size=4)
    requests = {
        "first": swapped("first", 1, 2), "again": swapped("again", 1, 2), "second differs": swapped("second differs", 1, 3),
        "swapped": swapped("swapped", 2, 1), "another": swapped("another", 1, 2, tenant="another"),
    }  # fmt: skip
    cached = {}
    for name, request in requests.items():
        heard = hear(engine, [request])[name]
        assert told(heard) == alone(checkpoint, request)
        cached[name] = heard[0].num_cached  # type: ignore[union-attr]
    length, (one, two) = len(requests["first"].prompt_ids), requests["first"].images
    assert cached["first"] == cached["another"] == 0 and cached["again"] == (length - 1) // 4 * 4
    assert cached["swapped"] == one.start // 4 * 4 and cached["second differs"] == two.start // 4 * 4


def test_tenants_do_not_share_features(checkpoint: Path) -> None:
    engine = engine_of(checkpoint, prefix_caching=False)
    hear(engine, [seeing(checkpoint, name, tenant=name) for name in "ab"])
    assert (engine.encoder.num_encoded, engine.encoder.num_hits) == (2, 0)
    hear(engine, [seeing(checkpoint, "again", tenant="a")])
    assert (engine.encoder.num_encoded, engine.encoder.num_hits) == (2, 1)


@pytest.mark.parametrize("memory", ["256MiB", "0"])
def test_a_picture_in_the_prefix_cache_is_a_hit(checkpoint: Path, memory: str) -> None:
    """As a further choice is: it need not be encoded, whether its features are still there or not."""
    engine = engine_of(checkpoint, image_cache_memory=memory)
    first = seeing(checkpoint, "0")
    for number in range(3):
        long = replace(first, id=f"{number}", prompt_ids=(*first.prompt_ids, *range(20, 52)))
        hear(engine, [long])
        assert (engine.encoder.num_encoded, engine.encoder.num_hits) == (1, number)


@pytest.mark.parametrize("memory", ["256MiB", "0"])
def test_whoever_gives_way_goes_on_with_the_same_tokens(checkpoint: Path, memory: str) -> None:
    requests = [
        seeing(checkpoint, f"{number}", [number, number + 1], seed=number, max_tokens=40)
        for number in range(4)
    ]
    expected = {one.id: alone(checkpoint, one) for one in requests}
    engine = engine_of(
        checkpoint, kv_cache_memory="170tokens", image_cache_memory=memory, max_num_batched_tokens=32
    )
    heard = hear(engine, requests)
    assert engine.scheduler.num_preemptions > 0
    assert {name: told(events) for name, events in heard.items()} == expected


def test_prompts_are_scored_alike(checkpoint: Path) -> None:
    request = seeing(checkpoint, "a", [1, 2], prompt_logprobs=2, logprobs=1)
    whole, cut = (
        hear(engine_of(checkpoint, max_num_batched_tokens=rows, speculate="off"), [request])["a"]
        for rows in (128, 9)
    )
    assert whole == [replace(event, scheduled_s=whole[0].scheduled_s) for event in cut]  # type: ignore[union-attr, type-var]
    assert len(whole[0].prompt_logprobs) == len(request.prompt_ids)  # type: ignore[union-attr]


@pytest.mark.parametrize("speculate", ["off", "suffix,ngram"])
def test_what_was_delivered_by_an_engine_that_died_is_output(checkpoint: Path, speculate: str) -> None:
    request = seeing(checkpoint, "a", [1, 2], max_tokens=24, temperature=0.8)
    expected = alone(checkpoint, request)
    resumed = replace(request, resume_output_ids=tuple(token_id for token_id, _ in expected[:9]))
    assert (
        told(hear(engine_of(checkpoint, speculate=speculate, max_num_batched_tokens=16), [resumed])["a"])
        == expected[9:]
    )


def test_who_comes_again_after_a_death_hits_nothing_anew(checkpoint: Path) -> None:
    """What its first engine counted is not counted by the next."""
    request = seeing(checkpoint, "a", [1], max_tokens=12)
    expected = alone(checkpoint, request)
    delivered = tuple(token_id for token_id, _ in expected[:5])
    engine = engine_of(checkpoint, prefix_caching=False)
    hear(engine, [replace(request, id="before")])
    assert (
        told(hear(engine, [replace(request, resume_output_ids=delivered, resumed=True)])["a"]) == expected[5:]
    )
    assert (engine.encoder.num_encoded, engine.encoder.num_hits) == (1, 0)
    hear(engine, [replace(request, id="behind")])
    assert (engine.encoder.num_encoded, engine.encoder.num_hits) == (1, 1)


def test_features_are_bounded(checkpoint: Path) -> None:
    """One picture has 16 features of 64 floats: there is room for two, for which the first that is needed is not asked."""
    engine = engine_of(checkpoint, image_cache_memory=f"{2 * 16 * 64 * 4}", max_num_batched_tokens=128)
    held = []
    put = engine.encoder.cache.put

    def watched(key: Any, features: torch.Tensor) -> None:
        put(key, features)
        held.append(engine.encoder.cache.num_bytes)

    engine.encoder.cache.put = watched  # type: ignore[method-assign]
    request = seeing(checkpoint, "a", [1, 2, 3, 4])
    assert told(hear(engine, [request])["a"]) == alone(checkpoint, request)
    assert [size // 4096 for size in held] == [1, 2, 2, 2]
    hear(engine, [seeing(checkpoint, "b", [9, 4, 3])])
    assert [size // 4096 for size in held[4:]] == [3], "the last two were kept, as they were needed"


# What goes wrong


def showing(checkpoint: Path) -> list[Request]:
    """Two with the first picture, one with another, and one that reads."""
    return [
        seeing(checkpoint, "bad"),
        seeing(checkpoint, "bad too", [2, 1], seed=2),
        seeing(checkpoint, "good", [3, 4], seed=3),
        reading("text"),
    ]


@pytest.mark.parametrize("kind", ["error", "memory", "device memory", "nan", "infinite", "too few"])
def test_a_picture_that_cannot_be_encoded_ends_those_who_show_it(checkpoint: Path, kind: str) -> None:
    requests = showing(checkpoint)
    engine = engine_of(checkpoint)
    FaultInjector(engine, Fault("encode", kind, "bad"))
    heard = hear(engine, requests)
    for name in ("bad", "bad too"):
        (failed,) = heard[name]
        assert isinstance(failed, ErrorEvent) and isinstance(failed.error, RequestFailed), failed
    for request in requests[2:]:
        assert told(heard[request.id]) == alone(checkpoint, request)
    assert engine.step().stats.faults == {"nonfinite" if kind in ("nan", "infinite") else "encode": 2}


@pytest.mark.parametrize("kind", ["error", "memory"])
def test_what_does_not_happen_again_is_nobodys_fault(checkpoint: Path, kind: str) -> None:
    requests = showing(checkpoint)
    engine = engine_of(checkpoint)
    FaultInjector(engine, Fault("encode", kind))
    heard = hear(engine, requests)
    assert {name: told(events) for name, events in heard.items()} == {
        one.id: alone(checkpoint, one) for one in requests
    }
    assert not engine.step().stats.faults


def test_a_lost_device_is_the_end_of_the_engine(checkpoint: Path) -> None:
    engine = engine_of(checkpoint)
    FaultInjector(engine, Fault("encode", "device"))
    engine.submit(seeing(checkpoint, "a"))
    with pytest.raises(torch.AcceleratorError):
        while True:
            engine.step()


def test_pixels_that_are_missing_end_the_request(checkpoint: Path) -> None:
    request = seeing(checkpoint, "a")
    bare = replace(request, id="bare", pictures=tuple(picture.without_pixels() for picture in request.images))
    engine = engine_of(checkpoint)
    (failed,) = hear(engine, [bare])["bare"]
    assert isinstance(failed, ErrorEvent) and "did not reach the engine" in failed.error.message
    (picture,) = request.images
    assert picture.pixels is not None
    engine.encoder.add_pixels(picture.digest, picture.pixels)
    assert told(hear(engine, [bare])["bare"]) == alone(checkpoint, request)


def test_who_is_given_up_is_not_encoded_for(checkpoint: Path) -> None:
    engine = engine_of(checkpoint, max_num_batched_tokens=8)
    engine.submit(seeing(checkpoint, "a"))
    while engine.encoder._job is None:
        engine.step()
    engine.remove("a")
    assert engine.encoder._job is None and engine.idle
    engine.check()


def test_the_board_says_for_whom_a_picture_is_encoded(checkpoint: Path) -> None:
    engine = engine_of(checkpoint, max_num_batched_tokens=8)
    noted: list[list[int]] = []
    engine.on_batch = noted.append
    for request in (reading("text"), seeing(checkpoint, "a"), seeing(checkpoint, "b")):
        engine.submit(request)
    at_work: list[set[int]] = []
    encode = engine.encoder._tower.encode  # type: ignore[union-attr]

    def watched(picture: PromptImage) -> Any:
        pieces = encode(picture)
        while True:
            at_work.append(set(noted[-1]))
            try:
                yield next(pieces)
            except StopIteration as end:
                return end.value

    engine.encoder._tower.encode = watched  # type: ignore[union-attr, method-assign]
    hear(engine, [])
    assert at_work and set.union(*at_work) <= {1, 2} and all(1 in one for one in at_work)


def with_picture(request: Request, **changes: Any) -> Request:
    return replace(request, pictures=(replace(request.images[0], **changes), *request.images[1:]))


REFUSED: dict[str, Callable[[Request], Request]] = {
    "does not stand on 16 placeholders": lambda one: with_picture(one, start=4),
    "reaches out of the prompt": lambda one: with_picture(one, start=500),
    "overlaps another": lambda one: replace(one, pictures=one.images[::-1]),
    "stands for pictures, and for nothing else": lambda one: replace(one, pictures=one.images[:1]),
    f"token id {IMAGE_TOKEN_ID} stands for pictures": lambda one: replace(
        one, resume_output_ids=(IMAGE_TOKEN_ID,)
    ),
    "a digest of 16 bytes": lambda one: with_picture(one, digest=b"short"),
    "a token at least": lambda one: with_picture(one, num_tokens=0),
    "has 7 bytes of pixels": lambda one: with_picture(one, pixels=b"1234567"),
    "cannot be embedded": lambda one: replace(one, pooling="mean"),
}


@pytest.mark.parametrize("words", REFUSED)
def test_pictures_that_do_not_fit_their_prompt_are_refused(checkpoint: Path, words: str) -> None:
    (failed,) = hear(engine_of(checkpoint), [REFUSED[words](seeing(checkpoint, "a", [1, 2]))])["a"]
    assert (
        isinstance(failed, ErrorEvent)
        and isinstance(failed.error, InvalidRequest)
        and words in failed.error.message
    )


def test_a_model_without_a_tower_sees_nothing(checkpoint: Path, tmp_path: Path) -> None:
    blind = load(
        Config(
            model=str(write_checkpoint(tmp_path / "model", "llama")), threads=1, kv_cache_memory="500tokens"
        ),
        (),
    )
    (failed,) = hear(blind, [seeing(checkpoint, "a")])["a"]
    assert isinstance(failed, ErrorEvent) and "sees no pictures" in failed.error.message


# Beside others


def test_streams_get_their_token_in_every_step(checkpoint: Path) -> None:
    """Large pictures arrive; what they cost in a step is half of its rows and a piece, and their prompts have the rest."""
    engine = engine_of(checkpoint, max_num_batched_tokens=64, max_num_seqs=4, speculate="off")
    engine.submit(reading("stream", 5, max_tokens=100))
    engine.step()
    for number in range(3):
        engine.submit(seeing(checkpoint, f"{number}", [10 + number, 20 + number]))
    most = 0
    while engine.scheduler.states.keys() - {"stream"}:
        events = engine.step().events
        assert any(event.request_id == "stream" for event in events)
        most = max(most, engine.encoder.cost_rows)
    assert engine.encoder.num_encoded == 6 and most


def test_the_rows_of_a_step_are_shared_with_pictures(checkpoint: Path) -> None:
    """A tower whose pieces cost ten rows each: four of them are more than half of a step."""
    engine = engine_of(checkpoint, max_num_batched_tokens=64, max_num_seqs=4, speculate="off")
    engine.encoder._tower = Slow(engine.encoder, pieces=9)
    for request in (reading("text", 150, max_tokens=1), seeing(checkpoint, "a", max_tokens=1)):
        engine.submit(request)
    spent = []
    plan = engine.scheduler.schedule

    def watched(taken: int) -> Any:
        made = plan(taken)
        spent.append((taken, sum(work.num_tokens for work in made.requests)))
        return made

    engine.scheduler.schedule = watched  # type: ignore[method-assign]
    hear(engine, [])
    assert [taken for taken, _ in spent if taken] == [40, 40, 10]
    assert all(taken + rows <= 64 for taken, rows in spent) and (40, 23) in spent, (
        "a row is left to whoever came later"
    )


class Slow:
    """A tower of zeros."""

    def __init__(self, encoder: VisionEncoderRunner, pieces: int) -> None:
        assert encoder._tower is not None
        self.feature_size, self._cost, self._pieces = (
            encoder._tower.feature_size,
            encoder._row_cost * 10,
            pieces,
        )

    def encode(self, image: PromptImage) -> Iterator[int]:
        for _ in range(self._pieces):
            yield self._cost
        return torch.zeros(image.num_tokens, self.feature_size)


def test_many_with_pictures_keep_nobody_out(checkpoint: Path) -> None:
    """There are more of them than places: who comes behind them and only reads gets one."""
    engine = engine_of(checkpoint, max_num_batched_tokens=32, max_num_seqs=4, speculate="off")
    engine.encoder._tower = Slow(engine.encoder, pieces=20)
    for number in range(4):
        engine.submit(seeing(checkpoint, f"{number}", [number, number + 20]))
    engine.submit(reading("text", 5, max_tokens=2))
    for _ in range(5):
        engine.step()
    assert "text" not in engine.scheduler.states and len(engine.scheduler.states) == 4
    hear(engine, [])


def test_a_trace_of_pictures_is_replayed(checkpoint: Path, tmp_path: Path) -> None:
    engine = engine_of(
        checkpoint, trace=str(tmp_path / "trace"), max_num_batched_tokens=16, kv_cache_memory="250tokens"
    )
    engine.encoder._tower = Slow(engine.encoder, pieces=9)
    hear(engine, [*showing(checkpoint), seeing(checkpoint, "last", [1, 5], max_tokens=30)], apart=2)
    plans = list(replay((tmp_path / "trace").read_text().splitlines()))
    assert len(plans) == engine._num_steps and any(not plan.requests for plan in plans)
