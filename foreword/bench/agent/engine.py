"""Sessions of an agent on engines in this process: prompts, recorded answers, and events."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

from foreword.bench.agent.workload import TOOLS, AgentScript, Sources, make_script
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

MAX_TURNS = 64  # most turns of a session: each turn has a seed of its own
OWN_ANSWER_TOKENS = 96  # longest answer that is not recorded
WARMUP_STEPS = 1  # steps of uncounted sessions, whose logits are hashed
ROUND_NUMBERS = 1000  # distance of the first numbers of two rounds
NO_SCRIPT = AgentScript("", "", (), "")

CONTEXT = 40_960
VOCAB_SIZE = 8192
LAYERS, HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, HEAD_DIM = 8, 512, 1408, 8, 2, 64
END, START = "<|im_end|>", "<|im_start|>"
TOOL_MARKERS = ("<tool_call>", "</tool_call>")
# Hermes' form, as Qwen2.5's template writes it.
TEMPLATE = """\
{%- macro turn(role, content) -%}
{{- '<|im_start|>' + role + '\\n' + content + '<|im_end|>\\n' -}}
{%- endmacro -%}
{%- set system = messages[0]['content'] if messages[0]['role'] == 'system' else '' -%}
{%- if tools -%}
{%- set ns = namespace(text=system + '\\n\\n# Tools\\nCall one as JSON: name and arguments.\\n<tools>') -%}
{%- for tool in tools -%}{%- set ns.text = ns.text + '\\n' + (tool | tojson) -%}{%- endfor -%}
{{- turn('system', ns.text + '\\n</tools>') -}}
{%- elif system -%}
{{- turn('system', system) -}}
{%- endif -%}
{%- for message in messages -%}
{%- if message['role'] == 'tool' -%}
{{- turn('user', '<tool_response>\\n' + message['content'] + '\\n</tool_response>') -}}
{%- elif message['role'] == 'assistant' -%}
{%- set ns = namespace(text=message['content'] or '') -%}
{%- for call in message['tool_calls'] or [] -%}
{%- set function = call['function'] -%}
{%- set ns.text = ns.text + ('\\n' if ns.text else '') + '<tool_call>\\n{"name": "' + function['name'] -%}
{%- set ns.text = ns.text + '", "arguments": ' + (function['arguments'] | tojson) + '}\\n</tool_call>' -%}
{%- endfor -%}
{{- turn('assistant', ns.text) -}}
{%- elif message['role'] != 'system' -%}
{{- turn(message['role'], message['content']) -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""


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


def write_checkpoint(folder: Path, texts: Iterable[str]) -> Path:
    """Write a Llama of 27 million random weights in bfloat16, and a tokenizer trained on `texts`."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = _train_tokenizer(texts)
    tokenizer.save(str(folder / "tokenizer.json"))
    eos = tokenizer.token_to_id(END)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "vocab_size": tokenizer.get_vocab_size(),
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "eos_token_id": eos,
    }
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", {"eos_token_id": eos})
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "chat_template": TEMPLATE}
    _write_json(folder / "tokenizer_config.json", names)
    save_file(_random_weights(tokenizer.get_vocab_size()), folder / "model.safetensors", {"format": "pt"})
    return folder


def _train_tokenizer(texts: Iterable[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=VOCAB_SIZE, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([START, END])
    tokenizer.add_tokens([AddedToken(marker, normalized=False) for marker in TOOL_MARKERS])
    return tokenizer


def _random_weights(vocab_size: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)

    def matrix(n: int, k: int) -> Tensor:
        return torch.randn(n, k, generator=generator).mul_(0.8 * k**-0.5).bfloat16()

    tensors = {
        "model.embed_tokens.weight": matrix(vocab_size, HIDDEN),
        "model.norm.weight": torch.ones(HIDDEN).bfloat16(),
    }
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}{name}.weight"] = torch.ones(HIDDEN).bfloat16()
        for name, rows in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
            tensors[f"{prefix}self_attn.{name}_proj.weight"] = matrix(rows * HEAD_DIM, HIDDEN)
        tensors[f"{prefix}self_attn.o_proj.weight"] = matrix(HIDDEN, HEADS * HEAD_DIM)
        for name in ("gate", "up"):
            tensors[f"{prefix}mlp.{name}_proj.weight"] = matrix(INTERMEDIATE, HIDDEN)
        tensors[f"{prefix}mlp.down_proj.weight"] = matrix(HIDDEN, INTERMEDIATE)
    return tensors


def _write_json(path: Path, values: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=1), encoding="utf-8")


@dataclass(frozen=True, slots=True)
class AgentSession(Conversation):
    """A script as a conversation: a turn is the task, or the result of the call before."""

    script: AgentScript = NO_SCRIPT
    prompts: tuple[tuple[int, ...], ...] = ()  # prompt of each turn, where the answers are recorded
    answers: tuple[tuple[int, ...], ...] = ()  # recorded, with EOS


class AgentEngine(LocalEngine):
    """An engine that answers sessions, from the script if it is `recorded`, else by itself.

    The second way suits a model without tools and with a short context: it reads the results as messages of
    the user, and no answer is parsed.
    """

    def __init__(self, config: Config, recorded: bool) -> None:
        super().__init__(config)
        self.recorded = recorded
        self.use = ToolUse(TOOLS)
        self._chat = ChatInputProcessor(self.tokenizer, None, 0)
        self.format = self._chat.format
        runner = self.client._engine.model_runner
        self.sampler = runner.sampler
        self._scripted = ScriptedSampler(self.sampler)
        if recorded:
            runner.sampler = self._scripted  # type: ignore[assignment]

    def make_session(self, script: AgentScript, number: int) -> AgentSession:
        """`number` is one of few thousands."""
        turns = (script.task, *(step.result for step in script.steps))
        seed = number * MAX_TURNS
        if not self.recorded:
            return AgentSession(turns, max_tokens=OWN_ANSWER_TOKENS, seed=seed, script=script)
        texts = [*map(_answer_text, script.steps), script.summary]
        end = self.tokenizer.encode(END, add_special_tokens=False)
        answers = tuple((*self.tokenizer.encode(text, add_special_tokens=False), *end) for text in texts)
        prompts = tuple(
            tuple(self._chat.render(ChatTask(_messages(script, turn), tools=self.use))[0])
            for turn in range(len(turns))
        )
        longest = max(map(len, answers))
        return AgentSession(
            turns, max_tokens=longest, seed=seed, script=script, prompts=prompts, answers=answers
        )

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
        return self._chat.render(ChatTask(messages))[0]

    def make_output(self, request: Request) -> ChoiceOutput:
        if not self.recorded or self.format is None:
            return super().make_output(request)
        parser = ChatParser(self.format, self.use, False, "call_{}".format)
        return ChoiceOutput(self.tokenizer, request, parser)


class AgentTarget:
    """An engine without drafters, which is `off`, and one with them; every round has sessions of its own."""

    runs_per_mode = 1.0

    def __init__(
        self, configs: Mapping[str, Config], recorded: bool, sources: Sources, contexts: Sequence[int]
    ) -> None:
        self.engines = {name: AgentEngine(config, recorded) for name, config in configs.items()}
        self.sources = sources
        self.exact = True  # hashes of logits are equal
        self._contexts = contexts

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
            script = make_script(index, self.sources, min(context, limit), engine.count)
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


def _answer_text(step: Any) -> str:
    """The answer as the model's template writes it."""
    call = json.dumps({"name": step.tool, "arguments": step.arguments}, ensure_ascii=False)
    return f"{step.text}\n<tool_call>\n{call}\n</tool_call>"
