"""Which checkpoints are trained heads, by their configs alone."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from foreword.errors import CheckpointError
from foreword.weights.config_reader import ConfigReader, read_json, read_text_config
from foreword.weights.gguf.header import is_gguf, open_gguf

# Methods by `architectures` or `speculators_model_type` in config.json, and by the architecture of GGUF files
HEADS = MappingProxyType(
    {
        **dict.fromkeys(
            ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "LlamaEagle3ForCausalLM"), "eagle3"
        ),
        **dict.fromkeys(("Eagle3Qwen2_5vlForCausalLM", "Eagle3Qwen3vlForCausalLM", "eagle3"), "eagle3"),
        **dict.fromkeys(("Eagle3Speculator", "Eagle3DraftModel"), "eagle3"),
        **dict.fromkeys(("peagle", "PEagleSpeculator", "PEagleDraftModel"), "eagle3"),
        **dict.fromkeys(("PeagleLlamaForCausalLM", "PeagleQwen3ForCausalLM"), "eagle3"),
        **dict.fromkeys(("dflash", "DFlashDraftModel", "DFlashSpeculator"), "dflash"),
        **dict.fromkeys(("dspark", "DSparkDraftModel", "DSparkSpeculator", "Qwen3DSparkModel"), "dflash"),
        # Refused by name: what they have beyond DFlash
        **dict.fromkeys(("dflash2", "DFlash2DraftModel", "DFlash2Speculator"), "dflash"),
        **dict.fromkeys(("Gemma4AssistantForCausalLM", "Gemma4UnifiedAssistantForCausalLM"), "mtp"),
    }
)
# Names of heads of the EAGLE family; vision-language models of a family called Eagle have others
EAGLE_HEAD = re.compile("eagle(?!.*ForConditionalGeneration)", re.IGNORECASE)

QWEN_FAMILIES = ("qwen3_next", "qwen3_5", "qwen3_5_moe")
DEEPSEEK_FAMILIES = ("deepseek_v3", "glm4_moe", "glm4_moe_lite")
MTP_GGUF_ARCHITECTURES = ("deepseek2", "glm4moe", "qwen35", "qwen35moe", "qwen3next")
MTP_COUNTS = ("mtp_num_hidden_layers", "num_nextn_predict_layers")
GGUF_NEEDED = ("nextn.eh_proj", "nextn.enorm", "nextn.hnorm", "nextn.shared_head_norm", "attn_norm")
ALIASES = MappingProxyType({"kimi_k2": "deepseek_v3"})
INDEX_FILE = "model.safetensors.index.json"
MAX_HEADER_BYTES = 100 << 20  # limit of the reference implementation


@dataclass(frozen=True, slots=True)
class MTPNames:
    """Names of the tensors of an MTP head in a checkpoint."""

    prefix: str  # all tensors
    fc: str  # projection of a token's embedding and the hidden state before it
    embedding_norm: str
    hidden_norm: str
    layer: str  # prefix of the layer
    norm: str  # before the output layer
    copies: tuple[str, ...] = ()  # prefixes of the model's embedding and output layer once more

    @classmethod
    def of_family(cls, architecture: str, num_layers: int, gguf: bool = False) -> MTPNames | None:
        """In checkpoints of a family, or by our names in its GGUF files. None: no head that runs here."""
        if architecture in DEEPSEEK_FAMILIES or (gguf and architecture in QWEN_FAMILIES):
            prefix = f"model.layers.{num_layers}."
            copies = (f"{prefix}embed_tokens.", f"{prefix}shared_head.head.")
            return cls(prefix, "eh_proj", "enorm", "hnorm", "", "shared_head.norm", copies)
        if architecture in QWEN_FAMILIES:
            norms = "pre_fc_norm_embedding", "pre_fc_norm_hidden"
            return cls("mtp.", "fc", *norms, "layers.0.", "norm")
        return None

    def are_stored(self, names: set[str]) -> bool:
        """Whether tensors that no head lacks are among a checkpoint's: quantizers have left out parts."""
        norms = (self.embedding_norm, self.hidden_norm, self.norm, f"{self.layer}input_layernorm")
        fc = f"{self.prefix}{self.fc}."  # quantized, its tensors have other names
        has_norms = {f"{self.prefix}{norm}.weight" for norm in norms} <= names
        return has_norms and any(name.startswith(fc) for name in names)


def head_method(path: Path, target: Path | None = None) -> str | None:
    """The drafter of the trained head in `path`; None: it is no head, or cannot be read.

    The head in the checkpoint `target` itself is an MTP head. Raises CheckpointError for another EAGLE head.
    """
    if path == target:
        return "mtp" if brings_mtp_head(path) else None
    try:
        if is_gguf(path):
            return HEADS.get(str(open_gguf(path).metadata.get("general.architecture")))
        config = read_json(path / "config.json")
    except CheckpointError:
        return None
    architectures = config.get("architectures")
    values = [
        config.get("speculators_model_type"),
        *(architectures if isinstance(architectures, list) else ()),
    ]
    names = [value for value in values if isinstance(value, str)]
    known = [HEADS[name] for name in names if name in HEADS]
    for name in names:
        if not known and EAGLE_HEAD.search(name):
            problem = f"a trained head of the kind {name:.80} is not supported"
            raise CheckpointError(f"{path}: {problem}; EAGLE-3 heads of Llama's layers are", "draft_model")
    return next(iter(known), None)


def brings_mtp_head(path: Path) -> bool:
    """Whether a checkpoint has an MTP head that runs here; False if it cannot be read.

    Without files of weights, the config decides.
    """
    try:
        return _gguf_brings_mtp_head(path) if is_gguf(path) else _folder_brings_mtp_head(path)
    except (CheckpointError, OSError, ValueError, TypeError, RecursionError):
        return False


def _gguf_brings_mtp_head(path: Path) -> bool:
    gguf = open_gguf(path)
    architecture = str(gguf.metadata.get("general.architecture"))
    counts = [
        gguf.metadata.get(f"{architecture}.{key}", 0) for key in ("block_count", "nextn_predict_layers")
    ]
    if architecture not in MTP_GGUF_ARCHITECTURES or not all(
        type(count) is int and count for count in counts
    ):
        return False
    prefix = f"blk.{counts[0] - counts[1]}."
    return {f"{prefix}{name}.weight" for name in GGUF_NEEDED} <= gguf.tensors.keys()


def _folder_brings_mtp_head(path: Path) -> bool:
    file = path / "config.json"
    config = read_text_config(ConfigReader(read_json(file), str(file)))
    family = str(config.get("model_type")).removesuffix("_text")
    names = MTPNames.of_family(ALIASES.get(family, family), config.get_int("num_hidden_layers"))
    if names is None or config.get("mtp_use_dedicated_embeddings", False):
        return False
    stored = _stored_names(path)
    return names.are_stored(stored) if stored else any(config.get(key, 0) for key in MTP_COUNTS)


def _stored_names(path: Path) -> set[str]:
    """Names of the tensors in a checkpoint's safetensors files, by their index or their headers."""
    if (path / INDEX_FILE).is_file():
        return {*read_json(path / INDEX_FILE).get("weight_map", ())}
    names: set[str] = set()
    for file in path.glob("*.safetensors"):
        with file.open("rb") as stream:
            size = int.from_bytes(stream.read(8), "little")
            names |= {*json.loads(stream.read(min(size, MAX_HEADER_BYTES)))}
    return names
