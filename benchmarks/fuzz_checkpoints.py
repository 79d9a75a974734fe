"""Targets of fuzz_parsers.py that load whole checkpoints with the native kernels, and compute with them.

An input is one file of a checkpoint, after a line with the checkpoint's kind and the file's name; its other
files are sound. `make sanitize` runs some of them with kernels under AddressSanitizer.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

from PIL import Image

from benchmarks.fuzz_mutate import change_bytes, change_json, change_safetensors
from benchmarks.fuzz_targets import QUANTIZED, SMALL, SMALL_GROUPED, UNICODE, FuzzTarget
from foreword.checkpoint import prepare_checkpoint
from foreword.config.models_file import read_models
from foreword.config.options import Config
from foreword.core.images import PromptImage, expand_placeholders
from foreword.core.params import SamplingParams
from foreword.core.request import Request
from foreword.embedding.local import load_local_encoder
from foreword.engine.loader import load
from foreword.errors import CheckpointError, ForewordError
from tests.support.checkpoints import write_checkpoint
from tests.support.embedding_checkpoints import write_encoder
from tests.support.gguf_files import write_gguf
from tests.support.lora_files import write_adapter
from tests.support.quantized_checkpoints import write_quantized
from tests.support.vision_checkpoints import write_vision_checkpoint

CONTEXT = 64  # tokens
ENGINE = Config(kv_cache_memory="200tokens", max_model_len=CONTEXT, threads=2, draft_length="fixed")
MAX_STEPS = 40
MAX_CHANGED_BYTES = 1 << 17  # of the beginning of a file, which has its header
Serve = Callable[[Path], None]  # with a folder that holds the files


@dataclass(frozen=True, slots=True)
class Sound:
    """The files of a checkpoint by name, and what loads and runs it."""

    files: Mapping[str, bytes]
    serve: Serve


def checkpoint_targets() -> Mapping[str, Callable[[], FuzzTarget]]:
    """Constructors by name."""
    return {
        "checkpoint": lambda: _target(_text_checkpoints),
        "checkpoint-vision": lambda: _target(_vision_checkpoints),
        "checkpoint-encoder": lambda: _target(_encoder_checkpoints),
    }


def _target(write: Callable[[Path], Mapping[str, Sound]]) -> FuzzTarget:
    with TemporaryDirectory() as folder:
        checkpoints = write(Path(folder))

    def run(data: bytes, folder: Path) -> None:
        kind, name, content = _split(data)
        sound = checkpoints.get(kind) or next(iter(checkpoints.values()))
        name = name if name in sound.files else next(iter(sound.files))
        path = folder / "checkpoint"
        shutil.rmtree(path, ignore_errors=True)
        for file, value in (*sound.files.items(), (name, content)):
            (path / file).parent.mkdir(parents=True, exist_ok=True)
            (path / file).write_bytes(value)
        sound.serve(path)

    seeds = [
        f"{kind} {name}\n".encode() + content
        for kind, sound in checkpoints.items()
        for name, content in sound.files.items()
    ]
    modules = ("models/", "weights/", "kernels/cpu/", "embedding/", "lora/", "multimodal/", "checkpoint.py")
    return FuzzTarget(seeds, run, (ForewordError,), modules, _change, share=0.05)


def _split(data: bytes) -> tuple[str, str, bytes]:
    head, _, content = data.partition(b"\n")
    kind, _, name = head.decode(*UNICODE).partition(" ")
    return kind, name, content


def _change(random: Random, data: bytes, other: bytes) -> bytes:
    head, _, content = data.partition(b"\n")
    change = change_bytes
    if head.endswith(b".json"):
        change = change_json
    elif head.endswith(b".safetensors"):
        change = change_safetensors
    first, rest = content[:MAX_CHANGED_BYTES], content[MAX_CHANGED_BYTES:]
    return head + b"\n" + change(random, first, _split(other)[2][:MAX_CHANGED_BYTES]) + rest


def _text_checkpoints(folder: Path) -> dict[str, Sound]:
    """Decoders in all formats, a draft model, an adapter, and a file of models."""
    llama = write_checkpoint(folder / "llama", **SMALL)
    paths = {"llama": llama}
    for name in ("gemma2", "qwen3_moe", "gpt_oss"):
        paths[name] = write_checkpoint(folder / name, name, **SMALL)
    source = write_checkpoint(folder / "source", dtype="bfloat16", **SMALL_GROUPED)
    for kind in QUANTIZED:
        paths[kind] = folder / kind
        write_quantized(source, paths[kind], kind)
    sound = {name: Sound(_files(path), _generate) for name, path in paths.items()}
    (folder / "gguf").mkdir()
    write_gguf(llama, folder / "gguf" / "model.gguf")
    sound["gguf"] = Sound(_files(folder / "gguf"), lambda path: _generate(path / "model.gguf"))
    adapter = write_adapter(folder / "adapter", llama)
    for kind, other in (("draft_model", llama), ("lora_modules", adapter)):
        files = _files(llama, "model/") | _files(other, "other/")
        sound[kind] = Sound(files, partial(_generate_with, kind))
    text = (
        b"models:\n  a: {model: demo, pinned: true}\n  b: {model: x/y, variants: {c: {temperature: 0.5}}}\n"
    )
    sound["models"] = Sound({"models.yaml": text}, _read_models)
    return sound


def _vision_checkpoints(folder: Path) -> dict[str, Sound]:
    """With their image processors."""
    paths = [write_vision_checkpoint(folder / family, family) for family in ("llava", "qwen2_vl")]
    return {path.name: Sound(_files(path), _generate) for path in paths}


def _encoder_checkpoints(folder: Path) -> dict[str, Sound]:
    for family in ("bert", "modernbert"):
        write_encoder(folder / family, family)
    return {path.name: Sound(_files(path), _encode) for path in folder.iterdir()}


def _files(path: Path, prefix: str = "") -> dict[str, bytes]:
    return {
        f"{prefix}{file.relative_to(path)}": file.read_bytes() for file in path.rglob("*") if file.is_file()
    }


def _read_models(path: Path) -> None:
    read_models(Config(models=str(path / "models.yaml")))


def _generate_with(option: str, path: Path) -> None:
    """With a draft model or an adapter in another folder."""
    other = path / "other"
    if option == "draft_model":
        _generate(path / "model", draft_model=str(other), speculate="draft")
    else:
        _generate(path / "model", lora_modules=f"a={other}")


def _generate(path: Path, **options: Any) -> None:
    """A few tokens in a batch of two requests, with an image if the model takes some."""
    prepared = prepare_checkpoint(replace(ENGINE, model=str(path), **options))
    engine = load(prepared.config, prepared.never_sampled_ids)
    adapter = engine.adapters.loaded[0].digest if engine.adapters else ""
    prompt: Sequence[int] = (1, 2, 3, 4, 5)
    images: Sequence[PromptImage] = ()
    if prepared.processor is not None and engine.info.image_token_id is not None:
        image = prepared.processor.preprocess(Image.new("RGB", (30, 40)))
        prompt = (*prompt, engine.info.image_token_id)
        prompt, images = expand_placeholders(prompt, engine.info.image_token_id, [image])
    params = SamplingParams(max_tokens=4, logprobs=2, top_k=5, repetition_penalty=1.1, ignore_eos=True)
    for seed in range(2):
        engine.submit(Request(f"{seed}", tuple(prompt), params, seed, images=tuple(images), adapter=adapter))
    for _ in range(MAX_STEPS):
        if engine.idle:
            return
        try:
            engine.step()
        except RuntimeError as error:  # the engine's check of itself
            raise CheckpointError(f"weights that give no logits: {error}") from error
    raise AssertionError("the requests do not end")


def _encode(path: Path) -> None:
    encoder = load_local_encoder(replace(ENGINE, embedding_model=str(path)))
    encoder.encode([[0, 1, 2], [3, 4, 5, 6]])
