"""Config from flags, environment and file, in that order; errors are one line."""

import argparse
from pathlib import Path

import pytest

from foreword.cli.command_line import Parser, has_foreign_words
from foreword.cli.configuration import (
    check_foreign_keys,
    engine_fields,
    environment_name,
    foreign_variables,
    read_config,
    unknown_variables,
)
from foreword.cli.flags import (
    add_config_options,
    add_sampling_options,
    add_serve_arguments,
    flag,
    help_text,
)
from foreword.config.options import Config, option_fields
from foreword.errors import ConfigError

NAMED_DEMO = {"model": "demo", "served_model_name": "a,b", "max_num_seqs": 1}
NGRAM_3 = {"speculate": "ngram", "prompt_lookup_max": 3}


def parse(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_config_options(parser)
    return parser.parse_args(words)


def test_no_options_give_the_defaults() -> None:
    assert read_config(parse(), {}) == Config()


def test_every_field_is_a_flag() -> None:
    parser = argparse.ArgumentParser()
    add_config_options(parser)
    flags = {name for action in parser._actions for name in action.option_strings}
    assert {flag(item.name) for item in option_fields()} <= flags


def test_flag_beats_environment_beats_file_beats_default(tmp_path: Path) -> None:
    file = tmp_path / "options.yaml"
    file.write_text("port: 1\nmax-num-seqs: 1\nblock_size: 32\n")
    config = read_config(
        parse("--config", str(file), "--port", "3"), {"FOREWORD_PORT": "2", "FOREWORD_MAX_NUM_SEQS": "2"}
    )
    assert (config.port, config.max_num_seqs, config.block_size, config.threads) == (3, 2, 32, None)


def test_speculative_config_may_be_a_mapping_in_the_file(tmp_path: Path) -> None:
    file = tmp_path / "options.yaml"
    file.write_text("speculative-config:\n  method: ngram\n  num_speculative_tokens: 5\n")
    config = read_config(parse("--config", str(file)), {})
    assert (config.speculate, config.num_speculative_tokens) == ("ngram", 5)


def test_environment_may_name_the_file(tmp_path: Path) -> None:
    file = tmp_path / "options.yaml"
    file.write_text("port: 9\n")
    assert read_config(parse(), {"FOREWORD_CONFIG": str(file)}).port == 9


@pytest.mark.parametrize(("text", "value"), [("off", "off"), ('"off"', "off"), ("ngram", "ngram")])
def test_yaml_off_stays_text(tmp_path: Path, text: str, value: str) -> None:
    file = tmp_path / "options.yaml"
    file.write_text(
        f"speculate: {text}\napi-key: 0123\nprefix_caching: no\nlog-interval: 2\nmax_model_len:\n"
    )
    config = read_config(parse("--config", str(file)), {})
    assert (config.speculate, config.api_key, config.prefix_caching, config.log_interval) == (
        value,
        "0123",
        False,
        2.0,
    )


@pytest.mark.parametrize(
    ("words", "value"), [(["--no-prefix-caching"], False), (["--prefix-caching"], True), ([], True)]
)
def test_switches(words: list[str], value: bool) -> None:
    assert read_config(parse(*words), {}).prefix_caching is value


@pytest.mark.parametrize(("text", "value"), [("1", True), ("TRUE", True), ("off", False), ("", False)])
def test_switches_in_the_environment(text: str, value: bool) -> None:
    assert read_config(parse(), {"FOREWORD_FAST_MATH": text}).fast_math is value


def test_speculative_config_sets_its_fields() -> None:
    config = read_config(
        parse("--speculative-config", '{"method": "ngram", "num_speculative_tokens": 7}'), {}
    )
    assert (config.speculate, config.num_speculative_tokens, config.speculative_config) == ("ngram", 7, None)


@pytest.mark.parametrize(
    ("environ", "part"),
    [
        ({"FOREWORD_PORT": "many"}, "FOREWORD_PORT must be a whole number, got 'many'"),
        ({"FOREWORD_PORT": "tcp://10.0.0.1:80"}, "set enableServiceLinks: false"),
        ({"FOREWORD_FAST_MATH": "perhaps"}, "FOREWORD_FAST_MATH must be one of"),
        ({"FOREWORD_PORT": "70000"}, "port must be between"),
        ({"FOREWORD_CONFIG": "/nowhere/at/all"}, "config file /nowhere/at/all: No such file"),
        ({"FOREWORD_SPECULATE": "magic"}, "unknown drafter 'magic'"),
    ],
)
def test_environment_errors_name_the_variable(environ: dict[str, str], part: str) -> None:
    with pytest.raises(ConfigError, match=part):
        read_config(parse(), environ)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("host: h\nprot: 1", "line 2: unknown option 'prot'; did you mean port?"),
        ("max-num-seq: 1", "did you mean max-num-seqs?"),
        ("port: [1, 2]", "line 1: port must be a single value"),
        ("served_model_name: [[a], b]", "line 1: served_model_name must be a single value"),
        ("served_model_name: {a: b}", "line 1: served_model_name must be a single value"),
        ('api_key: ""', "api_key is empty"),
        ("port: x", "port must be a whole number, got 'x'"),
        ("port: 1\nport: 2", "line 2: port is given twice"),
        ("[1]: 2", "unknown option 'a key of several values'"),
        ("parallel: 4", "line 1: parallel is --max-num-seqs here (an option of llama-server"),
        ("tensor_parallel_size: 1", "one device"),
        ("lora: x", "use --lora-modules name=path"),
        ("- port", "must hold `option: value` lines"),
        ("a: b: c", "is not YAML"),
        ("{" * 10_000, "nests more than 50 lists and mappings"),
        (f"port: {'9' * 400}", "a number of 1329 bits"),
        ("port: 1e3", "port must be a whole number"),
    ],
)
def test_file_errors_name_the_option(tmp_path: Path, text: str, part: str) -> None:
    file = tmp_path / "options.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_config(parse("--config", str(file)), {})
    assert part in str(caught.value)
    assert "\n" not in str(caught.value)


