"""Token ids and type ids against transformers, with and without truncation."""

from pathlib import Path

import pytest
import transformers

from foreword.embedding.encoder_messages import EncoderInfo
from foreword.embedding.encoder_tokenizer import EncoderTokenizer
from foreword.errors import InvalidRequest
from tests.support.embedding_checkpoints import TOKENIZERS, write_tokenizer
from tests.support.tokenizer_builders import DIFFICULT_TEXTS

LIMIT = 24
INFO = EncoderInfo("tiny", "bert", "embed", 8, LIMIT, 1, 300, "mean", False, "none", {"query": "query: "})
PAIRS = [
    ("short", "word " * 30),
    ("word " * 30, "short"),
    ("one two " * 10, "three four " * 12),
    ("a", "b"),
    ("", "b"),
    ("a", ""),
]


@pytest.fixture(params=TOKENIZERS)
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    write_tokenizer(tmp_path, request.param, TOKENIZERS[request.param]())
    return tmp_path


def test_ids_equal_transformers(path: Path) -> None:
    tokenizer = EncoderTokenizer.from_directory(path, INFO)
    hf_tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    for text in DIFFICULT_TEXTS:
        assert tokenizer.encode(text) == hf_tokenizer(text)["input_ids"]
        # In lists: a bare empty text would count as no text.
        pair = hf_tokenizer(["hello"], [text], return_token_type_ids=True)
        assert tokenizer.encode_pair("hello", text) == (pair["input_ids"][0], pair["token_type_ids"][0])


@pytest.mark.parametrize("limit", [3, 5, 8, 11, 24])
def test_truncation_equals_transformers(path: Path, limit: int) -> None:
    tokenizer = EncoderTokenizer.from_directory(path, INFO)
    hf_tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    for text in DIFFICULT_TEXTS:
        expected = hf_tokenizer(text, truncation=True, max_length=limit)["input_ids"]
        assert tokenizer.encode(text, max_tokens=limit) == expected
    if limit < 5:
        return  # too small for the special tokens of a pair
    for first, second in PAIRS:
        options = {"truncation": "longest_first", "max_length": limit, "return_token_type_ids": True}
        pair = hf_tokenizer([first], [second], **options)
        expected = pair["input_ids"][0], pair["token_type_ids"][0]
        assert tokenizer.encode_pair(first, second, max_tokens=limit) == expected


def test_minus_one_truncates_to_the_models_limit(path: Path) -> None:
    tokenizer = EncoderTokenizer.from_directory(path, INFO)
    assert len(tokenizer.encode("word " * 100)) > LIMIT
    assert len(tokenizer.encode("word " * 100, max_tokens=-1)) == LIMIT


def test_bad_limit_is_rejected(path: Path) -> None:
    for limit in [0, -2, LIMIT + 1]:
        tokenizer = EncoderTokenizer.from_directory(path, INFO)
        with pytest.raises(InvalidRequest, match="truncate_prompt_tokens"):
            tokenizer.encode("word", max_tokens=limit)


def test_limit_below_the_special_tokens_is_rejected(path: Path) -> None:
    tokenizer = EncoderTokenizer.from_directory(path, INFO)
    with pytest.raises(InvalidRequest, match="special tokens"):
        tokenizer.encode("word word word", max_tokens=1)


def test_prompt_precedes_the_text(path: Path) -> None:
    tokenizer = EncoderTokenizer.from_directory(path, INFO)
    assert tokenizer.encode("hello", prompt="query") == tokenizer.encode("query: hello")
    with pytest.raises(InvalidRequest, match="query"):
        tokenizer.encode("hello", prompt="passage")


def test_lone_surrogate_is_rejected(path: Path) -> None:
    tokenizer = EncoderTokenizer.from_directory(path, INFO)
    for encode in (tokenizer.encode, lambda text: tokenizer.encode_pair("hello", text)):
        with pytest.raises(InvalidRequest, match="surrogate"):
            encode("\ud800")
