from case import JOB_MAX_TOKENS, JOB_PROMPT, KEY, MAX_TOKENS, MODEL, PROMPT, TEXTS, V1, Job, report
from haystack.components.embedders import OpenAITextEmbedder
from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.dataclasses import ChatMessage, ToolCall
from haystack.utils import Secret

where = {"model": MODEL, "api_base_url": V1, "api_key": Secret.from_token(KEY)}
pieces: list[str] = []
options = {"temperature": 0, "max_tokens": MAX_TOKENS}
plain = OpenAIChatGenerator(**where, generation_kwargs=options)
streamed = OpenAIChatGenerator(
    **where, generation_kwargs=options, streaming_callback=lambda chunk: pieces.append(chunk.content)
)
typed = OpenAIChatGenerator(
    **where, generation_kwargs={"temperature": 0, "max_tokens": JOB_MAX_TOKENS, "response_format": Job}
)
call = ToolCall("price", {"item": "lamp"}, id="call_1")
user = ChatMessage.from_user(PROMPT)
history = [
    ChatMessage.from_user("What is the price?"),
    ChatMessage.from_assistant(tool_calls=[call]),
    ChatMessage.from_tool("125", call),
    user,
]
streamed.run([user])
job = typed.run([ChatMessage.from_user(JOB_PROMPT)])["replies"][0].text
embedder = OpenAITextEmbedder(**where)
report(
    text=plain.run([user])["replies"][0].text,
    stream="".join(pieces),
    structured=Job.model_validate_json(job).model_dump(),
    embeddings=[embedder.run(text)["embedding"] for text in TEXTS],
    tool_history=plain.run(history)["replies"][0].text,
)
