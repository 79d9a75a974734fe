import asyncio

from case import (
    JOB_MAX_TOKENS,
    JOB_PROMPT,
    KEY,
    MAX_TOKENS,
    MODEL,
    PROMPT,
    TOOL_NAME,
    TOOL_PROMPT,
    TOOL_RESULT,
    TOOL_TEXT,
    V1,
    Job,
    report,
)
from pydantic_ai import Agent, NativeOutput, Tool
from pydantic_ai.messages import (
    ModelRequest,
    ModelResponse,
    ToolCallPart,
    ToolReturnPart,
    UserPromptPart,
)
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

model = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=V1, api_key=KEY))
agent = Agent(model, model_settings={"temperature": 0, "max_tokens": MAX_TOKENS})
# By default a type is a tool; NativeOutput makes it a response_format.
typed = Agent(
    model,
    output_type=NativeOutput(Job),
    model_settings={"temperature": 0, "max_tokens": JOB_MAX_TOKENS},
)


def calculate(expression: str) -> str:
    return TOOL_RESULT


solver = Agent(
    model,
    tools=[Tool(calculate, name=TOOL_NAME, description=TOOL_TEXT)],
    model_settings={"temperature": 0},
)
solved = solver.run_sync(TOOL_PROMPT)
calls = [
    [part.tool_name, part.args_as_dict()]
    for message in solved.all_messages()
    for part in message.parts
    if isinstance(part, ToolCallPart)
]
history = [
    ModelRequest(parts=[UserPromptPart("What is the price?")]),
    ModelResponse(parts=[ToolCallPart("price", '{"item": "lamp"}', tool_call_id="call_1")]),
    ModelRequest(parts=[ToolReturnPart("price", "125", tool_call_id="call_1")]),
]


async def stream() -> tuple[str, int]:
    async with agent.run_stream(PROMPT) as result:
        text = "".join([piece async for piece in result.stream_text(delta=True)])
        return text, result.usage.output_tokens


text, usage = asyncio.run(stream())
report(
    text=agent.run_sync(PROMPT).output,
    stream=text,
    usage=usage,
    structured=typed.run_sync(JOB_PROMPT).output.model_dump(),
    tool_loop={"calls": calls, "text": solved.output},
    tool_history=agent.run_sync(PROMPT, message_history=history).output,
)
