import dspy
from case import KEY, MAX_TOKENS, MODEL, PROMPT, TEXTS, V1, report

lm = dspy.LM(f"openai/{MODEL}", api_base=V1, api_key=KEY, temperature=0, max_tokens=MAX_TOKENS, cache=False)
embedder = dspy.Embedder(f"openai/{MODEL}", api_base=V1, api_key=KEY, caching=False)
report(text=lm(PROMPT)[0], embeddings=embedder(TEXTS).tolist())
