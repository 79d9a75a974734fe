"""Fields of other servers and clients that have no effect here, with the values that are accepted.

One table per body. A field is a hint, of which any value is accepted because none changes the answer, or a
feature that this server lacks, of which the values that switch it off are accepted. Null counts as absent.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

MAX_SHOWN_CHARS = 80  # characters of a refused value in a message


@dataclass(frozen=True, slots=True)
class IgnoredField:
    """One row: who sends the field, and what is accepted."""

    source: str  # the server or client that defines it
    neutral: tuple[Any, ...] | None  # accepted values; None: any
    reason: str = ""  # why other values are refused, or what to use instead

    def accepts(self, value: Any) -> bool:
        """Whether the value changes nothing. 1 and 1.0 are equal, 1 and true are not."""
        return self.neutral is None or any(
            value == item and isinstance(value, bool) == isinstance(item, bool) for item in self.neutral
        )

    def refusal(self, value: Any) -> str:
        """The end of the sentence that begins with the field's name."""
        allowed = " or ".join(json.dumps(item) for item in self.neutral or ())
        limit = f"it may only be {allowed}" if allowed else "leave it out"
        shown = repr(value)
        shown = shown if len(shown) <= MAX_SHOWN_CHARS else shown[:MAX_SHOWN_CHARS] + "..."
        verb = f"is refused: {self.reason}" if self.reason else "is not supported"
        return f"{verb}; {limit}, got {shown}"


def hint(source: str) -> IgnoredField:
    return IgnoredField(source, None)


def only(source: str, *neutral: Any, reason: str = "") -> IgnoredField:
    return IgnoredField(source, neutral, reason)


OPENAI, VLLM, SGLANG, LLAMA, OLLAMA = "OpenAI", "vLLM", "SGLang", "llama-server", "Ollama"
WEBUI = "text-generation-webui"  # SillyTavern sends its fields, and KoboldCpp's
KOBOLD, ROUTER, ANTHROPIC = "KoboldCpp", "OpenRouter", "Anthropic"

NO_MIROSTAT = (
    "its state depends on every sampled token, so draft tokens could not be verified independently; "
    "typical_p and min_p bound surprise without state"
)
NO_BEAM_SEARCH = (
    "beam search ranks unfinished answers and does not sample; "
    "best_of of /v1/completions returns the likeliest of several answers"
)
NO_LOGITS_PROCESSORS = (
    "a server runs no code of its callers; "
    "logit_bias, allowed_token_ids, bad_words and structured_outputs restrict tokens"
)
NO_ORDER = "the order of the sampling steps is fixed; see docs/python.md"
NO_CONTRASTIVE = "it needs a second pass of the model for every token"
NO_ROUTING = "one server runs one engine, and has no other to choose from"
LORA = "the request's model names the adapter"
ALL_PENALIZED = "penalties count all of the text; dry_penalty_last_n limits those of repeats"
USE_SPECULATION = 'use speculation, such as {"method": "auto", "max_tokens": 4}'
USE_TOP_P = "use top_p, min_p, typical_p or top_n_sigma"
USE_LOGPROBS = "use logprobs, and in chat top_logprobs"
USE_TIMEOUT = "use timeout, in seconds"
USE_THINK = "use think: true or false"
NOT_PARSED = "a completion is the model's text as it is; /v1/chat/completions separates its parts"
ONE_ANSWER = "this API gives one answer, without token ids; /v1/chat/completions has them"

