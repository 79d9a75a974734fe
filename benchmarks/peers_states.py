"""Random models whose layers differ in kind or size, in the shapes of known ones: see peers_experts.py."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import gguf
from gguf import GGMLQuantizationType as Kind
from peers_experts import EXPERT_MODELS, PER_LAYER_TABLE, ROPE_FREQS, ExpertModelShape, Tensors

CONV_SIZE, INTERVAL = 4, 4  # inputs of a convolution; every n-th layer has attention
ROTARY_DIVISOR = 4  # RoPE rotates this part of a head's values


@dataclass(frozen=True, slots=True)
class StateModelShape(ExpertModelShape):
    """Gated DeltaNet in most layers; an MLP (qwen35) or experts and a shared one (qwen35moe) in all."""

    key_heads: int = 16
    value_heads: int = 16
    state_dim: int = 128  # of keys and values
    is_tied: bool = False

    @property
    def has_experts(self) -> bool:
        return self.experts > 0

    def tensors(self) -> Tensors:
        yield "token_embd.weight", (self.vocab, self.hidden), Kind.Q6_K
        if not self.is_tied:
            yield "output.weight", (self.vocab, self.hidden), Kind.Q6_K
        yield "output_norm.weight", (self.hidden,), Kind.F32
        for layer in range(self.layers):
            is_attention = (layer + 1) % INTERVAL == 0
            matrices = self._attention() if is_attention else self._delta_net()
            for name, shape in (matrices | self._feed_forward()).items():
                yield f"blk.{layer}.{name}.weight", shape, self._kind(name, layer)
            floats = {"attn_norm.weight": (self.hidden,), "post_attention_norm.weight": (self.hidden,)}
            if is_attention:
                floats |= dict.fromkeys(("attn_q_norm.weight", "attn_k_norm.weight"), (self.head_dim,))
            else:
                floats |= {"ssm_a": (self.value_heads,), "ssm_dt.bias": (self.value_heads,)}
                floats |= {"ssm_norm.weight": (self.state_dim,)}
                floats |= {"ssm_conv1d.weight": (self._channels, CONV_SIZE)}
            if self.has_experts:
                floats |= {"ffn_gate_inp.weight": (self.experts, self.hidden)}
                floats |= {"ffn_gate_inp_shexp.weight": (self.hidden,)}
            for name, shape in floats.items():
                yield f"blk.{layer}.{name}", shape, Kind.F32

    @property
    def _channels(self) -> int:
        return (2 * self.key_heads + self.value_heads) * self.state_dim

    def _attention(self) -> dict[str, tuple[int, ...]]:
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        sizes = {"attn_q": 2 * q, "attn_k": kv, "attn_v": kv}  # q_proj yields queries and gates
        return {name: (size, self.hidden) for name, size in sizes.items()} | {"attn_output": (self.hidden, q)}

    def _delta_net(self) -> dict[str, tuple[int, ...]]:
        values = self.value_heads * self.state_dim
        sizes = {"attn_qkv": self._channels, "attn_gate": values}
        sizes |= dict.fromkeys(("ssm_alpha", "ssm_beta"), self.value_heads)
        return {name: (size, self.hidden) for name, size in sizes.items()} | {
            "ssm_out": (self.hidden, values)
        }

    def _feed_forward(self) -> dict[str, tuple[int, ...]]:
        up, down = (self.intermediate, self.hidden), (self.hidden, self.intermediate)
        mlp = {"ffn_gate": up, "ffn_up": up, "ffn_down": down}
        if not self.has_experts:
            return mlp
        routed = {f"{name}_exps": (self.experts, *shape) for name, shape in mlp.items()}
        return routed | {f"{name}_shexp": shape for name, shape in mlp.items()}

    def _kind(self, name: str, layer: int) -> Kind:
        """As llama.cpp chooses for Q4_K_M."""
        if name in ("ssm_alpha", "ssm_beta"):
            return Kind.Q8_0
        eighth = self.layers // 8
        is_wide = layer < eighth or layer >= 7 * self.layers // 8 or (layer - eighth) % 3 == 2
        wide = ("attn_v", "ffn_down", "ffn_down_exps", "ffn_down_shexp")
        return Kind.Q6_K if is_wide and name in wide else Kind.Q4_K

    def add_metadata(self, writer: gguf.GGUFWriter) -> None:
        ExpertModelShape.add_metadata(self, writer)
        writer.add_full_attention_interval(INTERVAL)
        writer.add_ssm_conv_kernel(CONV_SIZE)
        writer.add_ssm_state_size(self.state_dim)
        writer.add_ssm_group_count(self.key_heads)
        writer.add_ssm_time_step_rank(self.value_heads)
        writer.add_ssm_inner_size(self.value_heads * self.state_dim)
        writer.add_rope_dimension_count(self.head_dim // ROTARY_DIVISOR)
        writer.add_rope_dimension_sections([11, 11, 10, 0])
        if self.has_experts:
            writer.add_expert_shared_feed_forward_length(self.intermediate)


@dataclass(frozen=True, slots=True)
class Gemma4ModelShape(ExpertModelShape):
    """E2B and E4B: global layers have heads of twice the size; the last ones read K and V of earlier ones."""

    shared_layers: int = 20  # their MLPs have twice the size
    period: int = 5  # every n-th layer is global
    per_layer: int = 256  # of per-layer embeddings
    window: int = 512

    def tensors(self) -> Tensors:
        width = self.layers * self.per_layer
        yield "token_embd.weight", (self.vocab, self.hidden), Kind.Q6_K
        yield PER_LAYER_TABLE, (self.vocab, width), Kind.Q6_K
        yield "per_layer_model_proj.weight", (width, self.hidden), Kind.Q8_0
        yield "per_layer_proj_norm.weight", (self.per_layer,), Kind.F32
        yield "output_norm.weight", (self.hidden,), Kind.F32
        yield ROPE_FREQS, (self.head_dim,), Kind.F32
        for layer in range(self.layers):
            size = self._head_size(layer)
            for name, shape in self._matrices(layer, size).items():
                yield f"blk.{layer}.{name}.weight", shape, self._kind(name, layer)
            floats = dict.fromkeys(("attn_norm", "post_attention_norm", "ffn_norm"), self.hidden)
            floats |= dict.fromkeys(("post_ffw_norm", "post_norm"), self.hidden) | {"layer_output_scale": 1}
            floats |= dict.fromkeys(("attn_q_norm", "attn_k_norm")[: 1 + self._has_kv(layer)], size)
            for name, length in floats.items():
                yield f"blk.{layer}.{name}.weight", (length,), Kind.F32

    def _head_size(self, layer: int) -> int:
        return self.head_dim * (1 + self._is_global(layer))

    def _is_global(self, layer: int) -> bool:
        return (layer + 1) % self.period == 0

    def _has_kv(self, layer: int) -> bool:
        return layer < self.layers - self.shared_layers

    def _inner(self, layer: int) -> int:
        return self.intermediate * (2 - self._has_kv(layer))

    def _matrices(self, layer: int, size: int) -> dict[str, tuple[int, ...]]:
        sizes = {"attn_q": self.heads * size, "ffn_gate": self._inner(layer), "ffn_up": self._inner(layer)}
        if self._has_kv(layer):
            sizes |= dict.fromkeys(("attn_k", "attn_v"), self.kv_heads * size)
        sizes["inp_gate"] = self.per_layer
        return {name: (rows, self.hidden) for name, rows in sizes.items()} | {
            "attn_output": (self.hidden, self.heads * size),
            "ffn_down": (self.hidden, self._inner(layer)),
            "proj": (self.hidden, self.per_layer),
        }

    def _kind(self, name: str, layer: int) -> Kind:
        eighth = self.layers // 8
        is_wide = layer < eighth or layer >= 7 * self.layers // 8 or (layer - eighth) % 3 == 2
        return Kind.Q6_K if is_wide and name in ("attn_v", "ffn_down") else Kind.Q4_K

    def add_metadata(self, writer: gguf.GGUFWriter) -> None:
        ExpertModelShape.add_metadata(self, writer)
        layers = range(self.layers)
        writer.kv_data[0].pop(f"{self.architecture}.feed_forward_length")
        writer.add_feed_forward_length([self._inner(layer) for layer in layers])
        for key in ("attention.key_length", "attention.value_length"):
            writer.kv_data[0].pop(f"{self.architecture}.{key}")
        writer.add_key_length(2 * self.head_dim)
        writer.add_value_length(2 * self.head_dim)
        writer.add_key_length_swa(self.head_dim)
        writer.add_value_length_swa(self.head_dim)
        writer.add_shared_kv_layers(self.shared_layers)
        writer.add_sliding_window(self.window)
        writer.add_sliding_window_pattern([not self._is_global(layer) for layer in layers])
        writer.add_embedding_length_per_layer_input(self.per_layer)
        writer.add_rope_dimension_count(2 * self.head_dim)
        writer.add_rope_dimension_count_swa(self.head_dim)
        writer.add_rope_freq_base_swa(10000.0)
        writer.add_final_logit_softcapping(30.0)


@dataclass(frozen=True, slots=True)
class DeepSeekModelShape(ExpertModelShape):
    """DeepSeek-V2-Lite: latent attention, an MLP in the first layer, experts in the others."""

    latent: int = 512  # values that are cached of a token and layer, beside those of RoPE
    rope: int = 64
    plain: int = 128  # values of a head's query without RoPE, and of its output
    dense: int = 10944
    shared: int = 2

    def tensors(self) -> Tensors:
        yield "token_embd.weight", (self.vocab, self.hidden), Kind.Q4_K
        yield "output.weight", (self.vocab, self.hidden), Kind.Q6_K
        yield "output_norm.weight", (self.hidden,), Kind.F32
        for layer in range(self.layers):
            for name, shape in (self._attention() | self._feed_forward(layer)).items():
                kind = Kind.Q8_0 if shape[-1] % 256 else self._kind(name, layer)
                yield f"blk.{layer}.{name}.weight", shape, kind
            floats = {
                "attn_norm": (self.hidden,),
                "ffn_norm": (self.hidden,),
                "attn_kv_a_norm": (self.latent,),
            }
            if layer:
                floats |= {"ffn_gate_inp": (self.experts, self.hidden)}
            for name, shape in floats.items():
                yield f"blk.{layer}.{name}.weight", shape, Kind.F32

    def _attention(self) -> dict[str, tuple[int, ...]]:
        return {
            "attn_q": (self.heads * self.head_dim, self.hidden),
            "attn_kv_a_mqa": (self.latent + self.rope, self.hidden),
            "attn_k_b": (self.heads, self.latent, self.plain),
            "attn_v_b": (self.heads, self.plain, self.latent),
            "attn_output": (self.hidden, self.heads * self.plain),
        }

    def _feed_forward(self, layer: int) -> dict[str, tuple[int, ...]]:
        if layer == 0:
            return dict.fromkeys(("ffn_gate", "ffn_up"), (self.dense, self.hidden)) | {
                "ffn_down": (self.hidden, self.dense)
            }
        inner, shared = self.intermediate, self.shared * self.intermediate
        return {
            "ffn_gate_exps": (self.experts, inner, self.hidden),
            "ffn_up_exps": (self.experts, inner, self.hidden),
            "ffn_down_exps": (self.experts, self.hidden, inner),
            "ffn_gate_shexp": (shared, self.hidden),
            "ffn_up_shexp": (shared, self.hidden),
            "ffn_down_shexp": (self.hidden, shared),
        }

    def add_metadata(self, writer: gguf.GGUFWriter) -> None:
        ExpertModelShape.add_metadata(self, writer)
        for key in ("feed_forward_length", "attention.key_length", "attention.value_length"):
            writer.kv_data[0].pop(f"{self.architecture}.{key}")
        writer.add_feed_forward_length(self.dense)
        writer.add_key_length(self.latent + self.rope)
        writer.add_value_length(self.latent)
        writer.add_key_length_mla(self.plain + self.rope)
        writer.add_value_length_mla(self.plain)
        writer.add_kv_lora_rank(self.latent)
        writer.add_rope_dimension_count(self.rope)
        writer.add_leading_dense_block_count(1)
        writer.add_vocab_size(self.vocab)
        writer.add_expert_shared_count(self.shared)
        writer.add_expert_weights_scale(1.0)
        writer.add_expert_weights_norm(False)
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SOFTMAX)
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(40.0)
        writer.add_rope_scaling_orig_ctx_len(4096)
        writer.add_rope_scaling_yarn_log_mul(0.0707)


STATE_MODELS: Mapping[str, ExpertModelShape] = {
    "deepseek-v2-lite": DeepSeekModelShape(  # 24 of 64 experts: llama.cpp knows Lite by its 27 layers
        "deepseek2", 27, 2048, 24, 6, 1408, 16, 1, 192, 102400, 163840, 1e4, "q4_k_m.gguf"
    ),
    "tiny-latent": DeepSeekModelShape(
        *("deepseek2", 26, 256, 8, 2, 256, 4, 1, 96, 1024, 4096, 1e4, "q4_k_m.gguf"),
        latent=256,
        rope=32,
        plain=64,
        dense=512,
    ),
    "qwen3.5-0.8b": StateModelShape(
        "qwen35", 24, 1024, 0, 0, 3584, 8, 2, 256, 248320, 262144, 1e7, "q4_k_m.gguf", is_tied=True
    ),
    "qwen3.6-35b-a3b": StateModelShape(  # 12 of 40 layers
        "qwen35moe", 12, 2048, 256, 8, 512, 16, 2, 256, 74496, 262144, 1e7, "q4_k_m.gguf", value_heads=32
    ),
    "gemma4-e2b": Gemma4ModelShape(
        "gemma4", 35, 1536, 0, 0, 6144, 8, 1, 256, 262144, 131072, 1e6, "q4_k_m.gguf"
    ),
    "tiny-gemma4": Gemma4ModelShape(
        "gemma4", 10, 256, 0, 0, 512, 4, 1, 64, 1024, 4096, 1e6, "q4_k_m.gguf", shared_layers=5
    ),
    "tiny-states": StateModelShape(
        "qwen35", 4, 256, 0, 0, 512, 4, 2, 64, 1024, 4096, 1e7, "q4_k_m.gguf", is_tied=True
    ),
}
GGUF_MODELS: Mapping[str, ExpertModelShape] = {**EXPERT_MODELS, **STATE_MODELS}
