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
    V1,
    Job,
    report,
)
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings

where = {"model": MODEL, "base_url": V1, "api_key": KEY}
chat = ChatOpenAI(**where, temperature=0, max_tokens=MAX_TOKENS, stream_usage=True)
chunks = list(chat.stream(PROMPT))
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
)
