"""Items of the Responses API become messages in the form of chat templates."""

from __future__ import annotations

from collections.abc import Iterable

from foreword.server.apis.conversation import ConversationBuilder, Part, make_call, text_part
from foreword.server.apis.responses.items import RESULTS, Item, NamedItem, decode_reasoning, join_namespace


class ItemConversation(ConversationBuilder):
    """Builds a conversation from items."""

    def __init__(self, takes_images: bool) -> None:
        super().__init__(takes_images, "input")
        self._last_type = ""  # type of the item before

    def add_instructions(self, text: str) -> None:
        self.add_system([text_part(text)], "instructions")

    def add(self, items: Iterable[NamedItem]) -> None:
        """Raises InvalidRequest for damaged reasoning."""
        for origin, item in items:
            self._add_item(item, origin)
            self._last_type = item["type"]

    def finish(self) -> None:
        """Add an empty message of the user if there is none: Codex probes with an empty input."""
        if self.last_role in (None, "system"):
            self.add_user([text_part("")], "input")
        super().finish()

    def _add_item(self, item: Item, origin: str) -> None:
        kind = item["type"]
        if kind in RESULTS:
            output = item["output"]
            given = [{"type": "input_text", "text": output}] if isinstance(output, str) else output
            self.add_result(item["call_id"], map(_template_part, given), origin)
        elif kind == "message" and item["role"] == "user":
            self.add_user(list(map(_template_part, item["content"])), origin)
        elif kind == "message" and item["role"] != "assistant":
            self.add_system(list(map(_template_part, item["content"])), origin)
        else:
            self._add_to_answer(item, origin)

    def _add_to_answer(self, item: Item, origin: str) -> None:
        """Reasoning, text or a call."""
        message = self.open_answer(origin)
        if item["type"] == "reasoning":
            reasoning = message.get("reasoning_content", "") + _reasoning_text(item, origin)
            message["reasoning_content"] = reasoning
        elif item["type"] == "message":
            # Texts around a call are one text, as in chat; messages of a client are lines.
            text = "\n".join(_template_part(part)["text"] for part in item["content"])
            if not message["content"]:
                message["content"] += [text_part(text)] if text else []
            else:
                message["content"][0]["text"] += ("\n" if self._last_type == "message" else "") + text
        else:
            name = join_namespace(item.get("namespace", ""), item["name"])
            is_custom = item["type"] == "custom_tool_call"
            arguments = {"input": item["input"]} if is_custom else item["arguments"]
            message.setdefault("tool_calls", []).append(make_call(item["call_id"], name, arguments))


def _template_part(part: Part) -> Part:
    if part["type"] == "input_image":
        detail = "high" if part["detail"] == "original" else part["detail"]
        return {"type": "image_url", "image_url": {"url": part["image_url"], "detail": detail}}
    return text_part(part["refusal"] if part["type"] == "refusal" else part["text"])


def _reasoning_text(item: Item, origin: str) -> str:
    """The reasoning; a summary only in its absence, as other servers send it."""
    texts = [part["text"] for part in item.get("content", ())]
    if not texts and (text := decode_reasoning(item.get("encrypted_content", ""), origin)):
        texts = [text]
    return "".join(texts) or "\n\n".join(part["text"] for part in item["summary"])