# Chat and completions.
GENERATION: Mapping[str, IgnoredField] = {
    "user": hint(OPENAI),
    "metadata": hint(OPENAI),
    "store": hint(OPENAI),
    "service_tier": hint(OPENAI),
    "safety_identifier": hint(OPENAI),
    "prompt_cache_key": hint(OPENAI),
    "prompt_cache_retention": hint(OPENAI),
    "prompt_cache_options": hint(OPENAI),
    "use_beam_search": only(VLLM, False, reason=NO_BEAM_SEARCH),
    "length_penalty": only(VLLM, 1, reason=NO_BEAM_SEARCH),
    "early_stopping": only(VLLM, False, reason=NO_BEAM_SEARCH),
    "logits_processors": only(VLLM, [], reason=NO_LOGITS_PROCESSORS),
    "logit_processors": only(VLLM, [], reason=NO_LOGITS_PROCESSORS),
    "spaces_between_special_tokens": only(VLLM, True),
    "watermarking": only(VLLM, False),
    "session_id": hint(VLLM),
    "stream_interval": only(VLLM, 1, reason="a chunk has the tokens of one step"),
    "repetition_detection": only(VLLM, {}, reason='use on_runaway: "stop"'),
    "return_prompt_text": only(VLLM, False, reason="use return_token_ids and /detokenize"),
    "return_token_offsets": only(VLLM, False),
    "mm_payload": only(VLLM, {}, []),
    "return_mm_kwargs": hint(VLLM),  # of its render routes alone
    "routed_experts_prompt_start": only(VLLM, 0),
    "kv_transfer_params": only(VLLM, {}),
    "ec_transfer_params": only(VLLM, {}),
    "vllm_xargs": only(VLLM, {}),
    "lora_request": only(VLLM, {}, reason=LORA),
    "mm_processor_kwargs": only(VLLM, {}),
    "media_io_kwargs": only(VLLM, {}),
    "guided_decoding_backend": hint(VLLM),
    "stream_reasoning": hint(SGLANG),
    "return_hidden_states": only(SGLANG, False),
    "return_routed_experts": only(SGLANG, False),
    "return_weight_versions": only(SGLANG, False),
    "routed_experts_start_len": only(SGLANG, 0),
    "return_cached_tokens_details": only(SGLANG, False),
    "return_prompt_token_ids": only(SGLANG, False, reason="use return_token_ids"),
    "return_meta_info": only(SGLANG, False, reason="use metrics: true"),
    "stop_regex": only(SGLANG, "", [], reason="use stop"),
    "no_stop_trim": only(SGLANG, False, reason="use include_stop_str_in_output"),
    "lora_path": only(SGLANG, "", [], reason=LORA),
    "session_params": only(SGLANG, {}),
    "custom_params": only(SGLANG, {}),
    "custom_logit_processor": only(SGLANG, "", reason=NO_LOGITS_PROCESSORS),
    "custom_labels": hint(SGLANG),
    "images_config": only(SGLANG, {}),
    "max_dynamic_patch": only(SGLANG),
    "min_dynamic_patch": only(SGLANG),
    "use_audio_in_video": only(SGLANG, False),
    "input_ids": only(SGLANG, reason="use prompt of /v1/completions"),
    "extra_key": only(SGLANG, "", reason="use cache_salt"),
    "ngram_corpus_id": only(SGLANG, "", reason="use prediction"),
    "task": only(SGLANG),
    "bootstrap_host": only(SGLANG, reason=NO_ROUTING),
    "bootstrap_port": only(SGLANG, reason=NO_ROUTING),
    "bootstrap_room": only(SGLANG, reason=NO_ROUTING),
    "routed_dp_rank": only(SGLANG, 0, reason=NO_ROUTING),
    "disagg_prefill_dp_rank": only(SGLANG, 0, reason=NO_ROUTING),
    "data_parallel_rank": only(SGLANG, 0, reason=NO_ROUTING),
    "cache_prompt": hint(LLAMA),  # cached or not, the tokens are the same
    "id_slot": hint(LLAMA),  # there are no slots
    "slot_id": hint(LLAMA),
    "n_keep": hint(LLAMA),  # the context is never shifted
    "n_discard": hint(LLAMA),
    "n_cache_reuse": hint(LLAMA),
    "n_indent": only(LLAMA, 0),
    "n_probs": only(LLAMA, 0, reason=USE_LOGPROBS),
    "min_keep": only(LLAMA, 0, 1),
    "post_sampling_probs": only(LLAMA, False, reason="log-probabilities are those of the raw distribution"),
    "backend_sampling": hint(LLAMA),
    "return_tokens": only(LLAMA, False, reason="use return_token_ids"),
    "return_progress": only(LLAMA, False),
    "timings_per_token": only(LLAMA, False, reason="use metrics: true"),
    "response_fields": only(LLAMA, []),
    "t_max_prompt_ms": only(LLAMA, 0, -1, reason=USE_TIMEOUT),
    "t_max_predict_ms": only(LLAMA, 0, -1, reason=USE_TIMEOUT),
    "verbose": only(LLAMA, False),
    "grammar_lazy": only(LLAMA, False, reason="use structured_outputs.after"),
    "grammar_triggers": only(LLAMA, [], reason="use structured_outputs.after"),
    "preserved_tokens": only(LLAMA, []),
    "thinking_forced_open": only(LLAMA, False),
    "image_data": only(LLAMA, [], reason="send images as parts of chat messages"),
    "lora": only(LLAMA, [], reason=LORA),
    "samplers": only(LLAMA, [], reason=NO_ORDER),
    "repeat_last_n": only(LLAMA, -1, reason=ALL_PENALIZED),
    "penalize_nl": only(LLAMA, True, reason=ALL_PENALIZED),
    "mirostat": only(LLAMA, 0, reason=NO_MIROSTAT),
    "mirostat_tau": only(LLAMA, 5, reason=NO_MIROSTAT),
    "mirostat_eta": only(LLAMA, 0.1, reason=NO_MIROSTAT),
    "dynatemp_range": only(LLAMA, 0),
    "dynatemp_exponent": only(LLAMA, 1),
    "adaptive_target": only(LLAMA, -1),
    "adaptive_decay": only(LLAMA, 0.9),
    "tfs_z": only(LLAMA, 1, reason=USE_TOP_P),
    "speculative.n_max": only(LLAMA, reason=USE_SPECULATION),
    "speculative.n_min": only(LLAMA, 0, reason="drafts have no minimum length"),
    "speculative.p_min": only(LLAMA, 0, reason=USE_SPECULATION),
    "speculative.type": only(LLAMA, reason=USE_SPECULATION),
    "speculative.ngram_size_n": only(LLAMA, reason=USE_SPECULATION),
    "speculative.ngram_size_m": only(LLAMA, reason=USE_SPECULATION),
    "speculative.ngram_m_hits": only(LLAMA, reason=USE_SPECULATION),
    "speculative.ngram_min_hits": only(LLAMA, reason=USE_SPECULATION),
    "keep_alive": hint(OLLAMA),  # the model stays loaded
    "num_ctx": hint(OLLAMA),  # the context is the server's --max-model-len; longer prompts are refused
    "num_batch": hint(OLLAMA),
    "num_keep": hint(OLLAMA),
    "num_thread": hint(OLLAMA),
    "num_gpu": hint(OLLAMA),
    "main_gpu": hint(OLLAMA),
    "low_vram": hint(OLLAMA),
    "numa": hint(OLLAMA),
    "use_mmap": hint(OLLAMA),
    "use_mlock": hint(OLLAMA),
    "options": only(OLLAMA, {}, reason="give its fields in the body itself"),
    "format": only(OLLAMA, "", reason="use response_format"),
    "raw": only(OLLAMA, False, reason="use /v1/completions"),
    "system": only(OLLAMA, "", reason="send a message with the role system"),
    "template": only(OLLAMA, "", reason="start the server with another chat template"),
    "context": only(OLLAMA, []),
    "top_a": only(KOBOLD, 0, reason=USE_TOP_P),
    "tfs": only(KOBOLD, 1, reason=USE_TOP_P),
    "smoothing_factor": only(KOBOLD, 0),
    "smoothing_curve": only(KOBOLD, 1),
    "rep_pen": only(KOBOLD, 1, reason="use repetition_penalty"),
    "rep_pen_range": only(KOBOLD, 0, reason=ALL_PENALIZED),
    "rep_pen_slope": only(KOBOLD, 0, 1),
    "sampler_order": only(KOBOLD, [], reason=NO_ORDER),
    "sampler_priority": only(WEBUI, [], reason=NO_ORDER),
    "temperature_last": only(WEBUI, False, reason=NO_ORDER),
    "dynamic_temperature": only(WEBUI, False),
    "do_sample": only(WEBUI, True, reason="use temperature: 0"),
    "num_beams": only(WEBUI, 1, reason=NO_BEAM_SEARCH),
    "min_length": only(WEBUI, 0, reason="use min_tokens"),
    "epsilon_cutoff": only(WEBUI, 0, reason=USE_TOP_P),
    "eta_cutoff": only(WEBUI, 0, reason=USE_TOP_P),
    "penalty_alpha": only(WEBUI, 0, reason=NO_CONTRASTIVE),
    "guidance_scale": only(WEBUI, 1, reason=NO_CONTRASTIVE),
    "negative_prompt": only(WEBUI, "", reason=NO_CONTRASTIVE),
    "no_repeat_ngram_size": only(WEBUI, 0, reason="use dry_multiplier"),
    "encoder_repetition_penalty": only(WEBUI, 1),
    "repetition_penalty_range": only(WEBUI, 0, reason=ALL_PENALIZED),
    "mirostat_mode": only(WEBUI, 0, reason=NO_MIROSTAT),
    "ban_eos_token": only(WEBUI, False, reason="use ignore_eos"),
    "add_bos_token": only(WEBUI, True, reason="use add_special_tokens"),
    "custom_token_bans": only(WEBUI, "", reason="use logit_bias"),
    "banned_strings": only(WEBUI, [], reason="use bad_words"),
    "grammar_string": only(WEBUI, "", reason="use grammar"),
    "truncation_length": hint(WEBUI),  # longer prompts are refused
    "max_tokens_second": only(WEBUI, 0),
    "auto_max_new_tokens": only(WEBUI, False, reason="use max_tokens: -1"),
    "provider": only(ROUTER, {}, reason=NO_ROUTING),
    "models": only(ROUTER, [], reason=NO_ROUTING),
    "route": hint(ROUTER),
    "transforms": only(ROUTER, []),
    "plugins": only(ROUTER, []),
}

