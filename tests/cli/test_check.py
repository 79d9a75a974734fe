"""`foreword check` on the bundled demo and on invalid directories."""

import json
import os
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from foreword.cli import check as command
from foreword.cli.check import sets_that_fit
from foreword.cli.main import main
from foreword.config.models_file import ModelEntry
from foreword.config.options import Config
from foreword.demo import DRAFTER, MODEL
from foreword.errors import ConfigError
from foreword.fleet.memory import ModelPlan
from foreword.models.heads.head_loader import read_head_info
from foreword.models.model_loader import read_model_info
from foreword.planning.hardware import HardwareInfo
from foreword.planning.memory import format_bytes
from foreword.planning.memory_plan import MemoryPart
from tests.server.conftest import run_server
from tests.support.block_heads import (
    MARKOV_RANK,
    dflash_config,
    dflash_tensors,
    dspark_config,
    markov_tensors,
)
from tests.support.checkpoints import change_config, change_tensors, write_checkpoint, write_json
from tests.support.engines import load_engine, make_request, run
from tests.support.gguf_files import Kind, write_gguf
from tests.support.heads import write_head, write_random_head
from tests.support.mtp_checkpoints import write_mtp_checkpoint
from tests.support.tool_checkpoint import write_tool_checkpoint
from tests.support.vision_checkpoints import write_vision_checkpoint

FILE = """
memory_limit: 1200MiB
models:
  demo:
    pinned: true
    draft_model: demo
    variants:
      creative: {temperature: 1.2}
  vision: {model: demo-vision, keep_alive: -1, preload: true, cpus: "%d"}
  third: {model: demo, served_model_name: other, threads: 3, speculate: off}
"""


