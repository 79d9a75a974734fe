import asyncio

from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, Runner, set_tracing_disabled
from case import JOB_MAX_TOKENS, JOB_PROMPT, KEY, MAX_TOKENS, MODEL, PROMPT, V1, Job, report
from openai import AsyncOpenAI

set_tracing_disabled(True)


async def main() -> None:
    # The default model asks /v1/responses.
    model = OpenAIChatCompletionsModel(MODEL, AsyncOpenAI(base_url=V1, api_key=KEY))
    settings = ModelSettings(temperature=0, max_tokens=MAX_TOKENS, include_usage=True)
    agent = Agent("agent", model=model, model_settings=settings)
    typed = Agent(
        "typed",
        model=model,
        model_settings=ModelSettings(temperature=0, max_tokens=JOB_MAX_TOKENS),
        output_type=Job,
    )
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
    )


asyncio.run(main())
