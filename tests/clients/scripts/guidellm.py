import json
import os
import subprocess
import sys
from pathlib import Path

from case import BASE, MODEL, NUM_REQUESTS, OUTPUT_TOKENS, report

path = Path("guidellm.json").resolve()
words = [
    *("--backend", f"kind=openai_http,target={BASE},model={MODEL}"),
    *("--profile", "kind=synchronous", "--constraint", f"kind=max_requests,count={NUM_REQUESTS}"),
    *("--data", f"kind=synthetic_text,prompt_tokens=32,output_tokens={OUTPUT_TOKENS}"),
    *("--tokenizer", f"kind=huggingface_auto,model={os.environ['FOREWORD_CLIENTS_MODEL']}"),
    *("--output", f"kind=json,path={path}"),
]
subprocess.run(
    [sys.executable, "-m", "guidellm", "run", "--disable-console", *words], check=True, stdout=sys.stderr
)
metrics = json.loads(path.read_text())["benchmarks"][0]["metrics"]
mean = {name: metrics[name]["successful"]["mean"] for name in metrics if name.endswith(("_ms", "_count"))}
assert 0 < mean["inter_token_latency_ms"] < mean["time_to_first_token_ms"], mean
report(
    benchmark={
        "successful": metrics["request_totals"]["successful"],
        "errored": metrics["request_totals"]["errored"],
        "output_tokens": mean["output_token_count"],
    }
)
