import instructor
import openai
from case import JOB_MAX_TOKENS, JOB_PROMPT, KEY, MODEL, V1, Job, report

# The default mode sends tools.
client = instructor.from_openai(openai.OpenAI(base_url=V1, api_key=KEY), mode=instructor.Mode.JSON_SCHEMA)
job = client.chat.completions.create(
    model=MODEL,
    messages=[{"role": "user", "content": JOB_PROMPT}],
    response_model=Job,
    max_retries=0,
    temperature=0,
    max_tokens=JOB_MAX_TOKENS,
)
report(structured=job.model_dump())
