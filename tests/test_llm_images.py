"""Images in offline inference: every form of the same image gives the same answer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from foreword import LLM, SamplingParams
from foreword.errors import ContextLengthExceeded, InvalidRequest, Unsupported
from foreword.multimodal.image_source import read_image
from tests.support.checkpoints import write_checkpoint
from tests.support.images import image_part, png
from tests.support.vision_checkpoints import write_vision_checkpoint

GREEDY = SamplingParams(temperature=0, max_tokens=6)
ASK = {"type": "text", "text": "What is it?"}
OPTIONS: dict[str, Any] = {"threads": 1, "max_model_len": 128, "kv_cache_memory": "2000tokens"}


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    path = write_vision_checkpoint(tmp_path_factory.mktemp("conversation") / "model", "llava", seed=5)
    llm = LLM(str(path), **OPTIONS)
    yield llm
    llm.check()
    llm._image_loader.close()  # type: ignore[union-attr]


def user(*parts: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(parts)}]


def test_every_form_of_an_image_is_equal(llm: LLM, tmp_path: Path) -> None:
    data = png("orange", (50, 20))
    file = tmp_path / "an image.png"
    file.write_bytes(data)
    (expected,) = llm.chat(user(image_part(data), ASK), GREEDY)
    for given in (data, bytearray(data), file, str(file), Image.open(file), Image.open(file).convert("P")):
        (output,) = llm.chat(user({"type": "image", "image": given}, ASK), GREEDY)
        assert (output.token_ids, output.prompt_token_ids) == (expected.token_ids, expected.prompt_token_ids)
    (other,) = llm.chat(user(image_part(png("black")), ASK), GREEDY)
    assert other.token_ids != expected.token_ids, "the image matters"


def test_conversations_and_choices_in_one_batch(llm: LLM) -> None:
    red, blue = user(image_part(png("red")), ASK), user(image_part(png("blue")), ASK)
    params = SamplingParams(max_tokens=6, n=3, seed=4)
    together = llm.chat([red, blue, [{"role": "user", "content": "Hi"}]], params)
    alone = [llm.chat(one, params)[0] for one in (red, blue)]
    assert [output.outputs[2].token_ids for output in together[:2]] == [
        output.outputs[2].token_ids for output in alone
    ]
    assert [len(output.outputs) for output in together] == [3, 3, 3]
    assert "".join(piece.text for piece in llm.stream(red, GREEDY)) == llm.chat(red, GREEDY)[0].text


def test_prompt_with_images(llm: LLM) -> None:
    data = png("purple")
    (chat,) = llm.chat(user({"type": "image", "image": data}, ASK), GREEDY)
    assert chat.prompt is not None and chat.prompt.count("<image>") == 1
    (text,) = llm.generate({"prompt": chat.prompt, "images": [data]}, GREEDY)
    ids = llm.tokenizer.encode(chat.prompt)
    (from_ids,) = llm.generate([{"prompt_token_ids": ids, "images": [data]}], GREEDY)
    assert chat.token_ids == text.token_ids == from_ids.token_ids
    assert chat.prompt_token_ids == text.prompt_token_ids == from_ids.prompt_token_ids
    (bare,) = llm.generate([{"prompt": "Hi"}], GREEDY)
    assert bare.token_ids == llm.generate("Hi", GREEDY)[0].token_ids


@pytest.mark.parametrize(
    ("prompt", "reason"),
    [
        ({"prompt": "no place", "images": [png()]}, "places for 0 images, got 1"),
        ({"prompt": "<image><image>", "images": [png()]}, "places for 2 images, got 1"),
        ({"prompt": "<image>"}, "represents an image"),
        ("<image>", "represents an image"),
        ({"prompt": "<image>" * 17, "images": [png()] * 17}, "images hold 17 images, of at most 16"),
        ({"images": [png()]}, "a prompt is a text"),
        ({"prompt": "<image>", "images": [b"nothing"]}, r"images\[0\]"),
        (
            {"prompt": "<image>", "images": [3]},
            r"images\[0\] must be a path, file bytes or PIL.Image, got int",
        ),
        (
            {"prompt": "<image>", "images": ["/nowhere.png"]},
            r"images\[0\]: /nowhere.png cannot be read: No such file",
        ),
    ],
)
def test_invalid_prompt_is_refused_before_any_step(llm: LLM, prompt: Any, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason):
        llm.generate(prompt, GREEDY)
    assert llm._client.idle


def test_too_long_prompt_names_image_tokens(llm: LLM) -> None:
    with pytest.raises(ContextLengthExceeded, match="96 of them for 6 images"):
        llm.chat(user(*[image_part()] * 6, {"type": "text", "text": "x" * 40}), GREEDY)


def test_text_only_model_refuses_images(tmp_path: Path) -> None:
    llm = LLM(str(write_checkpoint(tmp_path / "model", "llama")), **OPTIONS)
    for part in ({"type": "image", "image": png()}, image_part()):
        with pytest.raises(Unsupported, match="this model takes none"):
            llm.chat(user(part), GREEDY)
    with pytest.raises(Unsupported, match="this model takes no images"):
        llm.generate({"prompt": "x", "images": [png()]}, GREEDY)
    assert llm.generate("<image>", GREEDY)[0].token_ids, "plain text for this model"


def test_exif_orientation_applies_to_files_only(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    file = tmp_path / "turned.png"
    Image.new("RGB", (8, 4)).save(file, exif=exif)
    assert read_image(file, "x").data == file.read_bytes()
    with Image.open(file) as opened:
        data = read_image(opened, "x").data
    assert data is not None and b"eXIf" not in data
    with Image.open(file).convert("CMYK") as cmyk:
        assert read_image(cmyk, "x").data is not None
