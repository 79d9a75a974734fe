"""Token ids and type ids against transformers, whole and cut."""

from pathlib import Path

import pytest
import transformers

from foreword.embedding.messages import EncoderInfo
from foreword.embedding.tokenizer import EncoderTokenizer
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


def test_texts_and_pairs_are_those_of_transformers(path: Path) -> None:
    texts = EncoderTokenizer.from_directory(path, INFO)
    theirs = transformers.AutoTokenizer.from_pretrained(path)
    for text in DIFFICULT_TEXTS:
        assert texts.encode(text) == theirs(text)["input_ids"]
        pair = theirs(
            ["hello"], [text], return_token_type_ids=True
        )  # in lists, or it takes an empty text for none
        assert texts.encode_pair("hello", text) == (pair["input_ids"][0], pair["token_type_ids"][0])


@pytest.mark.parametrize("limit", [3, 5, 8, 11, 24])
def test_long_ones_are_cut_as_transformers_does(path: Path, limit: int) -> None:
    texts = EncoderTokenizer.from_directory(path, INFO)
    theirs = transformers.AutoTokenizer.from_pretrained(path)
    for text in DIFFICULT_TEXTS:
        assert (
            texts.encode(text, max_tokens=limit)
            == theirs(text, truncation=True, max_length=limit)["input_ids"]
        )
    if limit < 5:
        return  # no room between the special tokens of a pair
    for first, second in PAIRS:
        pair = theirs(
            [first], [second], truncation="longest_first", max_length=limit, return_token_type_ids=True
        )
        assert texts.encode_pair(first, second, max_tokens=limit) == (
            pair["input_ids"][0],
            pair["token_type_ids"][0],
        )


def test_the_limit_may_be_that_of_the_model(path: Path) -> None:
    texts = EncoderTokenizer.from_directory(path, INFO)
    assert len(texts.encode("word " * 100)) > LIMIT
    assert len(texts.encode("word " * 100, max_tokens=-1)) == LIMIT


@pytest.mark.parametrize("limit", [0, -2, LIMIT + 1])
def test_a_limit_that_is_none_is_refused(path: Path, limit: int) -> None:
    texts = EncoderTokenizer.from_directory(path, INFO)
    with pytest.raises(InvalidRequest, match="truncate_prompt_tokens"):
        texts.encode("word", max_tokens=limit)


def test_a_limit_that_leaves_no_room_is_refused(path: Path) -> None:
    texts = EncoderTokenizer.from_directory(path, INFO)
    with pytest.raises(InvalidRequest, match="special tokens"):
        texts.encode("word word word", max_tokens=1)


def test_prompts_go_in_front(path: Path) -> None:
    texts = EncoderTokenizer.from_directory(path, INFO)
    assert texts.encode("hello", prompt="query") == texts.encode("query: hello")
    with pytest.raises(InvalidRequest, match="query"):
        texts.encode("hello", prompt="passage")


def test_what_is_no_unicode_is_refused(path: Path) -> None:
    texts = EncoderTokenizer.from_directory(path, INFO)
    for encode in (texts.encode, lambda text: texts.encode_pair("hello", text)):
        with pytest.raises(InvalidRequest, match="surrogate"):
            encode("\ud800")