def check(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    code = main(["check", *words])
    return code, capsys.readouterr().out


def edited(tmp_path: Path, source: Path, file: str, **changes: object) -> str:
    """A copy of a checkpoint without weights, with one JSON file changed."""
    for path in source.iterdir():
        if path.suffix != ".safetensors":
            shutil.copy(path, tmp_path)
    content = json.loads((tmp_path / file).read_text())
    (tmp_path / file).write_text(json.dumps(content | changes))
    return str(tmp_path)


def test_demo_fits(capsys: pytest.CaptureFixture[str]) -> None:
    code, text = check(capsys, "demo", "--draft-model", "demo")
    assert code == 0
    assert "draft tokenizer: the same, token by token" in text
    assert re.search(r"\n {7}draft model +[0-9.]+ KiB  bfloat16 ", text)
    assert re.search(r"\n {7}KV cache +[0-9.]+ MiB  \d+ tokens in bfloat16, 3.5 KiB a token\n", text)
    assert not any(line.startswith("no ") for line in text.splitlines())


def test_unsupported_architecture_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, text = check(capsys, edited(tmp_path, MODEL, "config.json", model_type="mamba"))
    assert code == 1
    assert "no   model:" in text
    assert "mamba" in text


def test_other_tokenizer_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = json.loads((DRAFTER / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    a, b = sorted(vocab, key=vocab.get)[400:402]
    vocab[a], vocab[b] = vocab[b], vocab[a]
    code, text = check(
        capsys, "demo", "--draft-model", edited(tmp_path, DRAFTER, "tokenizer.json", model=tokenizer["model"])
    )
    assert code == 1
    assert "no   draft model: the draft model's tokenizer differs from the model's: id 400 is" in text


def test_too_little_memory_fails(capsys: pytest.CaptureFixture[str]) -> None:
    code, text = check(capsys, "demo", "--kv-cache-memory", "64tokens", "--max-model-len", "512")
    assert code == 1
    assert "no   memory: max_model_len 512 does not fit into a KV cache of 64 tokens" in text


def test_shortened_context_is_a_note(capsys: pytest.CaptureFixture[str]) -> None:
    code, text = check(capsys, "demo", "--kv-cache-memory", "128tokens")
    assert code == 0
    assert "note context: 128 of 1024 tokens" in text


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
def test_disk_of_the_kv_cache_is_checked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kv_cache_dtype: str
) -> None:
    model, kv = write_checkpoint(tmp_path / "tiny"), tmp_path / "kv"
    options = {"kv_cache_dtype": kv_cache_dtype, "kv_cache_dir": str(kv), "kv_cache_disk": "100KiB"}
    words = [str(model), *(f"--{name.replace('_', '-')}={value}" for name, value in options.items())]
    code, text = check(capsys, *words)
    (found,) = re.findall(
        r"ok +disk: (\S+ \S+) a token; 100.0 KiB in \S+/kv hold (\d+) tokens; private", text
    )
    assert code == 0 and not kv.exists(), "nothing is written"
    engine = load_engine(model, max_model_len=128, **options)
    run(engine, [make_request("one", list(range(5, 60)), max_tokens=2)])
    engine.close()
    (size,) = {path.stat().st_size for path in kv.glob("tiny-*/blocks/*/*")}
    assert found == (format_bytes(size / 16), f"{(100 << 10) * 16 / size:.0f}")
    for problem in ("1KiB", "writable", "root", "file"):
        if problem == "writable":
            next(kv.glob("tiny-*")).chmod(0o777)
        elif problem == "root":
            next(kv.glob("tiny-*")).chmod(0o700)
            kv.chmod(0o777)
        elif problem == "file":
            shutil.rmtree(kv)
            kv.write_text("")
        code, text = check(capsys, *words[:-1], f"--kv-cache-disk={'1KiB' if problem == '1KiB' else '1GiB'}")
        assert code == 1
        private = "must be a directory of this user that no one else may write to"
        reasons = {
            "1KiB": "kv_cache_disk 1KiB holds no block: a block of 16 tokens has ",
            "writable": private,
            "root": f"{kv} {private}",
            "file": "is no directory that this user may write to",
        }
        assert re.search(rf"no +disk: .*{re.escape(reasons[problem])}", text), problem


@pytest.mark.parametrize("family", ["llama", "qwen3_5_text"])
def test_host_memory_of_the_kv_cache_is_checked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], family: str
) -> None:
    model = write_checkpoint(tmp_path / "tiny", family)
    code, text = check(capsys, str(model), "--kv-cache-host-memory", "100KiB")
    (tokens,) = re.findall(r"ok +host memory: 100.0 KiB of each engine hold (\d+) tokens", text)
    assert code == 0 and re.search(r"^ +host memory +100.0 KiB", text, re.MULTILINE), "a part of the plan"
    engine = load_engine(model, max_model_len=128, kv_cache_host_memory="100KiB")
    assert engine.prefix_loader is not None
    num_slots = len(engine.prefix_loader.tiers[0].blocks._free)  # type: ignore[attr-defined]
    assert 0 <= int(tokens) - 16 * num_slots < 16
    engine.close()
    code, text = check(capsys, str(model), "--kv-cache-host-memory", "100")
    assert code == 1 and "kv_cache_host_memory 100 holds no block: a block of 16 tokens has" in text


def test_shared_memory_and_a_limit_without_a_directory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, line in (("advise", "ok   shared memory: with huge"), ("never", "note shared memory: without")):
        pages = tmp_path / "shmem_enabled"
        pages.write_text(f"always [{name}]" if name == "advise" else "always [never]")
        monkeypatch.setattr(command, "SHMEM_HUGE_PAGES", pages)
        code, text = check(capsys, "demo", "--kv-cache-shared-memory")
        assert code == 0 and line in text
    assert main(["check", "demo", "--kv-cache-disk", "1GiB"]) == 2
    assert "--kv-cache-disk limits the files of --kv-cache-dir DIR" in capsys.readouterr().err