CHAT: Mapping[str, IgnoredField] = {
    **GENERATION,
    "audio": only(OPENAI),
    "modalities": only(OPENAI, ["text"]),
    "verbosity": only(OPENAI, "medium"),
    "web_search_options": only(OPENAI),
    "moderation": only(OPENAI),
    "echo": only(VLLM, False),
    "best_of": only(VLLM, 1, reason="/v1/completions has it"),
    "documents": only(VLLM, [], reason="give them in a message"),
    "chat_template": only(VLLM, "", reason="the server's is used"),
    "chat_format": only(LLAMA),
    "reasoning_in_content": only(LLAMA, False, reason='use reasoning_format: "none"'),
    "parse_tool_calls": only(LLAMA, True, reason='use tool_choice: "none"'),
    "thinking": only("DeepSeek", {}, reason=USE_THINK),
    "reasoning": only(ROUTER, {}, reason=USE_THINK),
}

COMPLETION: Mapping[str, IgnoredField] = {
    **GENERATION,
    "suffix": only(OPENAI, ""),
    "prompt_embeds": only(VLLM, []),
    "include_reasoning": only(VLLM, True, reason=NOT_PARSED),
    "thinking_token_budget": only(VLLM, -1, reason=NOT_PARSED),
    "separate_reasoning": hint(SGLANG),
    "reasoning_format": only(LLAMA, "none", reason=NOT_PARSED),
    "reasoning_in_content": only(LLAMA, True, reason=NOT_PARSED),
    "parse_tool_calls": only(LLAMA, False, reason=NOT_PARSED),
}

