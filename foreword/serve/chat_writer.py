"""Bodies of /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

from foreword.serve.logprobs import chat_logprobs
from foreword.serve.writer import ResponseBuilder
from foreword.text.answer import ChoiceOutput, OutputDelta

__all__ = ["ChatResponseBuilder"]


class ChatResponseBuilder(ResponseBuilder):
    object_type: ClassVar[str] = "chat.completion"
    chunk_object_type: ClassVar[str] = "chat.completion.chunk"

    def first_chunks(self) -> Iterable[dict[str, Any]]:
        for index in range(len(self.outputs)):
            delta = {"role": "assistant", "content": ""}
            yield self.make_chunk({"index": index, "delta": delta, "logprobs": None, "finish_reason": None})

    def full_choice(self, index: int, output: ChoiceOutput) -> dict[str, Any]:
        logprobs = chat_logprobs(output.logprobs, self.server.tokenizer) if self.options.logprobs else None
        return {"message": {"role": "assistant", "content": output.text, "refusal": None}, "logprobs": logprobs}

    def chunk_choice(self, index: int, delta: OutputDelta, is_first: bool) -> dict[str, Any]:
        logprobs = chat_logprobs(delta.logprobs, self.server.tokenizer) if self.options.logprobs else None
        return {"delta": {"content": delta.text} if delta.text else {}, "logprobs": logprobs}