def test_weight_files_are_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_checkpoint(tmp_path / "model")
    assert re.search(r"ok   weights: [0-9.]+ KiB in safetensors files", check(capsys, str(path))[1])
    (path / "model.safetensors").rename(path / "pytorch_model.bin")
    code, text = check(capsys, str(path))
    assert code == 1
    assert "no   weights:" in text and "holds pickled weights (pytorch_model.bin)" in text
    assert check(capsys, str(path), "--load-format", "dummy")[0] == 0


def test_shapes_in_the_headers_are_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_checkpoint(tmp_path / "model", hidden_size=256, intermediate_size=256, num_attention_heads=8)
    file = write_gguf(path, tmp_path / "model.gguf", Kind.Q4_0)
    assert "ok   weights: " in check(capsys, str(file))[1]
    config = json.loads((path / "config.json").read_text())
    write_json(path / "config.json", config | {"vocab_size": 400})
    for words in ([str(path)], ["demo", "--draft-model", str(path)]):
        code, text = check(capsys, *words)
        assert (
            code == 1
            and "tensor `model.embed_tokens.weight` is [272, 256], the config says [400, 256]" in text
        )
    write_json(path / "config.json", config | {"num_hidden_layers": 1})
    code, text = check(capsys, str(path))
    assert code == 1 and "no   weights:" in text and "unexpected tensors: model.layers.1." in text


def test_sampling_defaults_and_template_are_checked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_checkpoint(tmp_path / "model")
    write_json(path / "generation_config.json", {"temperature": 0.6, "top_p": 7})
    (tmp_path / "x.jinja").write_text("{{ messages[-1].content }}")
    code, text = check(capsys, str(path), "--chat-template", str(tmp_path / "x.jinja"))
    assert code == 0
    assert "ok   sampling defaults: temperature 0.6; --generation-config none turns them off" in text
    assert "generation_config.json: top_p is not used: top_p must be above 0 and at most 1, got 7" in text
    assert "sampling" not in check(capsys, str(path), "--generation-config", "none")[1]
    (tmp_path / "x.jinja").write_text("{% for %}")
    code, text = check(capsys, str(path), "--chat-template", str(tmp_path / "x.jinja"))
    assert code == 1 and "syntax error in line 1" in text


def test_tool_format_is_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(write_tool_checkpoint(tmp_path))
    line = "tool calls: hermes (markers of the chat template), proven; reasoning between <think> and </think>"
    assert f"ok   {line}" in check(capsys, path)[1]
    code, text = check(capsys, path, "--tool-format", "mistral-v3")
    assert code == 0 and "note tool calls: mistral-v3 (--tool-format), not proven (a call: " in text
    code, text = check(capsys, path, "--tool-format", "hermess")
    assert code == 1 and "tool_format 'hermess' is not known; did you mean hermes?" in text
    assert "is one of auto, none, hermes, " in check(capsys, path, "--tool-format", "?")[1]


def test_missing_added_tokens_of_the_drafter_are_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, drafter = (write_checkpoint(tmp_path / name) for name in ("model", "drafter"))
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    tokenizer.add_tokens(["<tool>"])
    tokenizer.save(str(model / "tokenizer.json"))
    text = check(capsys, str(model), "--draft-model", str(drafter))[1]
    assert "ok   draft tokenizer: the same, but lacks 1 added tokens" in text
    assert "note draft size: the draft model has 1.0 times the model's parameters" in text


def test_trained_head_is_counted_and_must_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = write_checkpoint(tmp_path / "model")
    head = write_random_head(tmp_path / "head", model)
    code, text = check(capsys, str(model), "--draft-model", str(head), "--max-num-seqs", "2")
    assert code == 0 and "ok   trained head: eagle3, 68.9 k parameters in float32, fits" in text
    assert re.search(r"ok   a draft token reads at most \d\d\.\d% of the model's parameters", text)
    assert re.search(r"trained head +269\.\d KiB  float32", text)
    # 2 requests of 32 draft tokens; K and V of 2 heads of 16 and a hidden state of 64, in float32
    assert re.search(r"draft tokens +32\.0 KiB  room of the trained head", text)
    assert "speculation: grammar, prediction, suffix, text, eagle3;" in text
    change_config(head, vocab_size=100)
    code, text = check(capsys, str(model), "--draft-model", str(head))
    assert code == 1 and "trained head: the EAGLE-3 head is made for a model with 100 tokens" in text


