"""Which checkpoints are trained heads, by their configs alone."""

from __future__ import annotations

from pathlib import Path
from types import MappingProxyType

from foreword.errors import CheckpointError
from foreword.weights.config_reader import read_json
from foreword.weights.gguf.header import is_gguf, open_gguf

# Methods by `architectures` or `speculators_model_type` in config.json, and by the architecture of GGUF files
HEADS = MappingProxyType(
    {
        "LlamaForCausalLMEagle3": "eagle3",
        "Eagle3LlamaForCausalLM": "eagle3",
        "LlamaEagle3ForCausalLM": "eagle3",
        "Eagle3Speculator": "eagle3",
        "Eagle3DraftModel": "eagle3",
        "eagle3": "eagle3",
    }
)


def head_method(path: Path) -> str | None:
    """The drafter of the trained head in `path`; None: it is no head, or cannot be read."""
    try:
        if is_gguf(path):
            return HEADS.get(str(open_gguf(path).metadata.get("general.architecture")))
        config = read_json(path / "config.json")
    except CheckpointError:
        return None
    architectures = config.get("architectures")
    names = [
        config.get("speculators_model_type"),
        *(architectures if isinstance(architectures, list) else ()),
    ]
    return next((HEADS[name] for name in names if isinstance(name, str) and name in HEADS), None)
