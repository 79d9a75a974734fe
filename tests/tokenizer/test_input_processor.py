from typing import Any

import pytest

from foreword.core.params import SamplingParams
from foreword.core.structured_output import StructuredOutput
from foreword.errors import ContextLengthExceeded, InvalidRequest
from foreword.tokenizer import input_processor
from foreword.tokenizer.input_processor import (
    SamplingDefaults,
    encode_bad_words,
    encode_dry_breakers,
    encode_params,
    encode_prediction,
    encode_reasoning_end,
    make_requests,
    resolve_seed,
)
from foreword.tokenizer.tokenizer import Tokenizer
from tests.support.counted_work import count_calls
from tests.support.fakes import EOS, byte_tokenizer
from tests.support.tokenizer_builders import byte_level_backend

TOKENIZER = byte_tokenizer()


def test_each_choice_is_a_request() -> None:
    params = SamplingParams(n=3, seed=2**64 - 2, temperature=0.5)
    requests = make_requests([1, 2], params, TOKENIZER, "x", 100)
    assert [request.id for request in requests] == ["x-0", "x-1", "x-2"]
    assert [request.seed for request in requests] == [2**64 - 2, 2**64 - 1, 0]
    for request in requests:
        assert (
            request.params.n == 1
            and request.params.seed == request.seed
            and request.params.temperature == 0.5
        )
        assert (request.prompt_ids, request.eos_token_ids[0]) == ((1, 2), EOS)
        assert request.arrival_s > 0


def test_resolve_seed() -> None:
    assert resolve_seed(5, 7) == 5
    assert resolve_seed(None, 7) == 7
    assert resolve_seed(-2) == 2**64 - 2
    drawn = {resolve_seed(*args) for args in [(None,), (-1,), (-1, 7), (None, -1)] * 2}
    assert len(drawn) == 8 and max(drawn) < 2**64


def test_prompt_without_room_for_an_answer_is_refused() -> None:
    assert make_requests([1] * 99, SamplingParams(), TOKENIZER, "x", 100)
    with pytest.raises(ContextLengthExceeded, match=r"100 tokens.*100 tokens long.*at most 99"):
        make_requests([1] * 100, SamplingParams(), TOKENIZER, "x", 100)


def test_empty_prompt_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="empty"):
        make_requests([], SamplingParams(), TOKENIZER, "x", 100)


@pytest.mark.parametrize(
    ("prompt", "params", "name"),
    [
        ([260], {}, "prompt"),
        ([-1], {}, "prompt"),
        ([True], {}, "prompt"),
        ([1], {"logit_bias": {260: 1}}, "logit_bias"),
        ([1], {"allowed_token_ids": [260]}, "allowed_token_ids"),
        ([1], {"stop_token_ids": [260]}, "stop_token_ids"),
    ],
)
def test_ids_outside_the_vocabulary_are_refused(prompt: list[int], params: dict[str, Any], name: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        make_requests(prompt, SamplingParams(**params), TOKENIZER, "x", 100)
    assert caught.value.param == name


def test_ids_are_limited_by_the_smaller_vocabulary() -> None:
    with pytest.raises(InvalidRequest, match="ends at 199"):
        make_requests([200], SamplingParams(), TOKENIZER, "x", 100, vocab_size=200)


def test_texts_of_several_prompts_are_encoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(n=2, bad_words=("ab",), dry_multiplier=1.0, max_tokens=1)
    encoded = encode_params(params, TOKENIZER, 99, TOKENIZER.vocab_size)
    alone = [make_requests(ids, params, TOKENIZER, "x", 99) for ids in ([1], [2])]
    monkeypatch.setattr(input_processor, "encode_params", None)
    shared = [make_requests(ids, params, TOKENIZER, "x", 99, encoded=encoded) for ids in ([1], [2])]
    for one, other in zip(alone, shared, strict=True):
        assert [(each.bad_words_ids, each.dry_breakers) for each in one] == [
            (each.bad_words_ids, each.dry_breakers) for each in other
        ]
        assert other[0].bad_words_ids is encoded.bad_words is other[1].bad_words_ids


@pytest.mark.parametrize("name", ["stop_token_ids", "allowed_token_ids", "logit_bias"])
def test_ids_are_checked_once_for_all_prompts(name: str) -> None:
    """4096 prompts and 20,000 ids, 56 KB, held the event loop for 26 s of CPU time."""

    def count(num_ids: int) -> int:
        ids: Any = range(num_ids) if name != "logit_bias" else dict.fromkeys(range(num_ids), 1.0)
        params = SamplingParams(**{name: ids})
        encoded = encode_params(params, TOKENIZER, 99, TOKENIZER.vocab_size)
        return count_calls(lambda: make_requests([1], params, TOKENIZER, "x", 99, encoded=encoded))

    assert count(200) == count(1)


def test_more_ids_than_the_vocabulary_has_are_refused() -> None:
    for name in ("stop_token_ids", "allowed_token_ids"):
        with pytest.raises(InvalidRequest, match="holds 261 ids; the vocabulary has 260"):
            make_requests([1], SamplingParams(**{name: [1] * 261}), TOKENIZER, "x", 100, vocab_size=260)


def test_bad_words_with_and_without_space() -> None:
    trained = Tokenizer(byte_level_backend())
    token = trained.encode(" the", add_special_tokens=False)
    assert len(token) == 1
    assert encode_bad_words(["the"], trained) == (
        tuple(trained.encode("the", add_special_tokens=False)),
        *([tuple(token)] if len(trained.encode("the", add_special_tokens=False)) == 1 else []),
    )
    assert encode_bad_words([" ab", "ab"], TOKENIZER) == ((97, 98),)


def test_blank_bad_word_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="bad_words"):
        encode_bad_words([" "], TOKENIZER)


