"""Bodies of /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

from foreword.serve.logprobs import chat_logprobs
from foreword.serve.writer import Writer
from foreword.text.answer import Answer, Delta

__all__ = ["ChatWriter"]


class ChatWriter(Writer):
    kind: ClassVar[str] = "chat.completion"
    chunk_kind: ClassVar[str] = "chat.completion.chunk"

    def opening(self) -> Iterable[dict[str, Any]]:
        for index in range(len(self.answers)):
            delta = {"role": "assistant", "content": ""}
            yield self.chunk_of({"index": index, "delta": delta, "logprobs": None, "finish_reason": None})

    def whole_choice(self, index: int, answer: Answer) -> dict[str, Any]:
        logprobs = chat_logprobs(answer.logprobs, self.server.tokenizer) if self.wanted.logprobs else None
        return {"message": {"role": "assistant", "content": answer.text, "refusal": None}, "logprobs": logprobs}

    def chunk_choice(self, index: int, delta: Delta, first: bool) -> dict[str, Any]:
        logprobs = chat_logprobs(delta.logprobs, self.server.tokenizer) if self.wanted.logprobs else None
        return {"delta": {"content": delta.text} if delta.text else {}, "logprobs": logprobs}
