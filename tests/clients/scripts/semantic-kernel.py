import asyncio

from case import JOB_MAX_TOKENS, JOB_PROMPT, KEY, MAX_TOKENS, MODEL, PROMPT, TEXTS, V1, Job, report
from openai import AsyncOpenAI
from semantic_kernel.connectors.ai.open_ai import (
    OpenAIChatCompletion,
    OpenAIChatPromptExecutionSettings,
    OpenAITextEmbedding,
)
from semantic_kernel.contents import ChatHistory


async def main() -> None:
    client = AsyncOpenAI(base_url=V1, api_key=KEY)
    chat = OpenAIChatCompletion(ai_model_id=MODEL, async_client=client)
    settings = OpenAIChatPromptExecutionSettings(temperature=0, max_tokens=MAX_TOKENS)
    typed = OpenAIChatPromptExecutionSettings(temperature=0, max_tokens=JOB_MAX_TOKENS, response_format=Job)
    history, job_history = ChatHistory(), ChatHistory()
    history.add_user_message(PROMPT)
    job_history.add_user_message(JOB_PROMPT)
    answer = await chat.get_chat_message_content(history, settings)
    job = await chat.get_chat_message_content(job_history, typed)
    pieces = [
        str(piece)
        async for piece in chat.get_streaming_chat_message_content(history, settings)
        if piece is not None
    ]
    embedder = OpenAITextEmbedding(ai_model_id=MODEL, async_client=client)
    vectors = await embedder.generate_embeddings(TEXTS)
    report(
        text=str(answer),
        stream="".join(pieces),
        structured=Job.model_validate_json(str(job)).model_dump(),
        embeddings=vectors.tolist(),
    )


asyncio.run(main())
