"""Targets of fuzz_parsers.py that read files and texts, each with valid inputs as seeds."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import tokenizers
from safetensors.torch import load_file, save_file
from tokenizers import decoders, models

from benchmarks.fuzz_mutate import Mutate, change_bytes, change_json, change_lines, change_safetensors
from foreword.checkpoint import read_tokenizer
from foreword.cli.configuration import read_config
from foreword.core.structured_output import StructuredOutput, Vocabulary
from foreword.embedding.local import load_encoder
from foreword.embedding.sentence_transformers import read_pooling_config
from foreword.errors import CheckpointError, ConfigError, InvalidRequest, Overloaded
from foreword.grammar.check import GrammarChecker
from foreword.grammar.compiler import to_llguidance
from foreword.kernels.reference.backend import ReferenceOps
from foreword.models.interfaces import Precision
from foreword.models.model_loader import load_model, read_model_info
from foreword.server.auth.key_file import read_key_file
from foreword.tokenizer.chat_template import ChatTemplate
from foreword.tokenizer.gguf import build_gguf_tokenizer
from foreword.tokenizer.tokenizer import Tokenizer
from foreword.weights.gguf.header import open_gguf
from foreword.weights.safetensors_weights import SafetensorsFile, SafetensorsWeights
from tests.support.checkpoints import replace_by_mxfp4, write_checkpoint
from tests.support.gguf_files import RawGGUF, write_gguf
from tests.support.quantized_checkpoints import write_quantized

Checkpoints = Mapping[str, tuple[bytes, bytes]]  # config.json and weights by kind

SMALL: Mapping[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_key_value_heads": 2,
}
# Two groups a row.
SMALL_GROUPED = {**SMALL, "hidden_size": 64, "intermediate_size": 64, "tie_word_embeddings": True}
QUANTIZED = ("awq", "gptq-act-order", "pack-quantized-asymmetric", "int-quantized", "fp8-block")
POSITIONS = 16  # of models that are loaded
MESSAGES = [{"role": "user", "content": "Hello ü"}]
UNICODE = ("utf-8", "surrogateescape")


def _noop() -> None:
    """No resources to free."""


@dataclass(frozen=True, slots=True)
class FuzzTarget:
    """A parser."""

    seeds: Sequence[bytes]
    run: Callable[[bytes, Path], None]  # with an input and a scratch folder
    refusals: tuple[type[Exception], ...]  # documented errors; others are findings
    modules: tuple[str, ...]  # below foreword/: inputs that reach new lines of these are kept
    change: Mutate = change_bytes
    share: float = 1.0  # of --inputs; slow targets get fewer
    close: Callable[[], None] = _noop


def file_targets() -> Mapping[str, Callable[[], FuzzTarget]]:
    """Constructors by name."""
    return {
        "safetensors": _safetensors,
        "index": _index,
        "gguf": _gguf,
        "gguf-metadata": _gguf_metadata,
        "config": _config,
        "quantized": lambda: _weights_of(_quantized_checkpoints(), "weights/quantized/"),
        "quantized-config": lambda: _configs_of(_quantized_checkpoints(), "weights/quantized/"),
        "experts": lambda: _weights_of(_expert_checkpoints(), "models/expert_weights.py"),
        "experts-config": lambda: _configs_of(_expert_checkpoints(), "models/expert_weights.py"),
        "tokenizer": _tokenizer,
        "encoder": _encoder,
        "options": _options,
        "keys": _keys,
        "grammar": _grammar,
        "grammar-worker": _grammar_worker,
    }


def _safetensors() -> FuzzTarget:
    def run(data: bytes, folder: Path) -> None:
        path = _write(folder / "x.safetensors", data)
        file = SafetensorsFile(path)
        for name in file.entries:
            file.tensor(name).sum()
            file.release(name)

    entries = {
        "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
        "b": {"dtype": "BF16", "shape": [4], "data_offsets": [24, 32]},
    }
    more = {
        "__metadata__": {"format": "pt"},
        **entries,
        "c": {"dtype": "F16", "shape": [], "data_offsets": [32, 34]},
    }
    seeds = [_with_header(json.dumps(header).encode(), 34) for header in (entries, more, {})]
    return FuzzTarget(
        seeds,
        run,
        (CheckpointError,),
        ("weights/safetensors_weights.py", "weights/mapped_file.py"),
        change_safetensors,
    )


def _index() -> FuzzTarget:
    """The index of a sharded checkpoint, and one shard."""

    def run(data: bytes, folder: Path) -> None:
        _write(folder / "model.safetensors.index.json", data)
        _write(folder / "one.safetensors", sound)
        weights = SafetensorsWeights(folder)
        for name in weights.names:
            weights.tensor(name, 2)
        weights.check_all_read()

    sound = _with_header(b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}', 8)
    seeds = [b'{"metadata": {"total_size": 8}, "weight_map": {"a": "one.safetensors"}}']
    return FuzzTarget(
        seeds,
        run,
        (CheckpointError,),
        ("weights/safetensors_weights.py",),
        change_json,
    )


def _gguf() -> FuzzTarget:
    """From the first byte to a model and a tokenizer."""

    def run(data: bytes, folder: Path) -> None:
        path = _write(folder / "x.gguf", data)
        gguf = open_gguf(path)
        read_tokenizer(path)
        read_model_info(path, gguf_dequantize=True)
        if gguf.tensors:
            load_model(
                path, ReferenceOps(), Precision.from_dtypes("float32"), "cpu", POSITIONS, gguf_dequantize=True
            )

    seeds = [RawGGUF.sample().bytes()]
    with TemporaryDirectory() as folder:
        for family in ("llama", "gemma2", "phi3", "qwen2_moe", "gpt_oss"):
            checkpoint = write_checkpoint(Path(folder) / family, family, **SMALL)
            seeds.append(write_gguf(checkpoint, Path(folder) / f"{family}.gguf").read_bytes())
    return FuzzTarget(seeds, run, (CheckpointError,), ("weights/gguf/", "tokenizer/gguf"), share=0.5)


def _gguf_metadata() -> FuzzTarget:
    """Values of any type and length in the header."""

    def run(data: bytes, folder: Path) -> None:
        try:
            values = json.loads(data)
        except (ValueError, RecursionError):
            return
        metadata = {str(key): value for key, value in values.items()} if isinstance(values, dict) else {}
        tokenizer = build_gguf_tokenizer(
            {key: kept for key, value in metadata.items() if (kept := _to_gguf_value(value)) is not None}, "x"
        )
        _exercise(tokenizer)

    seeds = []
    with TemporaryDirectory() as folder:
        for family in ("llama", "phi3"):
            checkpoint = write_checkpoint(Path(folder) / family, family, **SMALL)
            metadata = dict(open_gguf(write_gguf(checkpoint, Path(folder) / f"{family}.gguf")).metadata)
            seeds.append(json.dumps(metadata).encode())
    pieces = ["<unk>", "<s>", "</s>", "<0x41>", "▁", "a", "b", "ab", "▁a", "▁ab"]
    spm = {
        "model": "llama",
        "tokens": pieces,
        "scores": [float(-i) for i in range(10)],
        "token_type": [2, 3, 3, 6] + [1] * 6,
    }
    seeds.append(json.dumps({f"tokenizer.ggml.{key}": value for key, value in spm.items()}).encode())
    return FuzzTarget(seeds, run, (CheckpointError, InvalidRequest), ("tokenizer/",), change_json)


def _to_gguf_value(value: Any) -> Any:
    """The value if GGUF can hold it, lists of one type only; None if not."""
    if isinstance(value, list):
        kept = [
            item for item in map(_to_gguf_value, value) if item is not None and not isinstance(item, list)
        ]
        return [item for item in kept if type(item) is type(kept[0])]
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, bool | float):
        return value
    return max(min(value, 2**64 - 1), -(2**63)) if isinstance(value, int) else None


def _config() -> FuzzTarget:
    """config.json with another checkpoint's weights."""

    def run(data: bytes, folder: Path) -> None:
        _write(folder / "config.json", data)
        _write(folder / "model.safetensors", weights)
        _write(folder / "tokenizer.json", tokenizer)
        read_model_info(folder)
        read_tokenizer(folder)
        load_model(folder, ReferenceOps(), Precision.from_dtypes("float32"), "cpu", POSITIONS)

    seeds = []
    with TemporaryDirectory() as folder:
        for family in ("phi3", "gemma2", "gemma3_text", "mistral", "qwen2", "qwen3", "llama"):
            checkpoint = write_checkpoint(Path(folder) / family, family, **SMALL)
            seeds.append((checkpoint / "config.json").read_bytes())
        scaled = json.loads(seeds[-1]) | {
            "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}
        }
        scaled["rope_scaling"] |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 128}
        seeds.append(json.dumps(scaled).encode())
        weights = (checkpoint / "model.safetensors").read_bytes()
        tokenizer = (checkpoint / "tokenizer.json").read_bytes()
    modules = ("models/", "checkpoint.py", "layers/")
    return FuzzTarget(seeds, run, (CheckpointError,), modules, change_json, share=0.5)


