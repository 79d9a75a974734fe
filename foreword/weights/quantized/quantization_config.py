"""The quantization of a checkpoint, read strictly: an option that is not honoured is refused by name."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from foreword.weights.config_reader import ConfigReader, read_json
from foreword.weights.module_patterns import NamePattern, find_first
from foreword.weights.quantized.awq import AWQ
from foreword.weights.quantized.gptq import GPTQ
from foreword.weights.quantized.scheme import Float8, PackedInts, PlainInts, Scheme

logger = logging.getLogger(__name__)

CONFIG_FILES = ("quantize_config.json", "quant_config.json")  # beside a config.json without the section
SECTIONS = ("quantization_config", "compression_config")
BITS = (4, 8)
# How the checkpoint was made, and what other engines do with it.
IGNORED_KEYS = (
    *("act_group_aware", "backend", "batch_size", "block_name_to_quantize", "cache_block_outputs"),
    *("damp_auto_increment", "damp_percent", "dataset", "do_fuse", "exllama_config", "fuse_max_seq_len"),
    *("lm_head", "max_input_length", "meta", "method", "model_file_base_name", "model_name_or_path"),
    *("model_seqlen", "module_name_preceding_first_block", "modules_in_block_to_quantize"),
    *("modules_to_fuse", "mse", "offload_to_disk", "offload_to_disk_path", "pad_token_id", "quant_method"),
    *("static_groups", "sym", "tokenizer", "true_sequential", "use_cuda_fp16", "use_exllama"),
)
GPTQ_ZERO_OFFSETS: Mapping[str, int] = MappingProxyType({"gptq": 1, "gptq_v2": 0})
MIXED_FORMAT = "mixed-precision"
COMPRESSED_FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", MIXED_FORMAT)
ANY_MODULE = NamePattern("", "start")
MAX_BLOCK = 1 << 17  # rows or columns
BLOCK_TEXT = re.compile(r"(\d{1,6})x(\d{1,6})", re.ASCII)  # as old versions of compressed-tensors write it


@dataclass(frozen=True, slots=True)
class Rule:
    """Quantization scheme of modules that match a name pattern."""

    pattern: NamePattern
    scheme: Scheme | None  # None: not quantized


@dataclass(frozen=True, slots=True)
class Quantization:
    """A checkpoint's quantization. The first rule that matches a module holds."""

    method: str
    rules: tuple[Rule, ...]
    source: str  # name of the config in errors

    def schemes(self, modules: Sequence[str]) -> dict[str, Scheme | None]:
        """By module; None for one that is not quantized. Raises CheckpointError."""
        found = find_first([rule.pattern for rule in self.rules], modules, self.source)
        return {
            module: None if index < 0 else self.rules[index].scheme
            for module, index in zip(modules, found, strict=True)
        }


def read_quantization(config: ConfigReader, path: Path) -> Quantization | None:
    """Read the section of config.json, or else a file beside it; None for a plain checkpoint.

    Raises CheckpointError.
    """
    sections = [section for key in SECTIONS if (section := config.get_section(key)) is not None]
    method = None
    if not sections:
        file = next((path / name for name in CONFIG_FILES if (path / name).is_file()), None)
        if file is None:
            return None
        sections = [ConfigReader(read_json(file), str(file))]
        method = "gptq" if file.name == CONFIG_FILES[0] else "awq"
    section = sections[0]
    method = section.get("quant_method", method) if method else section.get("quant_method")
    if not isinstance(method, str) or method not in READERS:
        raise section.error("quant_method", f"{method!r:.80} is not supported; known: {', '.join(READERS)}")
    rules = READERS[method](section)
    for key in IGNORED_KEYS:
        section.get(key, None)
    section.check_all_read()
    return Quantization(method, rules, section.source) if rules or method == "mxfp4" else None


def _read_awq(config: ConfigReader) -> tuple[Rule, ...]:
    key = "bits" if "bits" in config else "w_bit"
    if (bits := config.get_int(key)) != 4:
        raise config.error(key, f"must be 4 here, got {bits}")
    if not config.get_bool("zero_point", True):
        raise config.error("zero_point", "must be true here, got false")
    for key in ("version", "format"):
        if str(version := config.get(key, "gemm")).lower() != "gemm":
            raise config.error(key, f"{version!r:.80} is not supported; known: gemm")
    if config.get("backend", "autoawq") == "llm-awq":
        raise config.error("backend", "llm-awq packs weights in another layout; autoawq's `gemm` works")
    config.require_value("desc_act", False)
    config.get_strs("modules_to_not_convert")
    group_size = _read_group_size(config, "group_size" if "group_size" in config else "q_group_size")
    return (Rule(ANY_MODULE, AWQ(4, group_size)),)


