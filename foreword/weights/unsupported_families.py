"""Families that are known and not supported: what they need, and what runs instead. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from foreword.errors import ConfigError

DEEPSEEK = "deepseek_v2 and deepseek_v3 run, like its distillations on Qwen and Llama"
RECURRENT = "it needs Mamba, RWKV or other recurrent layers"
ALTUP = "it needs Gemma 3n's AltUp; gemma4, gemma3_text and gemma2 run"
HEADS = "it needs trained heads for drafting"
VISION = "it needs another vision encoder; llava, llava_next, qwen2_vl, qwen2_5_vl and qwen3_vl run"
POSITIONS = "it needs learned positions or ALiBi"
FUSED = "it needs q, k and v of each head in one tensor"
INDEXER = "it needs a sparse indexer"
PAIR = "it needs an encoder and a decoder; models with a decoder alone run"

# What families need, by the start of model_type or GGUF architecture without - _ and .; first match
MISSING_FEATURES: Mapping[str, str | None] = MappingProxyType(
    {
        **dict.fromkeys(("deepseekvl", "glm4v", "idefics", "internvl", "janus", "kimivl", "llama4"), VISION),
        **dict.fromkeys(("llavaonevision", "minicpmv", "mllama", "molmo", "ovis", "paligemma"), VISION),
        **dict.fromkeys(("phi3v", "phi4mm", "phi4multimodal", "pixtral", "qwen25omni", "qwen3omni"), VISION),
        **dict.fromkeys(("qwen3vlmoe", "smolvlm", "videollava"), VISION),
        "gemma3n": ALTUP,
        **dict.fromkeys(("gemma4assistant", "gemma4unifiedassistant"), HEADS),
        "deepseek": DEEPSEEK,
        **dict.fromkeys(("deepseek2", "deepseekv2", "deepseekv3"), None),
        **dict.fromkeys(("deepseek32", "deepseek4", "deepseekv32", "deepseekv4"), f"{INDEXER}; {DEEPSEEK}"),
        **dict.fromkeys(("deepseekocr", "deepseek2ocr", "kimik25"), VISION),
        **dict.fromkeys(("glm5", "glmdsa", "glmmoedsa"), f"{INDEXER}; glm4_moe_lite runs"),
        "kimik2": None,  # deepseek_v3
        "longcat": "it needs two attentions in a layer, and experts without weights",
        "minicpm3": "it needs latent attention with scaled layers; deepseek_v2 runs",
        "olmohybrid": f"{RECURRENT}; olmo2 and olmo3 run",
        "lfm2vl": f"{VISION}; lfm2 runs",
        "bamba": f"{RECURRENT}; granitemoehybrid and falcon_h1 run",
        **dict.fromkeys(("falconh1", "nemotronh")),  # they run, and are not Falcon and Nemotron
        **dict.fromkeys(("falconmamba", "jamba", "kimilinear"), RECURRENT),
        "lfm3": f"{RECURRENT}; lfm2 runs",
        **dict.fromkeys(("mamba", "plamo2", "recurrentgemma"), RECURRENT),
        **dict.fromkeys(("rwkv", "zamba"), RECURRENT),
        **dict.fromkeys(("eagle", "medusa", "mlpspeculator", "speculator"), HEADS),
        **dict.fromkeys(("bart", "mbart", "pegasus", "t5", "mt5", "whisper"), PAIR),
        **dict.fromkeys(("bloom", "gpt2", "gptbigcode", "gptneo", "mpt", "opt"), POSITIONS),
        **dict.fromkeys(("falcon", "gptneox"), FUSED),
        "gptj": "it needs GPT-J's names of tensors",
        "cohere2vision": f"{VISION}; cohere2 runs",
        "afmoe": "it needs a gate of attention with a projection of its own",
        "bailinghybrid": f"{RECURRENT}; bailing_moe runs",
        "granitemoeswa": "granite_swa and granitemoeshared run",
        "hyv": "it needs Hunyuan's later layers; hunyuan_v1_dense and hunyuan_v1_moe run",
        "internlm": "it needs InternLM's names of tensors",
        "laguna": "it needs a number of heads for each layer",
        "mimov2": "it needs head sizes of values that differ from those of keys",
    }
)
# By the whole model_type of config.json; GGUF files of these families may run
CHECKPOINT_FAMILIES: Mapping[str, str] = MappingProxyType(
    {
        "minimax": f"{RECURRENT}; minimax_m2 runs",
        "gemma3": "its text alone runs, as a checkpoint of model_type gemma3_text or a GGUF file",
        "mistral3": "its text alone runs, as a checkpoint of model_type mistral or a GGUF file",
        "olmo": "olmo2 and olmo3 run",
        **dict.fromkeys(
            ("bert", "camembert", "distilbert", "modernbert", "mpnet", "roberta", "xlm-roberta"),
            "it is an encoder, which embeds or ranks beside a model: foreword serve --embedding-model PATH",
        ),
    }
)


# model_type and GGUF architecture of families that have layers with state
TYPES_WITH_STATES = frozenset(
    {
        *("falcon_h1", "granitemoehybrid", "lfm2", "lfm2_moe", "nemotron_h", "qwen3_next"),
        *("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"),
        *("nemotron_h_moe", "falcon-h1", "granitehybrid", "lfm2moe", "qwen35", "qwen35moe", "qwen3next"),
    }
)


def draft_model_with_states(architecture: str) -> ConfigError:
    """The error for a draft model of such a family."""
    problem = f"{architecture} has layers with state, which a draft model may not have yet"
    return ConfigError(f"draft_model: {problem}; as a model it runs", "draft_model")


def missing_feature(architecture: str) -> str:
    """ " (it needs ...)" for a known family that is not supported, else ""."""
    name = architecture.lower().replace("-", "").replace("_", "").replace(".", "")
    # The longest start is the nearest family: falconh1 is not falcon.
    starts = [start for start in MISSING_FEATURES if name.startswith(start)]
    feature = MISSING_FEATURES[max(starts, key=len)] if starts else None
    return f" ({feature})" if feature else ""


def describe_checkpoint(model_type: str) -> str:
    """missing_feature() of a directory's config.json, where further families are known."""
    if model_type in CHECKPOINT_FAMILIES:
        return f" ({CHECKPOINT_FAMILIES[model_type]})"
    return missing_feature(model_type)
