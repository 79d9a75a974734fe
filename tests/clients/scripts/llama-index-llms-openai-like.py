from case import JOB_MAX_TOKENS, JOB_PROMPT, KEY, MAX_TOKENS, MODEL, PROMPT, STORY, TEXTS, V1, Job, report
from llama_index.core.llms import ChatMessage
from llama_index.embeddings.openai import OpenAIEmbedding
from llama_index.llms.openai_like import OpenAILike

where = {"api_base": V1, "api_key": KEY}
llm = OpenAILike(**where, model=MODEL, is_chat_model=True, temperature=0, max_tokens=MAX_TOKENS)
plain = OpenAILike(**where, model=MODEL, temperature=0, max_tokens=MAX_TOKENS)
typed = OpenAILike(
    **where,
    model=MODEL,
    is_chat_model=True,
    should_use_structured_outputs=True,
    temperature=0,
    max_tokens=JOB_MAX_TOKENS,
)
user = [ChatMessage(role="user", content=PROMPT)]
report(
    text=llm.chat(user).message.content,
    stream="".join(chunk.delta or "" for chunk in llm.stream_chat(user)),
    completion=plain.complete(STORY).text,
    structured=typed.as_structured_llm(Job).complete(JOB_PROMPT).raw.model_dump(),
    embeddings=OpenAIEmbedding(**where, model_name=MODEL).get_text_embedding_batch(TEXTS),
)