# /tokenize and /detokenize.
TEMPLATE: Mapping[str, IgnoredField] = {
    "chat_template": CHAT["chat_template"],
    "mm_processor_kwargs": only(VLLM, {}),
    "media_io_kwargs": only(VLLM, {}),
    "with_pieces": only(LLAMA, False, reason="use return_token_strs"),
    "parse_special": only(LLAMA, True),
}

# A message of a conversation. Its unknown fields are ignored.
MESSAGE: Mapping[str, IgnoredField] = {
    "annotations": hint(OPENAI),
    "audio": only(OPENAI, reason="its text is not here; send the transcript as content"),
}

# /v1/messages and its count_tokens. The newer fields of Anthropic's betas are hints to its own servers.
MESSAGES_API: Mapping[str, IgnoredField] = {
    "metadata": hint(ANTHROPIC),
    "service_tier": hint(ANTHROPIC),
    "cache_control": hint(ANTHROPIC),  # every prefix is cached
    "context_management": hint(ANTHROPIC),  # the client's own history is taken as it is
    "betas": hint(ANTHROPIC),
    "anthropic_version": hint(ANTHROPIC),
    "anthropic_beta": hint(ANTHROPIC),
    "inference_geo": hint(ANTHROPIC),
    "speed": hint(ANTHROPIC),
    "diagnostics": hint(ANTHROPIC),
    "user_profile_id": hint(ANTHROPIC),
    "workspace_id": hint(ANTHROPIC),
    "fallbacks": hint(ANTHROPIC),
    "fallback_credit_token": hint(ANTHROPIC),
    "billing_policy": hint(ANTHROPIC),
    "thread": only(ANTHROPIC, reason="no conversation is kept here: each request sends all of it"),
    "compaction": only(ANTHROPIC, reason="the client compacts its conversation"),
    "container": only(ANTHROPIC, reason="no code is run here"),
    "mcp_servers": only(ANTHROPIC, [], reason="the client talks to MCP servers, and sends their tools"),
    "n": only(OPENAI, 1, reason=ONE_ANSWER),
    "stop": only(OPENAI, [], reason="use stop_sequences"),
    "stream_options": only(OPENAI, {}, reason="usage is always sent"),
    "max_completion_tokens": only(OPENAI, reason="use max_tokens"),
    "response_format": only(OPENAI, reason="use output_config.format"),
    "include_reasoning": only(VLLM, True, reason="use thinking"),
    "prompt_logprobs": only(VLLM, reason=ONE_ANSWER),
    "logprob_token_ids": only(VLLM, [], reason=ONE_ANSWER),
    "return_token_ids": only(VLLM, False, reason=ONE_ANSWER),
    "return_tokens_as_token_ids": only(VLLM, False, reason=ONE_ANSWER),
}

