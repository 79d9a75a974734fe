from typing import Any

from case import BASE, KEY, MAX_TOKENS, MODEL, PROMPT, TOOL, TOOL_PROMPT, TOOL_RESULT, report
from langchain_anthropic import ChatAnthropic

where = {"model": MODEL, "base_url": BASE, "api_key": KEY, "temperature": 0}
chat = ChatAnthropic(**where, max_tokens=MAX_TOKENS)
solver = ChatAnthropic(**where, max_tokens=100).bind_tools([TOOL])


def loop() -> dict[str, Any]:
    messages: list[Any] = [{"role": "user", "content": TOOL_PROMPT}]
    calls: list[Any] = []
    while True:
        answer = solver.invoke(messages)
        if not answer.tool_calls:
            return {"calls": calls, "text": answer.text}
        calls += [[call["name"], call["args"]] for call in answer.tool_calls]
        results = [
            {"role": "tool", "tool_call_id": call["id"], "content": TOOL_RESULT} for call in answer.tool_calls
        ]
        messages += [answer, *results]


report(
    messages=chat.invoke(PROMPT).text,
    messages_stream="".join(chunk.text for chunk in chat.stream(PROMPT)),
    messages_tool_loop=loop(),
)