def _weights_of(checkpoints: Checkpoints, module: str) -> FuzzTarget:
    """Weights of checkpoints, whose metadata name the config."""

    def run(data: bytes, folder: Path) -> None:
        kind = next((kind for kind in configs if f'"{kind}"'.encode() in data), next(iter(configs)))
        _load_checkpoint(configs[kind], data, folder)

    configs = {kind: config for kind, (config, _) in checkpoints.items()}
    seeds = [stored for _, stored in checkpoints.values()]
    modules = (module, "weights/safetensors_weights.py")
    return FuzzTarget(seeds, run, (CheckpointError,), modules, change_safetensors, share=0.5)


def _configs_of(checkpoints: Checkpoints, module: str) -> FuzzTarget:
    """config.json of checkpoints; the line before it names the weights."""

    def run(data: bytes, folder: Path) -> None:
        kind, _, config = data.partition(b"\n")
        _load_checkpoint(config, weights.get(kind.decode(*UNICODE), next(iter(weights.values()))), folder)

    weights = {kind: stored for kind, (_, stored) in checkpoints.items()}
    seeds = [f"{kind}\n".encode() + config for kind, (config, _) in checkpoints.items()]
    return FuzzTarget(seeds, run, (CheckpointError,), (module,), change_lines, share=0.5)