def test_block_head_counts_a_draft_and_the_layers_of_its_memory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = write_checkpoint(tmp_path / "model")
    config = dflash_config(model)
    head = write_head(tmp_path / "head", config, dflash_tensors(config))
    code, text = check(capsys, str(model), "--draft-model", str(head), "--max-num-seqs", "2")
    assert code == 0 and re.search(r"ok   trained head: dflash, [\d.]+ k parameters in float32, fits", text)
    assert re.search(r"ok   a draft of up to 7 tokens reads at most [\d.]+% of the model's parameters", text)
    _, shorter = check(capsys, str(model), "--draft-model", str(head), "--num-speculative-tokens", "4")
    assert "ok   a draft of up to 4 tokens reads" in shorter
    # 2 requests of 33 rows in blocks of 16; K and V of 2 heads of 16 in 2 layers, in float32
    assert re.search(r"draft tokens +48\.0 KiB  room of the trained head", text)
    assert "speculation: grammar, prediction, suffix, text, dflash;" in text


def test_markov_head_is_counted_for_each_token(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = write_checkpoint(tmp_path / "model")
    config = dspark_config(model)
    size, vocab_size = config["hidden_size"], config["vocab_size"]
    tensors = dflash_tensors(config) | markov_tensors(vocab_size, vocab_size, size)
    head = write_head(tmp_path / "head", config, tensors)
    code, text = check(capsys, str(model), "--draft-model", str(head))
    own = sum(value.numel() for value in tensors.values())
    # The model's output layer once, and a table of the Markov head for each of 8 tokens
    num_read = own + vocab_size * (size + 7 * MARKOV_RANK)
    share = num_read / read_model_info(model).parameters
    assert code == 0 and f"ok   a draft of up to 8 tokens reads at most {share:.1%} of the model's" in text


def test_mtp_head_of_the_model_is_no_draft_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = write_mtp_checkpoint(tmp_path / "model", "qwen3_5_text")
    code, text = check(capsys, str(model))
    assert code == 0 and re.search(r"ok   trained head: mtp, [\d.]+ k parameters in float32, fits", text)
    assert re.search(r"trained head +[\d.]+ KiB  float32", text)
    assert "draft model" not in text and "draft weights" not in text and "draft size" not in text
    info = read_model_info(model)
    for options, num_rows in ((("--mtp-vocab-size", "100"), 100), ((), info.vocab_size)):
        text = check(capsys, str(model), *options)[1]
        num_read = read_head_info(model, model).parameters + num_rows * 64  # of the model's output layer
        assert f"a draft token reads at most {num_read / info.parameters:.1%} of the model's" in text


def test_mtp_head_that_cannot_load_is_a_note_unless_it_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = write_mtp_checkpoint(tmp_path / "model", "qwen3_5_text")
    change_tensors(model, **{"mtp.layers.0.mlp.down_proj.weight": None})
    code, text = check(capsys, str(model))
    assert code == 0 and re.search(r"note the MTP head, which drafts, is not used: .*down_proj", text)
    assert "speculation: grammar, prediction, suffix, text;" in text
    code, text = check(capsys, str(model), "--speculate", "mtp")
    assert code == 1 and re.search(r"no   trained head: .*down_proj", text)


def test_cpu_memory_is_divided(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    cpu = HardwareInfo("cpu", 4, 20 << 30, True)
    monkeypatch.setattr(command, "detect_hardware", lambda *_: cpu)
    text = check(capsys, "demo")[1]
    lines = text[text.index("ok   memory:") :].splitlines()
    assert lines[0] == "ok   memory:" and lines[1].split()[0] == "weights"
    assert re.search(
        r"^ {7}sum +\d+\.\d MiB  of 20.00 GiB free, of which 2.00 GiB stay in reserve$", text, re.M
    )
    _, text = check(capsys, "demo", "--kv-cache-memory", "100tokens")
    assert "of 20.00 GiB free\n" in text


def test_model_that_does_not_fit_has_a_plan_and_flags_that_help(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "detect_hardware", lambda *_: HardwareInfo("cpu", 4, 11 << 20, True))
    code, text = check(capsys, "demo")
    assert code == 1
    assert re.search(r"no   memory: the model does not fit: .* What would help: .*--quantization int4", text)
    assert re.search(
        r"note memory:\n {7}weights +9.2 MiB  bfloat16 9.2 MiB\n {7}KV cache +[0-9.]+ MiB  512", text
    )


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ([], "ok   speculation: grammar, prediction, suffix, text; at most 32 tokens a request and step"),
        (["--speculate", "off"], "ok   speculation: off"),
        (
            ["--num-speculative-tokens", "0"],
            "note num_speculative_tokens is 0: nothing is drafted, as with --speculate off",
        ),
        (
            ["--draft-model", "demo", "--speculate", "ngram"],
            "note the draft model demo is not used: --speculate ngram names no drafter that needs it",
        ),
        (
            ["--speculative-config", '{"disable_by_batch_size": 4}'],
            "note speculative_config: disable_by_batch_size has no effect: the controller decides",
        ),
        (
            ["--speculative-config", '{"num_speculative_tokens": 3}'],
            "ok   speculation: grammar, prediction, suffix, text; at most 3 tokens a request and step",
        ),
        (
            ["--draft-model", str(MODEL)],
            "note draft size: the draft model has 1.0 times the model's parameters",
        ),
    ],
)
def test_speculation_is_described(words: list[str], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, text = check(capsys, "demo", *words)
    assert code == 0 and any(shown.startswith(line) for shown in text.splitlines()), text


def test_image_token_counts_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, text = check(capsys, str(write_vision_checkpoint(tmp_path, "llava_next")))
    assert code == 0
    # 16 of the base image, and rows 1 to 6 and 2 to 5 of four 8 x 8 tiles, each with a newline.
    assert (
        "ok   images: 26.7 k parameters in the vision encoder; "
        "640 x 480 is 70 tokens, 1920 x 1080 is 52 tokens" in text
    )
    assert "images" not in check(capsys, "demo")[1]


def test_unsupported_image_processor_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_vision_checkpoint(tmp_path)
    values = json.loads((path / "preprocessor_config.json").read_text(encoding="utf-8"))
    (path / "preprocessor_config.json").write_text(
        json.dumps(values | {"crop_size": {"height": 20, "width": 20}})
    )
    code, text = check(capsys, str(path))
    assert code == 1
    assert "no   images:" in text and "must give 28 x 28 pixels, the size of the vision encoder" in text


def test_gguf_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint = write_checkpoint(
        tmp_path / "model", hidden_size=256, intermediate_size=256, num_attention_heads=8
    )
    file = write_gguf(checkpoint, tmp_path / "model.gguf", Kind.Q4_0)
    code, text = check(capsys, str(file), "--draft-model", str(checkpoint))
    assert code == 0
    assert "tokenizer: 270 ids, 272 rows in the model, 2 without a token" in text
    assert "draft tokenizer: the same, token by token" in text
    other = write_gguf(checkpoint, tmp_path / "other.gguf", Kind.IQ3_XXS)
    code, text = check(capsys, str(other))
    assert code == 1
    assert "tensor types without kernels: iq3_xxs (" in text and "--gguf-dequantize" in text
    assert check(capsys, str(other), "--gguf-dequantize")[0] == 0


def test_missing_directory_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "./nowhere"]) == 2
    assert "./nowhere" in capsys.readouterr().err