# /v1/responses and its input_tokens: as of generation, without the fields that are answered there.
RESPONSES: Mapping[str, IgnoredField] = {
    **{
        name: field
        for name, field in GENERATION.items()
        if name not in ("user", "metadata", "store", "safety_identifier", "prompt_cache_key")
    },
    "background": only(OPENAI, False, reason="an answer is computed while its client waits"),
    "conversation": only(OPENAI, "", reason="use previous_response_id"),
    "prompt": only(OPENAI, reason="templates of prompts are not stored here; use input"),
    "moderation": only(OPENAI),
    "context_management": only(OPENAI, [], reason="the client compacts its own history"),
    "client_metadata": hint("Codex"),
    "personality": hint(OPENAI),
    "messages": only(OPENAI, [], reason="use input"),
    "max_completion_tokens": only(OPENAI, reason="use max_output_tokens"),
    "reasoning_effort": only(OPENAI, reason="use reasoning.effort"),
    "n": only(OPENAI, 1, reason=ONE_ANSWER),
    "include_reasoning": only(VLLM, True, reason="reasoning is an item of its own"),
    "enable_response_messages": only(VLLM, False),
    "prompt_logprobs": only(VLLM, reason=ONE_ANSWER),
    "logprob_token_ids": only(VLLM, [], reason=ONE_ANSWER),
    "return_token_ids": only(VLLM, False, reason=ONE_ANSWER),
}

# An item of `input`. Its unknown fields are ignored.
RESPONSE_ITEM: Mapping[str, IgnoredField] = {
    "status": hint(OPENAI),
    "phase": hint(OPENAI),
    "caller": hint(OPENAI),
    "created_by": hint(OPENAI),
}

# `reasoning` of /v1/responses.
RESPONSE_REASONING: Mapping[str, IgnoredField] = {
    "generate_summary": hint(OPENAI),
    "context": hint(OPENAI),
    "mode": hint(OPENAI),
}

STREAM_OPTIONS: Mapping[str, IgnoredField] = {"include_obfuscation": hint(OPENAI)}
JSON_SCHEMA: Mapping[str, IgnoredField] = {"description": hint(OPENAI), "strict": hint(OPENAI)}
STRUCTURED_OUTPUTS: Mapping[str, IgnoredField] = {
    "disable_fallback": hint(VLLM),
    "disable_additional_properties": only(VLLM, False),
}

# Embeddings and ranking.
POOLING: Mapping[str, IgnoredField] = {
    "user": hint(OPENAI),
    "truncation_side": only(VLLM, "right"),
    "padding": only(VLLM, "do_not_pad"),
    "mm_processor_kwargs": only(VLLM, {}),
    "media_io_kwargs": only(VLLM, {}),
    "session_id": hint(VLLM),
    "keep_alive": hint(OLLAMA),
}

EMBEDDING: Mapping[str, IgnoredField] = {
    **POOLING,
    "messages": only(VLLM, [], reason="use input"),
    "embed_dtype": only(VLLM, "float32"),
    "endianness": only(VLLM, "native", "little"),
    "input_type": only("NVIDIA NIM", reason="use prompt_name"),
}

RANKING: Mapping[str, IgnoredField] = {
    **POOLING,
    "use_activation": only(VLLM, True),
    "rank_fields": only("Cohere", [], ["text"]),
    "max_chunks_per_doc": only("Cohere"),
    "max_tokens_per_doc": only("Cohere"),
}
