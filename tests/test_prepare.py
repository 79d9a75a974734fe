"""What the API process learns of a checkpoint, without torch."""

import subprocess
import sys
from pathlib import Path

import pytest

from foreword.config import Config
from foreword.errors import CheckpointError, ConfigError
from foreword.prepare import prepare, read_vocabulary
from tests.checkpoints import VOCAB_SIZE, write_checkpoint
from tests.gguf_files import Raw, write_gguf


def test_a_gguf_file_is_prepared_without_torch(tmp_path: Path) -> None:
    file = write_gguf(write_checkpoint(tmp_path / "checkpoint"), tmp_path / "model.gguf")
    code = (
        "import sys; from foreword.config import Config; from foreword.prepare import prepare; "
        f"print(prepare(Config(model={str(file)!r})).unused_ids, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "(270, 271) False\n"


def test_both_formats_have_the_same_vocabulary(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "checkpoint")
    file = write_gguf(checkpoint, tmp_path / "model.gguf")
    (theirs, their_rows), (ours, our_rows) = read_vocabulary(checkpoint), read_vocabulary(file)
    assert ours.first_difference(theirs) is None
    assert our_rows == their_rows == VOCAB_SIZE
    assert (ours.eos_token_ids[0], ours.chat_template) == (theirs.eos_token_ids[0], theirs.chat_template)
    prepared = prepare(Config(model=str(checkpoint), draft_model=str(file)))
    assert prepared.config.draft_model == str(file)


def test_a_drafter_with_another_tokenizer(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "checkpoint")
    file = write_gguf(checkpoint, tmp_path / "model.gguf")
    file.write_bytes(file.read_bytes().replace(b"<|im_start|>", b"<|im_begin|>"))
    with pytest.raises(ConfigError, match=r"tokenizer differs.*id 258 is '<\|im_start\|>' in the one"):
        prepare(Config(model=str(checkpoint), draft_model=str(file)))


def test_a_file_without_a_model(tmp_path: Path) -> None:
    """Such as those that hold a vocabulary alone."""
    (tmp_path / "x.gguf").write_bytes(Raw.small().bytes())
    with pytest.raises(CheckpointError, match=r"tensor `token_embd\.weight` is missing"):
        prepare(Config(model=str(tmp_path / "x.gguf")))