def _expert_checkpoints() -> Checkpoints:
    """One by one, in one tensor, behind a shared expert, and in MXFP4."""
    result = {}
    with TemporaryDirectory() as folder:
        for family in ("qwen3_moe", "qwen2_moe", "granitemoeshared", "gpt_oss"):
            path = write_checkpoint(Path(folder) / family, family, **SMALL, num_experts_per_tok=2)
            tensors = load_file(path / "model.safetensors")
            if family == "gpt_oss":
                replace_by_mxfp4(tensors)
            save_file(tensors, path / "model.safetensors", metadata={"kind": family})
            result[family] = (path / "config.json").read_bytes(), (path / "model.safetensors").read_bytes()
    return result


def _quantized_checkpoints() -> Checkpoints:
    """config.json and weights by format."""
    result = {}
    with TemporaryDirectory() as folder:
        source = write_checkpoint(Path(folder) / "source", dtype="bfloat16", **SMALL_GROUPED)
        for kind in QUANTIZED:
            path = Path(folder) / kind
            write_quantized(source, path, kind)
            result[kind] = (path / "config.json").read_bytes(), (path / "model.safetensors").read_bytes()
    return result


def _load_checkpoint(config: bytes, weights: bytes, folder: Path) -> None:
    _write(folder / "config.json", config)
    _write(folder / "model.safetensors", weights)
    read_model_info(folder)
    load_model(folder, ReferenceOps(), Precision.from_dtypes("float32"), "cpu", POSITIONS)


