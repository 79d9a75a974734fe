"""A model in this process, for `chat` and `generate`. Apart from client.py because it imports torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from foreword.chat_formats.events import CallArguments, CallStart, ReasoningText
from foreword.checkpoint import model_names
from foreword.cli.banner import speculation_line
from foreword.cli.client import ChatPiece, ChatResult, Tool
from foreword.cli.configuration import engine_fields
from foreword.cli.flags import Message
from foreword.cli.terminal import loading_bar
from foreword.config.options import Config
from foreword.core.params import SamplingParams
from foreword.llm import LLM


class LocalBackend:
    """Implements ChatBackend with the model of `config`."""

    def __init__(self, config: Config) -> None:
        with loading_bar("loading") as progress:
            self._llm = LLM(on_progress=progress, **engine_fields(config))
        self.name = model_names(config, Path(str(self._llm.config.model)))[0]
        self.speculation: str | None = speculation_line(self._llm.info)
        self.drafters: Sequence[str] | None = self._llm.info.resolved.drafters
        self.sampling_defaults: Mapping[str, Any] = self._llm.tokenizer.generation_config.as_dict()

    def stream(
        self, prompt: str | Sequence[Message], params: SamplingParams, tools: Sequence[Tool] = ()
    ) -> Iterator[ChatPiece]:
        llm_prompt: Any = prompt if isinstance(prompt, str) else [dict(message) for message in prompt]
        options: dict[str, Any] = {"tools": tools} if tools else {}
        for piece in self._llm.stream(llm_prompt, params, **options):
            metrics = piece.metrics.as_dict() if piece.metrics is not None else None
            match piece.event:
                case CallArguments() as arguments:
                    call = replace(arguments, text=piece.text)
                    yield ChatPiece("", piece.is_draft, call=call)
                case CallStart() as call:
                    yield ChatPiece("", call=call)
                case event:
                    is_reasoning = isinstance(event, ReasoningText)
                    yield ChatPiece(
                        piece.text, piece.is_draft, piece.finish_reason, metrics, is_reasoning=is_reasoning
                    )

    def answer(self, prompt: str | Sequence[Message], params: SamplingParams) -> ChatResult:
        if isinstance(prompt, str):
            output = self._llm.generate([prompt], params, progress=False)[0]
        else:
            output = self._llm.chat([dict(message) for message in prompt], params)[0]
        metrics = output.metrics.as_dict() if output.metrics is not None else None
        return ChatResult(output.text, output.finish_reason, tuple(output.token_ids), metrics)
