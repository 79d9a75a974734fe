"""Images in a whole engine: equal tokens however images are chunked, shared, evicted and preempted."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from foreword.core.images import PromptImage, expand_placeholders
from foreword.core.outputs import ErrorEvent, TokenEvent
from foreword.core.params import SamplingParams
from foreword.core.request import Request
from foreword.engine.encoder_runner import VisionEncoderRunner
from foreword.engine.engine import Engine
from foreword.engine.scheduler_trace import replay
from foreword.errors import InvalidRequest, RequestFailed
from tests.support.checkpoints import EOS, write_checkpoint
from tests.support.engines import image_token_id, load_engine, run, token_hashes
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
TokenHashes = list[tuple[int, int]]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_vision_checkpoint(tmp_path_factory.mktemp("encoding") / "model", "llava", seed=5)


def engine_of(checkpoint: Path, **options: Any) -> Engine:
    return load_engine(checkpoint, **{"max_num_batched_tokens": 64, "max_num_seqs": 8, **options})


@cache
def plain_engine(checkpoint: Path) -> Engine:
    """Without chunking, caches and speculation."""
    options = {"prefix_caching": False, "image_cache_memory": "0", "max_model_len": 256}
    return engine_of(checkpoint, max_num_batched_tokens=512, speculate="off", **options)


def alone(checkpoint: Path, request: Request) -> TokenHashes:
    return token_hashes(run(plain_engine(checkpoint), [request])[request.id])


def check_answers(engine: Engine, checkpoint: Path, requests: Sequence[Request], apart: int = 0) -> None:
    """Each request has the tokens and logits that it has alone."""
    events_by_id = run(engine, requests, apart)
    for request in requests:
        assert token_hashes(events_by_id[request.id]) == alone(checkpoint, request), request.id


def image_request(
    checkpoint: Path, name: str, images: Sequence[int] = (1,), seed: int = 1, **options: Any
) -> Request:
    """A request of text and the random images of these numbers."""
    ids, placeholder = [*TEXT], image_token_id(checkpoint)
    assert placeholder is not None
    for number in images:
        ids += [placeholder, 50 + number, 51]
    prompt, shown = expand_placeholders(
        ids, placeholder, [random_image(checkpoint, number, *SIZES[number % 3]) for number in images]
    )
    fields = {
        key: options.pop(key) for key in ("cache_salt", "resume_output_ids", "priority") if key in options
    }
    sampling = SamplingParams(**{"max_tokens": 10, "ignore_eos": True, "temperature": 0.0, **options})
    return Request(name, prompt, sampling, seed, (EOS,), images=shown, **fields)


def text_request(name: str, length: int = 30, seed: int = 1, **params: Any) -> Request:
    sampling = SamplingParams(**{"max_tokens": 10, "ignore_eos": True, **params})
    return Request(name, tuple(30 + 7 * i % 190 for i in range(length)), sampling, seed, (EOS,))


def test_output_depends_on_the_image(checkpoint: Path) -> None:
    one, two = (alone(checkpoint, image_request(checkpoint, "a", [number])) for number in (1, 2))
    assert one != two and len(one) == 10


@pytest.mark.parametrize("rows", [8, 9, 13, 23, 64])
def test_chunked_prefill_with_images_is_exact(checkpoint: Path, rows: int) -> None:
    """Also within images, batched with text, with and without a feature cache."""
    requests = [
        image_request(checkpoint, "a", [1, 2]),
        text_request("t"),
        image_request(checkpoint, "b", [3], temperature=0.8),
        text_request("u", 3),
    ]
    for memory in ("256MiB", "0"):
        engine = engine_of(checkpoint, max_num_batched_tokens=rows, max_num_seqs=4, image_cache_memory=memory)
        check_answers(engine, checkpoint, requests, apart=2)


@pytest.mark.parametrize("family", VISION_FAMILIES)
def test_image_outputs_are_exact_for_every_family(family: str, tmp_path: Path) -> None:
    """Images of odd sizes: chunked, batched, with drafts, from the caches, and as the bare model decodes."""
    path = write_vision_checkpoint(tmp_path / "model", family, seed=3)
    requests = [
        image_request(path, "a", [1, 2, 3]),
        image_request(path, "b", [4, 2], temperature=0.8, max_tokens=30),
        text_request("t"),
    ]
    expected = [alone(path, request) for request in requests]
    assert len({tuple(answer) for answer in expected}) == 3
    forward_helper, first = ForwardHelper(path, max_len=256), requests[0]
    greedy = forward_helper.greedy(first.prompt_ids, 10, first.images)
    assert [token_id for token_id, _ in expected[0]] == greedy
    common = {"max_model_len": 256, "kv_cache_memory": "330tokens", "block_size": 4}
    for rows in (11, 64):
        engine = engine_of(path, max_num_batched_tokens=rows, speculate="suffix,ngram", **common)
        for _ in range(2):
            check_answers(engine, path, requests, apart=1)


def test_choices_share_one_encoding(checkpoint: Path) -> None:
    """Eight choices equal single requests with their seeds; the image is encoded once."""
    requests = [
        image_request(checkpoint, f"x-{seed}", [1], seed, temperature=1.0, top_p=0.9) for seed in range(8)
    ]
    expected = [alone(checkpoint, one) for one in requests]
    assert len({tuple(one) for one in expected}) > 4
    for options in ({}, {"prefix_caching": False}, {"max_num_seqs": 3}, {"block_size": 64}):
        engine = engine_of(checkpoint, **options)
        events_by_id = run(engine, requests)
        assert [token_hashes(events_by_id[one.id]) for one in requests] == expected
        assert engine.encoder.num_encoded == 1


def test_cached_prefix_needs_no_pixels(checkpoint: Path) -> None:
    """All rows of both images are cached: neither features nor pixels are needed."""
    request = image_request(checkpoint, "a", [1, 2])
    engine = engine_of(checkpoint, block_size=1, image_cache_memory="0")
    first = token_hashes(run(engine, [request])["a"])
    bare = replace(request, images=tuple(image.without_pixels() for image in request.images))
    (event, *_), again = (events_by_id := run(engine, [bare])["a"]), token_hashes(events_by_id)
    assert again == first and engine.encoder.num_encoded == 2
    assert isinstance(event, TokenEvent) and event.num_cached == len(request.prompt_ids) - 1


def test_prefix_cache_needs_equal_images_and_positions(checkpoint: Path) -> None:
    """All prompts have the same token ids."""

    def swapped(name: str, first: int, second: int, **options: Any) -> Request:
        request = image_request(checkpoint, name, [1, 2], **options)
        shown = [random_image(checkpoint, number) for number in (first, second)]
        places = [replace(one, start=old.start) for one, old in zip(shown, request.images, strict=True)]
        return replace(request, images=tuple(places))

    engine = engine_of(checkpoint, block_size=4)
    requests = {
        "first": swapped("first", 1, 2), "again": swapped("again", 1, 2),
        "second differs": swapped("second differs", 1, 3),
        "swapped": swapped("swapped", 2, 1), "another": swapped("another", 1, 2, cache_salt="another"),
    }  # fmt: skip
    cached = {}
    for name, request in requests.items():
        events_by_id = run(engine, [request])[name]
        assert token_hashes(events_by_id) == alone(checkpoint, request)
        cached[name] = events_by_id[0].num_cached  # type: ignore[union-attr]
    length, (one, two) = len(requests["first"].prompt_ids), requests["first"].images
    assert cached["first"] == cached["another"] == 0 and cached["again"] == (length - 1) // 4 * 4
    assert cached["swapped"] == one.start // 4 * 4 and cached["second differs"] == two.start // 4 * 4


def test_cache_salts_do_not_share_features(checkpoint: Path) -> None:
    engine = engine_of(checkpoint, prefix_caching=False)
    run(engine, [image_request(checkpoint, name, cache_salt=name) for name in "ab"])
    assert (engine.encoder.num_encoded, engine.encoder.num_hits) == (2, 0)
    run(engine, [image_request(checkpoint, "again", cache_salt="a")])
    assert (engine.encoder.num_encoded, engine.encoder.num_hits) == (2, 1)


@pytest.mark.parametrize("memory", ["256MiB", "0"])
def test_image_in_the_prefix_cache_counts_as_hit(checkpoint: Path, memory: str) -> None:
    """Like another choice: it is not encoded, even if its features were evicted."""
    engine = engine_of(checkpoint, image_cache_memory=memory)
    first = image_request(checkpoint, "0")
    for number in range(3):
        long = replace(first, id=f"{number}", prompt_ids=(*first.prompt_ids, *range(20, 52)))
        run(engine, [long])
        assert (engine.encoder.num_encoded, engine.encoder.num_hits) == (1, number)


@pytest.mark.parametrize("memory", ["256MiB", "0"])
def test_preempted_image_requests_are_exact(checkpoint: Path, memory: str) -> None:
    requests = [
        image_request(checkpoint, f"{number}", [number, number + 1], seed=number, max_tokens=40)
        for number in range(4)
    ]
    options = {"kv_cache_memory": "170tokens", "image_cache_memory": memory}
    engine = engine_of(checkpoint, max_num_batched_tokens=32, **options)
    check_answers(engine, checkpoint, requests)
    assert engine.scheduler.num_preemptions > 0


def test_prompt_logprobs_with_images_are_equal_when_chunked(checkpoint: Path) -> None:
    request = image_request(checkpoint, "a", [1, 2], prompt_logprobs=2, logprobs=1)
    whole, cut = (
        run(engine_of(checkpoint, max_num_batched_tokens=rows, speculate="off"), [request])["a"]
        for rows in (128, 9)
    )
    assert whole == [event._replace(scheduled_s=whole[0].scheduled_s) for event in cut]  # type: ignore[union-attr]
    assert len(whole[0].prompt_logprobs) == len(request.prompt_ids)  # type: ignore[union-attr]


@pytest.mark.parametrize("speculate", ["off", "suffix,ngram"])
def test_resumed_image_request_continues_its_output(checkpoint: Path, speculate: str) -> None:
    request = image_request(checkpoint, "a", [1, 2], max_tokens=24, temperature=0.8)
    expected = alone(checkpoint, request)
    resumed = replace(request, resume_output_ids=tuple(token_id for token_id, _ in expected[:9]))
    engine = engine_of(checkpoint, speculate=speculate, max_num_batched_tokens=16)
    assert token_hashes(run(engine, [resumed])["a"]) == expected[9:]


def test_resumed_request_counts_no_hit(checkpoint: Path) -> None:
    """The first engine has counted it."""
    request = image_request(checkpoint, "a", [1], max_tokens=12)
    expected = alone(checkpoint, request)
    delivered = tuple(token_id for token_id, _ in expected[:5])
    engine = engine_of(checkpoint, prefix_caching=False)
    run(engine, [replace(request, id="before")])
    resumed = replace(request, resume_output_ids=delivered, is_resumed=True)
    assert token_hashes(run(engine, [resumed])["a"]) == expected[5:]
    assert (engine.encoder.num_encoded, engine.encoder.num_hits) == (1, 0)
    run(engine, [replace(request, id="after")])
    assert (engine.encoder.num_encoded, engine.encoder.num_hits) == (1, 1)


def test_feature_cache_stays_within_its_bound(checkpoint: Path) -> None:
    """The bound holds two images of 16 x 64 floats; the first needed one ignores it."""
    engine = engine_of(checkpoint, image_cache_memory=f"{2 * 16 * 64 * 4}", max_num_batched_tokens=128)
    held = []
    put = engine.encoder.cache.put

    def recording(key: Any, features: torch.Tensor) -> None:
        put(key, features)
        held.append(engine.encoder.cache.num_bytes)

    engine.encoder.cache.put = recording  # type: ignore[method-assign]
    request = image_request(checkpoint, "a", [1, 2, 3, 4])
    assert token_hashes(run(engine, [request])["a"]) == alone(checkpoint, request)
    assert [size // 4096 for size in held] == [1, 2, 2, 2]
    run(engine, [image_request(checkpoint, "b", [9, 4, 3])])
    assert [size // 4096 for size in held[4:]] == [3], "the last two are kept while they are needed"


def mixed_requests(checkpoint: Path) -> list[Request]:
    """Two requests with the same image, one with other images, one text request."""
    return [
        image_request(checkpoint, "bad"),
        image_request(checkpoint, "bad too", [2, 1], seed=2),
        image_request(checkpoint, "good", [3, 4], seed=3),
        text_request("text"),
    ]


@pytest.mark.parametrize("kind", ["error", "memory", "device memory", "nan", "infinite", "too few"])
def test_encode_failure_fails_the_requests_with_the_image(checkpoint: Path, kind: str) -> None:
    requests = mixed_requests(checkpoint)
    engine = engine_of(checkpoint)
    FaultInjector(engine, Fault("encode", kind, "bad"))
    events_by_id = run(engine, requests)
    for name in ("bad", "bad too"):
        (failed,) = events_by_id[name]
        assert isinstance(failed, ErrorEvent) and isinstance(failed.error, RequestFailed), failed
    for request in requests[2:]:
        assert token_hashes(events_by_id[request.id]) == alone(checkpoint, request)
    assert engine.step().stats.faults == {"nonfinite" if kind in ("nan", "infinite") else "encode": 2}


@pytest.mark.parametrize("kind", ["error", "memory"])
def test_transient_encode_failure_fails_no_request(checkpoint: Path, kind: str) -> None:
    requests = mixed_requests(checkpoint)
    engine = engine_of(checkpoint)
    FaultInjector(engine, Fault("encode", kind))
    check_answers(engine, checkpoint, requests)
    assert not engine.step().stats.faults


def test_lost_device_while_encoding_ends_the_engine(checkpoint: Path) -> None:
    engine = engine_of(checkpoint)
    FaultInjector(engine, Fault("encode", "device"))
    engine.submit(image_request(checkpoint, "a"))
    with pytest.raises(torch.AcceleratorError):
        while True:
            engine.step()


def test_missing_pixels_fail_the_request(checkpoint: Path) -> None:
    request = image_request(checkpoint, "a")
    bare = replace(request, id="bare", images=tuple(image.without_pixels() for image in request.images))
    engine = engine_of(checkpoint)
    (failed,) = run(engine, [bare])["bare"]
    assert isinstance(failed, ErrorEvent) and "did not reach the engine" in failed.error.message
    (image,) = request.images
    assert image.pixels is not None
    engine.encoder.add_pixels(image.digest, image.pixels)
    assert token_hashes(run(engine, [bare])["bare"]) == alone(checkpoint, request)


def test_abort_stops_encoding(checkpoint: Path) -> None:
    engine = engine_of(checkpoint, max_num_batched_tokens=8)
    engine.submit(image_request(checkpoint, "a"))
    while engine.encoder._job is None:
        engine.step()
    engine.remove("a")
    assert engine.encoder._job is None and engine.idle
    engine.check()


def test_on_batch_reports_requests_of_the_encoded_image(checkpoint: Path) -> None:
    engine = engine_of(checkpoint, max_num_batched_tokens=8)
    batches: list[list[int]] = []
    engine.on_batch = batches.append
    for request in (text_request("text"), image_request(checkpoint, "a"), image_request(checkpoint, "b")):
        engine.submit(request)
    reported: list[set[int]] = []
    encode = engine.encoder._encoder.encode  # type: ignore[union-attr]

    def recording(image: PromptImage) -> Any:
        pieces = encode(image)
        while True:
            reported.append(set(batches[-1]))
            try:
                yield next(pieces)
            except StopIteration as end:
                return end.value

    engine.encoder._encoder.encode = recording  # type: ignore[union-attr, method-assign]
    run(engine, [])
    assert reported and set.union(*reported) <= {1, 2} and all(1 in one for one in reported)


def with_image(request: Request, **changes: Any) -> Request:
    return replace(request, images=(replace(request.images[0], **changes), *request.images[1:]))


INVALID_IMAGES: dict[str, Callable[[Request], Request]] = {
    "needs 16 placeholder tokens": lambda one: with_image(one, start=4),
    "exceeds the prompt": lambda one: with_image(one, start=500),
    "overlaps another": lambda one: replace(one, images=one.images[::-1]),
    "is reserved for image placeholders": lambda one: replace(one, images=one.images[:1]),
    f"token id {IMAGE_TOKEN_ID} is reserved": lambda one: replace(one, resume_output_ids=(IMAGE_TOKEN_ID,)),
    "5 bytes, needs 16": lambda one: with_image(one, digest=b"short"),
    "0 tokens, needs at least 1": lambda one: with_image(one, num_tokens=0),
    "has 7 bytes of pixels": lambda one: with_image(one, pixels=b"1234567"),
    "cannot be embedded": lambda one: replace(one, pooling="mean"),
}


def test_images_that_do_not_fit_the_prompt_are_refused(checkpoint: Path) -> None:
    engine, request = engine_of(checkpoint), image_request(checkpoint, "a", [1, 2])
    for message, change in INVALID_IMAGES.items():
        (failed,) = run(engine, [change(request)])["a"]
        assert isinstance(failed, ErrorEvent) and isinstance(failed.error, InvalidRequest)
        assert message in failed.error.message


def test_text_model_refuses_images(checkpoint: Path, tmp_path: Path) -> None:
    blind = load_engine(write_checkpoint(tmp_path / "model", "llama"), kv_cache_memory="500tokens")
    (failed,) = run(blind, [image_request(checkpoint, "a")])["a"]
    assert isinstance(failed, ErrorEvent) and "has no vision encoder" in failed.error.message


def test_decoding_continues_while_images_are_encoded(checkpoint: Path) -> None:
    """Large images arrive; encoding gets half of a step's rows and a piece."""
    engine = engine_of(checkpoint, max_num_batched_tokens=64, max_num_seqs=4, speculate="off")
    engine.submit(text_request("stream", 5, max_tokens=100))
    engine.step()
    for number in range(3):
        engine.submit(image_request(checkpoint, f"{number}", [10 + number, 20 + number]))
    most = 0
    while engine.scheduler.states.keys() - {"stream"}:
        events = engine.step().events
        assert any(event.request_id == "stream" for event in events)
        most = max(most, engine.encoder.cost_rows)
    assert engine.encoder.num_encoded == 6 and most


