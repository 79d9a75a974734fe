"""Options of Mamba-2 layers, which granitemoehybrid, nemotron_h and falcon_h1 share."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from foreword.core.states import HEAD_DIM_MULTIPLE, MAX_KERNEL_SIZE, StateShape
from foreword.models.decoder_config import MAX_HIDDEN_SIZE
from foreword.weights.config_reader import ConfigReader

TIME_STEP_LIMITS = "time_step_limit"


@dataclass(frozen=True, slots=True)
class Mamba2Keys:
    """Names of options in config.json."""

    heads: str = "mamba_n_heads"
    head_dim: str = "mamba_d_head"
    groups: str = "mamba_n_groups"
    state_dim: str = "mamba_d_state"
    kernel_size: str = "mamba_d_conv"


def read_mamba2_shape(
    config: ConfigReader, keys: Mamba2Keys, inner_size: int | None, groups: int, state_dim: int
) -> StateShape:
    """The state of a layer. Raises CheckpointError.

    inner_size  values of all heads together, which head_dim "auto" divides; None: heads * head_dim
    groups, state_dim  defaults
    """
    heads, groups = config.get_int(keys.heads, 128), config.get_int(keys.groups, groups)
    state_dim = config.get_int(keys.state_dim, state_dim)
    if heads % groups:
        raise config.error(keys.heads, f"must be a multiple of {keys.groups}, {groups}, got {heads}")
    if inner_size is not None and config.get(keys.head_dim, "auto") == "auto":
        head_dim = inner_size // heads
    else:
        head_dim = config.get_int(keys.head_dim, 64)
    if inner_size is not None and heads * head_dim != inner_size:
        raise config.error(keys.heads, f"{heads} times {keys.head_dim} {head_dim} must be {inner_size}")
    for key, size in ((keys.head_dim, head_dim), (keys.state_dim, state_dim)):
        if size % HEAD_DIM_MULTIPLE:
            raise config.error(key, f"must be a multiple of {HEAD_DIM_MULTIPLE} here, got {size}")
    channels = 2 * groups * state_dim + heads * head_dim
    if channels > MAX_HIDDEN_SIZE:
        raise config.error(keys.heads, f"makes {channels} channels; at most {MAX_HIDDEN_SIZE}")
    kernel_size = config.get_int(keys.kernel_size, 4, low=2, high=MAX_KERNEL_SIZE)
    return StateShape(channels, kernel_size, groups, heads, state_dim, head_dim)


def read_time_step_limits(config: ConfigReader) -> tuple[float, float]:
    """`time_step_limit`; JSON has infinity as Infinity, or as transformers writes it."""
    value = config.get(TIME_STEP_LIMITS, [0.0, math.inf])
    limits = [_read_number(item) for item in value] if isinstance(value, list) else []
    if len(limits) != 2 or not 0 <= limits[0] < limits[1]:  # NaN fails too
        raise config.error(TIME_STEP_LIMITS, f"must be two ascending numbers from 0 on, got {value!r:.60}")
    return limits[0], limits[1]


def _read_number(value: Any) -> float:
    if isinstance(value, dict) and value == {"__float__": "Infinity"}:
        return math.inf
    return float(value) if type(value) in (int, float) else math.nan
