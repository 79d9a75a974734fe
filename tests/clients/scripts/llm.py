import os
from pathlib import Path

import llm
from case import KEY, MAX_TOKENS, MODEL, PROMPT, V1, report

# It reads the models of OpenAI-compatible servers from this file.
Path("extra-openai-models.yaml").write_text(
    f"- {{model_id: foreword, model_name: {MODEL}, api_base: {V1}}}\n"
)
os.environ["LLM_USER_PATH"] = os.getcwd()
model = llm.get_model("foreword")
options = {"temperature": 0, "max_tokens": MAX_TOKENS, "key": KEY}
report(
    text=model.prompt(PROMPT, stream=False, **options).text(),
    stream="".join(model.prompt(PROMPT, **options)),
)
