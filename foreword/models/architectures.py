"""Decoder architectures by model_type."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from foreword.errors import CheckpointError
from foreword.models.apertus import Apertus
from foreword.models.bailing_moe import BailingMoe
from foreword.models.cohere2 import Cohere, Cohere2, Cohere2Moe
from foreword.models.decoder import Decoder
from foreword.models.decoder_config import DecoderConfig
from foreword.models.deepseek_v2 import DeepseekV2
from foreword.models.deepseek_v3 import DeepseekV3
from foreword.models.dots1 import Dots1
from foreword.models.ernie4_5 import Ernie45, Ernie45Moe
from foreword.models.exaone import Exaone
from foreword.models.exaone4 import Exaone4
from foreword.models.exaone_moe import ExaoneMoe
from foreword.models.falcon_h1 import FalconH1
from foreword.models.gemma2 import Gemma, Gemma2
from foreword.models.gemma3_text import Gemma3Text
from foreword.models.gemma4 import Gemma4, Gemma4Unified
from foreword.models.glm4 import Glm, Glm4
from foreword.models.glm4_moe import Glm4Moe, SolarOpen
from foreword.models.glm4_moe_lite import Glm4MoeLite
from foreword.models.gpt_oss import GptOss
from foreword.models.granite import Granite, GraniteSwa
from foreword.models.granitemoe import GraniteMoe, GraniteMoeShared
from foreword.models.granitemoehybrid import GraniteMoeHybrid
from foreword.models.hunyuan_v1_dense import HunyuanDense
from foreword.models.hunyuan_v1_moe import HunyuanMoe
from foreword.models.lfm2 import Lfm2
from foreword.models.lfm2_moe import Lfm2Moe
from foreword.models.llama import Llama
from foreword.models.mellum import Mellum
from foreword.models.minimax_m2 import MiniMaxM2
from foreword.models.ministral3 import Ministral3
from foreword.models.mistral import Mistral
from foreword.models.mistral4 import Mistral4
from foreword.models.mixtral import Mixtral
from foreword.models.nemotron import Arcee, Nemotron
from foreword.models.nemotron_h import NemotronH
from foreword.models.olmo2 import Olmo2
from foreword.models.olmo3 import Olmo3
from foreword.models.olmoe import Olmoe
from foreword.models.phi import Phi
from foreword.models.phi3 import Phi3
from foreword.models.phimoe import PhiMoe
from foreword.models.qwen2 import Qwen2
from foreword.models.qwen2_moe import Qwen2Moe
from foreword.models.qwen3 import Qwen3
from foreword.models.qwen3_5 import Qwen35, Qwen35Moe
from foreword.models.qwen3_moe import Qwen3Moe
from foreword.models.qwen3_next import Qwen3Next
from foreword.models.seed_oss import SeedOss
from foreword.models.smollm3 import SmolLM3
from foreword.models.stablelm import StableLm
from foreword.models.starcoder2 import Starcoder2
from foreword.weights.config_reader import ConfigReader
from foreword.weights.unsupported_families import describe_checkpoint

ARCHITECTURES: Mapping[str, type[Decoder]] = MappingProxyType(
    {
        "apertus": Apertus,
        "arcee": Arcee,
        "bailing_moe": BailingMoe,
        "bailing_moe_v2": BailingMoe,
        "cohere": Cohere,
        "cohere2": Cohere2,
        "cohere2_moe": Cohere2Moe,
        "dots1": Dots1,
        "deepseek_v2": DeepseekV2,
        "deepseek_v3": DeepseekV3,
        "ernie4_5": Ernie45,
        "ernie4_5_moe": Ernie45Moe,
        "exaone": Exaone,
        "exaone4": Exaone4,
        "exaone_moe": ExaoneMoe,
        "falcon_h1": FalconH1,
        "gemma": Gemma,
        "gemma2": Gemma2,
        "gemma3_text": Gemma3Text,
        "gemma4_text": Gemma4,
        "gemma4_unified_text": Gemma4Unified,
        "glm": Glm,
        "glm4": Glm4,
        "glm4_moe": Glm4Moe,
        "glm4_moe_lite": Glm4MoeLite,
        "gpt_oss": GptOss,
        "granite": Granite,
        "granite_swa": GraniteSwa,
        "granitemoe": GraniteMoe,
        "granitemoehybrid": GraniteMoeHybrid,
        "granitemoeshared": GraniteMoeShared,
        "hunyuan_v1_dense": HunyuanDense,
        "hunyuan_v1_moe": HunyuanMoe,
        "lfm2": Lfm2,
        "lfm2_moe": Lfm2Moe,
        "llama": Llama,
        "mellum": Mellum,
        "minimax_m2": MiniMaxM2,
        "ministral": Mistral,
        "ministral3": Ministral3,
        "mistral": Mistral,
        "mistral4": Mistral4,
        "mixtral": Mixtral,
        "nemotron": Nemotron,
        "nemotron_h": NemotronH,
        "olmo2": Olmo2,
        "olmo3": Olmo3,
        "olmoe": Olmoe,
        "phi": Phi,
        "phi3": Phi3,
        "phimoe": PhiMoe,
        "qwen2": Qwen2,
        "qwen2_moe": Qwen2Moe,
        "qwen3": Qwen3,
        "qwen3_5_moe_text": Qwen35Moe,
        "qwen3_5_text": Qwen35,
        "qwen3_moe": Qwen3Moe,
        "qwen3_next": Qwen3Next,
        "seed_oss": SeedOss,
        "smollm3": SmolLM3,
        "solar_open": SolarOpen,
        "stablelm": StableLm,
        "starcoder2": Starcoder2,
    }
)


ALIASES: Mapping[str, str] = MappingProxyType({"kimi_k2": "deepseek_v3"})  # names of the same type


def read_decoder(reader: ConfigReader, default: str | None = None) -> tuple[type[Decoder], DecoderConfig]:
    """Read a decoder's config strictly; `default` is its model_type if missing. Raises CheckpointError."""
    model_type = reader.get("model_type", *([] if default is None else [default]))
    if isinstance(model_type, str):
        model_type = ALIASES.get(model_type, model_type)
    if not isinstance(model_type, str) or model_type not in ARCHITECTURES:
        known = ", ".join(sorted(ARCHITECTURES))
        problem = f"model_type {model_type!r:.80} is not supported{describe_checkpoint(str(model_type))}"
        raise CheckpointError(f"{reader.source}: {problem}; known: {known}")
    architecture = ARCHITECTURES[model_type]
    config = architecture.read_config(reader)
    reader.check_all_read()
    return architecture, config
