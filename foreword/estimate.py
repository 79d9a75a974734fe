"""What a model takes in memory, before and after it is loaded. Nothing here imports torch."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["GIB", "DeviceMemory", "ModelFacts", "estimated_memory", "kv_bytes_per_token", "weight_bytes"]

GIB = 1 << 30
# A value's bytes by data type; int4 has a scale of 16 bits for each 32 values, int8 and fp8 one of 32 bits for each row or
# vector, which is counted apart where there are many.
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "fp8": 1, "int4": 18 / 32}
SCALE_BYTES = 4
LOGIT_BYTES = 2 * 4  # float32, and as much again while they are filtered
OTHERS = 512 << 20  # CUDA's own, and what kernels take beside what they are given
MARGIN_SHARE, MARGIN_BYTES = 64, 512 << 20  # a part of the card, but no more than so much
GRAPHS_SHARE, GRAPHS_BYTES = 64, 1 << 30


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What `resolve()` needs to know of a checkpoint.

    context             positions it was made for
    dtype               of its weights
    parameters          number of weights (tied ones once)
    kv_values_per_token numbers that one token keeps in the KV cache (all layers, K and V)
    kv_vectors_per_token  vectors that those numbers make up, one for each head: int8 has a scale for each
    embedding_parameters  parameters of the embedding and of the head
    weight_bytes        of weights that keep the form they have in the file; None: there are none
    kept_parameters     how many weights that are
    tower_parameters    of the tower that sees pictures
    image_token_id      id of the placeholder of a picture's tokens; None: the model sees none
    kept_embedding_parameters  of these, parameters of the embedding and of the head
    row_values          numbers that one row of a pass holds at once, about
    gpu_bytes           of kept weights that keep their form on a GPU too
    gpu_kept_parameters how many weights that are; the others become values of the activations' type
    """

    architecture: str
    context: int
    dtype: str
    parameters: int
    vocab_size: int
    kv_values_per_token: int
    kv_vectors_per_token: int = 0
    embedding_parameters: int = 0
    weight_bytes: int | None = None
    kept_parameters: int = 0
    kept_embedding_parameters: int = 0
    tower_parameters: int = 0
    image_token_id: int | None = None
    row_values: int = 0
    gpu_bytes: int = 0
    gpu_kept_parameters: int = 0


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """How the memory of a GPU is divided, in bytes.

    total        of the card
    utilization  share of it that may be in use, whoever uses it
    others       other processes, and CUDA itself
    weights      of all models, and what else stays
    activations  at the peak of a step
    pictures     features of pictures that are kept
    graphs       set aside for CUDA graphs
    margin       for what lies between the allocator's pieces
    measured     on the loaded models; else estimated
    """

    total: int
    utilization: float
    others: int
    weights: int
    activations: int
    pictures: int
    graphs: int
    measured: bool = False

    @property
    def margin(self) -> int:
        return min(self.total // MARGIN_SHARE, MARGIN_BYTES)

    @property
    def usable(self) -> int:
        return int(self.total * self.utilization)

    @property
    def for_kv(self) -> int:
        """What is left for the KV cache; negative if the rest does not fit."""
        return self.usable - sum(size for _, size in self.parts)

    @property
    def parts(self) -> tuple[tuple[str, int], ...]:
        """All that is not KV, by name."""
        return (
            ("weights", self.weights),
            ("activations", self.activations),
            ("CUDA graphs", self.graphs),
            ("pictures", self.pictures),
            ("CUDA and other processes", self.others),
            ("margin", self.margin),
        )

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {size / GIB:.2f}" for name, size in self.parts if size)
        how = "measured" if self.measured else "estimated"
        return f"{self.usable / GIB:.2f} of {self.total / GIB:.2f} GiB may be used; {how}: {parts}"


def graphs_allowance(total: int) -> int:
    """Bytes set aside for CUDA graphs themselves, beside what a pass in them takes."""
    return min(total // GRAPHS_SHARE, GRAPHS_BYTES)


def estimated_memory(
    total: int, free: int, utilization: float, weights: int, activations: int, pictures: int, graphs: bool
) -> DeviceMemory:
    """Before anything is loaded; activations and pictures as in DeviceMemory, `free` of `total` bytes are free."""
    return DeviceMemory(
        total, utilization, max(total - free, OTHERS), weights, activations, pictures, graphs_allowance(total) if graphs else 0
    )


def activation_bytes(facts: ModelFacts, dtype: str, rows: int) -> int:
    """Of a pass over so many rows, all of which are sampled or scored."""
    return int(rows * (facts.row_values * DTYPE_BYTES[dtype] + facts.vocab_size * LOGIT_BYTES))


def kv_bytes_per_token(facts: ModelFacts, kv_dtype: str) -> int:
    """Of one token in the KV cache, scales included."""
    scales = facts.kv_vectors_per_token * SCALE_BYTES if kv_dtype in ("int8", "fp8") else 0
    return int(facts.kv_values_per_token * DTYPE_BYTES[kv_dtype]) + scales


def weight_bytes(facts: ModelFacts, dtype: str, weight_dtype: str, quantization: str | None, kernels: str) -> int:
    """The embedding and the head are never rounded to less than 8 bits, a tower that sees not at all.

    dtype    of activations
    kernels  who computes: "native" keeps all weights as they are; "triton" all but some blocks of a file, which become values
             of the activations' type; "torch" holds what is quantized as float32, and whatever is not of the activations'
             type once more in that
    """
    tower_dtype = dtype if quantization else weight_dtype
    if kernels == "torch":
        values = facts.kept_parameters if quantization is None else facts.parameters - facts.tower_parameters
        held = {"float32", dtype}, {tower_dtype, dtype}
        quantized, dense = (sum(DTYPE_BYTES[kind] for kind in kinds) for kinds in held)
        return int(values * quantized + (facts.parameters - values) * dense)
    linear = quantization or weight_dtype
    embedding = "int8" if quantization else weight_dtype
    outer = facts.embedding_parameters - facts.kept_embedding_parameters
    layers = facts.parameters - facts.kept_parameters - facts.tower_parameters - outer
    made = layers * DTYPE_BYTES[linear] + outer * DTYPE_BYTES[embedding] + facts.tower_parameters * DTYPE_BYTES[tower_dtype]
    dense = (facts.kept_parameters - facts.gpu_kept_parameters) * DTYPE_BYTES[dtype]
    kept = facts.weight_bytes or 0 if kernels == "native" else facts.gpu_bytes + dense
    return int(kept + made)
