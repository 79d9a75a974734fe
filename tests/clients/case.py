"""What every client is asked, at temperature 0. The scripts import it with no package but pydantic."""

import json
import os
from typing import Any

from pydantic import BaseModel

BASE = os.environ.get("FOREWORD_CLIENTS_URL", "")
V1 = BASE + "/v1"
KEY = "none"
MODEL = "demo"
MAX_TOKENS = 24

PROMPT = "What is speculative decoding?"
USER = [{"role": "user", "content": PROMPT}]
STORY = "Once upon a time"  # to complete without a chat template
SYSTEM = "You are brief."
TEXTS = ["a lamp", "a fox", "a key in the forest"]  # to embed and to rank

NUM_REQUESTS = 4  # of a benchmark
OUTPUT_TOKENS = 16

JOB_PROMPT = "Write JSON: name=Paul, age=42, city=Lisbon, job=pilot"
JOB_MAX_TOKENS = 100

TOOL_PROMPT = "What is 12 * (7 + 3)?"
TOOL_NAME = "calculate"
TOOL_TEXT = "Calculate an arithmetic expression."
TOOL_SCHEMA = {
    "type": "object",
    "properties": {"expression": {"type": "string"}},
    "required": ["expression"],
}
TOOL = {
    "type": "function",
    "function": {"name": TOOL_NAME, "description": TOOL_TEXT, "parameters": TOOL_SCHEMA},
}
TOOL_RESULT = "120"


class Job(BaseModel):
    """A person and what they do."""

    name: str
    age: int
    city: str
    job: str


# A conversation in which a tool was called.
HISTORY: list[dict[str, Any]] = [
    {"role": "user", "content": "What is the price?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {
                "id": "call_1",
                "type": "function",
                "function": {"name": "price", "arguments": '{"item": "lamp"}'},
            }
        ],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": "125"},
    *USER,
]


def report(**results: Any) -> None:
    """Print results by name as the last line; test_clients.py compares each with the plain HTTP answer."""
    print(json.dumps(results))