def test_variable_of_other_programs_is_read_after_our_own() -> None:
    environ = {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://a/v1/traces"}
    assert read_config(parse(), environ).otlp_traces_endpoint == "http://a/v1/traces"
    environ["FOREWORD_OTLP_TRACES_ENDPOINT"] = "http://b/v1/traces"
    assert read_config(parse(), environ).otlp_traces_endpoint == "http://b/v1/traces"


def test_unknown_variable_is_named_with_the_nearest() -> None:
    environ = dict.fromkeys(("FOREWORD_MAX_SEQS", "FOREWORD_PORT", "FOREWORD_NATIVE", "PATH"), "1")
    (line,) = unknown_variables(environ)
    assert line == (
        "unknown environment variable FOREWORD_MAX_SEQS has no effect; did you mean FOREWORD_MAX_NUM_SEQS?"
    )


@pytest.mark.parametrize(
    "name", ["FOREWORD_SERVICE_HOST", "FOREWORD_API_SERVICE_PORT_HTTP", "FOREWORD_PORT_80_TCP_ADDR"]
)
def test_variables_that_kubernetes_sets_are_not_reported(name: str) -> None:
    assert unknown_variables({name: "x", "FOREWORD_API_PORT": "tcp://10.0.0.1:80"}) == []
    assert len(unknown_variables({"FOREWORD_API_PORT": "80"})) == 1


def parse_foreign(*words: str) -> argparse.Namespace:
    parser = Parser(prog="foreword serve")
    add_config_options(parser)
    return parser.parse_args(words)


@pytest.mark.parametrize(
    ("words", "fields"),
    [
        ("-m a.gguf -ngl 99 -c 4096 -fa --temp 0.2", {"model": "a.gguf", "max_model_len": 4096}),
        ("-fa on -fa -c 0 -np -1 -ngl 0", {"device": "cpu"}),
        ("-fa --flash-attn=off -t 2 -np4", {"threads": 2, "max_num_seqs": 4}),
        (
            "--max_model_len 8k --max-num-batched-tokens=2K",
            {"max_model_len": 8000, "max_num_batched_tokens": 2048},
        ),
        ("--max-model-len auto --seed -1 --threads -1", {}),
        ("--structured-outputs-config.backend xgrammar -cc.level=3 -O3 -O 2 -cc {}", {}),
        ("--speculative-config.method ngram --speculative_config.prompt_lookup_max=3", NGRAM_3),
        ("--spec-method ngram --speculative-config.prompt_lookup_max 3", NGRAM_3),
        (
            "--spec-model d --spec-tokens 2",
            {"speculate": "draft", "draft_model": "d", "num_speculative_tokens": 2},
        ),
        ("--runner pooling --task embed", {}),
        ("--shutdown-timeout 30 --max-num-queued-reqs 9", {"drain_timeout": 30.0, "max_waiting": 9}),
        ("--kv-cache-memory-bytes 2G", {"kv_cache_memory": str(2 << 30)}),
        (
            '--limit-mm-per-prompt {"image":4} --mm-processor-cache-gb 2',
            {"max_images": 4, "image_cache_memory": "2GB"},
        ),
        ('--allowed-origins ["http://a","http://b"]', {"cors_origins": "http://a,http://b"}),
        ("--no-enable-prefix-caching --disable-lora", {"prefix_caching": False}),
        ("--disable-prefix-caching --no-async-scheduling", {"prefix_caching": False, "overlap": False}),
        ("--no-cache-prompt --no-webui", {"prefix_caching": False, "ui": False}),
        ("--webui --enable-fastapi-docs", {}),
        ("--no-enable-dbo --no-enable-sleep-mode --no-trust-remote-code", {}),
        ("--quantization awq --load-format safetensors --log-level INFO", {}),
        ("-m demo --served-model-name a b --trust-remote-code -np=1", NAMED_DEMO),
        ("--log-disable --log-jsonl", {"log_level": "error", "log_format": "json"}),
        ("--spec-type none", {"speculate": "off"}),
        ("-n 7 -to 5", {"default_max_tokens": 7, "client_timeout": 5.0}),
        ("--api-prefix /llm --media-path m", {"root_path": "/llm", "allowed_local_media_path": "m"}),
    ],
)
def test_command_lines_of_other_servers_start(words: str, fields: dict[str, object]) -> None:
    assert engine_fields(read_config(parse_foreign(*words.split()), {})) == fields


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("-ngl 99", "-ngl has no effect: all layers are on one device, see --device"),
        ("-tp 1", "-tp has no effect: a model runs on one device; --replicas N runs several engines"),
        ("-c 64", "-c is --max-model-len here; the cache that all requests share is --kv-cache-memory"),
        ("-c 0", "-c 0 is the default here"),
        ("--disable-log-stats", "--disable-log-stats is --log-interval 0 here"),
        ("--no-enable-dbo", "--no-enable-dbo has no effect: a step is one batch"),
        ("--no-grpc", "--no-grpc has no effect: it is off here"),
    ],
)
def test_foreign_flag_that_is_taken_has_a_line(
    words: str, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    parse_foreign(*words.split())
    assert capsys.readouterr().err == f"foreword serve: {line}\n"


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            "-tp 2",
            "-tp can only be 1, got '2': a model runs on one device; --replicas N runs several engines",
        ),
        ("--revision main", "--revision: download the revision and pass its directory"),
        ("--no-enable-chunked-prefill", "--no-enable-chunked-prefill: prompts are always computed in chunks"),
        ("-nocb", "-nocb: requests are always batched"),
        ("-ctk", "-ctk expected a value"),
        ("--grpc=1", "--grpc takes no value, got '1'"),
        (
            "--kv-cache-memory-bytes many",
            "--kv-cache-memory-bytes must be a number such as 8k or 8192, got 'many'",
        ),
        (
            "--spec-tokens 3 --speculative-config {}",
            "--speculative-config: give its fields in JSON or one by one",
        ),
        ("--hf-overrides.a.b 1", '--hf-overrides can only be {}, got \'{"a": {"b": 1}}\''),
    ],
)
def test_foreign_flag_that_is_refused_has_a_line(
    words: str, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        parse_foreign(*words.split())
    err = capsys.readouterr().err
    assert caught.value.code == 2
    assert err.startswith(f"foreword serve: {line}") and err.count("\n") == 1


def test_all_refused_flags_are_reported_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--enable-prompt-embeds", "-tp", "2", "--hf-overrides", "{}", "--hf-overrides", '{"a": 1}']
    for unknown in ([], ["--magic"]):
        with pytest.raises(SystemExit) as caught:
            parse_foreign(*words, *unknown)
        lines = capsys.readouterr().err.splitlines()
        starts = [
            "--enable-prompt-embeds",
            "-tp",
            "--hf-overrides",
            *(f"unknown flag {word}" for word in unknown),
        ]
        assert caught.value.code == 2 and len(lines) == len(starts)
        for line, start in zip(lines, starts, strict=True):
            assert line.startswith(f"foreword serve: {start}")


def test_foreign_table_is_read_for_foreign_words_alone() -> None:
    own = Parser(prog="foreword serve")
    add_config_options(own)
    actions = own._option_string_actions
    ours = ["demo", "--port", "8", "--threads=2", "--dtype", "auto", "--seed", "1", "-h"]
    assert not has_foreign_words([*ours, "--", "--magic"], actions)
    for word in (["--max_num_seqs", "2"], ["-c", "3"], ["--max-model-len", "8k"], ["--dtype", "half2"]):
        assert has_foreign_words([*ours, *word], actions)


def test_own_flag_comes_before_a_foreign_one() -> None:
    """`generate` has --temperature; `-n` then means its --max-tokens."""
    parser = Parser(prog="foreword generate")
    add_config_options(parser)
    add_sampling_options(parser)
    words = "--temperature 0.5 -n 7 --repeat-penalty 1.1 --seed -1"
    args = parser.parse_args(words.split())
    assert (args.temperature, args.max_tokens, args.repetition_penalty) == (0.5, 7, 1.1)
    assert not hasattr(args, "seed")


def test_random_seed_of_the_environment() -> None:
    assert read_config(parse(), {"FOREWORD_SEED": "-1"}).seed is None


def test_variables_of_other_servers_are_named() -> None:
    environ = {
        "VLLM_CPU_KVCACHE_SPACE": "4",
        "LLAMA_ARG_CTX_SIZE": "64",
        "LLAMA_ARG_UI": "0",
        "VLLM_USE_V1": "1",
        "VLLM_PORT": "tcp://10.0.0.1:80",
        "VLLM_SERVICE_HOST": "10.0.0.1",
        "SGLANG_X": "",
        "HOME": "/",
    }
    assert foreign_variables(environ) == [
        "variables of other servers have no effect: LLAMA_ARG_CTX_SIZE (here --max-model-len 64), "
        "LLAMA_ARG_UI (here --no-ui), VLLM_CPU_KVCACHE_SPACE (here --kv-cache-memory 4GiB), VLLM_USE_V1"
    ]
    assert foreign_variables({"PATH": "x", "VLLM_API_KEY": "k"}) == []


@pytest.mark.parametrize("name", ["VLLM_API_KEY", "LLAMA_API_KEY", "LLAMA_ARG_API_KEY_FILE"])
def test_server_is_not_open_where_another_server_has_a_key(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} is set.*FOREWORD_API_KEY"):
        check_foreign_keys(Config(), {name: "secret"})
    check_foreign_keys(Config(), {name: ""})
    check_foreign_keys(Config(api_key="k"), {name: "secret"})
    check_foreign_keys(Config(api_key_file="f"), {name: "secret"})


def test_empty_file_changes_nothing(tmp_path: Path) -> None:
    file = tmp_path / "options.yaml"
    file.write_text("")
    assert read_config(parse("--config", str(file)), {}) == Config()


def test_help_shows_defaults_once() -> None:
    texts = {item.name: help_text(item) for item in option_fields()}
    assert texts["port"].endswith("(default: 8000)")
    assert texts["max_num_seqs"].count("(default") == 1
    assert all(text.count("(default") <= 1 for text in texts.values())


def test_engine_fields_differ_from_defaults() -> None:
    config = Config(block_size=32, speculate="off", cpu_isa="auto")
    assert engine_fields(config) == {"block_size": 32, "speculate": "off"}


def test_flag_and_environment_names() -> None:
    assert (flag("max_model_len"), environment_name("max_model_len")) == (
        "--max-model-len",
        "FOREWORD_MAX_MODEL_LEN",
    )


@pytest.mark.parametrize(
    "words",
    [
        ("/models/a", "--served-model-name", "a", "b"),
        ("--served-model-name", "a,b", "--port", "1", "/models/a"),
        ("--served-model-name", "a", "b", "--model", "/models/a"),
    ],
)
def test_names_are_joined_by_commas_or_spaces(words: tuple[str, ...]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", nargs="?", default=argparse.SUPPRESS)
    add_config_options(parser)
    config = read_config(parser.parse_args(words), {})
    assert config.served_names() == ("a", "b") and config.model == "/models/a"


def test_model_that_a_flag_took_for_a_name_is_an_error() -> None:
    with pytest.raises(ConfigError, match="if '/models/a' is the model, put it before this flag"):
        read_config(parse("--served-model-name", "a", "/models/a"), {})


def test_words_after_the_name_are_a_prompt_where_nothing_is_served() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("prompt")
    add_config_options(parser, ("model",))
    args = parser.parse_args(["--served-model-name", "a", "Hello"])
    assert (args.prompt, read_config(args, {}).served_names()) == ("Hello", ("a",))


def test_names_may_be_a_list_in_the_file(tmp_path: Path) -> None:
    file = tmp_path / "options.yaml"
    file.write_text("served_model_name: [prod, qwen]\n")
    assert read_config(parse("--config", str(file)), {}).served_names() == ("prod", "qwen")


@pytest.mark.parametrize("name", ["api_key", "api_key_file"])
@pytest.mark.parametrize("value", ["", " "])
def test_empty_key_is_an_error(name: str, value: str) -> None:
    """A secret that was not filled in must not start a server without keys."""
    hint = f"{name} is empty; .* leave out {flag(name)} and unset {environment_name(name)}"
    for words, environ in (([flag(name), value], {}), ([], {environment_name(name): value})):
        with pytest.raises(ConfigError, match=hint):
            read_config(parse(*words), environ)


@pytest.mark.parametrize("keys", ["a,,b", ",", "a,", " ,a"])
def test_empty_key_in_a_list_is_an_error(keys: str) -> None:
    with pytest.raises(ConfigError, match="api_key has an empty key; to serve without keys"):
        read_config(parse(), {"FOREWORD_API_KEY": keys})
    assert read_config(parse("--api-key", "a, b"), {"FOREWORD_API_KEY": keys}).api_key == "a, b"


def test_several_words_are_models() -> None:
    def read(*words: str) -> Config:
        parser = argparse.ArgumentParser()
        add_serve_arguments(parser)
        return read_config(parser.parse_args(words), {})

    assert (read("a").model, read("a").models) == ("a", None)
    assert (read("--port", "1", "a", "b").model, read("a", "b", "--port", "1").models) == (None, "a,b")
    assert read("--models", "a", "b,c").models == "a,b,c"
    with pytest.raises(ConfigError, match="two models are given, a,b and --models c; leave one out"):
        read("a", "b", "--models", "c")
    with pytest.raises(ConfigError, match="give --model or --models, not both"):
        read("a", "--models", "b")
