"""Foreword: LLM inference and serving with speculative decoding that changes no token.

`LLM` and `SamplingParams` load on first use: the server's own process imports this package without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from foreword.utils.version import __version__

if TYPE_CHECKING:
    from foreword.chat_formats.events import ToolCall
    from foreword.chat_formats.tools import ReasoningOptions
    from foreword.config.lora import LoRARequest
    from foreword.core.outputs import Draft
    from foreword.core.params import SamplingParams, Speculation
    from foreword.core.structured_output import StructuredOutput
    from foreword.llm import LLM
    from foreword.outputs import CompletionOutput, EmbeddingOutput, RequestOutput
    from foreword.speculation.drafter import Drafter, DrafterContext, RequestView

__all__ = [
    "LLM",
    "CompletionOutput",
    "Draft",
    "Drafter",
    "DrafterContext",
    "EmbeddingOutput",
    "LoRARequest",
    "ReasoningOptions",
    "RequestOutput",
    "RequestView",
    "SamplingParams",
    "Speculation",
    "StructuredOutput",
    "ToolCall",
    "__version__",
]

_LAZY_EXPORTS = {
    "LLM": "foreword.llm",
    "CompletionOutput": "foreword.outputs",
    "Draft": "foreword.core.outputs",
    "Drafter": "foreword.speculation.drafter",
    "DrafterContext": "foreword.speculation.drafter",
    "EmbeddingOutput": "foreword.outputs",
    "LoRARequest": "foreword.config.lora",
    "ReasoningOptions": "foreword.chat_formats.tools",
    "RequestOutput": "foreword.outputs",
    "RequestView": "foreword.speculation.drafter",
    "SamplingParams": "foreword.core.params",
    "Speculation": "foreword.core.params",
    "StructuredOutput": "foreword.core.structured_output",
    "ToolCall": "foreword.chat_formats.events",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY_EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_LAZY_EXPORTS[name]), name)
