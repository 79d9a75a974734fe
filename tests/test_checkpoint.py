"""prepare_checkpoint(): tokenizer and ids of a checkpoint, without torch."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from foreword.checkpoint import prepare_checkpoint, read_tokenizer
from foreword.config.options import Config
from foreword.errors import CheckpointError, ConfigError
from foreword.tokenizer.tokenizer import Tokenizer
from tests.support.checkpoints import VOCAB_SIZE, write_checkpoint
from tests.support.gguf_files import RawGGUF, write_gguf
from tests.support.vision_checkpoints import IMAGE_TOKEN_ID, write_vision_checkpoint


def test_gguf_file_is_prepared_without_torch(tmp_path: Path) -> None:
    file = write_gguf(write_checkpoint(tmp_path / "checkpoint"), tmp_path / "model.gguf")
    code = (
        "import sys; from foreword.config.options import Config; import foreword.checkpoint as c; "
        f"print(c.prepare_checkpoint(Config(model={str(file)!r})).never_sampled_ids, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "(270, 271) False\n"


def test_both_formats_have_the_same_vocabulary(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "checkpoint")
    file = write_gguf(checkpoint, tmp_path / "model.gguf")
    (theirs, their_rows), (ours, our_rows) = read_tokenizer(checkpoint), read_tokenizer(file)
    assert ours.diff(theirs) is None
    assert our_rows == their_rows == VOCAB_SIZE
    assert (ours.eos_token_ids[0], ours.chat_template) == (theirs.eos_token_ids[0], theirs.chat_template)
    prepared = prepare_checkpoint(Config(model=str(checkpoint), draft_model=str(file)))
    assert prepared.config.draft_model == str(file)


def test_draft_model_with_another_tokenizer_is_refused(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "checkpoint")
    file = write_gguf(checkpoint, tmp_path / "model.gguf")
    file.write_bytes(file.read_bytes().replace(b"<|im_start|>", b"<|im_begin|>"))
    with pytest.raises(ConfigError, match=r"tokenizer differs.*id 258 is '<\|im_start\|>' in the one"):
        prepare_checkpoint(Config(model=str(checkpoint), draft_model=str(file)))


def test_gguf_file_without_model_is_refused(tmp_path: Path) -> None:
    """Such as files with only a vocabulary."""
    (tmp_path / "x.gguf").write_bytes(RawGGUF.sample().bytes())
    with pytest.raises(CheckpointError, match=r"tensor `token_embd\.weight` is missing"):
        prepare_checkpoint(Config(model=str(tmp_path / "x.gguf")))


def test_image_placeholder_is_never_sampled(tmp_path: Path) -> None:
    """Like rows without a token."""
    prepared = prepare_checkpoint(Config(model=str(write_vision_checkpoint(tmp_path))))
    assert prepared.never_sampled_ids == (IMAGE_TOKEN_ID, VOCAB_SIZE - 1)


def test_video_placeholder_is_never_sampled(tmp_path: Path) -> None:
    path = write_vision_checkpoint(tmp_path, "qwen2_vl")
    config = json.loads((path / "config.json").read_text())
    assert {config["image_token_id"], config["video_token_id"]} <= {
        *prepare_checkpoint(Config(model=str(path))).never_sampled_ids
    }


def drafting(model: Path, drafter: Path) -> Config:
    return Config(model=str(model), draft_model=str(drafter))


def test_text_draft_model_needs_no_image_tokens(tmp_path: Path) -> None:
    sees, reads = write_vision_checkpoint(tmp_path / "sees", "qwen2_vl"), write_checkpoint(tmp_path / "reads")
    assert prepare_checkpoint(drafting(sees, reads)).config.draft_model == str(reads)
    with pytest.raises(
        ConfigError, match=r"id 270 is no token in the one and '<\|image_pad\|>' in the other"
    ):
        prepare_checkpoint(drafting(reads, sees))


def test_other_missing_tokens_are_refused(tmp_path: Path) -> None:
    sees, reads = (
        write_vision_checkpoint(tmp_path / "sees", vocab_size=280),
        write_checkpoint(tmp_path / "reads"),
    )
    tokenizer = Tokenizer.from_directory(sees)
    tokenizer._backend.add_tokens(["word"])
    tokenizer._backend.save(str(sees / "tokenizer.json"))
    with pytest.raises(ConfigError, match="id 271 is 'word' in the one and no token in the other"):
        prepare_checkpoint(drafting(sees, reads))


def test_draft_model_must_preprocess_images_equally(tmp_path: Path) -> None:
    sees, same = (write_vision_checkpoint(tmp_path / name) for name in ("sees", "same"))
    assert prepare_checkpoint(drafting(sees, same)).config.draft_model == str(same)
    larger = write_vision_checkpoint(tmp_path / "larger", vision_config={"image_size": 42})
    with pytest.raises(
        ConfigError,
        match=r"image processor differs from the model's: .*image_size=42.* instead of .*image_size=28",
    ):
        prepare_checkpoint(drafting(sees, larger))
