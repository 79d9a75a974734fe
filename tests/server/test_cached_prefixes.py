"""Tool loops keep their prefix in the cache: `cached_tokens` of each turn, with a real engine."""

from collections.abc import Iterator
from typing import Any

import pytest

from foreword.config.options import Config
from tests.server.conftest import RunningServer, run_engine
from tests.support.tool_checkpoint import WEATHER, reasoning_bias, write_tool_checkpoint
from tests.tokenizer.test_answer_token_cache import reserialized

BLOCK_SIZE = 16
TIME = {"type": "function", "function": {"name": "get_time"}}
TOOLS = [WEATHER, TIME]
QUESTION = {"role": "user", "content": "Weather in Bonn?"}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    path = write_tool_checkpoint(tmp_path_factory.mktemp("hermes"))
    config = Config(
        model=str(path),
        kv_cache_memory="40000tokens",
        block_size=BLOCK_SIZE,
        log_level="warning",
        threads=1,
        speculate="grammar,suffix",
    )
    with run_engine(config) as server:
        yield server


class Loop:
    """A client's tool loop."""

    def __init__(self, server: RunningServer, **fields: Any) -> None:
        self.server = server
        self.fields = {
            "tools": TOOLS,
            "tool_choice": "required",
            "parallel_tool_calls": False,
            "temperature": 0.0,
            "max_tokens": 600,
            "logit_bias": {"34": 8.0},  # of quotation marks, so that strings end
            "think": False,
            **fields,
        }
        self.messages: list[dict[str, Any]] = [QUESTION]
        self.computed = 0  # tokens of the last turn whose keys are in the cache
        self.answers: list[Any] = []

    def step(self, seed: int | None = None) -> tuple[int, int]:
        """(cached tokens of this turn, those that the turn before left in the cache)."""
        answer = self.server.chat(messages=self.messages, seed=seed, **self.fields)
        usage = answer.usage
        expected, self.computed = self.computed, usage.total_tokens - 1
        self.answers.append(answer.choices[0])
        return usage.prompt_tokens_details.cached_tokens, expected - expected % BLOCK_SIZE

    def reply(self, message: dict[str, Any], result: str = "rain") -> None:
        self.messages.append(message)
        self.messages += [
            {"role": "tool", "tool_call_id": call["id"], "content": result} for call in message["tool_calls"]
        ]

    def last_message(self) -> dict[str, Any]:
        message = self.answers[-1].message
        calls = [call.model_dump(include={"id", "type", "function"}) for call in message.tool_calls]
        return {"role": "assistant", "content": message.content, "tool_calls": calls}


def test_reserialized_arguments_stay_cached(served: RunningServer) -> None:
    loop = Loop(served)
    loop.step()
    for _ in range(1, 5):
        loop.reply(reserialized(loop.last_message()))
        cached, expected = loop.step()
        assert cached >= expected > 0
    assert len({choice.message.tool_calls[0].function.arguments for choice in loop.answers}) > 1


def test_reasoning_that_the_client_drops_stays_cached(served: RunningServer) -> None:
    biases = {str(token_id): value for token_id, value in reasoning_bias().items()}
    loop = Loop(served, think=True, logit_bias={"34": 8.0} | biases, thinking_token_budget=20)
    loop.step()
    for _ in range(1, 4):
        assert loop.answers[-1].message.reasoning_content, "the model reasons in this test"
        loop.reply(loop.last_message())  # without reasoning_content
        cached, expected = loop.step()
        assert cached >= expected > 0


def test_late_system_message_does_not_move_to_the_front(served: RunningServer) -> None:
    """A reminder behind a result is rendered in its place, so all before it stays cached."""
    loop = Loop(served)
    loop.step()
    for seed in range(1, 3):
        loop.reply(loop.last_message())
        loop.messages.append({"role": "system", "content": f"{9000 - seed} tokens left"})
        cached, expected = loop.step()
        assert cached >= expected > 0