def test_dry_breakers_contain_or_begin_the_text() -> None:
    tokenizer = Tokenizer(byte_level_backend())
    texts = {token_id: tokenizer.token_bytes(token_id) for token_id in range(tokenizer.vocab_size)}
    found = encode_dry_breakers((":", "b:"), tokenizer)
    single = [token_id for token_id, raw in texts.items() if b":" in raw]
    begun = [token_id for token_id, raw in texts.items() if raw.endswith(b"b")]
    rest = tokenizer.encode(":", add_special_tokens=False)
    assert set(found) == {*((token_id,) for token_id in single), *((token_id, *rest) for token_id in begun)}
    assert len(found) == len(set(found)) and single and begun


def test_sequences_of_dry_breakers_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """64 words of 6 letters, 703 bytes, made 690,000 sequences in 4.3 s."""
    tokenizer = Tokenizer(byte_level_backend())
    num_sequences = len(encode_dry_breakers(["the", "then"], tokenizer))
    monkeypatch.setattr(input_processor, "MAX_DRY_SEQUENCES", num_sequences)
    assert len(encode_dry_breakers(["the", "then", "the"], tokenizer)) == num_sequences
    with pytest.raises(InvalidRequest, match=f"more than {num_sequences} sequences.*the limit") as caught:
        encode_dry_breakers(["the", "then", "cat"], tokenizer)
    assert caught.value.param == "dry_sequence_breakers"


@pytest.mark.parametrize(
    "fields",
    [
        {"bad_words": ["a", "\ud800"]},
        {"dry_sequence_breakers": ["\ud800"], "dry_multiplier": 1.0},
        {"dry_sequence_breakers": ["a\ud800b"], "dry_multiplier": 1.0},
    ],
)
def test_lone_surrogate_is_refused_by_its_field(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match=f"^{next(iter(fields))} is not valid Unicode") as caught:
        make_requests([1], SamplingParams(**fields), TOKENIZER, "x", 100)
    assert caught.value.param == next(iter(fields))


def test_dry_breakers_only_with_dry_sampling() -> None:
    (plain,) = make_requests([1], SamplingParams(), TOKENIZER, "x", 100)
    (dry,) = make_requests(
        [1], SamplingParams(dry_multiplier=1.0, dry_sequence_breakers=["ab"]), TOKENIZER, "x", 100
    )
    assert (plain.dry_breakers, dry.dry_breakers) == ((), ((97, 98),))


@pytest.mark.parametrize(
    ("wanted", "max_tokens", "kept"),
    [(3, None, 3), (50, None, 10), (-1, None, 10), (-1, 95, 5), (-1, 500, 1)],
)
def test_truncation_keeps_the_end(wanted: int, max_tokens: int | None, kept: int) -> None:
    params = SamplingParams(truncate_prompt_tokens=wanted, max_tokens=max_tokens)
    (request,) = make_requests(list(range(10)), params, TOKENIZER, "x", 100)
    assert request.prompt_ids == tuple(range(10 - kept, 10))


