"""prepare_checkpoint(): tokenizer and ids of a checkpoint, without torch."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from foreword import LLM, SamplingParams
from foreword.checkpoint import model_names, prepare_checkpoint, read_tokenizer, resolve_paths
from foreword.config.options import Config
from foreword.demo import MODEL, VISION_MODEL
from foreword.errors import CheckpointError, ConfigError, InvalidRequest
from foreword.models.architectures import ARCHITECTURES
from foreword.models.model_loader import TEXT_MODELS, VISION_MODELS, read_model_info
from foreword.tokenizer.tokenizer import Tokenizer
from foreword.weights.gguf.header import open_gguf
from foreword.weights.gguf.hf_config import MODEL_TYPES
from foreword.weights.unsupported_families import TYPES_WITH_STATES, describe_checkpoint, missing_feature
from tests.support.checkpoints import (
    STATE_FAMILIES,
    VOCAB_SIZE,
    change_config,
    write_checkpoint,
    write_config,
    write_json,
)
from tests.support.gguf_files import RawGGUF, write_gguf
from tests.support.heads import read_head, write_gguf_head, write_random_head
from tests.support.vision_checkpoints import IMAGE_TOKEN_ID, write_vision_checkpoint


def test_gguf_file_is_prepared_without_torch(tmp_path: Path) -> None:
    file = write_gguf(write_checkpoint(tmp_path / "checkpoint"), tmp_path / "model.gguf")
    code = (
        "import sys; from foreword.config.options import Config; import foreword.checkpoint as c; "
        f"print(c.prepare_checkpoint(Config(model={str(file)!r})).never_sampled_ids, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "(270, 271) False\n"


def test_both_formats_have_the_same_vocabulary(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "checkpoint")
    file = write_gguf(checkpoint, tmp_path / "model.gguf")
    (theirs, their_rows), (ours, our_rows) = read_tokenizer(checkpoint), read_tokenizer(file)
    assert ours.diff(theirs) is None
    assert our_rows == their_rows == VOCAB_SIZE
    assert (ours.eos_token_ids[0], ours.chat_template) == (theirs.eos_token_ids[0], theirs.chat_template)
    prepared = prepare_checkpoint(Config(model=str(checkpoint), draft_model=str(file)))
    assert prepared.config.draft_model == str(file)


def test_draft_model_with_another_tokenizer_is_refused(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "checkpoint")
    file = write_gguf(checkpoint, tmp_path / "model.gguf")
    file.write_bytes(file.read_bytes().replace(b"<|im_start|>", b"<|im_begin|>"))
    with pytest.raises(ConfigError, match=r"tokenizer differs.*id 258 is '<\|im_start\|>' in the one"):
        prepare_checkpoint(Config(model=str(checkpoint), draft_model=str(file)))


def test_vllm_config_names_a_head_by_its_folder_alone(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "checkpoint")
    head = write_random_head(tmp_path / "head", checkpoint)
    given = {"model": str(head), "parallel_drafting": True, "disable_by_batch_size": 8}
    config = Config(model=str(checkpoint), speculative_config=json.dumps(given))
    prepared = prepare_checkpoint(config).config
    assert prepared.drafter_names() == ("eagle3",) and resolve_paths(prepared) == prepared
    notes = LLM(str(checkpoint), max_model_len=64, speculative_config=given).info.resolved.notes
    assert [note.split(" has no effect")[0] for note in notes] == [
        "speculative_config: disable_by_batch_size",
        "speculative_config: parallel_drafting",
    ]
    text = json.dumps(given | {"model": str(checkpoint)})
    with pytest.raises(ConfigError, match="parallel_drafting can only be false with draft_model"):
        prepare_checkpoint(replace(config, speculative_config=text))


def test_heads_of_the_eagle_family_are_known_by_their_names(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "checkpoint")
    head = write_random_head(tmp_path / "head", checkpoint)
    config = Config(model=str(checkpoint), draft_model=str(head))
    for name in ("Eagle3Qwen3vlForCausalLM", "Eagle3Qwen2_5vlForCausalLM", "PEagleDraftModel"):
        change_config(head, architectures=[name])
        assert "eagle3" in prepare_checkpoint(config).config.drafter_names()
    for name in ("Eagle3DeepseekV2ForCausalLM", "EagleLlamaForCausalLM", "LlamaForCausalLMEagle"):
        change_config(head, architectures=[name])
        for speculate in ("auto", "eagle3"):
            with pytest.raises(CheckpointError, match=f"trained head of the kind {name} is not supported"):
                prepare_checkpoint(replace(config, speculate=speculate))


def test_trained_head_needs_no_tokenizer(tmp_path: Path) -> None:
    """Its method joins the drafters, without an import of what it computes."""
    checkpoint = write_checkpoint(tmp_path / "checkpoint")
    head = write_random_head(tmp_path / "head", checkpoint)
    for speculate, names in (
        ("auto", ("grammar", "prediction", "suffix", "text", "eagle3")),
        ("draft", ("eagle3",)),
    ):
        config = Config(model=str(checkpoint), draft_model=str(head), speculate=speculate)
        prepared = prepare_checkpoint(config).config
        assert prepared.drafter_names() == names and resolve_paths(prepared) == prepared
    file = write_gguf_head(tmp_path / "head.gguf", *read_head(head))
    assert "eagle3" in resolve_paths(Config(model=str(checkpoint), draft_model=str(file))).drafter_names()


def test_suppressed_tokens_are_never_sampled(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path)
    before = prepare_checkpoint(Config(model=str(path))).never_sampled_ids
    generation = json.loads((path / "generation_config.json").read_text())
    write_json(path / "generation_config.json", generation | {"suppress_tokens": [7, 5, VOCAB_SIZE]})
    after = prepare_checkpoint(Config(model=str(path))).never_sampled_ids
    assert after == tuple(sorted({*before, 5, 7}))
    write_json(path / "generation_config.json", generation | {"suppress_tokens": ["<bos>"]})
    with pytest.raises(CheckpointError, match="suppress_tokens must be an id or a list of ids"):
        prepare_checkpoint(Config(model=str(path)))


@pytest.mark.parametrize("family", STATE_FAMILIES)
def test_draft_model_with_states_is_refused_without_its_engine(tmp_path: Path, family: str) -> None:
    model, drafter = write_checkpoint(tmp_path / "model"), write_checkpoint(tmp_path / "drafter", family)
    with pytest.raises(ConfigError, match=rf"draft_model: {family} has layers with state.*as a model it"):
        prepare_checkpoint(Config(model=str(model), draft_model=str(drafter)))


def test_families_with_states_are_known_by_their_model_type(tmp_path: Path) -> None:
    for family in ARCHITECTURES:
        write_config(tmp_path / family, family)
        has_states = bool(read_model_info(tmp_path / family).state_shapes)
        assert has_states == (family in TYPES_WITH_STATES), family
    for name, text in TEXT_MODELS.items():
        assert (name in TYPES_WITH_STATES) == (text in TYPES_WITH_STATES), name
    for architecture, model_type in MODEL_TYPES.items():
        assert (architecture in TYPES_WITH_STATES) == (model_type in TYPES_WITH_STATES), architecture


def test_unsupported_family_is_refused_before_its_tokenizer(tmp_path: Path) -> None:
    for model_type, reason in [
        ("bert", "it is an encoder, .* foreword serve --embedding-model PATH"),
        ("xlm-roberta", "it is an encoder"),
        ("gemma3", "its text alone runs, as a checkpoint of model_type gemma3_text or a GGUF file"),
        ("deepseek_v32", "it needs a sparse indexer; deepseek_v2 and deepseek_v3 run"),
        ("kimi_linear", "it needs Mamba, RWKV or other recurrent layers"),
        ("kimi_k25", "it needs another vision encoder"),
        ("glm5_next", "it needs a sparse indexer; glm4_moe_lite runs"),
        ("lfm2_vl", "it needs another vision encoder; .*lfm2 runs"),
        (
            "bamba",
            "it needs Mamba, RWKV or other recurrent layers; granitemoehybrid and falcon_h1 run",
        ),
        ("falcon", "it needs q, k and v of each head in one tensor"),
        ("gpt2", "it needs learned positions or ALiBi"),
        ("gpt_neox", "it needs q, k and v of each head in one tensor"),
        ("llava_onevision", "it needs another vision encoder; llava,"),
        ("t5", "it needs an encoder and a decoder"),
    ]:
        write_json(tmp_path / "config.json", {"model_type": model_type})
        with pytest.raises(CheckpointError, match=rf"'{model_type}' is not supported \({reason}") as refused:
            prepare_checkpoint(Config(model=str(tmp_path)))
        assert refused.value.param == "model"


def test_unsupported_gguf_family_is_refused_before_its_tokenizer(tmp_path: Path) -> None:
    file = write_gguf(write_checkpoint(tmp_path / "checkpoint"), tmp_path / "model.gguf")
    raw = file.read_bytes()
    kind = b"general.architecture\x08\0\0\0\x05\0\0\0\0\0\0\0llama"
    assert kind in raw
    file.write_bytes(raw.replace(kind, kind.replace(b"llama", b"mamba")))
    with pytest.raises(
        CheckpointError, match=r"'mamba' is not supported \(it needs Mamba, RWKV or other recurrent"
    ):
        prepare_checkpoint(Config(model=str(file)))


def test_no_supported_family_is_called_unsupported() -> None:
    assert not [name for name in (*ARCHITECTURES, *VISION_MODELS) if describe_checkpoint(name)]
    assert not [name for name in MODEL_TYPES if missing_feature(name)]


def test_trace_needs_a_directory() -> None:
    """Reported before the model is loaded, and before it is looked for."""
    with pytest.raises(ConfigError, match=r"^trace /nowhere/t: /nowhere is no directory") as refused:
        prepare_checkpoint(Config(model="./nowhere", trace="/nowhere/t"))
    assert refused.value.param == "trace"


def test_gguf_file_without_model_is_refused(tmp_path: Path) -> None:
    """Such as files with only a vocabulary."""
    (tmp_path / "x.gguf").write_bytes(RawGGUF.sample().bytes())
    with pytest.raises(CheckpointError, match=r"tensor `token_embd\.weight` is missing"):
        prepare_checkpoint(Config(model=str(tmp_path / "x.gguf")))


def test_image_placeholder_is_never_sampled(tmp_path: Path) -> None:
    """Like rows without a token."""
    prepared = prepare_checkpoint(Config(model=str(write_vision_checkpoint(tmp_path))))
    assert prepared.never_sampled_ids == (IMAGE_TOKEN_ID, VOCAB_SIZE - 1)


def test_video_placeholder_is_never_sampled(tmp_path: Path) -> None:
    path = write_vision_checkpoint(tmp_path, "qwen2_vl")
    config = json.loads((path / "config.json").read_text())
    assert {config["image_token_id"], config["video_token_id"]} <= {
        *prepare_checkpoint(Config(model=str(path))).never_sampled_ids
    }


def drafting(model: Path, drafter: Path) -> Config:
    return Config(model=str(model), draft_model=str(drafter))


def test_text_draft_model_needs_no_image_tokens(tmp_path: Path) -> None:
    sees, reads = write_vision_checkpoint(tmp_path / "sees", "qwen2_vl"), write_checkpoint(tmp_path / "reads")
    assert prepare_checkpoint(drafting(sees, reads)).config.draft_model == str(reads)
    with pytest.raises(ConfigError, match="the draft model takes images, but the model is text only"):
        prepare_checkpoint(drafting(reads, sees))


@pytest.mark.parametrize("has_more", ["model", "drafter"])
def test_added_tokens_of_one_model_do_not_refuse_a_pair(tmp_path: Path, has_more: str) -> None:
    """Those of the model are not drafted, those of the draft model never sampled."""
    paths = {name: write_checkpoint(tmp_path / name, vocab_size=280) for name in ("model", "drafter")}
    add_tokens(paths[has_more], "<tool>", "<pad>")
    prompt = {"prompt_token_ids": [1, 270, 2] if has_more == "model" else [1, 2]}
    outputs = [
        LLM(
            str(paths["model"]),
            draft_model=drafter,
            draft_length="fixed",  # the adaptive one may find that drafts do not pay
            kv_cache_memory="400tokens",
            threads=1,
        ).generate(prompt, SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))[0]
        for drafter in (str(paths["drafter"]), None)
    ]
    assert outputs[0].token_ids == outputs[1].token_ids
    assert outputs[0].metrics and outputs[0].metrics.draft_tokens


def add_tokens(path: Path, *tokens: str) -> None:
    tokenizer = Tokenizer.from_directory(path)
    tokenizer._backend.add_tokens(list(tokens))
    tokenizer._backend.save(str(path / "tokenizer.json"))


def test_draft_model_needs_the_end_of_an_answer(tmp_path: Path) -> None:
    model, drafter = (write_checkpoint(tmp_path / name, vocab_size=280) for name in ("model", "drafter"))
    add_tokens(model, "<end>")
    write_json(model / "generation_config.json", {"eos_token_id": 270})
    with pytest.raises(ConfigError, match="id 270 is '<end>' in the one and no token in the other"):
        prepare_checkpoint(drafting(model, drafter))


def test_draft_model_must_preprocess_images_equally(tmp_path: Path) -> None:
    sees, same = (write_vision_checkpoint(tmp_path / name) for name in ("sees", "same"))
    assert prepare_checkpoint(drafting(sees, same)).config.draft_model == str(same)
    larger = write_vision_checkpoint(tmp_path / "larger", vision_config={"image_size": 42})
    with pytest.raises(
        ConfigError,
        match=r"image processor differs from the model's: .*image_size=42.* instead of .*image_size=28",
    ):
        prepare_checkpoint(drafting(sees, larger))


TEMPLATE = "{% for message in messages %}[{{ message.role }}] {{ message.content }}\n{% endfor %}"


@pytest.mark.parametrize("is_file", [True, False])
def test_chat_template_option_replaces_the_checkpoints(tmp_path: Path, is_file: bool) -> None:
    path = write_checkpoint(tmp_path / "model")
    (tmp_path / "mine.jinja").write_text(TEMPLATE)
    option = str(tmp_path / "mine.jinja") if is_file else TEMPLATE
    prepared = prepare_checkpoint(Config(model=str(path), chat_template=option))
    assert prepared.tokenizer.chat_template == TEMPLATE
    file = write_gguf(path, tmp_path / "model.gguf")
    assert (
        prepare_checkpoint(Config(model=str(file), chat_template=option)).tokenizer.chat_template == TEMPLATE
    )


@pytest.mark.parametrize("head", ["{% for tool in tools %}{% endfor %}", "{{ tools[0].function.name }}"])
def test_template_that_needs_tools_does_not_refuse_the_start(tmp_path: Path, head: str) -> None:
    path = write_checkpoint(tmp_path / "model")
    prepared = prepare_checkpoint(Config(model=str(path), chat_template=head + TEMPLATE))
    assert prepared.tokenizer.chat_template == head + TEMPLATE


def test_chat_template_option_serves_a_model_without_one(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "model")
    write_json(path / "tokenizer_config.json", {"eos_token": "<eos>"})
    options: dict[str, Any] = {"kv_cache_memory": "400tokens", "threads": 1}
    messages = [{"role": "user", "content": "hi"}]
    with pytest.raises(InvalidRequest, match="no chat template: give one with --chat-template FILE"):
        LLM(str(path), **options).chat(messages, SamplingParams(max_tokens=1))
    (output,) = LLM(str(path), chat_template=TEMPLATE, **options).chat(messages, SamplingParams(max_tokens=1))
    assert output.prompt == "[user] hi\n"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a\n{% if %}", "the chat template has a syntax error in line 2: "),
        ("a\nb{{ nothing.at.all }}", r"'nothing' is undefined \(line 2 of the template\)"),
        ("{{ raise_exception('not today') }}", "refuses these messages: not today$"),
        ("{{ bos_token }}", "the prompt that it renders lacks the text of the last message"),
    ],
)
def test_broken_chat_template_is_refused_before_loading(tmp_path: Path, text: str, problem: str) -> None:
    path = write_checkpoint(tmp_path / "model")
    file = tmp_path / "broken.jinja"
    file.write_text(text)
    with pytest.raises(ConfigError, match=problem) as refused:
        prepare_checkpoint(Config(model=str(path), chat_template=str(file)))
    assert refused.value.param == "chat_template" and str(file) in refused.value.message


def test_missing_chat_template_file_is_named(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "model")
    with pytest.raises(ConfigError, match=r"chat_template ./no.jinja is no readable file \(No such file"):
        prepare_checkpoint(Config(model=str(path), chat_template="./no.jinja"))


def test_gguf_file_with_empty_merges_loads(tmp_path: Path) -> None:
    """A vocabulary of bytes needs none."""
    path = write_checkpoint(tmp_path / "model", vocab_size=260)
    tokenizer = json.loads((path / "tokenizer.json").read_text())
    tokenizer["model"]["merges"] = []
    tokenizer["model"]["vocab"] = {k: v for k, v in tokenizer["model"]["vocab"].items() if v < 260}
    write_json(path / "tokenizer.json", tokenizer)
    file = write_gguf(path, tmp_path / "model.gguf")
    assert "tokenizer.ggml.merges" not in open_gguf(file).metadata
    llm = LLM(str(file), kv_cache_memory="400tokens", threads=1)
    assert llm.tokenizer.decode(llm.tokenizer.encode("the thing")) == "the thing"
    assert llm.generate("the", SamplingParams(max_tokens=4, ignore_eos=True))[0].token_ids


def test_several_models_need_a_server() -> None:
    with pytest.raises(ConfigError, match=r"several models need a server: foreword serve --models"):
        resolve_paths(Config(models="a,b"))


def test_model_names() -> None:
    assert model_names(Config(served_model_name="x,y"), MODEL) == ("x", "y")
    assert model_names(Config(), MODEL) == ("demo",)
    assert model_names(Config(model=str(VISION_MODEL)), VISION_MODEL) == ("demo-vision",)
    assert model_names(Config(model="org/name"), Path("/cache/snapshots/abc")) == ("name",)
    assert model_names(Config(model="dir/name/"), Path("dir/name")) == ("name",)


def vision_demo(path: Path, **changes: object) -> Path:
    """The bundled vision model with another config.json."""
    for file in VISION_MODEL.iterdir():
        (path / file.name).symlink_to(file)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").unlink()
    write_json(path / "config.json", config | changes)
    return path


@pytest.mark.parametrize("vocab_size", [1600, 1600000, 2147483648])
def test_vocab_size_that_the_model_ignores_is_ignored_everywhere(tmp_path: Path, vocab_size: int) -> None:
    path = vision_demo(tmp_path, vocab_size=vocab_size)
    rows = json.loads((VISION_MODEL / "config.json").read_text())["text_config"]["vocab_size"]
    prepared = prepare_checkpoint(Config(model=str(path)))
    assert prepared.vocab_size == rows and max(prepared.never_sampled_ids) < rows


@pytest.mark.full
@pytest.mark.parametrize("vocab_size", [1600, 1600000])
def test_ignored_vocab_size_writes_no_foreign_memory(tmp_path: Path, vocab_size: int) -> None:
    """Ids beyond the logits were masked: the process died of a signal."""
    path = vision_demo(tmp_path, vocab_size=vocab_size)
    options = "threads=1, max_model_len=64, speculate='off'"
    code = (
        "from foreword import LLM, SamplingParams; "
        f"llm = LLM({str(path)!r}, {options}); llm.generate('x', SamplingParams(max_tokens=2))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("vocab_size", [1 << 31, -1, 0, True, "9", None])
def test_vocab_size_is_bounded(tmp_path: Path, vocab_size: object) -> None:
    path = write_checkpoint(tmp_path)
    write_json(
        path / "config.json", json.loads((path / "config.json").read_text()) | {"vocab_size": vocab_size}
    )
    with pytest.raises(CheckpointError, match="`vocab_size`"):
        prepare_checkpoint(Config(model=str(path)))


@pytest.mark.parametrize(
    ("model_type", "key"),
    [("llava", "image_token_index"), ("qwen2_vl", "image_token_id"), ("qwen2_vl", "video_token_id")],
)
@pytest.mark.parametrize("token_id", [1 << 12, 1 << 23, -1])
def test_placeholder_outside_the_vocabulary_is_refused(
    tmp_path: Path, model_type: str, key: str, token_id: int
) -> None:
    path = write_vision_checkpoint(tmp_path, model_type)
    write_json(path / "config.json", json.loads((path / "config.json").read_text()) | {key: token_id})
    with pytest.raises(CheckpointError, match=r"(image|video)_token_id|added token has the id"):
        prepare_checkpoint(Config(model=str(path)))
