"""Draft models and images: text-only models skip them, multimodal models need them encoded."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from foreword.core.images import PromptImage, expand_placeholders
from foreword.core.outputs import Draft
from foreword.core.params import SamplingParams
from foreword.core.request import Request, RequestState
from foreword.kernels.cpu.library import supported_isas
from foreword.kernels.ops import DraftJob, DraftTokens
from foreword.kernels.registry import select_backend
from foreword.kv_cache.block_pool import BlockPool
from foreword.kv_cache.storage import KVStorage
from foreword.models.decoder import Decoder
from foreword.models.interfaces import Precision
from foreword.models.model_loader import load_model
from foreword.sampling.sampler import Sampler
from foreword.speculation.drafters.draft_model import DraftState, ModelDrafter
from foreword.speculation.engine_drafter import DraftRequest
from tests.support.budget import examples
from tests.support.checkpoints import VOCAB_SIZE, write_checkpoint
from tests.support.fakes import extended
from tests.support.vision_checkpoints import IMAGE_TOKEN_ID, random_image, write_vision_checkpoint

BLOCK_SIZE = 4


def image_of(num_tokens: int, number: int = 0) -> PromptImage:
    return PromptImage(bytes([number] * 16), num_tokens, (1, 1, num_tokens), (8, 8), (1, 3, 8, 8), None)


def state_of(
    prompt: Sequence[int], images: Sequence[PromptImage] = (), seed: int = 0, name: str = "a", **params: Any
) -> RequestState:
    """A request with images at the placeholders of the prompt."""
    ids, found = expand_placeholders(prompt, IMAGE_TOKEN_ID, images)
    return RequestState(Request(name, ids, SamplingParams(**params), seed, images=found), 0, 4096)


@cache
def model_of(path: Path, max_len: int) -> Decoder:
    return load_model(path, select_backend("cpu"), Precision.from_dtypes("float32"), "cpu", max_len)


def drafter_of(path: Path, max_len: int = 256, blocks: int = 200, max_rows: int = 256) -> ModelDrafter:
    model = model_of(path, max_len)
    kv = KVStorage(blocks, BLOCK_SIZE, model.cache_shapes, "float32", "cpu")
    sampler = Sampler(model.ops, model.vocab_size, [IMAGE_TOKEN_ID])
    return ModelDrafter(model, kv, sampler, BlockPool(blocks), BLOCK_SIZE, max_rows, max_len)


class EncodedImages:
    """Features of the images encoded so far."""

    def __init__(self, model: Decoder) -> None:
        self.model = model
        self.known: dict[bytes, Tensor] = {}

    @torch.inference_mode()
    def show(self, image: PromptImage) -> None:
        assert self.model.vision_encoder is not None
        pieces = self.model.vision_encoder.encode(image)
        try:
            while True:
                next(pieces)
        except StopIteration as end:
            self.known[image.digest] = end.value

    def remaining_cost(self, state: RequestState, start: int) -> int:
        return sum(p.num_tokens for p in state.request.images if p.end > start and p.digest not in self.known)

    def computable_until(self, state: RequestState, start: int) -> int:
        unseen = (p for p in state.request.images if p.end > start and p.digest not in self.known)
        return next((max(image.start, start) for image in unseen), len(state.tokens))

    def features(self, state: RequestState, start: int, end: int) -> list[tuple[int, Tensor]]:
        found = []
        for image in state.request.images:
            first, last = max(image.start, start), min(image.end, end)
            if first < last:
                found.append(
                    (first - start, self.known[image.digest][first - image.start : last - image.start])
                )
        return found


def propose(drafter: ModelDrafter, *draft_requests: DraftRequest) -> list[Draft | None]:
    for draft_request in draft_requests:
        if draft_request.state.id not in drafter._states:
            drafter.start(draft_request.state)
    return drafter.propose(draft_requests)


# Text-only draft models


@pytest.fixture(scope="module")
def text_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("text_checkpoint") / "model", "llama", seed=5)


texts = st.lists(st.integers(0, 255), max_size=12)


@st.composite
def prompts(draw: st.DrawFn) -> tuple[list[int], list[int], list[PromptImage]]:
    """A prompt with placeholders, the prompt without them, and the images."""
    seen, read, images = draw(texts), [], []
    read = list(seen)
    for number in range(draw(st.integers(1, 4))):
        text = draw(texts)
        seen += [IMAGE_TOKEN_ID, *text]
        read += text
        images.append(image_of(draw(st.integers(1, 300)), number))
    return seen, read, images


@given(prompts(), st.lists(st.lists(st.integers(0, 255), min_size=1, max_size=4), min_size=1, max_size=4))
@settings(max_examples=examples(60))
def test_text_only_model_reads_the_text(
    prompt: tuple[list[int], list[int], list[PromptImage]], runs: list[list[int]]
) -> None:
    """From any index on, and as the text grows."""
    seen, read, images = prompt
    state = state_of(seen, images)
    track = DraftState.from_state(state, VOCAB_SIZE)
    for run in runs:
        state.append(run)
        read = read + run
        track.sync(DraftRequest(state))
        assert track.length == len(read)
        assert all(
            list(track.tokens_from(DraftRequest(state), index)) == read[index:]
            for index in range(len(read) + 1)
        )


@given(prompts(), st.lists(st.integers(0, 9), min_size=4, max_size=4))
@settings(max_examples=examples(30))
def test_text_only_model_drafts_as_without_images(
    text_checkpoint: Path, prompt: tuple[list[int], list[int], list[PromptImage]], accepted: list[int]
) -> None:
    seen, read, images = prompt
    drafter = drafter_of(text_checkpoint, max_len=64)
    one, other = (
        state_of(seen, images, temperature=0.0),
        state_of([*read, 7], name="other", temperature=0.0),
    )
    one.append((7,))
    for count in accepted:
        drafts = propose(drafter, DraftRequest(one, 4), DraftRequest(other, 4))
        assert drafts[0] == drafts[1] is not None
        for state in (one, other):
            state.append((*drafts[0].token_ids[:count], 9))
    drafter.check({"a", "other"})


class Recording:
    """A DraftLoop that records its jobs and drafts one token."""

    def __init__(self) -> None:
        self.lanes: list[DraftJob] = []

    def __call__(self, batch: object) -> Tensor:
        raise AssertionError("nothing is to be computed pass by pass")

    def draft(
        self, jobs: Sequence[DraftJob], block_size: int, never_sampled_ids: Tensor
    ) -> list[DraftTokens]:
        self.lanes += jobs
        return [DraftTokens((1,), (0.0,))] * len(jobs)


def test_noise_uses_the_targets_positions(text_checkpoint: Path) -> None:
    drafter = drafter_of(text_checkpoint)
    loop = drafter._draft_loop = Recording()
    state = state_of([5, IMAGE_TOKEN_ID, 6, 8], [image_of(2000)], temperature=1.0)
    propose(drafter, DraftRequest(state, 4))
    (job,) = loop.lanes
    assert (list(job.token_ids), job.start_position, job.first_draft_index, job.mrope_offset) == (
        [5, 6, 8],
        0,
        2003,
        0,
    )


def test_image_only_prompt_has_no_draft(text_checkpoint: Path) -> None:
    """With a prefix cache hit, such a request decodes before it has any text."""
    drafter = drafter_of(text_checkpoint)
    state = state_of([IMAGE_TOKEN_ID], [image_of(9)], temperature=0.0)
    assert propose(drafter, DraftRequest(state, 4)) == [None]
    assert drafter.num_pending_rows(DraftRequest(state, 4)) == 1, "at least one row is pending"
    (draft,) = propose(drafter, DraftRequest(extended(state, (7,)), 4))
    assert draft is not None
    alone = state_of([7], name="alone", temperature=0.0)
    assert propose(drafter, DraftRequest(alone, 4)) == [draft]


# Multimodal draft models


FAMILIES = ("llava", "qwen2_5_vl")  # RoPE, and M-RoPE


@pytest.fixture(scope="module", params=FAMILIES)
def vision_checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_vision_checkpoint(
        tmp_path_factory.mktemp("vision_checkpoint") / "model", request.param, seed=5
    )


def seeing(path: Path, **options: Any) -> tuple[ModelDrafter, EncodedImages]:
    drafter = drafter_of(path, **options)
    seen = EncodedImages(model_of(path, options.get("max_len", 256)))
    drafter.set_image_source(seen, 1)
    return drafter, seen


def test_no_draft_before_images_are_encoded(vision_checkpoint: Path) -> None:
    drafter, seen = seeing(vision_checkpoint)
    first, second = random_image(vision_checkpoint, 1), random_image(vision_checkpoint, 2)
    state = state_of([5, IMAGE_TOKEN_ID, 6, 7, IMAGE_TOKEN_ID, 8], [first, second], temperature=0.0)
    drafter.start(state)
    assert drafter.num_computed(state) == len(state.tokens), (
        "a request without draft requests needs no images"
    )
    assert propose(drafter, DraftRequest(state, 4)) == [None]
    assert drafter.num_computed(state) == 1
    seen.show(first)
    assert propose(drafter, DraftRequest(state, 4)) == [None]
    assert drafter.num_computed(state) == state.request.images[1].start
    seen.show(second)
    (draft,) = propose(drafter, DraftRequest(state, 4))
    assert draft is not None and len(draft.token_ids) == 4
    drafter.check({"a"})


def test_request_waiting_for_images_is_not_called(vision_checkpoint: Path) -> None:
    """Encoding is part of the pending rows at first."""
    drafter, seen = seeing(vision_checkpoint)
    image = random_image(vision_checkpoint, 1)
    state = state_of([5, IMAGE_TOKEN_ID, 6], [image])
    drafter.start(state)
    assert drafter.num_pending_rows(DraftRequest(state, 4)) == 2 + 2 * image.num_tokens
    propose(drafter, DraftRequest(state, 4))
    assert drafter.num_pending_rows(DraftRequest(state, 4)) == 0
    seen.show(image)
    assert drafter.num_pending_rows(DraftRequest(state, 4)) == 1 + image.num_tokens
    propose(drafter, DraftRequest(state, 4))
    assert drafter.num_pending_rows(DraftRequest(state, 4)) == 1


def test_draft_depends_on_the_image(vision_checkpoint: Path) -> None:
    drafter, seen = seeing(vision_checkpoint)
    images = [random_image(vision_checkpoint, number) for number in range(4)]
    states = [
        state_of([5, IMAGE_TOKEN_ID, 6], [image], name=f"{n}", temperature=0.0)
        for n, image in enumerate(images)
    ]
    for image in images:
        seen.show(image)
    assert (
        len(
            {
                draft.token_ids
                for draft in propose(drafter, *(DraftRequest(state, 6) for state in states))
                if draft
            }
        )
        > 1
    )


@given(data=st.data())
@settings(max_examples=examples(20))
def test_chunked_reading_changes_no_draft(vision_checkpoint: Path, data: st.DataObject) -> None:
    """Prompts are cut anywhere, also within images; after them the DraftLoop drafts."""
    sizes = data.draw(st.lists(st.tuples(st.integers(8, 90), st.integers(8, 90)), min_size=1, max_size=3))
    images = [random_image(vision_checkpoint, number, *size) for number, size in enumerate(sizes)]
    prompt = [5, *(token for n in range(len(sizes)) for token in (IMAGE_TOKEN_ID, 40 + n)), 9]
    params = {"temperature": data.draw(st.sampled_from([0.0, 1.0])), "seed": data.draw(st.integers(0, 2**63))}
    whole, cut = seeing(vision_checkpoint), seeing(vision_checkpoint, max_rows=data.draw(st.integers(3, 40)))
    states = [state_of(prompt, images, **params) for _ in range(2)]
    for (drafter, seen), state in zip((whole, cut), states, strict=True):
        drafter.start(state)
        for image in images:
            seen.show(image)
    for accepted in (2, 4, 0):
        found = []
        for (drafter, _), state in zip((whole, cut), states, strict=True):
            draft = None
            while draft is None:
                (draft,) = drafter.propose([DraftRequest(state, 4)])
            found.append(draft)
        assert found[0].token_ids == found[1].token_ids
        assert all(
            math.isclose(a, b, rel_tol=1e-4)
            for a, b in zip(found[0].confidence, found[1].confidence, strict=True)
        )
        for state in states:
            state.append((*found[0].token_ids[:accepted], 11))


def test_draft_loop_equals_eager_loop_after_images(vision_checkpoint: Path) -> None:
    """A logit bias without effect forces eager drafting: both must use the same positions."""
    drafter, seen = seeing(vision_checkpoint)
    assert (drafter._draft_loop is not None) == bool(supported_isas())
    image = random_image(vision_checkpoint, 3, 70, 30)
    seen.show(image)
    inside = state_of([5, IMAGE_TOKEN_ID, 6], [image], name="in", temperature=0.0)
    outside = state_of(
        [5, IMAGE_TOKEN_ID, 6], [image], name="out", temperature=0.0, logit_bias={IMAGE_TOKEN_ID: 1.0}
    )
    for step in range(4):
        drafts = propose(
            drafter, *(DraftRequest(extended(state, (20 + step,)), 6) for state in (inside, outside))
        )
        assert drafts[0] is not None and drafts[1] is not None
        assert drafts[0].token_ids == drafts[1].token_ids


def test_images_before_the_window_are_not_encoded(vision_checkpoint: Path) -> None:
    """The window restarts after the last image, or at its last half."""
    drafter, seen = seeing(vision_checkpoint, max_len=64)
    image = random_image(vision_checkpoint, 1, 40, 30)
    state = state_of([5, IMAGE_TOKEN_ID, 6], [image], temperature=0.0)
    seen.show(image)
    assert propose(drafter, DraftRequest(state, 4)) != [None]
    text = [(7 * i) % 200 + 10 for i in range(80)]
    state.append(text)
    (draft,) = propose(drafter, DraftRequest(state, 4))
    alone = state_of(text[-32:], name="alone", temperature=0.0)
    assert draft is not None and propose(drafter, DraftRequest(alone, 4)) == [draft]
    assert drafter.num_computed(state) >= image.num_tokens + 1
    late = state_of(
        [*text[:60], IMAGE_TOKEN_ID], [replace(image, digest=b"unseen")], name="late", temperature=0.0
    )
    drafts = propose(
        drafter,
        DraftRequest(extended(late, text[:9]), 4),
        DraftRequest(state_of(text[:9], name="short", temperature=0.0), 4),
    )
    assert drafts[0] == drafts[1] is not None


def test_evicted_request_needs_its_images_again(vision_checkpoint: Path) -> None:
    drafter, seen = seeing(vision_checkpoint, blocks=16)
    images = [random_image(vision_checkpoint, number, 40, 30) for number in (1, 2)]
    states = [
        state_of([5, IMAGE_TOKEN_ID, *range(30, 50)], [p], name=f"{n}", temperature=0.0)
        for n, p in enumerate(images)
    ]
    for image in images:
        seen.show(image)
    first = propose(drafter, DraftRequest(states[0], 4))
    assert drafter.num_computed(states[0]) == len(states[0].tokens)
    assert propose(drafter, DraftRequest(states[1], 4)) != [None]
    assert drafter.num_computed(states[0]) == 0, "the first request must be evicted"
    assert propose(drafter, DraftRequest(states[0], 4)) == first
