"""What each field of a body means: for the API's schema, docs/request-fields.md and the page."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

_LINK = re.compile(r"\[([^\]]+)\]\([^)]*\)")
# By class of the body and name in JSON; a subclass has the texts of its bases. Markdown, links as in docs/.
DESCRIPTIONS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "RequestBody": {
            "model": "a name of `/v1/models`; left out: the first",
            "priority": "lower is served first; default 0",
            "request_id": "sent back as `X-Request-Id`: 1 to 128 visible ASCII characters",
            "cache_salt": "the request shares cached prefixes, and finished answers for `suffix`, "
            "only with requests of the "
            "same salt and key; at most 1024 characters",
        },
        "SamplingBody": {
            "n": "answers generated for a prompt; choice i has the seed `seed + i`",
            "temperature": "flattens (above 1) or sharpens (below 1) the distribution; 0 takes the "
            "likeliest token",
            "top_p": "keep the likeliest tokens whose probabilities reach this sum; 1 keeps all",
            "top_k": "keep this many of the likeliest tokens; 0 or -1 keeps all",
            "min_p": "keep tokens with at least this share of the likeliest token's probability; 0 keeps all",
            "typical_p": "keep the most typical tokens whose probabilities reach this sum; 1 keeps all",
            "top_n_sigma": "keep tokens whose logit is within this many standard deviations of the highest",
            "xtc_probability": "probability that the likeliest tokens are left out at a position, "
            "but for one",
            "xtc_threshold": "probability from which `xtc_probability` counts a token as likely",
            "dry_multiplier": "penalty on tokens that would continue a repetition; 0 turns it off",
            "dry_base": "growth of this penalty with the length of the repetition",
            "dry_allowed_length": "length of a repetition without penalty",
            "dry_penalty_last_n": "number of last tokens searched for repetitions; -1: all, 0: none",
            "dry_sequence_breakers": "texts at which a repetition ends",
            "presence_penalty": "subtracted from the logits of tokens that the answer has; -2 to 2",
            "frequency_penalty": "subtracted from the logits of tokens for each time that the answer "
            "has them; -2 to 2",
            "repetition_penalty": "divides the logits of tokens of prompt and answer; above 1 repeats less",
            "logit_bias": "token id to an addition to its logit, -100 to 100",
            "bad_words": "texts that are not generated",
            "allowed_token_ids": "only these are sampled",
            "min_tokens": "tokens before the end of the text or a stop may end the answer",
            "max_tokens": "most tokens of the answer; -1: up to the end of the context. Default of chat: "
            "`--default-max-tokens` or the checkpoint's own, of completions 16",
            "stop": "texts that end the answer, excluded from it",
            "stop_token_ids": "token ids that end the answer",
            "include_stop_str_in_output": "keep the stop in the answer",
            "ignore_eos": "go on after the end of the text",
            "skip_special_tokens": "leave special tokens out of the text; default true",
            "truncate_prompt_tokens": "keep this many tokens of the prompt; -1: as many as fit",
            "truncation_side": "with `truncate_prompt_tokens`: `left` (the default) keeps the end of "
            "the prompt, `right` its "
            "beginning",
            "logprob_token_ids": "log-probabilities of these ids, instead of the likeliest; needs `logprobs`",
            "prompt_logprobs": "log-probabilities of the prompt's tokens, and of this many likely "
            "ones; not in a stream",
            "seed": "the same request with the same seed gives the same answer, [whatever was answered "
            "before](exactness.md#seeds); default and -1: a random one, which is returned",
            "on_runaway": "what to do if the answer [repeats "
            "itself](staying-up.md#repetition-detection): `warn`, `stop` or "
            "`off`",
            "stream": "answer as server-sent events, a chunk for the tokens of each step",
            "stream_options": "what a stream has beside the answer",
            "timeout": "seconds for the request, at most `--request-timeout`; then error 408",
            "speculation": "the method of [speculation](speculation.md) alone (`auto`, `off` or a "
            "drafter), or an object; it "
            "changes no token",
            "prediction": "[the expected answer](speculation.md#predicted-outputs), which speeds up "
            "the answer without "
            "changing it; at most the context's length",
            "metrics": "add a `metrics` object to each choice and to the answer, and `tokens` to each chunk",
            "return_token_ids": "add the ids of prompt and answer",
            "return_tokens_as_token_ids": 'in `logprobs`, "token_id:42" instead of the text of token 42',
        },
        "StreamOptions": {
            "include_usage": "a last chunk with `usage`, of all choices, and no choices",
            "continuous_usage_stats": "with `include_usage`: `usage` of a choice so far in each of "
            "its chunks",
        },
        "SpeculationBody": {
            "method": "`auto` (the default), `off`, or one [drafter](speculation.md#drafters)",
            "max_tokens": "most drafted tokens a step, at most `--num-speculative-tokens`",
        },
        "TextPart": {"type": "`text`", "text": "the text"},
        "PredictionBody": {"type": "`content`", "content": "the expected text, or parts of it"},
        "ChatBody": {
            "messages": "the conversation, oldest message first",
            "add_special_tokens": "add the tokenizer's own special tokens to what the chat template renders",
            "max_completion_tokens": "OpenAI's newer name of `max_tokens`",
            "logprobs": "add the log-probabilities of the answer's tokens",
            "top_logprobs": "with `logprobs`: log-probabilities of this many of the likeliest tokens "
            "too, 0 to 20",
        },
        "Message": {
            "role": "`system`, `developer` (the same), `user`, `assistant` or `tool`",
            "content": "a text, or parts: `text`, and of a user `image_url` too",
            "name": "the author's name, where the template has a place for it",
            "refusal": "OpenAI's text in place of the content",
            "reasoning": "the reasoning before an assistant's content",
            "reasoning_content": "another name of `reasoning`; the first of these that is not empty counts",
            "thinking": "a third name",
            "tool_calls": "calls of an assistant",
            "tool_call_id": "the call that a tool's message answers",
            "function_call": "OpenAI's older form of one call",
        },
        "ToolCallBody": {
            "id": "named by the answer to it",
            "type": "`function` or `custom`",
            "function": "the called function",
            "custom": "the called custom tool",
        },
        "CalledFunction": {"name": "its name", "arguments": "a JSON text, or an object"},
        "CalledCustom": {"name": "its name", "input": "what it was called with"},
        "ReasoningBody": {
            "think": "whether the model [reasons](tools.md#fields-of-chat) before it answers; "
            "default its template's",
            "reasoning_effort": "`none` (as `think: false`), `minimal`, `low`, `medium`, `high`, "
            "`xhigh` or `max`, as far as "
            "the template knows them",
            "thinking_token_budget": "most tokens of reasoning; -1: no limit",
            "include_reasoning": "false leaves the reasoning out of the answer",
            "separate_reasoning": "false leaves it in the content, with its markers",
            "reasoning_format": "`none` leaves it in the content (llama-server)",
        },
        "ToolsBody": {
            "tools": "[tools](tools.md) that the model may call",
            "tool_choice": "`auto`, `none`, `required`, or the tools that it may call",
            "parallel_tool_calls": "false: at most one call",
            "functions": "OpenAI's older form of `tools`",
            "function_call": "OpenAI's older form of `tool_choice`",
        },
        "ChatTool": {
            "type": "`function` or `custom`",
            "function": "a function",
            "custom": "a tool that takes a text",
        },
        "FunctionBody": {
            "name": "its name",
            "description": "what it does, for the model",
            "parameters": "JSON schema of its arguments",
            "strict": "enforce the schema, and refuse what cannot be enforced",
        },
        "CustomBody": {
            "name": "its name",
            "description": "what it does, for the model",
            "format": "`text`, or a grammar (Lark or a regular expression) that its input follows",
        },
        "TemplateOptions": {
            "add_generation_prompt": "whether the rendered prompt ends with the beginning of an answer",
            "continue_final_message": "continue the last message instead of answering it",
            "chat_template_kwargs": "further variables of the chat template",
        },
        "StructuredBody": {
            "response_format": "the [form of the answer](structured-output.md): text, JSON, or JSON "
            "by a schema",
            "structured_outputs": "vLLM's form of a constraint",
            "guided_json": "a JSON schema; older name of `structured_outputs.json`",
            "guided_json_object": "any JSON object",
            "guided_regex": "a regular expression that the whole answer matches",
            "guided_choice": "the answer is one of these texts",
            "guided_grammar": "a grammar in EBNF (GBNF), or Lark",
            "guided_whitespace_pattern": 'only `""`: JSON without whitespace between its parts',
            "grammar": "a grammar (llama-server)",
            "json_schema": "a JSON schema (llama-server)",
            "regex": "a regular expression (SGLang)",
            "ebnf": "a grammar (SGLang)",
        },
        "ResponseFormat": {
            "type": "`text`, `json_object`, `json_schema` or `structural_tag`",
            "json_schema": "the schema, with its name",
            "schema": "the schema itself (llama-server)",
            "structures": "tags whose content follows a schema",
            "triggers": "texts that begin such a tag",
            "format": "xgrammar's newer form of structural tags",
        },
        "NamedSchema": {"name": "any name", "schema": "the JSON schema; it is always enforced"},
        "StructuredOutputsBody": {
            "json": "a JSON schema, as an object or a text",
            "regex": "a regular expression that the whole answer matches",
            "choice": "the answer is one of these texts",
            "grammar": "a grammar in EBNF (GBNF), or Lark",
            "json_object": "any JSON object",
            "structural_tag": "tags whose content follows a schema",
            "disable_any_whitespace": "JSON without whitespace between its parts",
            "whitespace_pattern": 'only `""`: JSON without whitespace between its parts',
            "after": "the constraint begins after this text, such as the end of reasoning",
        },
        "CompletionBody": {
            "prompt": "a text or token ids, or a list of either",
            "echo": "begin the answer with the prompt",
            "logprobs": "log-probabilities of the answer's tokens, and of this many likely ones",
            "best_of": "answers generated per prompt; the `n` with the highest mean log-probability "
            "are returned, best "
            "first, those that [repeat themselves](staying-up.md#repetition-detection) last; usage "
            "counts all; not in a stream",
            "add_special_tokens": "add the tokenizer's special tokens to the prompt; default true",
        },
        "PoolingBody": {"truncate_prompt_tokens": "keep this many tokens of a text; -1: as many as fit"},
        "EmbeddingBody": {
            "input": "a text or token ids, or a list of either",
            "encoding_format": "`float` or `base64`",
            "dimensions": "keep this many dimensions, where the model is trained for it",
            "normalize": "scale vectors to length 1",
            "use_activation": "vLLM's name of `normalize`",
            "pooling": "`mean`, `cls` or `last`; default the model's",
            "prompt_name": "the prompt of the model's own list that is put before each text",
            "add_special_tokens": "add the tokenizer's special tokens; default true",
        },
        "RerankBody": {
            "query": "the text to which documents are compared",
            "documents": "texts, or objects with a `text`",
            "top_n": "return this many of the best; 0: all",
            "return_documents": "return their texts too; default true",
        },
        "DocumentBody": {"text": "its text"},
        "ScoreBody": {
            "text_1": "a text, or as many as `text_2`",
            "text_2": "texts to compare it with",
            "data_1": "vLLM's newer name of `text_1`",
            "data_2": "vLLM's newer name of `text_2`",
            "queries": "the same as `text_1`",
            "documents": "the same as `text_2`",
            "items": "the same as `text_2`",
        },
        "ItemsBody": {
            "input": "a text, or items: messages, calls, results and reasoning",
            "instructions": "a system message before them",
            "previous_response_id": "continue a stored response of the same key",
            "tools": "[tools](tools.md) that the model may call",
            "tool_choice": "`auto`, `none`, `required`, or the tools that it may call",
            "parallel_tool_calls": "false: at most one call",
            "reasoning": "whether and how hard the model reasons",
            "text": "form of the answer",
            "truncation": "`auto` drops the oldest turns until prompt and answer fit; default "
            "`disabled`: an error",
            "chat_template_kwargs": "further variables of the chat template",
        },
        "ResponsesBody": {
            "max_output_tokens": "most tokens of the answer, with its reasoning and calls",
            "max_tool_calls": "of tools that the server runs: there are none",
            "top_logprobs": "log-probabilities of this many of the likeliest tokens",
            "include": "further data in the answer, such as `message.output_text.logprobs`",
            "store": "keep the response for `previous_response_id`; default true",
            "metadata": "returned as it is",
            "user": "returned as it is",
            "safety_identifier": "returned as it is",
            "prompt_cache_key": "returned as it is",
        },
        "InputItem": {
            "type": "`message`, `function_call`, `function_call_output`, `reasoning` ...",
            "id": "its id, where it has one",
            "role": "of a message",
            "content": "of a message, or of reasoning",
            "call_id": "links a call and its result",
            "name": "of the called tool",
            "namespace": "of the called tool",
            "arguments": "of a call, as JSON text",
            "input": "of a custom call",
            "output": "the result of a call",
            "summary": "of reasoning",
            "encrypted_content": "of reasoning, as this server wrote it",
        },
        "FlatTool": {
            "type": "`function`, `custom` or `namespace`; other types are left out",
            "name": "its name",
            "description": "what it does, for the model",
            "parameters": "JSON schema of its arguments",
            "strict": "enforce the schema, and refuse what cannot be enforced",
            "format": "of a custom tool: `text` or a grammar",
            "tools": "the tools of a namespace",
        },
        "ReasoningFields": {
            "effort": "as `reasoning_effort` of chat",
            "summary": "a hint: nothing is summarized",
            "enabled": "whether the model reasons",
            "max_tokens": "most tokens of reasoning",
        },
        "TextBody": {"format": "text, JSON, or JSON by a schema", "verbosity": "a hint without effect"},
        "TextFormat": {
            "type": "`text`, `json_object` or `json_schema`",
            "name": "any name",
            "description": "for the model",
            "schema": "the JSON schema; it is always enforced",
            "strict": "accepted; the schema is always enforced",
        },
        "ConversationBody": {
            "messages": "the conversation, oldest message first",
            "system": "the system prompt: a text or text blocks",
            "tools": "[tools](tools.md) that the model may call",
            "tool_choice": "whether and what it calls",
            "thinking": "whether and how long it reasons",
            "output_config": "effort, and form of the answer",
            "output_format": "older place of `output_config.format`",
            "chat_template_kwargs": "further variables of the chat template",
        },
        "MessagesBody": {
            "max_tokens": "most tokens of the answer; cut to the context",
            "stop_sequences": "texts that end the answer, excluded from it",
        },
        "MessageBody": {"role": "`user`, `assistant` or `system`", "content": "a text, or blocks"},
        "OutputConfigBody": {
            "effort": "as `reasoning_effort` of chat",
            "format": "a JSON schema that the answer follows",
        },
        "OutputFormatBody": {"type": "`json_schema`", "schema": "the JSON schema; it is always enforced"},
        "ThinkingBody": {
            "type": "`enabled`, `adaptive`, `between_tools` or `disabled`",
            "budget_tokens": "most tokens of reasoning",
            "display": "`omitted`: only the signature holds the reasoning",
        },
        "ToolBody": {
            "type": "`custom`, or left out; a server's tools are left out",
            "name": "its name",
            "description": "what it does, for the model",
            "input_schema": "JSON schema of its input",
            "strict": "enforce the schema, and refuse what cannot be enforced",
            "defer_loading": "left out of the prompt until a result names it",
        },
        "ToolChoiceBody": {
            "type": "`auto`, `any`, `tool` or `none`",
            "name": "of the tool",
            "disable_parallel_tool_use": "at most one call",
        },
        "TokenizeBody": {
            "prompt": "the text",
            "messages": "a conversation, rendered by the chat template",
            "tools": "tools of the conversation",
            "add_special_tokens": "add the tokenizer's special tokens",
            "return_token_strs": "return the texts of the tokens too",
            "model": "a name of `/v1/models`; left out: the first",
        },
        "DetokenizeBody": {"tokens": "token ids", "model": "a name of `/v1/models`; left out: the first"},
        "LoadAdapterBody": {
            "lora_name": "its name as a model",
            "lora_path": "its folder in `--lora-dir`",
            "load_inplace": "replace an adapter of this name",
            "base_model_name": "of several models, the one that it belongs to; default the first",
        },
        "UnloadAdapterBody": {"lora_name": "its name", "lora_int_id": "accepted without effect"},
        "LoadModelBody": {
            "model": "the model to load",
            "pin": "true: it is never evicted from now on; false: it is, as others are",
        },
        "UnloadModelBody": {"model": "the model to unload, once its open answers have ended"},
        "AddReplicaBody": {"url": "of the server", "model": "the model that it serves; default the first"},
    }
)


def describe(body: type, field: str) -> str | None:
    """The text of a field by its name in JSON, in Markdown."""
    return next(
        (texts[field] for base in body.__mro__ if field in (texts := DESCRIPTIONS.get(base.__name__, {}))),
        None,
    )


def extend_schema(schema: dict[str, Any], body: type) -> None:
    """Add the descriptions to a body's schema, without their links; other fields are refused."""
    schema["additionalProperties"] = False
    for name, field in schema.get("properties", {}).items():
        if (text := describe(body, name)) is not None:
            field["description"] = _LINK.sub(r"\1", text)
