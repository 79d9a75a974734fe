"""LLM.embed and LLM.score, with the model or an embedding model."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from foreword import LLM, SamplingParams
from foreword.core.request import RequestState
from foreword.errors import ContextLengthExceeded, InvalidRequest
from tests.support.checkpoints import write_checkpoint
from tests.support.embedding_checkpoints import write_encoder

TEXTS = ("the cat and the dog", "in the thing", "a")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("embed") / "model", "llama", seed=5)


@pytest.fixture(scope="module")
def llm(path: Path) -> LLM:
    return LLM(
        str(path), draft_model=str(path), speculate="suffix,draft", threads=1, max_model_len=64,
        max_num_batched_tokens=48, max_num_seqs=8,
    )  # fmt: skip


def test_texts_and_ids_give_equal_vectors(llm: LLM) -> None:
    outputs = llm.embed(TEXTS)
    ids = [llm.tokenizer.encode(text) for text in TEXTS]
    assert [output.prompt_token_ids for output in outputs] == [tuple(item) for item in ids]
    assert llm.embed(ids) == outputs and llm.embed(TEXTS[0]) == outputs[:1] == llm.embed(ids[0])
    assert [math.hypot(*output.vector) for output in outputs] == [pytest.approx(1.0)] * 3
    assert llm.embed([]) == []


def test_pooling_length_and_dimensions(llm: LLM) -> None:
    (last,), (mean,), (cls,) = (
        llm.embed(TEXTS[0], pooling=pooling, normalize=False) for pooling in ("last", "mean", "cls")
    )
    assert len({tuple(output.vector) for output in (last, mean, cls)}) == 3
    assert llm.embed("t", pooling="mean") == llm.embed("t", pooling="cls") == llm.embed("t")
    (cut,) = llm.embed(TEXTS[0], dimensions=5)
    scale = math.hypot(*last.vector[:5])
    assert list(cut.vector) == pytest.approx([value / scale for value in last.vector[:5]], rel=1e-6)


def test_batch_equals_single_inputs(llm: LLM) -> None:
    texts = [TEXTS[index % 3] * (1 + index % 4) for index in range(40)]
    together = llm.embed(texts, pooling="mean")
    assert together == [llm.embed(text, pooling="mean")[0] for text in texts]
    llm.check()
    assert llm._client.idle and not llm._event_queues


@pytest.mark.parametrize(
    ("inputs", "options", "error", "text"),
    [
        (["a", ""], {}, InvalidRequest, r"inputs\[1\] has no tokens"),
        (["a", [10**6]], {}, InvalidRequest, r"inputs\[1\] holds 1000000"),
        (
            ["a", [7] * 65],
            {},
            ContextLengthExceeded,
            r"inputs\[1\] has 65 tokens; the model takes at most 64",
        ),
        (["a"], {"pooling": "max"}, InvalidRequest, "pooling must be one of last, mean, cls"),
        (["a"], {"dimensions": 65}, InvalidRequest, "dimensions must be between 1 and 64"),
        (["a"], {"dimensions": 0}, InvalidRequest, "dimensions must be between 1 and 64"),
    ],
)
def test_invalid_inputs_are_refused(
    llm: LLM, inputs: object, options: dict[str, object], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        llm.embed(inputs, **options)  # type: ignore[arg-type]
    assert llm._client.idle and not llm._event_queues


def test_input_may_fill_the_context(llm: LLM) -> None:
    assert len(llm.embed([[7] * 64])[0].prompt_token_ids) == 64


def test_embed_during_an_open_stream(llm: LLM) -> None:
    """Embedding during a stream changes neither vectors nor tokens."""
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    expected, vectors = llm.generate(TEXTS[0], params)[0].text, llm.embed(TEXTS)
    stream = llm.stream(TEXTS[0], params)
    heard = next(stream).text
    assert llm.embed(TEXTS) == vectors
    assert heard + "".join(piece.text for piece in stream) == expected
    llm.check()


def test_embedding_calls_no_drafter(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*args: object) -> None:
        raise AssertionError("a drafter was message")

    drafting = llm._client._engine.proposer
    for drafter in (*drafting.drafters, *drafting.model_drafters):
        for method in ("start", "finish", "propose"):
            monkeypatch.setattr(drafter, method, never)
    for name in ("start", "finish", "record_step"):
        monkeypatch.setattr(drafting, name, never)
    llm.embed(TEXTS)
    assert not drafting.errors and not drafting._request_drafters


def test_score_is_the_cosine_similarity(llm: LLM) -> None:
    same, other = llm.score(TEXTS[0], [TEXTS[0], TEXTS[1]])
    assert same == pytest.approx(1.0) and -1.0 <= other < same
    assert llm.score(TEXTS[0], TEXTS[1]) == [other]
    first, second = (output.vector for output in llm.embed(TEXTS[:2]))
    assert other == pytest.approx(sum(a * b for a, b in zip(first, second, strict=True)), abs=1e-6)


def test_error_of_one_input_aborts_all(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    check = llm._client._engine._validate

    def refuse(request: RequestState) -> None:
        if request.id.endswith("-2"):
            raise InvalidRequest("not this one")
        check(request)  # type: ignore[arg-type]

    monkeypatch.setattr(llm._client._engine, "_validate", refuse)
    with pytest.raises(InvalidRequest, match="not this one"):
        llm.embed([TEXTS[0]] * 30)
    assert llm._client.idle and not llm._event_queues
    llm.check()


def test_embedding_model_replaces_the_model(path: Path, tmp_path: Path) -> None:
    write_encoder(tmp_path / "bert")
    llm = LLM(str(path), embedding_model=str(tmp_path / "bert"), threads=1, max_model_len=64)
    (output,) = llm.embed(TEXTS[0])
    assert len(output.vector) == 48 and output.prompt_token_ids[0] == 2
    assert llm.embed(TEXTS[0], pooling="cls") != [output]
    assert llm.score(TEXTS[0], [TEXTS[0]]) == [pytest.approx(1.0)]
    assert len(llm.generate(TEXTS[0], SamplingParams(max_tokens=3, ignore_eos=True))[0].token_ids) == 3
    with pytest.raises(ContextLengthExceeded, match="takes at most 130"):
        llm.embed([[7] * 131])


def test_ranker_scores_and_model_embeds(path: Path, tmp_path: Path) -> None:
    write_encoder(tmp_path / "bert", ranks=True)
    llm = LLM(str(path), embedding_model=str(tmp_path / "bert"), threads=1, max_model_len=64)
    scores = llm.score(TEXTS[0], TEXTS)
    assert len(set(scores)) == 3 and all(0 < score < 1 for score in scores)
    assert len(llm.embed(TEXTS[0])[0].vector) == 64
    with pytest.raises(ContextLengthExceeded, match=r"documents\[1\] has .* takes at most 130"):
        llm.score("a", ["b", "cat " * 200])


def test_sentence_transformers_checkpoint(path: Path, tmp_path: Path) -> None:
    """Tensors without prefix; pooling and prompts from the files of sentence-transformers."""
    model = tmp_path / "model"
    write_checkpoint(model, "qwen3", seed=5, tie_word_embeddings=True)
    plain = LLM(str(model), threads=1, max_model_len=64)
    tensors = load_file(model / "model.safetensors")
    save_file(
        {name.removeprefix("model."): tensor for name, tensor in tensors.items()}, model / "model.safetensors"
    )
    _write(model / "modules.json", [{"type": "sentence_transformers.models.Pooling", "path": "1_Pooling"}])
    _write(model / "1_Pooling" / "config.json", {"pooling_mode_mean_tokens": True})
    _write(model / "config_sentence_transformers.json", {"prompts": {"query": "find: "}})
    llm = LLM(str(model), threads=1, max_model_len=64)
    assert llm.embed(TEXTS) == plain.embed(TEXTS, pooling="mean")
    assert llm.embed("cat", prompt_name="query") == llm.embed("find: cat")
    with pytest.raises(InvalidRequest, match=r"prompt_name must be a prompt of model \(query\), got 'magic'"):
        llm.embed("cat", prompt_name="magic")
    with pytest.raises(InvalidRequest, match=r"a prompt of model \(none\)"):
        plain.embed("cat", prompt_name="query")


def _write(path: Path, value: object) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(value), encoding="utf-8")
