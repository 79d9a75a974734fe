"""Sessions of an agent on engines in this process: prompts, recorded answers, and events."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from foreword.bench.agent.checkpoint import CONTEXT, END
from foreword.bench.agent.sources import Sources
from foreword.bench.agent.styles import ALL_TOOLS
from foreword.bench.agent.workload import AgentScript, AgentStep, make_script
from foreword.bench.engine import LocalEngine, run_modes
from foreword.bench.measurement import ADAPTIVE, OFF, PLAIN, BenchCase, BenchRepetition, Mode, PairedRun
from foreword.bench.regime import require
from foreword.bench.workloads import Conversation
from foreword.chat_formats.events import CallEnd
from foreword.chat_formats.parser import ChatParser
from foreword.chat_formats.tools import ToolUse
from foreword.config.options import Config
from foreword.core.batch import SampleRow
from foreword.core.request import Request
from foreword.sampling.sampler import Sampler, SamplerOutput
from foreword.tokenizer.chat_processor import ChatInputProcessor, ChatTask
from foreword.tokenizer.output_processor import ChoiceOutput
from foreword.tokenizer.tokenizer import Tokenizer

MAX_TURNS = 64  # most turns of a session: each turn has a seed of its own
OWN_ANSWER_TOKENS = 96  # longest answer that is not recorded
WARMUP_STEPS = 1  # steps of uncounted sessions, whose logits are hashed
ROUND_NUMBERS = 1000  # distance of the first numbers of two rounds
NO_SCRIPT = AgentScript("", "", (), "")


class ScriptedSampler:
    """A sampler whose rows are computed, and then replaced by recorded answers."""

    def __init__(self, sampler: Sampler) -> None:
        self.answers: dict[int, Sequence[int]] = {}  # token ids with EOS, by the request's seed
        self.sampler = sampler

    def __getattr__(self, name: str) -> Any:
        return getattr(self.sampler, name)

    def __call__(self, logits: Tensor, rows: Sequence[SampleRow], logprobs: bool = True) -> SamplerOutput:
        output = self.sampler(logits, rows, logprobs)
        for index, row in enumerate(rows):
            answer = self.answers.get(row.state.request.seed)
            if answer is not None:  # rows after a draft of EOS are never used
                output.token_ids[index] = answer[min(row.position - row.state.num_prompt, len(answer) - 1)]
        return output


@dataclass(frozen=True, slots=True)
class AgentSession(Conversation):
    """A script as a conversation: a turn is the task, or the result of the call before."""

    script: AgentScript = NO_SCRIPT
    prompts: tuple[tuple[int, ...], ...] = ()  # prompt of each turn, where the answers are recorded
    answers: tuple[tuple[int, ...], ...] = ()  # recorded, with EOS


class SessionWriter:
    """Writes scripts as the model's template does: prompts and recorded answers, in tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.chat = ChatInputProcessor(tokenizer, None, 0)

    def write(self, script: AgentScript, number: int) -> AgentSession:
        encode, use = self.tokenizer.encode, ToolUse(script.tools)
        texts = [*map(answer_text, script.steps), script.summary]
        end = encode(END, add_special_tokens=False)
        answers = tuple((*encode(text, add_special_tokens=False), *end) for text in texts)
        turns = (script.task, *(step.result for step in script.steps))
        prompts = tuple(
            tuple(self.chat.render(ChatTask(_messages(script, turn), tools=use))[0])
            for turn in range(len(turns))
        )
        longest = max(map(len, answers))
        seed = number * MAX_TURNS
        return AgentSession(
            turns, max_tokens=longest, seed=seed, script=script, prompts=prompts, answers=answers
        )


class AgentEngine(LocalEngine):
    """An engine that answers sessions, from the script if it is `recorded`, else by itself.

    The second way suits a model without tools and with a short context: it reads the results as messages of
    the user, and no answer is parsed.
    """

    def __init__(self, config: Config, recorded: bool) -> None:
        super().__init__(config)
        self.recorded = recorded
        self.use = ToolUse(ALL_TOOLS)
        self._writer = SessionWriter(self.tokenizer)
        self.format = self._writer.chat.format
        runner = self.client._engine.model_runner
        self.sampler = runner.sampler
        self._scripted = ScriptedSampler(self.sampler)
        if recorded:
            runner.sampler = self._scripted  # type: ignore[assignment]

    def make_session(self, script: AgentScript, number: int) -> AgentSession:
        """`number` is one of few thousands."""
        if self.recorded:
            return self._writer.write(script, number)
        turns = (script.task, *(step.result for step in script.steps))
        return AgentSession(turns, max_tokens=OWN_ANSWER_TOKENS, seed=number * MAX_TURNS, script=script)

    def use_answers(self, sessions: Sequence[AgentSession]) -> None:
        """The sessions of the next run; their seeds differ."""
        self._scripted.answers = {
            session.seed + turn: answer for session in sessions for turn, answer in enumerate(session.answers)
        }

    def prompt_ids(self, conversation: Conversation, history: Sequence[str]) -> list[int]:
        assert isinstance(conversation, AgentSession)
        if conversation.prompts:
            return list(conversation.prompts[len(history)])
        messages = [
            {"role": "system", "content": conversation.script.system},
            *conversation.messages(history),
        ]
        return self._writer.chat.render(ChatTask(messages))[0]

    def make_output(self, request: Request) -> ChoiceOutput:
        if not self.recorded or self.format is None:
            return super().make_output(request)
        parser = ChatParser(self.format, self.use, False, "call_{}".format)
        return ChoiceOutput(self.tokenizer, request, parser)


