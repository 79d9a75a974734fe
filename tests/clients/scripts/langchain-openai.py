from typing import Any

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
    V1,
    Job,
    report,
)
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings

where = {"model": MODEL, "base_url": V1, "api_key": KEY}
chat = ChatOpenAI(**where, temperature=0, max_tokens=MAX_TOKENS, stream_usage=True)
chunks = list(chat.stream(PROMPT))
solver = ChatOpenAI(**where, temperature=0)


def loop(model: ChatOpenAI, stream: bool = False) -> dict[str, Any]:
    bound = model.bind_tools([TOOL])
    messages: list[Any] = [{"role": "user", "content": TOOL_PROMPT}]
    calls: list[Any] = []
    while True:
        first, *others = bound.stream(messages) if stream else [bound.invoke(messages)]
        answer: Any = sum(others, start=first)
        if not answer.tool_calls:
            return {"calls": calls, "text": answer.text}
        calls += [[call["name"], call["args"]] for call in answer.tool_calls]
        results = [
            {"role": "tool", "tool_call_id": call["id"], "content": TOOL_RESULT} for call in answer.tool_calls
        ]
        messages += [answer, *results]


job = ChatOpenAI(**where, temperature=0, max_tokens=JOB_MAX_TOKENS).with_structured_output(Job)
# Otherwise it sends ids of OpenAI's tokenizer.
embedder = OpenAIEmbeddings(**where, check_embedding_ctx_length=False)
report(
    text=chat.invoke(PROMPT).content,
    stream="".join(chunk.content for chunk in chunks),
    usage=sum((chunk.usage_metadata or {}).get("output_tokens", 0) for chunk in chunks),
    completion=OpenAI(**where, temperature=0, max_tokens=MAX_TOKENS).invoke(STORY),
    structured=job.invoke(JOB_PROMPT).model_dump(),
    embeddings=embedder.embed_documents(TEXTS),
    tool_history=chat.invoke(HISTORY).content,
    tool_loop=loop(solver),
    tool_loop_stream=loop(solver, stream=True),
    responses_tool_loop=loop(ChatOpenAI(**where, temperature=0, use_responses_api=True)),
)