def _read_gptq(config: ConfigReader) -> tuple[Rule, ...]:
    formats = tuple(GPTQ_ZERO_OFFSETS)
    default = config.get_choice("format", formats, "gptq")  # the name in newer versions
    zero_offset = GPTQ_ZERO_OFFSETS[config.get_choice("checkpoint_format", formats, default)]
    for key in ("is_marlin_format", "awq_gemm_checkpoint"):
        config.require_value(key, False)
    config.require_value("pack_dtype", "int32")
    base = _read_gptq_scheme(config, zero_offset)
    rules = []
    dynamic = config.get("dynamic", {})
    if not isinstance(dynamic, dict):
        raise config.error("dynamic", "must be an object of patterns")
    for text, changes in dynamic.items():
        pattern = _read_pattern(config, "dynamic", text.removeprefix("-:").removeprefix("+:"))
        if text.startswith("-:"):
            rules.append(Rule(pattern, None))
            continue
        if not isinstance(changes, dict):
            raise config.error("dynamic", f"{text!r:.80} must have an object")
        options = {"bits": base.bits, "group_size": base.group_size or -1, "desc_act": base.needs_g_idx}
        reader = ConfigReader(options | changes, f"{config.source}: dynamic {text!r:.80}")
        rules.append(Rule(pattern, _read_gptq_scheme(reader, zero_offset)))
        for key in IGNORED_KEYS:
            reader.get(key, None)
        reader.check_all_read()
    return (*rules, Rule(ANY_MODULE, base))


def _read_gptq_scheme(config: ConfigReader, zero_offset: int) -> GPTQ:
    bits, group_size = _read_bits(config, "bits"), _read_group_size(config, "group_size")
    return GPTQ(bits, group_size, zero_offset, needs_g_idx=config.get_bool("desc_act", False))


def _read_compressed(config: ConfigReader) -> tuple[Rule, ...]:
    """Names decide before patterns, and these before the class Linear."""
    status = config.get("quantization_status", "compressed")
    if status not in ("compressed", "frozen"):
        raise config.error("quantization_status", f"must be compressed here, got {status!r:.80}")
    default_format = config.get_choice("format", COMPRESSED_FORMATS)
    if config.get("kv_cache_scheme", None) is not None:
        logger.warning("%s: `kv_cache_scheme` is not used; see --kv-cache-dtype", config.source)
    sparsity = config.get_section("sparsity_config")
    if sparsity is not None and sparsity.get("format", "dense") != "dense":
        raise config.error("sparsity_config", f"of format {sparsity.get('format')!r:.80} is not supported")
    for key in ("global_compression_ratio", "version"):
        config.get(key, None)
    groups = config.get_section("config_groups")
    if groups is None:
        raise config.error("config_groups", "is missing")
    by_rank: dict[int, list[Rule]] = {0: [], 1: [], 2: []}
    for name in groups.keys:
        group = groups.get_section(name)
        if group is None:
            raise groups.error(name, "must be an object")
        scheme = _read_compressed_group(group, default_format)
        for target in group.get_strs("targets") or ():
            rank = 2 if target == "Linear" else int(target.startswith("re:"))
            by_rank[rank].append(Rule(_read_target(group, "targets", target), scheme))
        group.check_all_read()
    names = config.get_strs("ignore") or ()
    ignored = [Rule(_read_target(config, "ignore", name), None) for name in names]
    return (*ignored, *by_rank[0], *by_rank[1], *by_rank[2])


def _read_compressed_group(group: ConfigReader, default_format: str) -> Scheme | None:
    """Activations are not read: they are Foreword's own, whatever the checkpoint says."""
    storage = group.get_choice("format", COMPRESSED_FORMATS, default_format)
    if storage == MIXED_FORMAT:
        raise group.error("format", f"is missing; the checkpoint's is {MIXED_FORMAT}")
    group.get("input_activations", None)
    if group.get("output_activations", None) is not None:
        raise group.error("output_activations", "are not supported")
    weights = group.get_section("weights")
    if weights is None:
        return None
    for key in ("actorder", "observer", "observer_kwargs", "scale_dtype", "zp_dtype"):
        weights.get(key, None)
    if str(weights.get("actorder", None)).lower() in ("group", "dynamic", "true"):
        raise weights.error("actorder", "of groups (weight_g_idx) is not supported; weight or static works")
    weights.require_value("dynamic", False)
    kind = weights.get_choice("type", ("int", "float"), "int")
    if storage != "naive-quantized" and (kind == "float") != (storage == "float-quantized"):
        raise weights.error("type", f"{kind} does not fit the format {storage}")
    strategy = _read_strategy(weights, kind)
    symmetric = weights.get_bool("symmetric", True)
    scheme = _read_compressed_weights(weights, kind, storage, strategy, symmetric)
    weights.check_all_read()
    return scheme


