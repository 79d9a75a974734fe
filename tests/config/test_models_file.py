"""Several models of one server: from names, a directory or a YAML file."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from foreword.config.models_file import SAMPLING_FIELDS, ModelsConfig, ModelVariant, read_models
from foreword.config.options import Config
from foreword.core.params import FLOAT_BOUNDS, SamplingParams
from foreword.errors import ConfigError


@pytest.fixture
def read(tmp_path: Path):  # type: ignore[no-untyped-def]
    def read_text(text: str, **options: object) -> ModelsConfig:
        file = tmp_path / "models.yaml"
        file.write_text(text)
        return read_models(Config(models=str(file), **options))  # type: ignore[arg-type]

    return read_text


def test_names() -> None:
    models = read_models(Config(models="demo, Qwen/Qwen3-4B,/models/tiny/", threads=2, host="::1"))
    assert [entry.name for entry in models.entries] == ["demo", "Qwen3-4B", "tiny"]
    first, second, _ = models.entries
    assert (second.config.model, second.config.served_names()) == ("Qwen/Qwen3-4B", ("Qwen3-4B",))
    assert (first.config.models, first.config.threads, first.config.host) == (None, 2, "::1")
    assert (first.keep_alive, first.pinned, first.preload, first.variants) == (300.0, False, False, ())
    assert (models.memory_limit, models.max_loaded, models.max_swap_wait) == (None, None, 10.0)


def test_options_of_the_fleet() -> None:
    models = read_models(
        Config(models="a,b", memory_limit="2GiB", keep_alive="-1", max_loaded_models=1, max_swap_wait=0)
    )
    assert (models.memory_limit, models.max_loaded, models.max_swap_wait) == (2 << 30, 1, 0)
    assert [entry.keep_alive for entry in models.entries] == [None, None]
    assert models.entries[0].config == Config(model="a", served_model_name="a")


def test_only_the_default_model_answers_to_any_name() -> None:
    models = read_models(Config(models="a,b,c", any_model_name=True))
    assert [entry.config.any_model_name for entry in models.entries] == [True, False, False]


def test_a_directory_has_checkpoints_and_gguf_files(tmp_path: Path) -> None:
    for name in ("Beta", "alpha", "adapter", "empty"):
        (tmp_path / name).mkdir()
    (tmp_path / "Beta" / "config.json").touch()
    (tmp_path / "alpha" / "config.json").touch()
    (tmp_path / "adapter" / "adapter_config.json").touch()
    gguf = ("tiny.gguf", "mmproj-tiny.gguf", "big-00001-of-00002.gguf", "big-00002-of-00002.gguf")
    for name in (*gguf, "eleven-00011-of-00011.gguf", "notes.txt"):
        (tmp_path / name).touch()
    models = read_models(Config(models=str(tmp_path)))
    assert [entry.name for entry in models.entries] == [
        "alpha",
        "Beta",
        "big-00001-of-00002.gguf",
        "tiny.gguf",
    ]
    assert models.entries[0].config.model == str(tmp_path / "alpha")


def test_a_directory_that_is_a_checkpoint_is_one_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").touch()
    assert [entry.config.model for entry in read_models(Config(models=str(tmp_path))).entries] == [
        str(tmp_path)
    ]


def test_a_file(read) -> None:  # type: ignore[no-untyped-def]
    models = read(
        """
        memory-limit: 48GiB
        max_loaded_models: 3
        max-swap-wait: 5
        keep_alive: 10m
        defaults:
          kv-cache-memory: 2GiB
          speculate: off
        models:
          qwen:
            model: Qwen/Qwen3-4B
            served_model_name: [chat, gpt-4o]
            keep_alive: -1
            pinned: yes
            lora_modules: [sql=/adapters/sql]
            speculate: ngram
          demo:
          small: {preload: true, keep-alive: 90s, max_model_len: 4096}
          last: {keep_alive: null}
        """
    )
    qwen, demo, small, last = models.entries
    assert (models.memory_limit, models.max_loaded, models.max_swap_wait) == (48 << 30, 3, 5.0)
    assert (qwen.keep_alive, demo.keep_alive, small.keep_alive) == (None, 600.0, 90.0)
    assert last.keep_alive == 600.0
    assert (qwen.pinned, qwen.preload, small.pinned, small.preload) == (True, False, False, True)
    assert qwen.names == ("qwen", "chat", "gpt-4o", "sql")
    assert (qwen.config.model, demo.config.model) == ("Qwen/Qwen3-4B", "demo")
    assert [entry.config.speculate for entry in models.entries] == ["ngram", "off", "off", "off"]
    assert [entry.config.kv_cache_memory for entry in models.entries] == ["2GiB"] * 4
    assert small.config.max_model_len == 4096


def test_a_model_beats_flags_and_flags_beat_the_rest_of_the_file(read) -> None:  # type: ignore[no-untyped-def]
    models = read(
        "keep_alive: 1m\ndefaults: {threads: 1, block_size: 32}\nmodels: {a: {threads: 2}, b: }",
        threads=4,
        keep_alive="2m",
    )
    assert [entry.config.threads for entry in models.entries] == [2, 4]
    assert [entry.config.block_size for entry in models.entries] == [32, 32]
    assert [entry.keep_alive for entry in models.entries] == [120.0, 120.0]


def test_speculative_config_of_a_model(read) -> None:  # type: ignore[no-untyped-def]
    models = read("models:\n  a:\n    speculative-config: {method: ngram, num_speculative_tokens: 5}")
    config = models.entries[0].config
    assert (config.speculate, config.num_speculative_tokens, config.speculative_config) == ("ngram", 5, None)


def test_variants(read) -> None:  # type: ignore[no-untyped-def]
    models = read(
        """
        models:
          qwen:
            max_model_len: 8192
            variants:
              wild: {variant_of: creative, top_p: 1.0}
              creative:
                temperature: 1.2
                top-p: 0.9
                speculation: off
              short:
                max_model_len: 1024
                variant_of: wild
              plain:
        """
    )
    creative = {"temperature": 1.2, "top_p": 0.9}
    assert models.entries[0].variants == (
        ModelVariant("qwen:wild", {**creative, "top_p": 1.0}, "off"),
        ModelVariant("qwen:creative", creative, "off"),
        ModelVariant("qwen:short", {**creative, "top_p": 1.0}, "off", 1024),
        ModelVariant("qwen:plain"),
    )


def test_the_example_of_the_docs(read) -> None:  # type: ignore[no-untyped-def]
    page = (Path(__file__).parents[2] / "docs" / "fleet.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"## Models file\n.*?```yaml\n(.*?)```", page, re.DOTALL)
    models = read(example)
    qwen, coder, search, demo = models.entries
    assert (models.memory_limit, models.max_loaded, models.max_swap_wait) == (48 << 30, 4, 10.0)
    assert qwen.names == ("qwen", "chat", "gpt-4o", "sql", "qwen:creative", "qwen:brief")
    assert qwen.pinned and qwen.config.runs_draft_model
    brief = {"temperature": 1.1, "top_p": 0.95, "max_tokens": 200}
    assert qwen.variants[1] == ModelVariant("qwen:brief", brief, "off", 4096)
    assert (coder.keep_alive, coder.preload, coder.config.cpus) == (None, True, "0-15")
    assert search.config.embedding_model == "BAAI/bge-small-en-v1.5"
    assert (demo.config.model, demo.keep_alive, demo.config.max_num_seqs) == ("demo", 600.0, 32)


def test_a_variant_sets_what_a_request_may() -> None:
    assert {*FLOAT_BOUNDS} <= {*SAMPLING_FIELDS}
    assert {*SAMPLING_FIELDS} <= {*SamplingParams.__dataclass_fields__}


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("", "is empty; it needs `models:`"),
        ("a: b: c", "is not YAML"),
        ("- a", "line 1: must hold `option: value` lines, got a list"),
        ("keep_alive: 5m", "has no `models:`"),
        ("models:", "line 1: must hold `name: options` lines, got ''"),
        ("models: {}", "`models:` has none"),
        ("models: {a: 5}", "line 1: must hold `option: value` lines, got '5'"),
        ("model: {a: }", "line 1: model is an option of models: put it below `defaults:` or a model"),
        ("modles: {a: }", "line 1: unknown option 'modles'; did you mean models?"),
        ("port: 1\nmodels: {a: }", "line 1: port is an option of the server"),
        ("keep_alive: 1m\nkeep-alive: 1m\nmodels: {a: }", "line 2: keep-alive is given twice"),
        ("memory_limit: 2 GiBs\nmodels: {a: }", "line 1: memory_limit must be like"),
        ("keep_alive: soon\nmodels: {a: }", 'line 1: keep_alive must be like "5m"'),
        (
            "max_loaded_models: 0\nmodels: {a: }",
            "line 1: max_loaded_models must be between",
        ),
        (
            "models:\n  a:\n    max_modle_len: 5",
            "line 3: unknown option 'max_modle_len'; did you mean max-model-len?",
        ),
        ("models:\n  a:\n    pined: 1", "line 3: unknown option 'pined'; did you mean pinned?"),
        ("models:\n  a:\n    ctx-size: 5", "line 3: ctx-size is --max-model-len here"),
        ("models:\n  a:\n    threads: many", "line 3: threads must be a whole number, got 'many'"),
        ("models:\n  a:\n    threads: 0", "line 3: threads must be between 1 and"),
        ("models:\n  a:\n    threads: 1\n    threads: 2", "line 4: threads is given twice, first in line 3"),
        ("models:\n  a:\n    block_size: 1\n    block-size: 2", "line 4: block-size is given twice"),
        ("models:\n  a:\n    port: 80", "line 3: port is an option of the server, not of a model"),
        ("models:\n  a:\n    memory_limit: 5", "line 3: memory_limit is no option of a model"),
        ("models:\n  a:\n    models: b", "line 3: models is an option of the server"),
        ("models:\n  a:\n    keep_alive: 5 parsecs", 'line 3: keep_alive must be like "5m"'),
        ("models:\n  a:\n    pinned: maybe", "line 3: pinned must be one of 1, true"),
        ("models:\n  a:\n    preload: [yes]", "line 3: preload must be a single value"),
        ("models:\n  a:\n    speculate: magic", "line 3: speculate: unknown drafter 'magic'"),
        ("defaults: {draft_model: x}\nmodels: {a: }", "line 1: draft_model belongs to one model"),
        ("defaults:\n  threads: 0\nmodels: {a: }", "line 2: threads must be between"),
        ("defaults: {pinned: 1}\nmodels: {a: }", "line 1: unknown option 'pinned'"),
        (
            "defaults: {max_num_seqs: 64, max_num_batched_tokens: 32}\nmodels: {a: }",
            "line 1: max_num_batched_tokens 32 is below max_num_seqs 64",
        ),
        ("models:\n  a:\n  a:", "line 3: a is given twice, first in line 2"),
        ("models:\n  a:\n  b: {served_model_name: a}", "line 3: two models are called 'a': names of a and b"),
        ("models:\n  a: {lora_modules: [b=/x]}\n  b:", "line 3: two models are called 'b': names of a and b"),
        (
            "models:\n  a: {variants: {x: }}\n  'a:x':",
            "line 3: two models are called 'a:x': names of a and a:x",
        ),
        ("models:\n  a: {embedding_model: /x/b}\n  b:", "line 3: two models are called 'b'"),
        (
            "models:\n  a: {served_model_name: x, lora_modules: [x=/y]}",
            "two models are called 'x': names of a,",
        ),
        ("models:\n  'a,b':", "line 2: a model's name has 1 to 200 printable characters without commas"),
        (
            "models:\n  a:\n    variants: {x: {temprature: 1}}",
            "unknown field 'temprature'; did you mean temperature?",
        ),
        (
            "models:\n  a:\n    variants: {x: {temperature: hot}}",
            "line 3: temperature must be a number, got 'hot'",
        ),
        ("models:\n  a:\n    variants: {x: {temperature: -1}}", "line 3: temperature must be"),
        ("models:\n  a:\n    variants: {x: {top_k: 1.5}}", "line 3: top_k must be a whole number"),
        (
            "models:\n  a:\n    variants: {x: {speculation: magic}}",
            "line 3: speculation must be one of auto, off",
        ),
        (
            "models:\n  a:\n    variants: {x: {max_model_len: 1}}",
            "line 3: max_model_len must be at least 2, got 1",
        ),
        (
            "models:\n  a:\n    max_model_len: 64\n    variants: {x: {max_model_len: 65}}",
            "line 4: max_model_len must be between 2 and 64, the model's own, got 65",
        ),
        ("models:\n  a:\n    variants: {x: {threads: 2}}", "line 3: unknown field 'threads'"),
        ("models:\n  a:\n    variants: {'x:y': }", "line 3: a variant is named by what follows 'a:'"),
        ("models:\n  a:\n    variants: {x: {variant_of: y}, z: }", "line 3: x: no variant 'y'"),
        (
            "models:\n  a:\n    variants:\n      x: {variant_of: y}\n      y: {variant_of: x}",
            "line 4: variants refer to each other in a circle: x -> y -> x",
        ),
    ],
)
def test_errors_name_line_and_nearest_key(read, text: str, part: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ConfigError) as caught:
        read(text)
    assert part in str(caught.value)


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"models": "a,,b"}, "models must be names joined by commas"),
        ({"models": "demo,/x/demo"}, "two models are called 'demo'"),
        ({"models": "/nowhere.yaml"}, "models file /nowhere.yaml: No such file"),
        ({"models": "a,b", "draft_model": "c"}, "draft_model belongs to one model"),
        (
            {"models": "a,b", "replica_urls": "http://c", "engine_key": "x" * 16},
            "replica_urls belongs to one model",
        ),
        ({"models": "a,b", "served_model_name": "c"}, "served_model_name belongs to one model"),
        ({"models": "a,b", "model": "c"}, "give --model or --models, not both"),
    ],
)
def test_errors_without_a_file(options: dict[str, str], part: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_models(Config(**options))  # type: ignore[arg-type]
    assert part in str(caught.value)


def test_an_empty_directory_has_no_models(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no subdirectory with config\\.json and no GGUF file"):
        read_models(Config(models=str(tmp_path)))
