"""The bundled vision-language model: complete, equal to transformers, right on held-out images."""

import json

import pytest
import torch
from PIL import Image
from safetensors import safe_open
from transformers import AutoProcessor

from foreword import LLM, SamplingParams, demo
from foreword.checkpoint import read_tokenizer, resolve_paths
from foreword.config.options import Config
from foreword.core.images import expand_placeholders
from foreword.multimodal.processor_registry import read_processor
from tests.support.forward_helpers import ForwardHelper
from tests.support.vs_transformers import TransformersReference
from training.vision.cases import Case, cases
from training.vision.draw import draw_image
from training.vision.evaluate import GREEDY, messages
from training.vision.make import EXAMPLE
from training.vision.model import CHAT_TEMPLATE

CHECKPOINT = {
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
}
PICTURES = {"preprocessor_config.json", "processor_config.json"}
FOLDERS = (demo.VISION_MODEL, demo.VISION_DRAFTER)


@pytest.fixture(scope="module")
def llm() -> LLM:
    """With its text-only draft model and a fixed draft length of four."""
    return LLM(
        "demo-vision",
        draft_model="demo-vision",
        speculate="draft",
        draft_length="fixed",
        threads=1,
        kv_cache_memory="8000tokens",
    )


@pytest.fixture(scope="module")
def chats() -> list[Case]:
    return cases(40)


def test_checkpoints_are_complete_and_small() -> None:
    for folder, more in zip(FOLDERS, (PICTURES, set[str]()), strict=True):
        assert {one.name for one in folder.iterdir()} == CHECKPOINT | more | {"chat_template.jinja"}
        assert (folder / "chat_template.jinja").read_text(encoding="utf-8") == CHAT_TEMPLATE
    assert sum(file.stat().st_size for folder in FOLDERS for file in folder.iterdir()) <= 4.6e6


def test_weights_are_bfloat16() -> None:
    for folder in FOLDERS:
        with safe_open(folder / "model.safetensors", framework="np") as weights:
            assert {weights.get_slice(name).get_dtype() for name in weights.keys()} == {"BF16"}  # noqa: SIM118


def test_tokenizers_are_equal_with_a_placeholder() -> None:
    target, drafter = (read_tokenizer(folder)[0] for folder in FOLDERS)
    assert target.diff(drafter) is None
    placeholder = json.loads((demo.VISION_MODEL / "config.json").read_text(encoding="utf-8"))[
        "image_token_index"
    ]
    assert target.encode("<image>", add_special_tokens=False) == [placeholder]


def test_demo_vision_names_model_and_draft_model() -> None:
    found = resolve_paths(Config(model="demo-vision", draft_model="demo-vision", speculate="draft"))
    assert (found.model, found.draft_model) == tuple(map(str, FOLDERS))


def test_example_image_matches_its_recipe() -> None:
    assert demo.PICTURE.stat().st_size < 20_000
    with Image.open(demo.PICTURE) as image:
        assert image.mode == "RGB" and image.size == (EXAMPLE.width, EXAMPLE.height)


def test_example_questions_are_answered(llm: LLM) -> None:
    url = {"type": "image", "image": str(demo.PICTURE)}
    conversations = [
        [{"role": "user", "content": [{"type": "text", "text": text}, url]}]
        for text in demo.PICTURE_QUESTIONS
    ]
    texts = [output.text.lower() for output in llm.chat(conversations, GREEDY)]
    wanted = (("circles",), ("three", "3"), ("red",), ("circles",), ("no", "not"))
    for text, words in zip(texts, wanted, strict=True):
        assert any(word in text for word in words), text


def test_held_out_accuracy_is_90_percent(llm: LLM, chats: list[Case]) -> None:
    outputs = llm.chat([messages(case) for case in chats], GREEDY)
    wrong = [
        (case.question, output.text)
        for case, output in zip(chats, outputs, strict=True)
        if not case.is_right(output.text)
    ]
    assert len(wrong) <= 4, wrong


def test_choices_vary_and_are_right(llm: LLM, chats: list[Case]) -> None:
    params = SamplingParams(temperature=0.7, max_tokens=40, n=8, seed=1)
    good, different = [], []
    for case, output in zip(
        chats[:10], llm.chat([messages(case) for case in chats[:10]], params), strict=True
    ):
        texts = [choice.text for choice in output.outputs]
        assert len(texts) == 8
        good.append(sum(map(case.is_right, texts)))
        different.append(len({text for text in texts if case.is_right(text)}))
    # Two of the ten pictures may be taken for something else.
    assert sorted(good)[2] >= 7, good
    assert sorted(different)[2] >= 3, different


def test_missing_image_is_mentioned(llm: LLM) -> None:
    (output,) = llm.chat([{"role": "user", "content": "Which digit is it?"}], GREEDY)
    assert "picture" in output.text.lower()


def test_speculation_changes_no_token(llm: LLM, chats: list[Case]) -> None:
    asked = [messages(case) for case in chats[:6]]
    plain = LLM("demo-vision", speculate="off", threads=1, kv_cache_memory="8000tokens")
    params = SamplingParams(temperature=0.7, max_tokens=40, n=4, seed=3)
    texts = [
        [[choice.token_ids for choice in one.outputs] for one in each.chat(asked, params)]
        for each in (llm, plain)
    ]
    assert texts[0] == texts[1]


def test_drafts_are_accepted(llm: LLM, chats: list[Case]) -> None:
    outputs = llm.chat([messages(case) for case in chats], GREEDY)
    taken = [
        output.metrics.draft_tokens_acceptance
        for output in outputs
        if output.metrics and output.metrics.draft_tokens
    ]
    assert taken and sum(share or 0 for share in taken) / len(taken) > 0.2


def test_transformers_gives_the_same_answers(chats: list[Case]) -> None:
    processor, peer, ours = (
        read_processor(demo.VISION_MODEL),
        TransformersReference(demo.VISION_MODEL),
        ForwardHelper(demo.VISION_MODEL),
    )
    theirs, tokenizer = AutoProcessor.from_pretrained(demo.VISION_MODEL), read_tokenizer(demo.VISION_MODEL)[0]
    assert processor is not None
    for case in chats[:4]:
        asked, one = messages(case), processor.preprocess(draw_image(case.scene))
        text = theirs.apply_chat_template(asked, add_generation_prompt=True)
        ids, pictures = expand_placeholders(
            tokenizer.encode(text, add_special_tokens=False), processor.placeholder_id, [one]
        )
        inputs = theirs(text=text, images=draw_image(case.scene), return_tensors="pt")
        assert inputs["input_ids"][0].tolist() == list(ids)
        torch.testing.assert_close(ours.encode(one), peer.features([one])[0], atol=1e-4, rtol=1e-4)
        assert ours.greedy(ids, 12, pictures) == peer.greedy(ids, 12, pictures)
