import asyncio

from autogen_core import FunctionCall
from autogen_core.models import (
    AssistantMessage,
    FunctionExecutionResult,
    FunctionExecutionResultMessage,
    ModelFamily,
    UserMessage,
)
from autogen_ext.models.openai import OpenAIChatCompletionClient
from case import JOB_MAX_TOKENS, JOB_PROMPT, KEY, MAX_TOKENS, MODEL, PROMPT, V1, Job, report


async def main() -> None:
    client = OpenAIChatCompletionClient(
        model=MODEL,
        base_url=V1,
        api_key=KEY,
        temperature=0,
        model_info={
            "vision": False,
            "function_calling": False,
            "json_output": True,
            "structured_output": True,
            "family": ModelFamily.UNKNOWN,
        },
    )
    user = UserMessage(content=PROMPT, source="user")
    extra = {"max_tokens": MAX_TOKENS}
    *pieces, last = [
        piece async for piece in client.create_stream([user], extra_create_args=extra, include_usage=True)
    ]
    job = await client.create(
        [UserMessage(content=JOB_PROMPT, source="user")],
        json_output=Job,
        extra_create_args={"max_tokens": JOB_MAX_TOKENS},
    )
    history = [
        UserMessage(content="What is the price?", source="user"),
        AssistantMessage(content=[FunctionCall("call_1", '{"item": "lamp"}', "price")], source="assistant"),
        FunctionExecutionResultMessage(
            content=[FunctionExecutionResult(content="125", name="price", call_id="call_1", is_error=False)]
        ),
        user,
    ]
    report(
        text=(await client.create([user], extra_create_args=extra)).content,
        stream="".join(pieces),
        usage=last.usage.completion_tokens,
        structured=Job.model_validate_json(job.content).model_dump(),
        tool_history=(await client.create(history, extra_create_args=extra)).content,
    )
    await client.close()


asyncio.run(main())