def _tokenizer() -> FuzzTarget:
    """All tokenizer files of a model, as one JSON object by name."""

    def run(data: bytes, folder: Path) -> None:
        _write_files(data, folder, ("tokenizer.json",))
        _exercise(Tokenizer.from_directory(folder))

    seeds = []
    with TemporaryDirectory() as folder:
        checkpoint = write_checkpoint(Path(folder) / "x", **SMALL)
        names = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")
        files = {name: json.loads((checkpoint / name).read_text()) for name in names}
    special = {
        "special_tokens_map.json": {
            "eos_token": {"content": "<eos>"},
            "additional_special_tokens": ["<|im_end|>"],
        }
    }
    added = {"0": {"content": "<extra>", "lstrip": False, "rstrip": True, "special": True}}
    more = {**files["tokenizer_config.json"], "added_tokens_decoder": added}
    jinja = {
        "chat_template.jinja": "{% for m in messages %}{{ m.content | trim }}{{ bos_token }}{% endfor %}"
    }
    seeds += [
        files,
        files | special | {"tokenizer_config.json": more},
        files | jinja | {"config.json": {"eos_token_id": [1, 2]}},
    ]
    wordpiece = models.WordPiece(vocab={"[UNK]": 0, "he": 1, "##llo": 2}, unk_token="[UNK]")
    unigram = models.Unigram([("<unk>", 0.0), ("▁", -1.0), ("He", -2.0), ("<0xC3>", -3.0)], 0, True)
    for model in (wordpiece, unigram):
        backend = tokenizers.Tokenizer(model)
        backend.decoder = decoders.Metaspace()
        seeds.append({"tokenizer.json": json.loads(backend.to_str())})
    texts = [json.dumps(seed).encode() for seed in seeds]
    return FuzzTarget(texts, run, (CheckpointError, InvalidRequest), ("tokenizer/",), change_json, share=0.7)