def test_image_encoding_shares_the_row_budget(checkpoint: Path) -> None:
    """Each piece costs ten rows: four pieces exceed half of a step."""
    engine = engine_of(checkpoint, max_num_batched_tokens=64, max_num_seqs=4, speculate="off")
    engine.encoder._encoder = SlowEncoder(engine.encoder, pieces=9)
    for request in (text_request("text", 150, max_tokens=1), image_request(checkpoint, "a", max_tokens=1)):
        engine.submit(request)
    spent = []
    schedule = engine.scheduler.schedule

    def recording(used_rows: int) -> Any:
        scheduled = schedule(used_rows)
        spent.append((used_rows, sum(work.num_tokens for work in scheduled.requests)))
        return scheduled

    engine.scheduler.schedule = recording  # type: ignore[method-assign]
    run(engine, [])
    assert [used_rows for used_rows, _ in spent if used_rows] == [40, 40, 10]
    assert all(used_rows + rows <= 64 for used_rows, rows in spent) and (40, 23) in spent, (
        "a row is left for the other request"
    )


class SlowEncoder:
    """A vision encoder of zero features."""

    def __init__(self, encoder: VisionEncoderRunner, pieces: int) -> None:
        assert encoder._encoder is not None
        self.feature_size, self._cost, self._pieces = (
            encoder._encoder.feature_size,
            encoder._row_cost * 10,
            pieces,
        )

    def encode(self, image: PromptImage) -> Iterator[int]:
        for _ in range(self._pieces):
            yield self._cost
        return torch.zeros(image.num_tokens, self.feature_size)


