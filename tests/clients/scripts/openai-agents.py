import asyncio

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
    TOOL_PROMPT,
    TOOL_RESULT,
    V1,
    Job,
    report,
)
from openai import AsyncOpenAI

set_tracing_disabled(True)
called: list[str] = []


@function_tool
def price(item: str) -> str:
    """Price of an item."""
    called.append("price")
    return TOOL_RESULT


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
    shop = Agent(
        "shop",
        model=responses,
        tools=[price],
        model_settings=ModelSettings(temperature=0, tool_choice="required"),
    )
    answer = (await Runner.run(shop, TOOL_PROMPT)).final_output
    streamed = Runner.run_streamed(agent, PROMPT)
    deltas = [
        event.data.delta
        async for event in streamed.stream_events()
        if event.type == "raw_response_event" and event.data.type == "response.output_text.delta"
    ]
    report(
        text=(await Runner.run(agent, PROMPT)).final_output,
        stream="".join(deltas),
        usage=streamed.context_wrapper.usage.output_tokens,
        structured=(await Runner.run(typed, JOB_PROMPT)).final_output.model_dump(),
        responses_structured=(
            await Runner.run(typed.clone(model=responses), JOB_PROMPT)
        ).final_output.model_dump(),
        tool_loop={"called": called, "has_result": TOOL_RESULT in answer},
    )


asyncio.run(main())
