"""Checks of `chat` and `generate` that need the model's small files, but neither weights nor torch."""

from __future__ import annotations

import argparse
from pathlib import Path

from foreword.checkpoint import check_context, has_chat_template, resolve_paths
from foreword.config.options import Config
from foreword.demo import DEFAULT_MODEL
from foreword.errors import ConfigError
from foreword.multimodal.decode import ImageError, read_size
from foreword.multimodal.processor_registry import read_processor


def check_local_request(args: argparse.Namespace, config: Config) -> None:
    """Check what the flags ask of the model. Raises ConfigError or CheckpointError."""
    path, name = Path(str(resolve_paths(config).model)), config.model or DEFAULT_MODEL
    _check_speculation(args.speculation, config)
    check_context(config, path)
    if args.image and read_processor(path) is None:
        raise ConfigError(f"--image: the model {name} is text only", "image")
    for file in args.image:
        try:
            read_size(Path(file).expanduser().read_bytes(), config.max_image_pixels)
        except (ImageError, OSError) as error:
            raise ConfigError(f"--image {file}: {error}", "image") from None
    is_raw = getattr(args, "raw", None)  # None: the command has no such flag
    if not is_raw and config.chat_template is None and not has_chat_template(path):
        other = "" if is_raw is None else ", or continue a text with --raw"
        problem = f"has no chat template: give one with --chat-template FILE{other}"
        raise ConfigError(f"the model {name} {problem}", "chat_template")


def _check_speculation(method: str | None, config: Config) -> None:
    names = config.drafter_names()
    known = ("auto", "off", *names, *(("ngram",) if "suffix" in names else ()))  # ngram may replace suffix
    if method is not None and method not in known:
        shown = ", ".join(("auto", "off", *names))
        raise ConfigError(f"--speculation must be one of {shown}, got {method!r:.80}", "speculation")