def _exercise(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("Hello ü <eos> <|im_end|>")
    tokenizer.decode(ids)
    tokenizer.vocabulary()
    tokenizer.token_search()
    ChatTemplate.from_tokenizer(tokenizer).render(MESSAGES)


def _encoder() -> FuzzTarget:
    """The files of a sentence-transformers checkpoint, as one JSON object by name."""

    def run(data: bytes, folder: Path) -> None:
        (folder / "1_Pooling").mkdir(exist_ok=True)
        _write_files(data, folder, ("config.json",))
        read_pooling_config(folder)
        with suppress(CheckpointError):  # it has no weights
            load_encoder(folder, ReferenceOps())

    config = {
        "model_type": "bert",
        "vocab_size": 30,
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    config |= {
        "intermediate_size": 8,
        "max_position_embeddings": 16,
        "type_vocab_size": 2,
        "layer_norm_eps": 1e-12,
    }
    config |= {"hidden_act": "gelu"}
    modules = [
        {"type": f"sentence_transformers.models.{name}", "path": path}
        for name, path in (("Pooling", "1_Pooling"),)
    ]
    files = {
        "config.json": config,
        "modules.json": modules,
        "1_Pooling/config.json": {"word_embedding_dimension": 8, "pooling_mode_mean_tokens": True},
        "config_sentence_transformers.json": {
            "prompts": {"query": "query: "},
            "default_prompt_name": "query",
        },
        "sentence_bert_config.json": {"max_seq_length": 16, "do_lower_case": False},
    }
    kinds = ("bert", "roberta", "distilbert", "mpnet", "modernbert")
    seeds = [json.dumps(files | {"config.json": config | {"model_type": kind}}).encode() for kind in kinds]
    return FuzzTarget(
        seeds, run, (CheckpointError,), ("embedding/", "weights/config_reader.py"), change_json, share=0.5
    )


def _options() -> FuzzTarget:
    """A file of options, and vLLM's --speculative-config within it."""

    def run(data: bytes, folder: Path) -> None:
        read_config(Namespace(config=str(_write(folder / "x.yaml", data))), environ={})

    values = {
        "max-model-len": 64,
        "kv-cache-memory": "1GiB",
        "log_interval": 1.5,
        "enforce_eager": True,
        "api_key": "a,b",
    }
    vllm = {"speculative_config": '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4}'}
    seeds = [
        json.dumps(values).encode(),
        json.dumps(vllm).encode(),
        b"max-num-seqs: 3\nspeculate: suffix,ngram\nseed: 0x10\n",
    ]
    return FuzzTarget(
        seeds,
        run,
        (ConfigError,),
        ("config/options.py", "config/option_parsing.py", "cli/configuration.py"),
        change_json,
    )


def _keys() -> FuzzTarget:
    """A file of API keys."""

    def run(data: bytes, folder: Path) -> None:
        read_key_file(_write(folder / "keys.yaml", data))

    hash_ = f"sha256:{'a' * 32}:{'b' * 64}"
    key: dict[str, Any] = {
        "name": "alice",
        "hash": hash_,
        "admin": True,
        "models": ["a"],
        "expires": "2027-01-01T00:00:00Z",
    }
    key |= {"requests_per_minute": 60, "tokens_per_minute": 1000, "max_concurrency": 2, "priority": 1}
    seeds = [json.dumps({"keys": [key, {"name": "bob", "hash": hash_.replace("b", "c")}]}).encode()]
    seeds.append(f"keys:\n  - name: x\n    hash: {hash_}\n    expires: 2027-01-01\n".encode())
    return FuzzTarget(seeds, run, (ConfigError,), ("server/auth/key_file.py",), change_json, share=0.5)


def _grammar() -> FuzzTarget:
    return FuzzTarget(
        _grammar_seeds(),
        lambda data, _: _check_text(data),
        (InvalidRequest,),
        ("grammar/", "core/structured"),
        change_lines,
    )


def _grammar_worker() -> FuzzTarget:
    """The same in the worker process, which is slow to restart."""
    vocabulary = Vocabulary((*(bytes([byte]) for byte in range(256)), b"</s>"), (256,), (256,))
    checker = GrammarChecker(lambda: vocabulary, num_workers=1)

    def run(data: bytes, folder: Path) -> None:
        kind, _, text = data.decode(*UNICODE).partition("\n")
        checker.check(StructuredOutput(kind, text))

    return FuzzTarget(
        _grammar_seeds(), run, (InvalidRequest, Overloaded), ("grammar/",), change_lines, 0.05, checker.close
    )


def _check_text(data: bytes) -> None:
    kind, _, text = data.decode(*UNICODE).partition("\n")
    to_llguidance(StructuredOutput(kind, text))


def _grammar_seeds() -> list[bytes]:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer", "minimum": 0}, "b": {"$ref": "#/$defs/x"}},
    }
    schema |= {
        "$defs": {
            "x": {
                "anyOf": [{"enum": ["y", 1]}, {"type": "array", "items": {"type": "string", "maxLength": 9}}]
            }
        }
    }
    tag = {"begin": "<f>", "schema": {"type": "object"}, "end": "</f>"}
    inner = {
        "type": "sequence",
        "elements": [{"type": "const_string", "value": "a"}, {"type": "regex", "pattern": "b+"}],
    }
    tags = [{"type": "tag", "begin": "<g>", "content": inner, "end": ["</g>"]}]
    format_ = {"format": {"type": "triggered_tags", "triggers": ["<"], "tags": tags, "excludes": ["no"]}}
    texts = {
        "json_schema": [
            json.dumps(schema),
            '{"type": "string", "pattern": "^a{2,5}$", "format": "date"}',
            "true",
        ],
        "regex": [r"^(a|b[^c-e]){2,7}\d+\.$", r"\p{L}+(?i:x)"],
        "choice": ['["yes", "no", "ü\\n"]'],
        "lark": ['start: A | b\nA: /[a-z]+/\nb: "x" start? "y"\n%ignore " "'],
        "gbnf": ['root ::= "a" ([b-d] | x)* # c\nx ::= "\\x41\\u00fc" root? y{2,3}\ny ::= [^\\n"] .'],
        "structural_tag": [json.dumps({"structures": [tag], "triggers": ["<f"]}), json.dumps(format_)],
    }
    return [f"{kind}\n{text}".encode() for kind, of in texts.items() for text in of]


def _write(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def _with_header(header: bytes, num_bytes: int) -> bytes:
    return len(header).to_bytes(8, "little") + header + bytes(num_bytes)


def _write_files(data: bytes, folder: Path, needed: Sequence[str]) -> None:
    """Write the files of a JSON object, in place of those of earlier inputs."""
    for file in folder.rglob("*.js*"):
        file.unlink()
    for file in folder.glob("*.jinja"):
        file.unlink()
    try:
        files = json.loads(data)
    except (ValueError, RecursionError):
        files = None
    if not isinstance(files, dict):
        _write(folder / needed[0], data)
        return
    for name, value in files.items():
        if name in NAMES:
            text = value if isinstance(value, str) else json.dumps(value)
            _write(folder / name, text.encode("utf-8", "surrogatepass"))


NAMES = frozenset(
    (
        *(
            "tokenizer.json",
            "tokenizer_config.json",
            "special_tokens_map.json",
            "generation_config.json",
            "config.json",
        ),
        *(
            "chat_template.jinja",
            "chat_template.json",
            "modules.json",
            "1_Pooling/config.json",
            "sentence_bert_config.json",
        ),
        "config_sentence_transformers.json",
    )
)
