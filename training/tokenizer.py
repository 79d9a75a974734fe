"""Train the byte-level tokenizer and write it for Hugging Face loaders.

Each of the 256 bytes has a token, so any text round-trips. Digits are single tokens, so that numbers are
copied digit by digit.
"""

import argparse
import json
from pathlib import Path
from random import Random

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from training.corpus import END, SPECIAL, conversation

VOCABULARY = 1536
MAX_LENGTH = 1024

# Tools and their parameters are named in the system turn. Calls and results: training/tool_tasks.py.
CHAT_TEMPLATE = (
    "{%- macro system(text) -%}"
    "{{- '<|system|>' + text -}}"
    "{%- if tools -%}"
    "{{- ('\\n' if text else '') + 'Tools:' -}}"
    "{%- for tool in tools -%}"
    "{%- set function = tool['function'] or tool -%}"
    "{%- set properties = (function['parameters'] or {})['properties'] or {} -%}"
    "{{- '\\n' + function['name'] + '(' + properties | join(', ') + ')' -}}"
    "{%- endfor -%}"
    "{%- endif -%}"
    "{{- '<|end|>' -}}"
    "{%- endmacro -%}"
    "{%- if tools and (not messages or messages[0]['role'] not in ['system', 'developer']) -%}"
    "{{- system('') -}}"
    "{%- endif -%}"
    "{%- for message in messages -%}"
    "{%- set role = message['role'] -%}"
    "{%- set content = message['content'] or '' -%}"
    "{%- if loop.first and role in ['system', 'developer'] -%}"
    "{{- system(content) -}}"
    "{%- elif role == 'tool' -%}"
    "{{- '<|user|>' if loop.first or loop.previtem['role'] != 'tool' else '' -}}"
    "{{- '<tool_response>' + content + '</tool_response>' -}}"
    "{{- '<|end|>' if loop.last or loop.nextitem['role'] != 'tool' else '' -}}"
    "{%- else -%}"
    "{%- if role == 'developer' -%}{%- set role = 'system' -%}{%- endif -%}"
    "{%- if role not in ['system', 'user', 'assistant'] -%}{%- set role = 'user' -%}{%- endif -%}"
    "{{- '<|' + role + '|>' + content -}}"
    "{%- for call in message['tool_calls'] or [] -%}"
    "{%- set function = call['function'] or call -%}"
    "{%- set arguments = function['arguments'] -%}"
    "{{- '<tool_call>{\"name\": ' + function['name'] | tojson + ', \"arguments\": ' -}}"
    "{{- (arguments if arguments is string else arguments | tojson) + '}</tool_call>' -}}"
    "{%- endfor -%}"
    "{{- '<|end|>' -}}"
    "{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)


def train(seed: int = 0, conversations: int = 20_000) -> Tokenizer:
    """Learn the merges from generated conversations."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    rng = Random(f"tokenizer:{seed}")
    turns = (turn for _ in range(conversations) for turn in conversation(rng, 8))
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((text for turn in turns for text in (turn.prompt, turn.answer)), trainer)
    return tokenizer


def save(tokenizer: Tokenizer, folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "pad_token": SPECIAL[0],
        "bos_token": None,
        "unk_token": None,
        "additional_special_tokens": list(SPECIAL[2:]),
        "clean_up_tokenization_spaces": False,
        "model_max_length": MAX_LENGTH,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    save(train(), parser.parse_args().folder)