def _read_strategy(weights: ConfigReader, kind: str) -> str:
    size = weights.get("group_size", None)
    default = "tensor" if size is None else "channel" if size == -1 else "group"
    known = ("tensor", "channel", "group", *(("block",) if kind == "float" else ()))
    return weights.get_choice("strategy", known, default)


def _read_compressed_weights(
    weights: ConfigReader, kind: str, storage: str, strategy: str, symmetric: bool
) -> Scheme:
    bits = _read_bits(weights, "num_bits", 8)
    group_size = _read_group_size(weights, "group_size") if strategy == "group" else None
    if strategy != "group":
        weights.get("group_size", None)
    block = _read_block_shape(weights, "block_structure") if strategy == "block" else None
    if kind == "float":
        if bits != 8:
            raise weights.error("num_bits", f"must be 8 for floats here, got {bits}")
        if not symmetric:
            raise weights.error("symmetric", "must be true for floats here, got false")
        return Float8("weight_scale", block if group_size is None else (1, group_size))
    if storage == "pack-quantized":
        return PackedInts(bits, group_size, symmetric)
    return PlainInts(8, group_size, symmetric)  # values of 4 bits take 8 too


def _read_fp8(config: ConfigReader) -> tuple[Rule, ...]:
    config.get_choice("activation_scheme", ("dynamic", "static"), "dynamic")
    for key in ("modules_to_not_convert", "ignored_layers"):
        config.get_strs(key)
    for key, value in (("fmt", "e4m3"), ("expert_dtype", "fp8")):
        config.require_value(key, value)
    config.get_choice("scale_fmt", ("float", "ue8m0"), "float")
    config.get("dequantize", None)
    if config.get("kv_cache_scheme", None) is not None:
        logger.warning("%s: `kv_cache_scheme` is not used; see --kv-cache-dtype", config.source)
    if config.get("weight_block_size", None) is None:
        return (Rule(ANY_MODULE, Float8("weight_scale", None)),)
    block = _read_block_shape(config, "weight_block_size")
    return (Rule(ANY_MODULE, Float8("weight_scale_inv", block)),)


def _read_fbgemm_fp8(config: ConfigReader) -> tuple[Rule, ...]:
    """A scale for each row; the limit of activations' scales is not used."""
    config.get("activation_scale_ub", None)
    config.get_strs("modules_to_not_convert")
    return (Rule(ANY_MODULE, Float8("weight_scale", None)),)


def _read_mxfp4(config: ConfigReader) -> tuple[Rule, ...]:
    """The architecture reads its tensors of blocks and scales itself."""
    config.get_strs("modules_to_not_convert")
    config.get("dequantize", None)
    return ()


READERS = MappingProxyType(
    {
        "awq": _read_awq,
        "gptq": _read_gptq,
        "compressed-tensors": _read_compressed,
        "fp8": _read_fp8,
        "fbgemm_fp8": _read_fbgemm_fp8,
        "mxfp4": _read_mxfp4,
    }
)


def _read_bits(config: ConfigReader, key: str, *default: int) -> int:
    bits = config.get_int(key, *default)
    if bits not in BITS:
        raise config.error(key, f"must be 4 or 8 here, got {bits}")
    return bits


def _read_group_size(config: ConfigReader, key: str) -> int | None:
    """None for -1, a group a row."""
    size = config.get_int(key, low=-1)
    if size == 0:
        raise config.error(key, "must be -1 or a positive number, got 0")
    return None if size == -1 else size


def _read_block_shape(config: ConfigReader, key: str) -> tuple[int, int]:
    shape = config.get(key)
    if isinstance(shape, str) and (match := BLOCK_TEXT.fullmatch(shape)):
        shape = [int(match[1]), int(match[2])]
    is_pair = isinstance(shape, list) and len(shape) == 2
    if not is_pair or not all(type(size) is int and 0 < size <= MAX_BLOCK for size in shape):
        raise config.error(key, f"must be two numbers from 1 to {MAX_BLOCK}, got {shape!r:.80}")
    return shape[0], shape[1]


def _read_target(config: ConfigReader, key: str, target: str) -> NamePattern:
    """The class Linear, a pattern after "re:", or a module's name."""
    if target == "Linear":
        return ANY_MODULE
    if target.startswith("re:"):
        return _read_pattern(config, key, target.removeprefix("re:"))
    return NamePattern(target, "exact")


def _read_pattern(config: ConfigReader, key: str, text: str) -> NamePattern:
    pattern = NamePattern(text, "start")
    try:
        pattern.compile()
    except (re.error, RecursionError, OverflowError) as error:
        raise config.error(key, f"holds {text!r:.80}, which is no pattern: {error}") from None
    return pattern
