"""The same conversation in the bodies of chat and Messages is one prompt."""

from __future__ import annotations

import json
import random
from typing import Any

from foreword.server.apis.chat.body import ChatBody, to_template_messages
from foreword.server.apis.messages.body import MessagesBody
from foreword.tokenizer.chat_processor import ChatInputProcessor
from tests.chat_formats.templates import TEMPLATES
from tests.support.fakes import byte_tokenizer

TEXTS = ("a", "b c", " d", "e\n", "", "f")


def parts(texts: list[str]) -> list[dict[str, Any]]:
    return [{"type": "text", "text": text} for text in texts]


def conversation(rng: random.Random) -> tuple[dict[str, Any], dict[str, Any]]:
    """A random conversation as bodies of Messages and chat, without empty turns, which Messages drops."""
    system = rng.choice([None, "Rules", parts(["Rules", "More"]), parts(["", "More"])])
    messages: list[Any] = []
    chat: list[Any] = [] if system is None else [{"role": "system", "content": system}]
    for _ in range(rng.randint(1, 3)):
        text = rng.choice(["a", parts(["u", rng.choice(TEXTS)])])
        messages.append({"role": "user", "content": text})
        chat.append({"role": "user", "content": text})
        for _ in range(rng.randint(0, 2)):
            texts, thinking = rng.choices(TEXTS, k=rng.randint(0, 2)), rng.choice(["", "hm"])
            calls = [(f"call_{len(chat)}_{i}", {"at": rng.choice(TEXTS)}) for i in range(rng.randint(1, 2))]
            results = [(call_id, rng.choice(TEXTS)) for call_id, _ in calls]
            thought = [{"type": "thinking", "thinking": thinking, "signature": "s"}] if thinking else []
            used = [
                {"type": "tool_use", "id": call_id, "name": "look", "input": given}
                for call_id, given in calls
            ]
            messages.append({"role": "assistant", "content": [*thought, *parts(texts), *used]})
            answers = [
                {"type": "tool_result", "tool_use_id": call_id, "content": rng.choice([text, parts([text])])}
                for call_id, text in results
            ]
            messages.append({"role": "user", "content": answers})
            functions = [
                {
                    "id": call_id,
                    "type": "function",
                    "function": {"name": "look", "arguments": json.dumps(given)},
                }
                for call_id, given in calls
            ]
            said: dict[str, Any] = {"content": parts(texts) or None, "reasoning": thinking}
            chat.append({"role": "assistant", "tool_calls": functions, **said})
            chat += [{"role": "tool", "tool_call_id": call_id, "content": text} for call_id, text in results]
        for body in (messages, chat):
            body.append({"role": "assistant", "content": "Well"})
    for body in (messages, chat):
        body.append({"role": "user", "content": "Go on"})
    return {"messages": messages, "max_tokens": 1, "system": system}, {"messages": chat}


def test_same_conversation_is_one_prompt() -> None:
    template = ChatInputProcessor(byte_tokenizer(TEMPLATES["hermes"]), None, 0).template
    for seed in range(60):
        first, second = conversation(random.Random(seed))
        given = MessagesBody.model_validate(first).conversation(takes_images=False).messages
        other = to_template_messages(ChatBody.model_validate(second).messages)
        assert template.render(given) == template.render(other), seed
