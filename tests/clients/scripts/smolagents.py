from case import KEY, MAX_TOKENS, MODEL, USER, V1, report
from smolagents import OpenAIServerModel
from smolagents.models import ChatMessageStreamDelta

model = OpenAIServerModel(MODEL, api_base=V1, api_key=KEY, temperature=0, max_tokens=MAX_TOKENS)
deltas: list[ChatMessageStreamDelta] = list(model.generate_stream(USER))
report(
    text=model.generate(USER).content,
    stream="".join(delta.content or "" for delta in deltas),
    usage=sum(delta.token_usage.output_tokens for delta in deltas if delta.token_usage),
)
