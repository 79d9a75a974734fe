"""The compiled library and its structures in ctypes. No torch.

csrc/common/forward_program.h and csrc/common/kernels.h define them.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import sys
from ctypes import POINTER, c_char_p, c_float, c_int32, c_int64, c_uint32, c_void_p
from enum import IntEnum
from pathlib import Path
from types import MappingProxyType
from typing import Any

ABI_VERSION = 23  # version of the signatures and structures below, as in c_api.cpp
ISAS = ("portable", "avx2", "avx2-vnni", "avx512", "amx", "neon")  # enum Isa
FORMAT_NAMES = [
    "float32",
    "bfloat16",
    "float16",
    "int8",
    "int4",
    "q8_0",
    "q5_0",
    "q4_0",
    "q4_1",
    "q5_1",
    "iq4_nl",
    "mxfp4",
    "grouped4",
    "grouped8",
    "float8",
    "q4_k",
    "q5_k",
    "q6_k",
    "q2_k",
    "q3_k",
    "iq4_xs",
]
FORMAT_IDS = MappingProxyType({name: number for number, name in enumerate(FORMAT_NAMES)})  # enum Format


INPUT_ERRORS = (  # enum InputError
    "",
    "a token id is outside of the embedding",
    "a position is outside of its table",
    "a slot is outside of the KV cache",
    "a block is outside of the KV cache",
    "a row is outside of the batch",
    "the rows of the requests are not those of the batch",
    "an adapter's slot is outside of its table",
    "a draft has more rows than slots or places",
    "more ids are wanted than there are",
    "the rows' ids are not those given",
    "the weight's format and shape do not match",
    "the text is not in the index",
    "a request's state is outside of its memory",
)


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
    EXPERTS = 10
    SCALE_BY_SIGMOID = 11
    GATHER_COLUMNS = 12
    ADD_LORA = 13
    GATE = 14
    CAUSAL_CONV = 15
    DELTA_RULE = 16
    SSM_SCAN = 17
    LAYER_NORM = 18
    LINEAR_BY_HEAD = 19
    WRITE_HIDDEN = 20
    READ_HIDDEN = 21
    COPY = 22
    EXPAND_VOCAB = 23


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
    LORA_SLOTS = 10
    STATE_SLOTS = 11
    ANCHOR_TABLES = 12
    PREV_SLOTS = 13


NUM_SPACES = len(AddressSpace)


class Operand(ctypes.Structure):
    """Rows of `stride` bytes from spaces[space] + address + per_row * (rows of the batch)."""

    _fields_ = (("space", c_int64), ("address", c_int64), ("per_row", c_int64), ("stride", c_int64))


class Instruction(ctypes.Structure):
    """One operation; program.cpp defines its fields."""

    _fields_ = (
        ("op", c_int32),
        ("sampled", c_int32),
        ("type", c_int32),
        ("out_type", c_int32),
        ("inputs", Operand * 3),
        ("out", Operand),
        ("object", c_void_p),
        ("sizes", c_int64 * 6),
        ("numbers", c_float * 2),
    )


class ProgramInputs(ctypes.Structure):
    """The inputs of one run."""

    _fields_ = (
        ("num_rows", c_int64),
        ("num_sampled", c_int64),
        ("num_requests", c_int64),
        ("table_width", c_int64),
        ("block_size", c_int64),
        ("anchor_width", c_int64),
        ("spaces", c_void_p * NUM_SPACES),
    )


class DraftArgs(ctypes.Structure):
    """A draft: several passes and the sampling between them; fields as in csrc/drafting/draft_loop.h."""

    _fields_ = (
        ("jobs", c_void_p),
        ("num_jobs", c_int64),
        ("token_ids", c_void_p),
        ("block_tables", c_void_p),
        ("never_sampled_ids", c_void_p),
        ("num_never_sampled", c_int64),
        ("vocab_size", c_int64),
        ("max_tokens", c_int64),
        ("draft_ids", c_void_p),
        ("draft_logprobs", c_void_p),
        ("draft_lengths", c_void_p),
    )


class Weight(ctypes.Structure):
    """A packed weight [n, k]; group_size of grouped formats only (csrc/common/kernels.h)."""

    _fields_ = (
        ("format", c_int32),
        ("group_size", c_int32),
        ("n", c_int64),
        ("k", c_int64),
        ("tiles", c_void_p),
        ("bias", c_void_p),
    )


class LoraPointers(ctypes.Structure):
    """LoRA adapters of one layer; csrc/lora/lora.h defines the fields."""

    _fields_ = (
        ("num_slots", c_int64),
        ("num_parts", c_int64),
        ("max_rank", c_int64),
        ("k", c_int64),
        ("n", c_int64),
        ("a", c_void_p),
        ("b", c_void_p),
        ("ranks", c_void_p),
        ("scales", c_void_p),
        ("part_sizes", c_void_p),
    )


class NormVectors(ctypes.Structure):
    """Weight and bias (or null) of a layer norm."""

    _fields_ = (("weight", c_void_p), ("bias", c_void_p))


class RopeTable(ctypes.Structure):
    """Cosines and sines by position, and the M-RoPE axis of each angle (or null)."""

    _fields_ = (("cos_sin", c_void_p), ("angle_axes", c_void_p))


class KVPointers(ctypes.Structure):
    """K and V of one layer."""

    _fields_ = (
        ("type", c_int32),
        ("is_latent", c_int32),
        ("k", c_void_p),
        ("v", c_void_p),
        ("k_scale", c_void_p),
        ("v_scale", c_void_p),
        ("heads", c_int64),
        ("dim", c_int64),
        ("value_dim", c_int64),
    )


class AttentionLayer(ctypes.Structure):
    """K and V of one layer, and the sinks of its heads (or null)."""

    _fields_ = (("kv", KVPointers), ("sinks", c_void_p))


class StateOperation(ctypes.Structure):
    """A layer with state and the vectors of its operation; csrc/states/states.h defines the fields."""

    _fields_ = (
        ("type", c_int32),
        ("reserved", c_int32),
        ("channels", c_int64),
        ("kernel_size", c_int64),
        ("key_heads", c_int64),
        ("value_heads", c_int64),
        ("key_dim", c_int64),
        ("value_dim", c_int64),
        ("ring", c_int64),
        ("num_slots", c_int64),
        ("num_anchors", c_int64),
        ("inputs", c_void_p),
        ("tails", c_void_p),
        ("keys", c_void_p),
        ("updates", c_void_p),
        ("decays", c_void_p),
        ("matrices", c_void_p),
        ("weight", c_void_p),
        ("bias", c_void_p),
        ("skips", c_void_p),
    )


class ExpertMatrices(ctypes.Structure):
    """One matrix of each expert: blocks[starts[e]] to blocks[starts[e + 1]]."""

    _fields_ = (("blocks", c_void_p), ("starts", c_void_p))


class Experts(ctypes.Structure):
    """The packed weights of a mixture of experts; csrc/experts/experts.h defines the fields."""

    _fields_ = (
        ("count", c_int64),
        ("hidden", c_int64),
        ("inner", c_int64),
        ("gate_up", ExpertMatrices),
        ("down", ExpertMatrices),
        ("bias", c_void_p),
        ("scales", c_void_p),
    )


class HeadWeights(ctypes.Structure):
    """A packed matrix of each head; csrc/attention/linear_by_head.h defines the fields."""

    _fields_ = (("heads", c_int64), ("weights", c_void_p))


def raise_input_error(error: int, function: Any, arguments: object) -> int:
    """Raise ValueError for an InputError, before which nothing was written; ctypes calls this."""
    if error:
        raise ValueError(f"{function.__name__}: {INPUT_ERRORS[error]}")
    return error


class CheckedResult(c_int32):
    """Result of functions that return an InputError: library functions with it raise ValueError."""


ROW_ARGS = (c_void_p, c_void_p, c_int64, c_int64)  # CPU context, logits, rows, vocabulary size
RUN_ARGS = (c_void_p, POINTER(Instruction), c_int64, POINTER(ProgramInputs))
SIGNATURES = MappingProxyType(
    {
        "foreword_log_sum_exp": (None, *ROW_ARGS, c_void_p),
        "foreword_top_ids": (CheckedResult, *ROW_ARGS, c_int64, c_void_p),
        "foreword_add_at": (CheckedResult, *ROW_ARGS, c_void_p, c_void_p, c_int64, c_void_p),
        "foreword_penalize": (CheckedResult, *ROW_ARGS, c_void_p, c_void_p, c_int64, c_void_p),
        "foreword_keep_allowed": (None, *ROW_ARGS, c_void_p, c_int64),
        "foreword_keep_top_k": (None, *ROW_ARGS, c_void_p),
        "foreword_keep_top_p": (None, *ROW_ARGS, c_void_p),
        "foreword_mask_ids": (None, *ROW_ARGS, c_void_p, c_int64),
        "foreword_apply_temperature": (None, *ROW_ARGS, c_void_p),
        "foreword_keep_min_p": (None, *ROW_ARGS, c_void_p),
        "foreword_keep_typical_p": (None, *ROW_ARGS, c_void_p),
        "foreword_keep_top_n_sigma": (None, *ROW_ARGS, c_void_p),
        "foreword_exclude_top": (None, *ROW_ARGS, c_void_p, c_void_p, c_void_p, c_void_p),
        "foreword_sample": (None, *ROW_ARGS, c_void_p, c_void_p, c_void_p, c_void_p),
        "foreword_noise": (None, c_void_p, c_int64, c_void_p, c_void_p),
        "foreword_supported": (c_int32, c_int32),
        "foreword_machine_new": (c_void_p, c_int32, c_int32),
        "foreword_machine_delete": (None, c_void_p),
        "foreword_run": (CheckedResult, *RUN_ARGS),
        "foreword_draft": (CheckedResult, *RUN_ARGS, POINTER(DraftArgs)),
        "foreword_packed_bytes": (c_int64, c_int32, c_int64, c_int64, c_int64),
        "foreword_pack": (CheckedResult, c_void_p, c_int32, c_int32, c_void_p, *[c_int64] * 4, c_void_p),
        "foreword_unpack": (None, c_void_p, POINTER(Weight), c_void_p),
        "foreword_suffix_new": (c_void_p, c_int32, c_void_p, c_int64, c_char_p, c_int64),
        "foreword_suffix_delete": (None, c_void_p),
        "foreword_suffix_start": (c_int32, c_void_p, c_uint32),
        "foreword_suffix_finish": (CheckedResult, c_void_p, c_int32, c_void_p, c_int64),
        "foreword_suffix_num_texts": (c_int64, c_void_p),
        "foreword_suffix_propose": (
            c_int64,
            *(c_void_p, c_void_p, c_int64, c_int64),  # index, queries, their values and number
            *(c_void_p, c_int64, c_void_p, c_void_p),  # lengths, room, ids, confidence
        ),
        "foreword_text_new": (c_void_p, c_char_p, c_void_p, c_char_p, c_int64),
        "foreword_text_delete": (None, c_void_p),
        "foreword_text_start": (c_int32, c_void_p),
        "foreword_text_finish": (CheckedResult, c_void_p, c_int32),
        "foreword_text_num_texts": (c_int64, c_void_p),
        "foreword_text_memory": (c_int64, c_void_p),
        "foreword_text_work": (c_int64, c_void_p, c_int32),
        "foreword_text_propose": (
            c_int64,
            *(c_void_p, c_int32, c_void_p, c_int64),  # drafts, text, new ids and their number
            *(c_int64, c_void_p, c_void_p),  # room, bytes, probabilities
        ),
    }
)


NOT_BUILT = (
    "the native kernels were not built when Foreword was installed: install g++ and run the same `make` or "
    "`pip install` again (if there is g++, `pip install -v` shows its error); everything runs in torch, much "
    "slower"
)
PACKAGE_DIR = Path(__file__).parents[1]
LIBRARY_ENV = "FOREWORD_NATIVE"  # path of another build of the library, such as one with sanitizers


def load_library(folder: Path | None = None) -> tuple[ctypes.CDLL | None, str]:
    """The compiled library of this package (or in `folder`), or None and the reason."""
    path = _find_library(folder or PACKAGE_DIR)
    if path is None:
        return None, shadowed_library() or NOT_BUILT
    try:
        library = ctypes.CDLL(str(path))
        version = int(library.foreword_native_version())
    except (OSError, AttributeError) as error:
        return None, f"{path.name} cannot be loaded ({error}); everything runs in torch, much slower"
    if version != ABI_VERSION:
        reason = f"{path.name} is from another version of Foreword; everything runs in torch, much slower"
        return None, f"{reason}, until it is rebuilt"
    for name, (result, *arguments) in SIGNATURES.items():
        function = getattr(library, name)
        function.argtypes = arguments
        function.restype = c_int32 if result is CheckedResult else result
        if result is CheckedResult:
            function.errcheck = raise_input_error
    return library, ""


def shadowed_library() -> str:
    """Which installed library this package hides; "" if none.

    Python in a source tree imports the tree, whatever is installed.
    """
    if _find_library(PACKAGE_DIR) is not None:
        return ""
    folders = (Path(entry) / "foreword" / "kernels" for entry in sys.path)
    installed = next((path for folder in folders if (path := _find_library(folder)) is not None), None)
    if installed is None:
        return ""
    return (
        f"{PACKAGE_DIR.parent} has no native kernels and hides the installed package in "
        f"{installed.parents[1]}, which has them: start Python in another folder, or run `make native` here"
    )


def library_digest() -> str:
    """Digest of the build: another compiler or source may round differently. Empty without the library."""
    path = _find_library(PACKAGE_DIR)
    if path is None or not path.is_file():
        return ""
    return hashlib.blake2b(path.read_bytes(), digest_size=8).hexdigest()


def _find_library(folder: Path) -> Path | None:
    """The newest library in `folder`, or the one in the environment instead of the package's own."""
    if folder == PACKAGE_DIR and os.environ.get(LIBRARY_ENV):
        return Path(os.environ[LIBRARY_ENV])
    return max(folder.glob("_native*.so"), key=lambda path: path.stat().st_mtime, default=None)


@functools.cache
def supported_isas() -> tuple[str, ...]:
    """Names of the instruction sets that this processor runs, best last; empty without the library."""
    library, _ = load_library()
    if library is None:
        return ()
    return tuple(name for number, name in enumerate(ISAS) if library.foreword_supported(number))
