"""Config from flags, environment and file, in that order; errors are one line."""

import argparse
from pathlib import Path

import pytest

from foreword.cli.flags import (
    add_config_options,
    engine_fields,
    environment_name,
    flag,
    help_text,
    read_config,
)
from foreword.config.options import Config, option_fields
from foreword.errors import ConfigError


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
        ({"FOREWORD_PORT": "many"}, "FOREWORD_PORT must be of type int, got 'many'"),
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
        ("prot: 1", "unknown option 'prot'; did you mean port?"),
        ("port: [1, 2]", "port must be a single value"),
        ("port: x", "port must be of type int, got 'x'"),
        ("- port", "must hold `option: value` lines"),
        ("a: b: c", "is not YAML"),
        ("{" * 10_000, "is not YAML"),
        (f"port: {'9' * 400}", "a number of 1329 bits"),
        ("port: 1e3", "port must be of type int"),
    ],
)
def test_file_errors_name_the_option(tmp_path: Path, text: str, part: str) -> None:
    file = tmp_path / "options.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_config(parse("--config", str(file)), {})
    assert part in str(caught.value)
    assert "\n" not in str(caught.value)


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
    assert engine_fields(Config(block_size=32, speculate="off")) == {"block_size": 32, "speculate": "off"}


def test_flag_and_environment_names() -> None:
    assert (flag("max_model_len"), environment_name("max_model_len")) == (
        "--max-model-len",
        "FOREWORD_MAX_MODEL_LEN",
    )
