"""What a model takes in memory, before and after it is loaded. Nothing here imports torch."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["GIB", "DeviceMemory", "ModelInfo", "estimate_memory", "kv_bytes_per_token", "weight_bytes"]

GIB = 1 << 30
# A value's bytes by data type; int4 has a scale of 16 bits for each 32 values, int8 and fp8 one of 32 bits for each row or
# vector, which is counted apart where there are many.
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "fp8": 1, "int4": 18 / 32}
SCALE_BYTES = 4
BYTES_PER_LOGIT = 2 * 4  # float32, and as much again while they are filtered
CUDA_CONTEXT_BYTES = 512 << 20  # CUDA's own, and what kernels take beside what they are given
MARGIN_DIVISOR, MAX_MARGIN_BYTES = 64, 512 << 20  # a part of the card, but no more than so much
CUDA_GRAPH_DIVISOR, MAX_CUDA_GRAPH_BYTES = 64, 1 << 30


@dataclass(frozen=True, slots=True)
class ModelInfo:
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
    context_len: int
    dtype: str
    parameters: int
    vocab_size: int
    kv_values_per_token: int
    kv_vectors_per_token: int = 0
    embedding_parameters: int = 0
    packed_bytes: int | None = None
    packed_parameters: int = 0
    packed_embedding_parameters: int = 0
    vision_parameters: int = 0
    image_token_id: int | None = None
    activation_values_per_row: int = 0
    gpu_packed_bytes: int = 0
    gpu_packed_parameters: int = 0


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
    other_processes: int
    weights: int
    activations: int
    image_cache: int
    cuda_graphs: int
    is_measured: bool = False

    @property
    def margin(self) -> int:
        return min(self.total // MARGIN_DIVISOR, MAX_MARGIN_BYTES)

    @property
    def usable(self) -> int:
        return int(self.total * self.utilization)

    @property
    def kv_cache(self) -> int:
        """What is left for the KV cache; negative if the rest does not fit."""
        return self.usable - sum(size for _, size in self.parts)

    @property
    def parts(self) -> tuple[tuple[str, int], ...]:
        """All that is not KV, by name."""
        return (
            ("weights", self.weights),
            ("activations", self.activations),
            ("CUDA graphs", self.cuda_graphs),
            ("pictures", self.image_cache),
            ("CUDA and other processes", self.other_processes),
            ("margin", self.margin),
        )

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {size / GIB:.2f}" for name, size in self.parts if size)
        how = "measured" if self.is_measured else "estimated"
        return f"{self.usable / GIB:.2f} of {self.total / GIB:.2f} GiB may be used; {how}: {parts}"


def cuda_graph_reserve(total: int) -> int:
    """Bytes set aside for CUDA graphs themselves, beside what a pass in them takes."""
    return min(total // CUDA_GRAPH_DIVISOR, MAX_CUDA_GRAPH_BYTES)


def estimate_memory(
    total: int,
    free: int,
    utilization: float,
    weights: int,
    activations: int,
    image_cache: int,
    cuda_graphs: bool,
) -> DeviceMemory:
    """Before anything is loaded; activations and pictures as in DeviceMemory, `free` of `total` bytes are free."""
    return DeviceMemory(
        total,
        utilization,
        max(total - free, CUDA_CONTEXT_BYTES),
        weights,
        activations,
        image_cache,
        cuda_graph_reserve(total) if cuda_graphs else 0,
    )


def activation_bytes(model: ModelInfo, dtype: str, num_rows: int) -> int:
    """Of a pass over so many rows, all of which are sampled or scored."""
    return int(
        num_rows * (model.activation_values_per_row * DTYPE_BYTES[dtype] + model.vocab_size * BYTES_PER_LOGIT)
    )


def kv_bytes_per_token(model: ModelInfo, kv_dtype: str) -> int:
    """Of one token in the KV cache, scales included."""
    scales = model.kv_vectors_per_token * SCALE_BYTES if kv_dtype in ("int8", "fp8") else 0
    return int(model.kv_values_per_token * DTYPE_BYTES[kv_dtype]) + scales


def weight_bytes(
    model: ModelInfo, dtype: str, weight_dtype: str, quantization: str | None, kernel_backend: str
) -> int:
    """The embedding and the head are never rounded to less than 8 bits, a tower that sees not at all.

    dtype    of activations
    kernels  who computes: "native" keeps all weights as they are; "triton" all but some blocks of a file, which become values
             of the activations' type; "torch" holds what is quantized as float32, and whatever is not of the activations'
             type once more in that
    """
    tower_dtype = dtype if quantization else weight_dtype
    if kernel_backend == "torch":
        values = (
            model.packed_parameters if quantization is None else model.parameters - model.vision_parameters
        )
        held = {"float32", dtype}, {tower_dtype, dtype}
        quantized, dense = (sum(DTYPE_BYTES[kind] for kind in kinds) for kinds in held)
        return int(values * quantized + (model.parameters - values) * dense)
    linear = quantization or weight_dtype
    embedding = "int8" if quantization else weight_dtype
    outer = model.embedding_parameters - model.packed_embedding_parameters
    layers = model.parameters - model.packed_parameters - model.vision_parameters - outer
    made = (
        layers * DTYPE_BYTES[linear]
        + outer * DTYPE_BYTES[embedding]
        + model.vision_parameters * DTYPE_BYTES[tower_dtype]
    )
    dense = (model.packed_parameters - model.gpu_packed_parameters) * DTYPE_BYTES[dtype]
    kept = model.packed_bytes or 0 if kernel_backend == "native" else model.gpu_packed_bytes + dense
    return int(kept + made)
