"""From image files to tokens, against transformers: processor, model and generate()."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from PIL import Image

from foreword.checkpoint import prepare_checkpoint
from foreword.config.options import Config
from foreword.core.params import SamplingParams
from foreword.llm import LLM
from tests.support.vision_checkpoints import VISION_FAMILIES, write_vision_checkpoint

SIZES = ((121, 333), (64, 64), (480, 200))  # (height, width)


def files_of(seed: int = 0) -> list[bytes]:
    """PNG files of smooth random colours."""
    colours = np.random.default_rng(seed)
    return [
        _png(Image.fromarray(colours.integers(0, 256, (9, 7, 3), np.uint8)).resize((w, h))) for h, w in SIZES
    ]


def _png(image: Image.Image) -> bytes:
    held = io.BytesIO()
    image.save(held, "PNG")
    return held.getvalue()


@pytest.mark.full
@pytest.mark.parametrize("family", VISION_FAMILIES)
def test_tokens_equal_transformers(family: str, tmp_path: Path) -> None:
    path = write_vision_checkpoint(tmp_path, family)
    files, mark = files_of(), VISION_FAMILIES[family].special_tokens[0]
    params = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
    llm = LLM(str(path), dtype="float32", max_model_len=512, threads=1)
    (output,) = llm.generate([{"prompt": f"a{mark}bc{mark}d{mark}what?", "images": files}], params)
    assert list(output.token_ids) == theirs(path, output.prompt_token_ids, files, 24)
    assert len(set(output.token_ids)) > 6, "the output loops, so the comparison is weak"


def theirs(path: Path, prompt_ids: tuple[int, ...], files: list[bytes], count: int) -> list[int]:
    """Without ids that have no token, and without placeholders."""
    transformers.utils.logging.disable_progress_bar()
    processor = transformers.AutoImageProcessor.from_pretrained(path, backend="pil")
    model = transformers.AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32).eval()
    inputs = processor([Image.open(io.BytesIO(file)) for file in files], return_tensors="pt")
    known = torch.tensor([prompt_ids])
    if "image_grid_thw" in inputs:  # positions in three directions are made from where the images stand
        inputs["mm_token_type_ids"] = (known == model.config.image_token_id).int()
    with torch.inference_mode():
        made = model.generate(
            known,
            attention_mask=torch.ones_like(known),
            max_new_tokens=count,
            do_sample=False,
            eos_token_id=None,
            suppress_tokens=list(prepare_checkpoint(Config(model=str(path))).never_sampled_ids),
            **inputs,
        )
    return made[0, len(prompt_ids) :].tolist()