class AgentTarget:
    """An engine without drafters, which is `off`, and one with them; every round has sessions of its own."""

    runs_per_mode = 1.0

    def __init__(
        self,
        configs: Mapping[str, Config],
        recorded: bool,
        sources: Sources,
        contexts: Sequence[int],
        of_set: str = "tuning",
    ) -> None:
        """of_set: one of styles.SETS"""
        self.engines = {name: AgentEngine(config, recorded) for name, config in configs.items()}
        self.sources = sources
        self.exact = True  # hashes of logits are equal
        self._contexts = contexts
        self._set = of_set

    def contexts_of(self, load: int, number: int) -> list[int]:
        """Contexts of the sessions of a round; of the first, which is not counted, the smallest."""
        contexts = self._contexts if number else [min(self._contexts)]
        return [contexts[index % len(contexts)] for index in range(max(load, len(contexts)))]

    def run_pairs(self, case: BenchCase, modes: Sequence[Mode], number: int) -> Mapping[str, PairedRun]:
        sessions = self._make_sessions(case.concurrency, number)
        for engine in self.engines.values():
            engine.use_answers(sessions)
            engine.sampler.with_hashes = number == 0

        def claim(mode: Mode, number: int, repetition: BenchRepetition) -> None:
            if self.engines[mode.engine].recorded:
                check_sessions(mode, sessions, repetition)

        case = replace(case, make=lambda _: sessions, claim=claim)
        off = replace(OFF, engine=PLAIN)
        pairs = run_modes(self.engines, case, off, modes, number, f"{case.name}, round {number}, ")
        if number == 0:
            runs = [run for pair in pairs.values() for run in (pair.plain, pair.other)]
            hashes = {tuple(result.logits_hashes for result in run.results) for run in runs}
            self.exact &= len(hashes) == 1
        return pairs

    def _make_sessions(self, load: int, number: int) -> tuple[AgentSession, ...]:
        engine = self.engines[ADAPTIVE]
        limit = CONTEXT if engine.recorded else engine.max_len - OWN_ANSWER_TOKENS
        sessions = []
        for index, context in enumerate(self.contexts_of(load, number), number * ROUND_NUMBERS + load):
            script = make_script(index, self.sources, min(context, limit), engine.count, self._set)
            if number == 0:
                script = replace(script, steps=script.steps[:WARMUP_STEPS])
            sessions.append(engine.make_session(script, index))
        return tuple(sessions)


def check_sessions(mode: Mode, sessions: Sequence[AgentSession], run: BenchRepetition) -> None:
    """Raise RegimeError where recorded sessions were not what they claim."""
    require(f"{mode.name}: steps", len(run.results), sum(session.num_turns for session in sessions))
    require(f"{mode.name}: preemptions", run.preemptions, 0)
    calls = sum(isinstance(event, CallEnd) for result in run.results for event in result.events)
    require(f"{mode.name}: calls parsed", calls, sum(len(session.script.steps) for session in sessions))


def _messages(script: AgentScript, num_steps: int) -> list[dict[str, Any]]:
    """The conversation after `num_steps` calls, in OpenAI's form."""
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": script.system},
        {"role": "user", "content": script.task},
    ]
    for number, step in enumerate(script.steps[:num_steps]):
        function: Mapping[str, Any] = {"name": step.tool, "arguments": dict(step.arguments)}
        call = {"id": f"call_{number}", "type": "function", "function": function}
        messages.append({"role": "assistant", "content": step.text, "tool_calls": [call]})
        messages.append({"role": "tool", "tool_call_id": f"call_{number}", "content": step.result})
    return messages


def answer_text(step: AgentStep) -> str:
    """The answer as the model's template writes it."""
    call = json.dumps({"name": step.tool, "arguments": step.arguments}, ensure_ascii=False)
    return f"{step.text}\n<tool_call>\n{call}\n</tool_call>"
