"""The virtual environment of the other engines, and their model files."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import torch
from peers_models import MODELS, write_checkpoint

__all__ = ["TO_GGUF", "convert", "make_environment", "make_files"]

TO_GGUF, TO_OPENVINO = (Path(__file__).with_name(f"peers_to_{name}.py") for name in ("gguf", "openvino"))
PACKAGES = (
    "llama-cpp-python",
    "openvino-genai",
    "openvino-tokenizers",
    "nncf",
    "gguf",
    "transformers",
    "numpy",
)
# ggml's AMX products crash when gcc 12 compiles them (ldtilecfg); everything else is native.
NO_AMX_FLAGS = "-mno-amx-tile -mno-amx-int8 -mno-amx-bf16"
GGUF_TYPES = ("q8_0", "q4_0", "q4_k_m")


def make_environment(folder: Path) -> str:
    """Python of the environment; a first call installs it and compiles llama.cpp for minutes."""
    python = str(folder / "bin" / "python")
    done = folder / "installed"
    if not done.exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        flags = {"CFLAGS": NO_AMX_FLAGS, "CXXFLAGS": NO_AMX_FLAGS} if platform.machine() == "x86_64" else {}
        packages = [*PACKAGES, f"torch=={torch.__version__}"]
        subprocess.run(
            [python, "-m", "pip", "install", "--quiet", *packages], check=True, env={**os.environ, **flags}
        )
        done.touch()
    return python


def make_files(python: str, name: str, folder: Path) -> None:
    """Write missing files: checkpoint, GGUF files, OpenVINO folders."""
    write_checkpoint(MODELS[name], folder)
    bf16, f16 = folder / "bf16.gguf", folder / "f16.gguf"
    convert(python, TO_GGUF, "gguf", folder, bf16)
    for kind in GGUF_TYPES:
        convert(python, TO_GGUF, "quantize", bf16, folder / f"{kind}.gguf", kind)
    fp16 = folder / "openvino-fp16"
    if not fp16.exists():
        convert(python, TO_GGUF, "quantize", bf16, f16, "f16")
        convert(python, TO_OPENVINO, "convert", f16, fp16)
        f16.unlink()
    for kind in ("int8", "int4"):
        convert(python, TO_OPENVINO, "compress", fp16, folder / f"openvino-{kind}", kind)


def convert(python: str, script: Path, action: str, source: Path, out: Path, *more: str) -> None:
    """Write under a temporary name first, so that an existing file is complete."""
    if out.exists():
        return
    unfinished = out.with_name(f"unfinished-{out.name}")
    with out.with_name("conversion.log").open("ab") as log:
        subprocess.run(
            [python, str(script), action, str(source), str(unfinished), *more],
            check=True,
            stdout=log,
            stderr=log,
        )
    unfinished.rename(out)
