import json
from typing import Any

import openai
from case import (
    HISTORY,
    JOB_MAX_TOKENS,
    JOB_PROMPT,
    KEY,
    MAX_TOKENS,
    MODEL,
    PROMPT,
    STORY,
    TEXTS,
    TOOL,
    TOOL_PROMPT,
    TOOL_RESULT,
    USER,
    V1,
    Job,
    report,
)

client = openai.OpenAI(base_url=V1, api_key=KEY)
options = {"model": MODEL, "temperature": 0, "max_tokens": MAX_TOKENS}
answer = client.chat.completions.create(messages=USER, **options).choices[0].message
chunks = list(
    client.chat.completions.create(
        messages=USER, stream=True, stream_options={"include_usage": True}, **options
    )
)
typed = {
    "messages": [{"role": "user", "content": JOB_PROMPT}],
    "response_format": Job,
    "model": MODEL,
    "temperature": 0,
    "max_tokens": JOB_MAX_TOKENS,
}
with client.chat.completions.stream(**typed) as events:
    streamed = events.get_final_completion().choices[0].message
brief = {"model": MODEL, "input": PROMPT, "temperature": 0, "max_output_tokens": MAX_TOKENS}
with client.responses.stream(**brief) as pieces:
    deltas = [piece.delta for piece in pieces if piece.type == "response.output_text.delta"]
parsed = client.responses.parse(
    model=MODEL, input=JOB_PROMPT, text_format=Job, temperature=0, max_output_tokens=JOB_MAX_TOKENS
)


def loop() -> dict[str, Any]:
    messages: list[Any] = [{"role": "user", "content": TOOL_PROMPT}]
    calls: list[Any] = []
    while True:
        with client.chat.completions.stream(
            messages=messages, tools=[TOOL], model=MODEL, temperature=0
        ) as events:
            message = events.get_final_completion().choices[0].message
        if not message.tool_calls:
            return {"calls": calls, "text": message.content}
        calls += [[call.function.name, json.loads(call.function.arguments)] for call in message.tool_calls]
        results = [
            {"role": "tool", "tool_call_id": call.id, "content": TOOL_RESULT} for call in message.tool_calls
        ]
        messages += [message, *results]


def responses_loop() -> dict[str, Any]:
    tool = {"type": "function", **TOOL["function"], "strict": False}
    items: Any = TOOL_PROMPT
    calls: list[Any] = []
    previous = None
    while True:
        answer = client.responses.create(
            model=MODEL, input=items, tools=[tool], temperature=0, previous_response_id=previous
        )
        called = [item for item in answer.output if item.type == "function_call"]
        if not called:
            return {"calls": calls, "text": answer.output_text}
        calls += [[call.name, json.loads(call.arguments)] for call in called]
        items = [
            {"type": "function_call_output", "call_id": call.call_id, "output": TOOL_RESULT}
            for call in called
        ]
        previous = answer.id


# A message of an earlier answer goes back as it came: with its null fields.
follow_up = [*HISTORY, answer, *USER]
report(
    text=answer.content,
    stream="".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices),
    usage=chunks[-1].usage.completion_tokens,
    completion=client.completions.create(prompt=STORY, **options).choices[0].text,
    structured=client.chat.completions.parse(**typed).choices[0].message.parsed.model_dump(),
    structured_stream=streamed.parsed.model_dump(),
    embeddings=[item.embedding for item in client.embeddings.create(model=MODEL, input=TEXTS).data],
    tool_history=client.chat.completions.create(messages=HISTORY, **options).choices[0].message.content,
    follow_up=client.chat.completions.create(messages=follow_up, **options).choices[0].message.content,
    tool_loop_stream=loop(),
    responses_tool_loop=responses_loop(),
    responses=client.responses.create(**brief).output_text,
    responses_stream="".join(deltas),
    responses_structured=parsed.output_parsed.model_dump(),
    models=[card.id for card in client.models.list()],
)
