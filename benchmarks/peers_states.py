"""Random models with layers with state in the shapes of known ones, as GGUF files: see peers_experts.py."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import gguf
from gguf import GGMLQuantizationType as Kind
from peers_experts import EXPERT_MODELS, ExpertModelShape, Tensors

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


STATE_MODELS: Mapping[str, StateModelShape] = {
    "qwen3.5-0.8b": StateModelShape(
        "qwen35", 24, 1024, 0, 0, 3584, 8, 2, 256, 248320, 262144, 1e7, "q4_k_m.gguf", is_tied=True
    ),
    "qwen3.6-35b-a3b": StateModelShape(  # 12 of 40 layers
        "qwen35moe", 12, 2048, 256, 8, 512, 16, 2, 256, 74496, 262144, 1e7, "q4_k_m.gguf", value_heads=32
    ),
    "tiny-states": StateModelShape(
        "qwen35", 4, 256, 0, 0, 512, 4, 2, 64, 1024, 4096, 1e7, "q4_k_m.gguf", is_tied=True
    ),
}
GGUF_MODELS: Mapping[str, ExpertModelShape] = {**EXPERT_MODELS, **STATE_MODELS}
