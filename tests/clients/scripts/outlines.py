import openai
import outlines
from case import JOB_MAX_TOKENS, JOB_PROMPT, KEY, MAX_TOKENS, MODEL, PROMPT, V1, Job, report

client = openai.OpenAI(base_url=V1, api_key=KEY)
options = {"temperature": 0, "max_tokens": MAX_TOKENS}
by_openai, by_vllm = outlines.from_openai(client, MODEL), outlines.from_vllm(client, MODEL)
job = {"temperature": 0, "max_tokens": JOB_MAX_TOKENS}
report(
    text=by_openai(PROMPT, **options),
    stream="".join(by_vllm.stream(PROMPT, **options)),
    structured=Job.model_validate_json(by_openai(JOB_PROMPT, Job, **job)).model_dump(),
    structured_outputs=Job.model_validate_json(by_vllm(JOB_PROMPT, Job, **job)).model_dump(),
)