def test_text_request_starts_before_waiting_image_requests(checkpoint: Path) -> None:
    """More image requests than slots: a later text request gets a slot."""
    engine = engine_of(checkpoint, max_num_batched_tokens=32, max_num_seqs=4, speculate="off")
    engine.encoder._encoder = SlowEncoder(engine.encoder, pieces=20)
    for number in range(4):
        engine.submit(image_request(checkpoint, f"{number}", [number, number + 20]))
    engine.submit(text_request("text", 5, max_tokens=2))
    for _ in range(5):
        engine.step()
    assert "text" not in engine.scheduler.states and len(engine.scheduler.states) == 4
    run(engine, [])


def test_trace_with_images_is_replayed(checkpoint: Path, tmp_path: Path) -> None:
    engine = engine_of(
        checkpoint, trace=str(tmp_path / "trace"), max_num_batched_tokens=16, kv_cache_memory="250tokens"
    )
    engine.encoder._encoder = SlowEncoder(engine.encoder, pieces=9)
    run(
        engine,
        [*mixed_requests(checkpoint), image_request(checkpoint, "last", [1, 5], max_tokens=30)],
        apart=2,
    )
    schedules = list(replay((tmp_path / "trace").read_text().splitlines()))
    assert len(schedules) == engine._num_steps and any(not schedule["work"] for schedule in schedules)
