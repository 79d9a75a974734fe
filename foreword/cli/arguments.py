"""Arguments of the commands whose modules import torch or FastAPI: a wrong flag is answered before that."""

from __future__ import annotations

import argparse

from foreword.cli.flags import ENGINE_GROUPS, add_config_options


def add_serve_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_words(parser)
    add_config_options(parser)


def add_check_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_words(parser)
    add_config_options(parser, (*ENGINE_GROUPS, "fleet"), more=("engine_key", "log_level"))


def add_run_batch_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_words(parser)
    parser.add_argument(
        "-i", "--input", required=True, metavar="FILE", help="requests, one JSON object per line"
    )
    parser.add_argument("-o", "--output", required=True, metavar="FILE", help="results; existing ones stay")
    parser.add_argument(
        "--url", "--base-url", metavar="URL", help="use this server instead of loading a model"
    )
    parser.add_argument(
        "--concurrency", type=int, metavar="N", help="requests at once (default: twice what the engine runs)"
    )
    add_config_options(parser)


def add_env_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="one JSON object")


def add_model_word(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model_word", nargs="?", metavar="MODEL", help="same as --model")


def add_model_words(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model_words", nargs="*", metavar="MODEL", help="same as --model; several: --models")
