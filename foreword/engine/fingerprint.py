"""The fingerprint of an engine, and the warnings of its start."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from foreword.config.options import Config
from foreword.kernels.cpu.library import library_digest
from foreword.kernels.gpu import ComputeTypes, current_gpu
from foreword.kernels.ops import Ops
from foreword.kernels.registry import native_unavailable_reason, source_digest
from foreword.models.interfaces import Precision
from foreword.models.model_loader import weight_files
from foreword.planning.memory import GIB, ModelInfo
from foreword.planning.resolve import ResolvedConfig, draft_size_warning

NUM_SAMPLES, SAMPLE_BYTES = 64, 1 << 16  # evenly spaced samples of a weight file


def make_fingerprint(
    config: Config,
    resolved: ResolvedConfig,
    ops: Ops,
    rope_digest: str,
    never_sampled_ids: Sequence[int],
    is_multimodal: bool,
) -> str:
    """A hash of all that outputs depend on, see docs/exactness.md: "The fingerprint"."""
    assert config.model is not None
    gpu = (str(current_gpu()), torch.version.cuda, _version("triton")) if resolved.device == "cuda" else None
    facts = (
        config.load_format,
        [sample_digest(file) for file in weight_files(Path(config.model))],
        ops.name,
        library_digest() if resolved.device == "cpu" else source_digest(),
        torch.__version__,
        _version("llguidance"),
        version("pillow") if is_multimodal else "",
        torch.get_num_threads(),  # 1 with the native kernels, whose own threads change no bit
        torch.backends.cpu.get_cpu_capability(),
        gpu or resolved.device,
        resolved.dtype,
        resolved.weight_dtype,
        resolved.quantization,
        resolved.kv_cache_dtype,
        rope_digest,
        sorted(never_sampled_ids),
    )
    return "fw_" + hashlib.blake2b(json.dumps(facts).encode(), digest_size=8).hexdigest()


def _version(package: str) -> str:
    """The version of a package; empty if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def sample_digest(path: Path) -> tuple[str, int, str]:
    """Name, size and a hash of samples of a weight file: tells checkpoints apart without reading them."""
    size = path.stat().st_size
    digest = hashlib.blake2b(digest_size=8)
    with path.open("rb") as file:
        for index in range(NUM_SAMPLES):
            file.seek(max(size - SAMPLE_BYTES, 0) * index // (NUM_SAMPLES - 1))
            digest.update(file.read(SAMPLE_BYTES))
    return path.name, size, digest.hexdigest()


def load_warnings(
    config: Config, resolved: ResolvedConfig, target: ModelInfo, draft_model: ModelInfo | None
) -> tuple[str, ...]:
    """Warnings of the start, for log and API."""
    warnings = list(resolved.notes)
    if config.max_model_len is None and resolved.max_model_len < target.context_len:
        size = config.kv_cache_memory or f"{resolved.kv_bytes / GIB:.2f} GiB"
        warnings.append(
            f"the context is {resolved.max_model_len} tokens, of the checkpoint's {target.context_len}: "
            f"a KV cache of {size} holds no more; --kv-cache-memory sets its size"
        )
    if draft_model is not None and not draft_model.is_head:
        size_warning = draft_size_warning(target.parameters, draft_model.parameters)
        warnings += [] if size_warning is None else [size_warning]
    missing = native_unavailable_reason(resolved.device, types_in_use(resolved))
    if missing is not None:
        warnings.append(missing)
    if resolved.quantization is not None and target.packed_bytes is not None:
        warnings.append(f"--quantization {resolved.quantization} skips blocks that are quantized in the file")
    if resolved.fast_math:
        warnings.append("--fast-math: outputs are not exact and may vary with load and speculation")
    return tuple(warnings)


def types_in_use(resolved: ResolvedConfig) -> ComputeTypes:
    """Data types that the kernels compute with."""
    return compute_types(resolved.dtype, resolved.weight_dtype, resolved.quantization)


def compute_types(dtype: str, weight_dtype: str, quantization: str | None) -> ComputeTypes:
    """Data types that the kernels would compute with."""
    precision = Precision.from_dtypes(dtype, weight_dtype, quantization)
    return ComputeTypes(dtype, precision.linear_format, precision.embedding_format)