def test_missing_gpu_fails(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def missing(config: Config, *_: object) -> HardwareInfo:
        raise ConfigError("no NVIDIA GPU", "device")

    monkeypatch.setattr(command, "detect_hardware", missing)
    code, text = check(capsys, "demo", "--device", "cuda")
    assert code == 1 and "no   memory: no NVIDIA GPU" in text


@pytest.mark.parametrize("reason", [None, "Triton is not installed"])
def test_gpu_memory_is_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], reason: str | None
) -> None:
    """An old GPU: the estimate, float16 for bfloat16, and the reason against Triton."""
    gpu = HardwareInfo("cuda", 4, 15 << 30, False, "triton", 16 << 30, "Tesla T4", (7, 5))
    monkeypatch.setattr(command, "detect_hardware", lambda *_: gpu)
    monkeypatch.setattr(command, "native_unavailable_reason", lambda *_: reason)
    code, text = check(capsys, "demo")
    assert code == 0
    assert (
        "note dtype bfloat16 is not supported on Tesla T4 (compute capability 7.5): float16 instead" in text
    )
    assert re.search(
        r"\n {7}sum +[0-9.]+ GiB  of 14.40 GiB that may be used on Tesla T4; 15.00 GiB are free\n", text
    )
    assert re.search(r"\n {7}CUDA and other processes +1.00 GiB\n", text)
    assert "by this estimate it does not fit" not in text
    assert ("note Triton is not installed" in text) is (reason is not None)


