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
report(
    text=litellm.completion(messages=USER, **options).choices[0].message.content,
    stream="".join(chunk.choices[0].delta.content or "" for chunk in chunks),
    usage=chunks[-1].usage.completion_tokens,
    completion=litellm.text_completion(
        **{**options, "model": f"text-completion-openai/{MODEL}"}, prompt=STORY
    )
    .choices[0]
    .text,
    structured=Job.model_validate_json(job.choices[0].message.content).model_dump(),
    embeddings=[item["embedding"] for item in litellm.embedding(**where, input=TEXTS).data],
    tool_history=litellm.completion(messages=HISTORY, **options).choices[0].message.content,
    ranking=[[item["index"], item["relevance_score"]] for item in ranked.results],
)
