from typing import Any

import anthropic
from case import (
    BASE,
    KEY,
    MAX_TOKENS,
    MODEL,
    TOOL_NAME,
    TOOL_PROMPT,
    TOOL_RESULT,
    TOOL_SCHEMA,
    TOOL_TEXT,
    USER,
    report,
)

client = anthropic.Anthropic(base_url=BASE, api_key=KEY)
# The package has no parameter for the temperature.
options: dict[str, Any] = {"model": MODEL, "extra_body": {"temperature": 0}}
tool = {"name": TOOL_NAME, "description": TOOL_TEXT, "input_schema": TOOL_SCHEMA}
with client.messages.stream(messages=USER, max_tokens=MAX_TOKENS, **options) as events:
    streamed = "".join(events.text_stream)
    usage = events.get_final_message().usage.output_tokens


def loop() -> dict[str, Any]:
    messages: list[Any] = [{"role": "user", "content": TOOL_PROMPT}]
    calls: list[Any] = []
    while True:
        with client.messages.stream(messages=messages, max_tokens=100, tools=[tool], **options) as events:
            answer = events.get_final_message()
        uses = [block for block in answer.content if block.type == "tool_use"]
        if not uses:
            return {"calls": calls, "text": answer.content[0].text}
        calls += [[use.name, use.input] for use in uses]
        results = [{"type": "tool_result", "tool_use_id": use.id, "content": TOOL_RESULT} for use in uses]
        messages += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": results}]


report(
    messages=client.messages.create(messages=USER, max_tokens=MAX_TOKENS, **options).content[0].text,
    messages_stream=streamed,
    usage=usage,
    messages_tool_loop=loop(),
    models=[card.id for card in client.models.list()],
)
