import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from foreword.errors import CheckpointError, ContextLengthExceeded, InvalidRequest, RequestFailed
from foreword.tokenizer import tokenizer as module
from foreword.tokenizer.input_processor import encode_prediction
from foreword.tokenizer.tokenizer import Tokenizer, TokenSearch
from tests.support.fakes import BOS, END, EOS, byte_backend, byte_tokenizer
from tests.support.tokenizer_builders import (
    DIFFICULT_TEXTS,
    byte_level_backend,
    sentencepiece_backend,
    write_checkpoint,
)

NAMES = {"bos_token": "<|bos|>", "eos_token": "<|eos|>"}
PIECE_NAMES = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
CHECKPOINTS = {
    "byte level": (byte_level_backend, NAMES),
    "byte level, add_bos_token off": (byte_level_backend, {**NAMES, "add_bos_token": False}),
    "sentencepiece": (sentencepiece_backend, {**PIECE_NAMES, "add_bos_token": True, "add_eos_token": False}),
    "tokens of the config": (
        byte_level_backend,
        {
            **NAMES,
            "additional_special_tokens": ["<extra>"],
            "added_tokens_decoder": {
                "9000": {"content": "<added>", "special": False, "lstrip": True, "normalized": False}
            },
        },
    ),
}


@pytest.fixture(params=CHECKPOINTS)
def checkpoint(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    build, config = CHECKPOINTS[request.param]
    return write_checkpoint(tmp_path, build(), config)


def test_encode_and_decode_equal_transformers(checkpoint: Path) -> None:
    ours, theirs = Tokenizer.from_directory(checkpoint), AutoTokenizer.from_pretrained(checkpoint)
    for text in [*DIFFICULT_TEXTS, "a <extra> b <added> c", "".join(DIFFICULT_TEXTS)]:
        for special in (True, False):
            ids = ours.encode(text, add_special_tokens=special)
            assert ids == theirs.encode(text, add_special_tokens=special), text
            for skip in (True, False):
                decoded = theirs.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
                assert ours.decode(ids, skip_special_tokens=skip) == decoded, text


def test_special_tokens_equal_transformers(checkpoint: Path) -> None:
    ours, theirs = Tokenizer.from_directory(checkpoint), AutoTokenizer.from_pretrained(checkpoint)
    assert ours.vocab_size == len(theirs)
    assert ours.eos_token_ids == (theirs.eos_token_id,)
    assert {i for i in range(len(theirs)) if ours.is_special(i)} >= set(theirs.all_special_ids)


def test_eos_of_generation_config_comes_first(tmp_path: Path) -> None:
    write_checkpoint(
        tmp_path,
        byte_backend(),
        NAMES,
        generation_config={"eos_token_id": [END, BOS]},
        config={"eos_token_id": 1},
    )
    assert Tokenizer.from_directory(tmp_path).eos_token_ids == (END, BOS, EOS)


def test_truncation_and_padding_are_ignored(tmp_path: Path) -> None:
    backend = byte_backend()
    backend.enable_truncation(3)
    backend.enable_padding(length=9)
    assert Tokenizer.from_directory(write_checkpoint(tmp_path, backend, NAMES)).encode("abcd") == [
        97,
        98,
        99,
        100,
    ]


def test_unassigned_ids() -> None:
    assert byte_tokenizer().unassigned_ids(264) == (260, 261, 262, 263)
    assert byte_tokenizer().unassigned_ids(100) == ()


def test_token_bytes_and_text() -> None:
    tokenizer = byte_tokenizer()
    assert tokenizer.token_bytes(0xC3) == b"\xc3"
    assert tokenizer.token_text(0xC3) == "\ufffd"
    assert tokenizer.token_text(EOS) == "<|eos|>"
    assert tokenizer.token_bytes(9999) == b""


def test_diff_names_the_first_difference() -> None:
    backend = byte_backend()
    backend.add_tokens(["more"])
    ours, theirs = byte_tokenizer(), Tokenizer(backend)
    assert ours.diff(byte_tokenizer()) is None
    assert ours.diff(theirs) is theirs.diff(ours) is None and theirs.added_tokens_missing_in(ours) == [260]
    swapped = json.loads(byte_backend().to_str())
    vocab = swapped["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    other = Tokenizer(type(backend).from_str(json.dumps(swapped)))
    assert ours.diff(other) == "id 97 is 'a' in the one and 'b' in the other"


def test_diff_ignores_special_flags() -> None:
    """They differ between a GGUF file and a checkpoint."""
    plain, special = byte_backend(), byte_backend()
    plain.add_tokens(["<tool>"])
    special.add_special_tokens(["<tool>"])
    ours, theirs = Tokenizer(plain), Tokenizer(special)
    assert not ours.is_special(260) and theirs.is_special(260)
    assert ours.diff(theirs) is None and theirs.diff(ours) is None


DESCRIBED = json.loads(byte_backend().to_str())
HUGE_ID = DESCRIBED["model"] | {"vocab": DESCRIBED["model"]["vocab"] | {"x": 1 << 31}}
WORD_PIECES = {
    "type": "WordPiece",
    "unk_token": "[UNK]",
    "continuing_subword_prefix": "##",
    "vocab": {"a": 0},
    "max_input_chars_per_word": 100,
}
WORD_PIECE_DECODER = {"type": "WordPiece", "prefix": "##", "cleanup": True}


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("tokenizer.json", "{", "cannot be read"),
        # lists of that length would exhaust memory
        ("tokenizer.json", DESCRIBED | {"model": HUGE_ID}, "a token with id 2147483648"),
        # the library fails on the first text that needs it, so the load probes one
        ("tokenizer.json", DESCRIBED | {"model": WORD_PIECES}, "UNK"),
        ("tokenizer.json", DESCRIBED | {"decoder": WORD_PIECE_DECODER}, "WordPiece"),
        ("config.json", {"eos_token_id": "x"}, "eos_token_id must be an id"),
        ("config.json", {"eos_token_id": -1}, "eos_token_id must be an id"),
        ("config.json", {"eos_token_id": [1, float("inf")]}, "eos_token_id must be an id"),
        ("config.json", [1], "must hold a JSON object"),
        (
            "tokenizer_config.json",
            {"added_tokens_decoder": {"x": {"content": "a"}}},
            "added_tokens_decoder must hold",
        ),
        (
            "tokenizer_config.json",
            {"added_tokens_decoder": {"1": {"lstrip": True}}},
            "added_tokens_decoder must hold",
        ),
        (
            "tokenizer_config.json",
            {"added_tokens_decoder": {"1": {"content": "a", "lstrip": 2}}},
            "added_tokens_decoder",
        ),
        (
            "tokenizer_config.json",
            {"chat_template": [{"name": "default", "template": 1}]},
            "chat_template must be a text",
        ),
        ("special_tokens_map.json", "[" * 100_000, "is not JSON"),
        ("chat_template.jinja", b"\xff", "is not UTF-8"),
    ],
)
def test_malformed_files_are_refused(tmp_path: Path, name: str, content: object, complaint: str) -> None:
    (tmp_path / "tokenizer.json").write_text(byte_backend().to_str())
    raw = content if isinstance(content, str | bytes) else json.dumps(content)
    (tmp_path / name).write_bytes(raw if isinstance(raw, bytes) else raw.encode())
    with pytest.raises(CheckpointError, match=complaint):
        Tokenizer.from_directory(tmp_path)