def test_doubtful_estimate_is_a_note(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny = HardwareInfo("cuda", 4, 1 << 30, True, "triton", 1100 << 20, "NVIDIA X", (8, 6))
    monkeypatch.setattr(command, "detect_hardware", lambda *_: tiny)
    monkeypatch.setattr(command, "native_unavailable_reason", lambda *_: None)
    code, text = check(capsys, "demo", "--max-num-batched-tokens", "60000", "--max-num-seqs", "8")
    assert (
        code == 0
        and "note by this estimate it does not fit, and loading measures it; what would help: --max" in text
    )


@pytest.mark.full
def test_replicas_that_differ_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    key = "a key of the engine"
    with run_server(Config(engine_key=key)) as first, run_server(Config(engine_key=key)) as other:

        def check_urls(*urls: str, engine_key: str = key, context: int | None = None) -> tuple[int, str]:
            words = ["--replicas", "0", "--engine-key", engine_key, "--replica-urls", ",".join(urls)]
            return check(capsys, *words, *(() if context is None else ("--max-model-len", str(context))))

        code, text = check_urls(first.url, other.url)
        assert code == 0
        assert text.count("fingerprint fp_fake") == 2
        assert "memory" not in text
        code, text = check_urls(first.url, "http://127.0.0.1:9")
        assert code == 1
        assert "no   replica http://127.0.0.1:9: " in text
        short = replace(other.client.info.resolved, max_model_len=512)
        other.client.info = replace(other.client.info, resolved=short)
        assert check_urls(first.url, other.url, context=512)[0] == 0
        code, text = check_urls(first.url, other.url, context=1024)
        assert code == 1
        assert (
            f"no   replica {other.url}: its context of 512 tokens is shorter than the router's 1024" in text
        )
        other.client.info = replace(other.client.info, fingerprint="fp_other")
        code, text = check_urls(first.url, other.url)
        assert code == 1
        assert f"no   replica {other.url}: fingerprint fp_other differs" in text
        code, text = check_urls(first.url, engine_key="the key of no engine")
        assert code == 1
        assert f"no   replica {first.url}: " in text


def check_models(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, *words: str
) -> tuple[int, str]:
    file = tmp_path / "models.yaml"
    file.write_text(text)
    code = main(["check", "--models", str(file), *words])
    captured = capsys.readouterr()
    return code, captured.out + captured.err


@pytest.mark.full
def test_replicas_and_models_of_other_machines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A router needs a model's config and tokenizer, but not its weights."""
    without_weights = tmp_path / "demo"
    shutil.copytree(MODEL, without_weights, ignore=shutil.ignore_patterns("*.safetensors"))
    file = "models:\n  a: {model: %s, replicas: 0, replica_urls: [http://127.0.0.1:9], pinned: true}\n"
    file += "  b: {model: demo, replicas: 2, variants: {brief: {max_tokens: 3}}}\n"
    code, text = check_models(
        tmp_path, capsys, file % without_weights, "--engine-key", "a key of the engines"
    )
    assert code == 1 and text.startswith("no   a: replica http://127.0.0.1:9: no connection"), text
    assert text.count("no   ") == 1 and "ok   a: engines of http://127.0.0.1:9; pinned\n" in text
    assert re.search(r"ok   b: \S+ GiB on cpu for 2 replicas; context 1024 tokens; ", text)
    assert text.count("memory of") == 1 and "all fit together" in text


def test_the_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cpu = min(os.sched_getaffinity(0))
    code, text = check_models(tmp_path, capsys, FILE % cpu)
    assert code == 0
    drafters = "drafters grammar, prediction, suffix, text, draft"
    assert re.search(
        rf"^ok   demo: \d+\.\d MiB on cpu; context 1024 tokens; {drafters}; 1 thread on", text, re.M
    )
    assert "pinned; variants demo:creative\n" in text
    assert re.search(r"\n       draft model +[0-9.]+ KiB  bfloat16 ", text)
    assert f"1 thread on cores {cpu}; loaded at the start, stays until memory is needed\n" in text
    assert re.search(
        r"speculation off; up to 3 threads .*; unloaded after 300 s .*; also called other\n", text
    )
    assert text.endswith(
        "ok   memory of cpu: models may use 1.17 GiB; these fit together:\n"
        "       demo, vision\n       demo, third\n"
    )


@pytest.mark.full
def test_all_models_may_fit_together(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = "memory_limit: 2GiB\nmodels: {demo: , demo-vision: }"
    assert "models may use 2.00 GiB; all fit together, in " in check_models(tmp_path, capsys, text)[1]
    text = check_models(tmp_path, capsys, text, "--max-loaded-models", "1")[1]
    assert text.endswith("at most 1 at a time; these fit together:\n       demo\n       demo-vision\n")


@pytest.mark.full
def test_a_broken_model_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(MODEL, broken)
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps(config | {"model_type": "mamba"}))
    code, text = check_models(tmp_path, capsys, f"models: {{demo: , broken: {{model: {broken}}}}}")
    assert code == 1
    assert "no   broken: model: " in text and "no   memory: model broken: " in text


def plan(name: str, size: int, pinned: bool = False) -> ModelPlan:
    entry = ModelEntry(name, Config(), pinned=pinned)
    return ModelPlan(entry, "cpu", (MemoryPart("weights", size),), None)  # type: ignore[arg-type]


def test_sets_that_fit() -> None:
    plans = [plan("a", 4), plan("b", 3, pinned=True), plan("c", 3), plan("d", 2)]
    assert sets_that_fit(plans, 10) == [("a", "b", "c"), ("a", "b", "d"), ("b", "c", "d")]
    assert sets_that_fit(plans, 9) == [("a", "b", "d"), ("b", "c", "d")]
    assert sets_that_fit(plans, 10, max_loaded=2) == [("a", "b"), ("b", "c"), ("b", "d")]
    assert sets_that_fit(plans, 3) == [("b",)]


@given(st.lists(st.integers(1, 9), min_size=1, max_size=7), st.integers(1, 30))
def test_sets_are_maximal(sizes: list[int], limit: int) -> None:
    plans = {str(index): plan(str(index), size) for index, size in enumerate(sizes)}
    sets = [{*names} for names in sets_that_fit(list(plans.values()), limit)]
    for names in sets:
        total = sum(plans[name].num_bytes for name in names)
        assert total <= limit
        assert all(total + plans[name].num_bytes > limit for name in plans.keys() - names)
    assert not any(names < larger for names in sets for larger in sets)
