"""A plugged-in drafter that is right at times, wrong at times, and sometimes fails."""

from __future__ import annotations

import random
from collections.abc import Sequence

from foreword import Drafter, DrafterContext, RequestView


class Moody(Drafter):
    """Drafts the text after the last token's previous occurrence, random ids, nothing, or raises."""

    def __init__(self, context: DrafterContext) -> None:
        super().__init__(context)
        self._rng = random.Random(11)

    def propose(self, requests: Sequence[RequestView]) -> list[list[int] | None]:
        if self._rng.random() < 0.05:
            raise RuntimeError("injected")
        return [self._draft(request) for request in requests]

    def _draft(self, request: RequestView) -> list[int] | None:
        mood = self._rng.random()
        if mood < 0.1:
            return None
        if mood < 0.4:
            return [self._rng.randrange(self.context.vocab_size) for _ in range(request.max_tokens + 2)]
        text = list(request.tokens)
        earlier = [index for index, token_id in enumerate(text[:-1]) if token_id == text[-1]]
        return text[earlier[-1] + 1 :] if earlier else None
