"""The compiled library, and its structures as ctypes sees them (csrc/program.h, csrc/kernels.h)."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
from ctypes import POINTER, c_char_p, c_float, c_int32, c_int64, c_uint32, c_void_p
from enum import IntEnum
from pathlib import Path
from types import MappingProxyType

import torch

__all__ = [
    "DTYPE_IDS",
    "FORMAT_IDS",
    "ISAS",
    "NUM_SPACES",
    "AddressSpace",
    "DraftArgs",
    "Instruction",
    "KVPointers",
    "Opcode",
    "Operand",
    "ProgramInputs",
    "RopeTable",
    "Weight",
    "library_digest",
    "load_library",
    "supported_isas",
]

ABI_VERSION = 7  # of the signatures and structures below, as in api.cpp
ISAS = ("portable", "avx2", "avx512", "amx")  # enum Isa
FORMAT_NAMES = (
    "float32",
    "bfloat16",
    "float16",
    "int8",
    "int4",
    "q8_0",
    "q5_0",
    "q4_0",
    "q4_k",
    "q5_k",
    "q6_k",
)
FORMAT_IDS = MappingProxyType({name: number for number, name in enumerate(FORMAT_NAMES)})  # enum Kind
DTYPE_IDS = MappingProxyType({torch.float32: 0, torch.bfloat16: 1, torch.int8: 2})  # enum Type


class Opcode(IntEnum):
    LINEAR = 0
    EMBEDDING = 1
    ADD = 2
    INDEX_ROWS = 3
    RMS_NORM = 4
    ROPE = 5
    GATED_ACT = 6
    WRITE_KV = 7
    ATTENTION = 8
    SOFTCAP = 9


class AddressSpace(IntEnum):
    ABSOLUTE = 0
    ARENA = 1
    TOKEN_IDS = 2
    POSITIONS = 3
    SLOTS = 4
    BLOCK_TABLES = 5
    QUERY_START_LOC = 6
    SAMPLE_ROWS = 7
    MROPE_POSITIONS = 8
    OUTPUT = 9


NUM_SPACES = len(AddressSpace)


class Operand(ctypes.Structure):
    """Rows of `stride` bytes from spaces[space] + address + per_row * (rows of the batch) on."""

    _fields_ = (("space", c_int64), ("address", c_int64), ("per_row", c_int64), ("stride", c_int64))


class Instruction(ctypes.Structure):
    """One operation; program.cpp tells what its fields hold."""

    _fields_ = (
        ("op", c_int32),
        ("sampled", c_int32),
        ("type", c_int32),
        ("out_type", c_int32),
        ("inputs", Operand * 3),
        ("out", Operand),
        ("object", c_void_p),
        ("sizes", c_int64 * 4),
        ("numbers", c_float * 2),
    )


class ProgramInputs(ctypes.Structure):
    """What differs from one run to the next."""

    _fields_ = (
        ("num_rows", c_int64),
        ("num_sampled", c_int64),
        ("num_requests", c_int64),
        ("table_width", c_int64),
        ("block_size", c_int64),
        ("spaces", c_void_p * NUM_SPACES),
    )


class DraftArgs(ctypes.Structure):
    """Several passes and the sampling between them; csrc/draft.h tells what its fields hold."""

    _fields_ = (
        ("lanes", c_void_p),
        ("num_lanes", c_int64),
        ("token_ids", c_void_p),
        ("blocks", c_void_p),
        ("unused", c_void_p),
        ("num_unused", c_int64),
        ("width", c_int64),
        ("columns", c_int64),
        ("guesses", c_void_p),
        ("logprobs", c_void_p),
        ("counts", c_void_p),
    )


class Weight(ctypes.Structure):
    """A packed weight [n, k]."""

    _fields_ = (
        ("kind", c_int32),
        ("reserved", c_int32),
        ("n", c_int64),
        ("k", c_int64),
        ("tiles", c_void_p),
        ("bias", c_void_p),
    )


class RopeTable(ctypes.Structure):
    """What rope turns by: cosines and sines by position, and the direction of each angle (or none)."""

    _fields_ = (("table", c_void_p), ("directions", c_void_p))


class KVPointers(ctypes.Structure):
    """K and V of one layer."""

    _fields_ = (
        ("type", c_int32),
        ("reserved", c_int32),
        ("k", c_void_p),
        ("v", c_void_p),
        ("k_scale", c_void_p),
        ("v_scale", c_void_p),
        ("heads", c_int64),
        ("dim", c_int64),
    )


ROW_ARGS = (c_void_p, c_void_p, c_int64, c_int64)  # machine, logits, rows, width
SIGNATURES = MappingProxyType(
    {
        "foreword_log_sum_exp": (None, *ROW_ARGS, c_void_p),
        "foreword_top_ids": (None, *ROW_ARGS, c_int64, c_void_p),
        "foreword_add_at": (None, *ROW_ARGS, c_void_p, c_void_p, c_void_p),
        "foreword_penalize": (None, *ROW_ARGS, c_void_p, c_void_p, c_void_p),
        "foreword_keep_allowed": (None, *ROW_ARGS, c_void_p, c_int64),
        "foreword_keep_top_k": (None, *ROW_ARGS, c_void_p),
        "foreword_keep_top_p": (None, *ROW_ARGS, c_void_p),
        "foreword_keep_min_p": (None, *ROW_ARGS, c_void_p),
        "foreword_keep_typical_p": (None, *ROW_ARGS, c_void_p),
        "foreword_keep_top_n_sigma": (None, *ROW_ARGS, c_void_p),
        "foreword_exclude_top": (None, *ROW_ARGS, c_void_p, c_void_p, c_void_p, c_void_p),
        "foreword_sample": (None, *ROW_ARGS, c_void_p, c_void_p, c_void_p, c_void_p),
        "foreword_noise": (None, c_void_p, c_int64, c_void_p, c_void_p),
        "foreword_supported": (c_int32, c_int32),
        "foreword_machine_new": (c_void_p, c_int32, c_int32),
        "foreword_machine_delete": (None, c_void_p),
        "foreword_run": (None, c_void_p, POINTER(Instruction), c_int64, POINTER(ProgramInputs)),
        "foreword_draft": (
            None,
            c_void_p,
            POINTER(Instruction),
            c_int64,
            POINTER(ProgramInputs),
            POINTER(DraftArgs),
        ),
        "foreword_packed_bytes": (c_int64, c_int32, c_int64, c_int64),
        "foreword_pack": (None, c_void_p, c_int32, c_int32, c_void_p, c_int64, c_int64, c_void_p),
        "foreword_unpack": (None, c_void_p, POINTER(Weight), c_void_p),
        "foreword_suffix_new": (c_void_p, c_int32, c_void_p, c_int64, c_char_p, c_int64),
        "foreword_suffix_delete": (None, c_void_p),
        "foreword_suffix_start": (c_int32, c_void_p, c_uint32),
        "foreword_suffix_finish": (None, c_void_p, c_int32, c_void_p, c_int64),
        "foreword_suffix_num_texts": (c_int64, c_void_p),
        "foreword_suffix_propose": (c_int64, c_void_p, c_void_p, c_int64, c_void_p, c_void_p, c_void_p),
    }
)


NOT_BUILT = (
    "the native kernels were not built when Foreword was installed (no compiler, or it failed: `pip install -v` shows it); "
    "everything runs in torch, much slower"
)
PACKAGE_DIR = Path(__file__).parents[1]
LIBRARY_ENV = "FOREWORD_NATIVE"  # names a library of another build, as one with sanitizers


def load_library(folder: Path | None = None) -> tuple[ctypes.CDLL | None, str]:
    """The compiled library beside this package (or in `folder`), or None and a reason that can be read."""
    path = _find_library(folder or PACKAGE_DIR)
    if path is None:
        return None, NOT_BUILT
    try:
        library = ctypes.CDLL(str(path))
        version = int(library.foreword_native_version())
    except (OSError, AttributeError) as error:
        return None, f"{path.name} cannot be loaded ({error}); everything runs in torch, much slower"
    if version != ABI_VERSION:
        return (
            None,
            f"{path.name} is of another version of Foreword; everything runs in torch, much slower, until it is built again",
        )
    for name, (result, *arguments) in SIGNATURES.items():
        function = getattr(library, name)
        function.argtypes = arguments
        function.restype = result
    return library, ""


def library_digest() -> str:
    """Tells builds apart: another compiler or another source may round differently. Empty without the library."""
    path = _find_library(PACKAGE_DIR)
    return (
        ""
        if path is None or not path.is_file()
        else hashlib.blake2b(path.read_bytes(), digest_size=8).hexdigest()
    )


def _find_library(folder: Path) -> Path | None:
    """The newest library there, or the one that the environment names instead of the package's own."""
    if folder == PACKAGE_DIR and os.environ.get(LIBRARY_ENV):
        return Path(os.environ[LIBRARY_ENV])
    return max(folder.glob("_native*.so"), key=lambda path: path.stat().st_mtime, default=None)


@functools.cache
def supported_isas() -> tuple[str, ...]:
    """Names of the instruction sets that this processor runs, the best one last; none without the library."""
    library, _ = load_library()
    if library is None:
        return ()
    return tuple(name for number, name in enumerate(ISAS) if library.foreword_supported(number))
