import cohere
from case import BASE, KEY, MODEL, PROMPT, TEXTS, report

client = cohere.ClientV2(api_key=KEY, base_url=BASE)
ranked = client.rerank(model=MODEL, query=PROMPT, documents=TEXTS)
report(ranking=[[item.index, item.relevance_score] for item in ranked.results])
