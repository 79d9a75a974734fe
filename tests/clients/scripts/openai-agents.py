import asyncio
import json
from typing import Any

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
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
from openai import AsyncOpenAI

set_tracing_disabled(True)


@function_tool(name_override=TOOL_NAME, description_override=TOOL_TEXT)
def calculate(expression: str) -> str:
    return TOOL_RESULT


def loop(result: Any) -> dict[str, Any]:
    calls = [item.raw_item for item in result.new_items if item.type == "tool_call_item"]
    return {
        "calls": [[call.name, json.loads(call.arguments)] for call in calls],
        "text": result.final_output,
    }


async def main() -> None:
    client = AsyncOpenAI(base_url=V1, api_key=KEY)
    model, responses = OpenAIChatCompletionsModel(MODEL, client), OpenAIResponsesModel(MODEL, client)
    settings = ModelSettings(temperature=0, max_tokens=MAX_TOKENS, include_usage=True)
    agent = Agent("agent", model=model, model_settings=settings)
    typed = Agent(
        "typed",
        model=model,
        model_settings=ModelSettings(temperature=0, max_tokens=JOB_MAX_TOKENS),
        output_type=Job,
    )
    counter = Agent("counter", model=model, tools=[calculate], model_settings=ModelSettings(temperature=0))
    streamed = Runner.run_streamed(agent, PROMPT)
    deltas = [
        event.data.delta
        async for event in streamed.stream_events()
        if event.type == "raw_response_event" and event.data.type == "response.output_text.delta"
    ]
    streamed_loop = Runner.run_streamed(counter, TOOL_PROMPT)
    async for _ in streamed_loop.stream_events():
        pass
    report(
        text=(await Runner.run(agent, PROMPT)).final_output,
        stream="".join(deltas),
        usage=streamed.context_wrapper.usage.output_tokens,
        structured=(await Runner.run(typed, JOB_PROMPT)).final_output.model_dump(),
        responses_structured=(
            await Runner.run(typed.clone(model=responses), JOB_PROMPT)
        ).final_output.model_dump(),
        tool_loop=loop(await Runner.run(counter, TOOL_PROMPT)),
        tool_loop_stream=loop(streamed_loop),
        responses_tool_loop=loop(await Runner.run(counter.clone(model=responses), TOOL_PROMPT)),
    )


asyncio.run(main())