def test_missing_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no tokenizer\.json"):
        Tokenizer.from_directory(tmp_path)


def test_malformed_special_tokens_are_ignored(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(byte_backend().to_str())
    special = {"eos_token": "\ud800", "bos_token": 3, "additional_special_tokens": "<x>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(special))
    assert not Tokenizer.from_directory(tmp_path).special_tokens


def test_library_panic_fails_one_request() -> None:
    class Panicking:
        def encode_batch(self, *_: object, **__: object) -> None:
            raise PanicException("index out of bounds")

    class PanicException(BaseException):
        """As Rust libraries raise it."""

    tokenizer = byte_tokenizer()
    tokenizer._backend = Panicking()  # type: ignore[assignment]
    with pytest.raises(RequestFailed, match="fails on this text"):
        tokenizer.encode("x")
    with pytest.raises(RequestFailed, match="fails on this text"):
        tokenizer.encode_truncated("x", None, 1)


def test_tokenizer_that_cannot_be_written_is_named() -> None:
    class Unwritable:
        def __getattr__(self, name: str) -> object:
            return getattr(backend, name)

        def to_str(self) -> str:
            raise ValueError("a part of one's own")

    tokenizer = byte_tokenizer()
    backend, tokenizer._backend = tokenizer._backend, Unwritable()  # type: ignore[assignment]
    with pytest.raises(CheckpointError, match="the tokenizer has no JSON: a part of one's own"):
        tokenizer.engine_vocabulary()


def test_lone_surrogate_is_a_bad_request() -> None:
    with pytest.raises(InvalidRequest, match="surrogate at character 1"):
        byte_tokenizer().encode("a\ud800")


TOKENS = st.lists(st.text("ab\n", max_size=5).map(str.encode), max_size=30)


def test_long_text_is_refused_by_a_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """32 MB of rare characters took 6 GB, and the interpreter's lock for a second."""
    tokenizer, read = byte_tokenizer(), []

    def encode(text: str, add_special_tokens: bool) -> object:
        read.append(len(text))
        return original(text, add_special_tokens)

    original = tokenizer._encode
    monkeypatch.setattr(tokenizer, "_encode", encode)
    monkeypatch.setattr(module, "MIN_COUNTED_CHARS", 16)
    monkeypatch.setattr(module, "MAX_COUNTED_CHARS", 64)
    monkeypatch.setattr(module, "CUT_TOKENS", 1)
    for limit, parts in ((1, [16]), (6, [48]), (40, [64]), (63, [64, 128])):
        for encode_text in (
            lambda text, limit=limit: tokenizer.encode(text, max_tokens=limit),
            lambda text, limit=limit: tokenizer.encode_truncated(text, None, None, max_whole_tokens=limit),
        ):
            read.clear()
            with pytest.raises(ContextLengthExceeded, match=f"first {parts[-1]} .* the limit is {limit}"):
                encode_text("a" * 1000)
            assert read == parts
    assert tokenizer.encode("a" * 17, max_tokens=16) == list(b"a" * 17), "above the limit by CUT_TOKENS"
    assert len(tokenizer.encode_truncated("a" * 1000, None, 6)[0]) == 6
    with pytest.raises(InvalidRequest, match=r"^prediction is too long"):
        encode_prediction("a" * 1000, tokenizer, 6)


@given(TOKENS, st.text("ab\n", min_size=1, max_size=3).map(str.encode))
def test_token_search_equals_a_linear_scan(tokens: list[bytes], part: bytes) -> None:
    search = TokenSearch(tokens)
    for _ in range(2):
        assert list(search.containing(part)) == [i for i, token in enumerate(tokens) if part in token]
    assert list(search.ending_with(part)) == [i for i, token in enumerate(tokens) if token.endswith(part)]
