import json
from typing import Any

import litellm
from case import (
    BASE,
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

where = {"model": f"hosted_vllm/{MODEL}", "api_base": V1, "api_key": KEY}
options = {**where, "temperature": 0, "max_tokens": MAX_TOKENS}
chunks = list(
    litellm.completion(messages=USER, stream=True, stream_options={"include_usage": True}, **options)
)
job = litellm.completion(
    **{**options, "max_tokens": JOB_MAX_TOKENS},
    messages=[{"role": "user", "content": JOB_PROMPT}],
    response_format=Job,
)
ranked = litellm.rerank(**{**where, "api_base": BASE}, query=PROMPT, documents=TEXTS)


def loop(model: str, base: str, stream: bool = False) -> dict[str, Any]:
    messages: list[Any] = [{"role": "user", "content": TOOL_PROMPT}]
    calls: list[Any] = []
    while True:
        answer = litellm.completion(
            model, messages, tools=[TOOL], temperature=0, api_base=base, api_key=KEY, stream=stream
        )
        if stream:
            answer = litellm.stream_chunk_builder(list(answer))
        message = answer.choices[0].message
        if not message.tool_calls:
            return {"calls": calls, "text": message.content}
        calls += [[call.function.name, json.loads(call.function.arguments)] for call in message.tool_calls]
        results = [
            {"role": "tool", "tool_call_id": call.id, "content": TOOL_RESULT} for call in message.tool_calls
        ]
        messages += [message.model_dump(), *results]


report(
    text=litellm.completion(messages=USER, **options).choices[0].message.content,
    stream="".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices),
    usage=chunks[-1].usage.completion_tokens,
    completion=litellm.text_completion(
        **{**options, "model": f"text-completion-openai/{MODEL}"}, prompt=STORY
    )
    .choices[0]
    .text,
    structured=Job.model_validate_json(job.choices[0].message.content).model_dump(),
    embeddings=[item["embedding"] for item in litellm.embedding(**where, input=TEXTS).data],
    tool_history=litellm.completion(messages=HISTORY, **options).choices[0].message.content,
    tool_loop=loop(f"openai/{MODEL}", V1),
    tool_loop_stream=loop(f"hosted_vllm/{MODEL}", V1, stream=True),
    responses_tool_loop=loop(f"openai/responses/{MODEL}", V1),
    messages_tool_loop=loop(f"anthropic/{MODEL}", BASE),
    ranking=[[item["index"], item["relevance_score"]] for item in ranked.results],
)