@pytest.mark.parametrize(
    ("asked", "defaults", "max_tokens", "on_runaway"),
    [
        ({}, SamplingDefaults(), None, None),
        ({}, SamplingDefaults(max_tokens=40, on_runaway="warn"), 40, "warn"),
        (
            {"max_tokens": 90, "on_runaway": "off"},
            SamplingDefaults(max_tokens=40, on_runaway="warn"),
            90,
            "off",
        ),
        ({"min_tokens": 60}, SamplingDefaults(max_tokens=40), 60, None),
        ({"max_tokens": -1, "min_tokens": 60}, SamplingDefaults(max_tokens=40), None, None),
        ({"on_runaway": "stop"}, SamplingDefaults(max_tokens=0, on_runaway="off"), None, "stop"),
    ],
)
def test_defaults_fill_unset_parameters(
    asked: dict[str, Any], defaults: SamplingDefaults, max_tokens: int | None, on_runaway: str | None
) -> None:
    for request in make_requests([1], SamplingParams(n=2, **asked), TOKENIZER, "x", 100, defaults):
        assert (request.params.max_tokens, request.params.on_runaway) == (max_tokens, on_runaway)


def test_default_max_tokens_does_not_truncate_the_prompt() -> None:
    """Only an explicit max_tokens does."""
    params = SamplingParams(truncate_prompt_tokens=-1)
    (request,) = make_requests([1] * 200, params, TOKENIZER, "x", 100, SamplingDefaults(max_tokens=1000))
    assert (len(request.prompt_ids), request.params.max_tokens) == (99, 1000)


def test_default_seed() -> None:
    assert make_requests([1], SamplingParams(), TOKENIZER, "x", 100, SamplingDefaults(seed=5))[0].seed == 5
    assert (
        make_requests([1], SamplingParams(seed=6), TOKENIZER, "x", 100, SamplingDefaults(seed=5))[0].seed == 6
    )


def test_prediction_is_tokenized_for_every_choice() -> None:
    requests = make_requests([1], SamplingParams(n=2, prediction="ab"), TOKENIZER, "x", 100)
    assert [request.prediction_ids for request in requests] == [(97, 98)] * 2
    assert "prediction" not in requests[0].params.non_default_fields(), "its text must not be logged"
    assert make_requests([1], SamplingParams(), TOKENIZER, "x", 100)[0].prediction_ids == ()


def test_prediction_longer_than_context_is_refused() -> None:
    assert len(encode_prediction("x" * 100, TOKENIZER, 100)) == 100
    with pytest.raises(
        InvalidRequest, match="the prediction has 101 tokens; an answer has at most 100"
    ) as caught:
        encode_prediction("x" * 101, TOKENIZER, 100)
    assert caught.value.param == "prediction"
    with pytest.raises(InvalidRequest, match="prediction is not valid Unicode"):
        encode_prediction("\ud800", TOKENIZER, 100)


def test_reasoning_end_covers_all_tokenizations() -> None:
    assert encode_reasoning_end(None, byte_tokenizer()) == ()
    # Whitespace does not change byte tokens, but merged ones.
    assert encode_reasoning_end("<e>", byte_tokenizer()) == ((60, 101, 62),)
    merged = Tokenizer(byte_level_backend())
    spellings = encode_reasoning_end("return", merged)
    assert len(spellings) > 1
    for text in ("So return[]", "So\nreturn\n[]", "!return\n\n[]"):
        ids = tuple(merged.encode(text, add_special_tokens=False))
        assert any(known == ids[i : i + len(known)] for known in spellings for i in range(len(ids))), text
    (request,) = make_requests(
        [1], SamplingParams(structured=StructuredOutput.regex("a", after="<e>")), byte_tokenizer(), "r", 9
    )
    assert request.reasoning_end_ids == ((60, 101, 62),)
    with pytest.raises(InvalidRequest, match="surrogate") as caught:
        encode_reasoning_end("\ud800", byte_tokenizer())
    assert caught.value.param == "structured_outputs.after"
