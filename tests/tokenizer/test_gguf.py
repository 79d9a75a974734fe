"""Tokenizers from GGUF metadata equal the tokenizers that the metadata was written from."""

import io
import json
import random
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import pytest
import sentencepiece
import tokenizers
from gguf import TokenType
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers

from foreword.errors import CheckpointError
from foreword.tokenizer.chat_template import ChatTemplate
from foreword.tokenizer.gguf import build_gguf_tokenizer
from foreword.tokenizer.tokenizer import Tokenizer
from foreword.weights.gguf.header import open_gguf
from tests.support.gguf_files import finish, write_byte_level, write_sentencepiece
from tests.support.tokenizer_builders import CORPUS, DIFFICULT_TEXTS

SPECIALS = ("<|bos|>", "<|eot_id|>", "<|im_start|>", "<|im_end|>", "<pad>")
RUNS_OF_ONE = (
    " ".join(char * count for char in "a=-" for count in range(2, 9) for _ in range(8))
    + " hahaha haha hahahaha" * 5
)
TRAINING = [
    *CORPUS,
    *DIFFICULT_TEXTS,
    Path(__file__).read_text(),
    "I'M, we'LL, they'Re; ÉCOLE École école ǅ ⅷ 二〇二六 ½ 1234567",
    RUNS_OF_ONE,
] * 2
TEXTS = [
    *DIFFICULT_TEXTS,
    "".join(DIFFICULT_TEXTS),
    Path(__file__).read_text(),
    "\r\n\r\n \r\n\t\t x\t \n \n",
    " \u00a0\u2003\u3000 \u200b\u200d\u2028\u2029\x85 x",
    "e\u0301 \u0301\u0301 a\u0308\u0323 ﷺ \u1e9b\u0323 Å가각",
    "नमस्ते दुनिया ਪੰਜਾਬੀ தமிழ் বাংলা ไทยไทย ខ្មែរ မြန်မာ ქართული አማርኛ ᏣᎳᎩ 𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𐍈 ٣٤٥ १२३ Ⅷ ²³",
    "👩‍👩‍👧‍👦👩🏽‍🚀🇩🇪🇫🇷 1️⃣ ☠️ \U0001f9d1\u200d\U0001f4bb",
    "\x00\x01\x1b[31m\x7f\x80\ufeff\ufffe\U0010ffff",
    "I'M sure we'LL 'ſ 'S they'Re it'd'Ve",
    "<|im_start|><|im_start|> <|im_end|>x<|eot_id|>\n<tool>y</tool> <pad>",
    "camelCaseHTTPServer snake_case SCREAMING_CASE iPhone12 x²y³ a/b//c\\d --flag=1,000.50",
    "3 33 333 3333 33333 333333 12345678901234567890",
    "中文，標點。「引號」！？カタカナｶﾀｶﾅ한글",
    "a" * 300,
    " unreachable, unreachable",
    ";\n/a a12 1 12 345 3456 34567 a/\nb ./\r\n. x.\n\n\naB 's ==== == ===== !a é ",
    "aaaaaaa aaaaa aaa -------- ----- ======= hahahahaha",
    " " * 500,
]

# Copies of the patterns in each family's tokenizer.json.
WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3 = WORDS + r"\p{N}{1,3}|" + REST
QWEN2 = WORDS + r"\p{N}|" + REST
QWEN35 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}|"
    r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GPT4O = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|"
    r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def split(pattern: str) -> list[Any]:
    return [
        pre_tokenizers.Split(Regex(pattern), "isolated", invert=False),
        pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=False),
    ]


FAMILIES: dict[str, tuple[list[Any], bool, bool]] = {  # pre-tokenizers, NFC, ignore_merges
    "llama-bpe": (split(LLAMA3), False, True),
    "dbrx": (split(LLAMA3), False, False),
    "lfm2": (split(LLAMA3), False, True),
    "qwen2": (split(QWEN2), True, False),
    "qwen35": (split(QWEN35), True, False),
    "gpt-4o": (split(GPT4O), False, False),
    "tekken": (split(TEKKEN), False, True),
    "gpt-2": ([pre_tokenizers.ByteLevel(add_prefix_space=False)], False, False),
    "smollm": (
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)],
        False,
        False,
    ),
}


@cache
def byte_level(family: str) -> tokenizers.Tokenizer:
    """A small trained tokenizer of the family."""
    steps, nfc, ignore_merges = FAMILIES[family]
    backend = tokenizers.Tokenizer(models.BPE(ignore_merges=ignore_merges))
    if nfc:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        TRAINING, trainers.BpeTrainer(vocab_size=900, initial_alphabet=alphabet, show_progress=False)
    )
    backend = with_tokens_across(backend)
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIALS])
    backend.add_tokens([AddedToken(text, special=False, normalized=False) for text in ("<tool>", "</tool>")])
    return backend


def with_tokens_across(backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """Tokens that only another split would produce, and one without merges."""
    described = json.loads(backend.to_str())
    vocab, merges = described["model"]["vocab"], described["model"]["merges"]
    pairs = [
        ("1", "2"),
        ("Ġ", "1"),
        ("/", "Ċ"),
        ("3", "4"),
        ("34", "5"),
        ("345", "6"),
        (".", "Ċ"),
        ("'", "s"),
        ("Ċ", "Ċ"),
        ("a", "B"),
    ]
    pairs += [
        ("=", "="),
        ("==", "="),
        ("Ġ", "Ġ"),
        ("ĠĠ", "Ġ"),
        ("Ġ", "x"),
        ("!", "a"),
        ("x", "."),
        ("é", "Ġ"),
        ("Č", "Ċ"),
        ("Ċ", "/"),
    ]
    for left, right in pairs:
        if left in vocab and right in vocab and left + right not in vocab:
            vocab[left + right] = len(vocab)
            merges.append([left, right])
    vocab["Ġunreachable"] = len(vocab)
    return tokenizers.Tokenizer.from_str(json.dumps(described))


def read(path: Path, write: Callable[[gguf.GGUFWriter], None], architecture: str = "llama") -> Tokenizer:
    writer = gguf.GGUFWriter(path / "x.gguf", architecture)
    write(writer)
    finish(writer)
    return build_gguf_tokenizer(open_gguf(path / "x.gguf").metadata, "x.gguf")


def same(ours: Tokenizer, theirs: tokenizers.Tokenizer, special: bool) -> None:
    for text in TEXTS:
        ids = ours.encode(text, add_special_tokens=special)
        assert ids == theirs.encode(text, add_special_tokens=special).ids, text
        for skip in (True, False):
            assert ours.decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip), text


@pytest.mark.parametrize("family", FAMILIES)
def test_byte_level_equals_its_source(family: str, tmp_path: Path) -> None:
    """With BOS, without it, and for random texts."""
    theirs = tokenizers.Tokenizer.from_str(byte_level(family).to_str())
    ids = [("<|bos|>", theirs.token_to_id("<|bos|>"))]
    theirs.post_processor = processors.TemplateProcessing(single="<|bos|> $A", special_tokens=ids)
    ours = read(
        tmp_path,
        lambda writer: write_byte_level(
            writer, theirs, family, bos="<|bos|>", eos="<|im_end|>", add_bos=True
        ),
    )
    same(ours, theirs, True)
    same(ours, theirs, False)
    assert ours.diff(Tokenizer(theirs)) is None
    chance = random.Random(7)
    alphabet = "aaBx 12345 ==!' aZé ßÅ\u0301ǅ中가😀\u200d\t\n\r'sS1²٣.,/_-#\u00a0\u3000\x00" + "".join(
        map(chr, range(0x300, 0x30A))
    )
    for _ in range(300):
        text = "".join(chance.choices(alphabet, k=chance.randint(1, 40)))
        assert ours.encode(text) == theirs.encode(text).ids, text


def test_bos_that_the_file_turns_off(tmp_path: Path) -> None:
    theirs = byte_level("llama-bpe")
    ours = read(
        tmp_path,
        lambda writer: write_byte_level(writer, theirs, "llama-bpe", bos="<|bos|>", add_bos=False),
    )
    assert ours.encode("x y") == theirs.encode("x y").ids


@pytest.mark.parametrize(
    "family, adds", [("llama-bpe", True), ("tekken", True), ("qwen2", False), ("smollm", False)]
)
def test_default_of_add_bos_token(family: str, adds: bool, tmp_path: Path) -> None:
    """Many Llama 3 files lack the key, but their models expect BOS."""
    ours = read(tmp_path, lambda writer: write_byte_level(writer, byte_level(family), family, bos="<|bos|>"))
    assert (ours.encode("x")[0] == ours.token_to_id("<|bos|>")) is adds


def test_add_eos_token(tmp_path: Path) -> None:
    def write(writer: gguf.GGUFWriter) -> None:
        write_byte_level(writer, byte_level("qwen2"), "qwen2", eos="<|im_end|>")
        writer.add_add_eos_token(True)

    assert read(tmp_path, write).encode("x")[-1] == byte_level("qwen2").token_to_id("<|im_end|>")


def test_unused_tokens_are_unassigned(tmp_path: Path) -> None:
    theirs = byte_level("qwen2")
    last = theirs.get_vocab_size()
    ours = read(tmp_path, lambda writer: write_byte_level(writer, theirs, "qwen2", size=last + 5))
    assert ours.unassigned_ids(last + 7) == tuple(range(last, last + 7))
    assert ours.vocab_size == last


def test_end_token_ids(tmp_path: Path) -> None:
    """EOS first, then known control tokens that end a turn."""

    def write(writer: gguf.GGUFWriter) -> None:
        write_byte_level(writer, byte_level("llama-bpe"), "llama-bpe", bos="<|bos|>", eos="<pad>")
        writer.add_eot_token_id(byte_level("llama-bpe").token_to_id("<|im_start|>"))

    ours = read(tmp_path, write)
    assert [ours.id_to_token(index) for index in ours.eos_token_ids] == [
        "<pad>",
        "<|im_start|>",
        "<|eot_id|>",
        "<|im_end|>",
    ]
    assert ours.special_tokens == {"bos_token": "<|bos|>", "eos_token": "<pad>"}


@pytest.mark.parametrize("kind", [TokenType.CONTROL, TokenType.USER_DEFINED, TokenType.NORMAL])
def test_known_control_tokens_are_control_tokens(kind: TokenType) -> None:
    """Whatever type the file states; other tokens keep their type."""
    tokens = ["a", "b", "ab", "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<EOT>"]
    changed = {"tokens": tokens, "token_type": [1, 1, 1, 3, kind, kind, kind], "eos_token_id": 3}
    ours = build_gguf_tokenizer(
        {**SMALL, **{f"tokenizer.ggml.{key}": value for key, value in changed.items()}}, "x.gguf"
    )
    assert ours.encode("<|im_start|>ab<|im_end|>") == [4, 2, 5]
    assert ours.is_special(4) and ours.is_special(5) and ours.is_special(6) is (kind == TokenType.CONTROL)
    assert ours.eos_token_ids == ((3, 5, 6) if kind == TokenType.CONTROL else (3, 5))


def test_unused_token_stays_unused() -> None:
    changed = {"tokens": ["a", "b", "ab", "<|im_end|>"], "token_type": [1, 1, 1, 5]}
    ours = build_gguf_tokenizer(
        {**SMALL, **{f"tokenizer.ggml.{key}": value for key, value in changed.items()}}, "x.gguf"
    )
    assert ours.id_to_token(3) is None and ours.encode("ab") == [2]


def test_chat_template(tmp_path: Path) -> None:
    template = "{{ bos_token }}{% for message in messages %}{{ message.content }}{{ eos_token }}{% endfor %}"
    ours = read(
        tmp_path,
        lambda writer: write_byte_level(
            writer, byte_level("qwen2"), "qwen2", bos="<|bos|>", eos="<pad>", template=template
        ),
    )
    assert ChatTemplate.from_tokenizer(ours).render([{"role": "user", "content": "hi"}]) == "<|bos|>hi<pad>"


# SentencePiece


@cache
def sentencepiece_model(
    prefix: bool, user_defined: tuple[str, ...] = ()
) -> sentencepiece.SentencePieceProcessor:
    """Trained with the options of Llama 2 (prefix) and Gemma."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(part for text in TRAINING for part in text.split("\n\n")),
        model_writer=model,
        vocab_size=900,
        model_type="bpe",
        byte_fallback=True,
        character_coverage=0.99,
        split_digits=True,
        allow_whitespace_only_pieces=True,
        remove_extra_whitespaces=False,
        normalization_rule_name="identity",
        add_dummy_prefix=prefix,
        user_defined_symbols=list(user_defined),
        minloglevel=2,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


def pieces(
    model: sentencepiece.SentencePieceProcessor, user_defined: tuple[str, ...] = ()
) -> list[tuple[str, float, TokenType]]:
    """As the converter writes them: user-defined tokens lose their scores and keep plain spaces."""
    return [
        (piece.replace("▁", " "), -1000.0, TokenType.USER_DEFINED)
        if (piece := model.id_to_piece(index)) in user_defined
        else (piece, model.get_score(index), piece_kind(model, index))
        for index in range(model.get_piece_size())
    ]


def piece_kind(model: sentencepiece.SentencePieceProcessor, index: int) -> TokenType:
    kinds = {
        TokenType.UNKNOWN: model.is_unknown,
        TokenType.CONTROL: model.is_control,
        TokenType.BYTE: model.is_byte,
        TokenType.UNUSED: model.is_unused,
    }
    return next((kind for kind, holds in kinds.items() if holds(index)), TokenType.NORMAL)


RUNS = tuple(char * count for char in "▁\n\t" for count in range(1, 9) if (char, count) != ("▁", 1))
GEMMA_TOKENS = (*RUNS, "<table>", "</td>")


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_equals_its_source(prefix: bool, tmp_path: Path) -> None:
    theirs = sentencepiece_model(prefix)
    ours = read(
        tmp_path,
        lambda writer: write_sentencepiece(
            writer, pieces(theirs), add_space_prefix=None if prefix else False
        ),
    )
    chance = random.Random(5)
    runs = ["".join(chance.choice("a=-h ") * chance.randint(1, 12) for _ in range(8)) for _ in range(50)]
    for text in (*TEXTS, *runs):
        ids = ours.encode(text, add_special_tokens=False)
        if "<s>" not in text:  # which the library spells out
            assert ids == theirs.encode(text), text
            assert ours.decode(ids) == theirs.decode(ids), text
    assert ours.encode("x") == [1, *theirs.encode("x")]
    assert ours.eos_token_ids == (2,) and ours.special_tokens["unk_token"] == "<unk>"


def test_gemma_equals_its_source(tmp_path: Path) -> None:
    theirs = sentencepiece_model(False, GEMMA_TOKENS)
    write = pieces(theirs, GEMMA_TOKENS)
    ours = read(tmp_path, lambda writer: write_sentencepiece(writer, write, add_space_prefix=False), "gemma2")
    for text in [*TEXTS, "<table>  x</td>\n\n\n\n\n\n\n\n\n\n\n" + " " * 29 + "x\t\t"]:
        if "<s>" not in text:
            assert ours.encode(text, add_special_tokens=False) == theirs.encode(text), text
    assert ours.decode(ours.encode("a    b\n\n c", add_special_tokens=False)) == "a    b\n\n c"


def test_gemma4_has_merges_instead_of_scores(tmp_path: Path) -> None:
    theirs = sentencepiece_model(False, GEMMA_TOKENS)
    kinds = pieces(theirs, GEMMA_TOKENS)
    scores = {
        theirs.id_to_piece(index): float("inf") if kind == TokenType.USER_DEFINED else score
        for index, (piece, score, kind) in enumerate(kinds)
        if kind == TokenType.NORMAL or not piece.strip(" ")
    }
    cuts = [(token[:cut], token[cut:]) for token in scores for cut in range(1, len(token))]
    known = [pair for pair in cuts if pair[0] in scores and pair[1] in scores]
    known.sort(key=lambda pair: (scores["".join(pair)], len(pair[0]), len(pair[1])), reverse=True)
    write = [(piece, 0.0, kind) for piece, _, kind in kinds]

    def write_vocabulary(writer: gguf.GGUFWriter) -> None:
        write_sentencepiece(writer, write, merges=[" ".join(pair) for pair in known])
        writer.add_array("tokenizer.ggml.suppress_tokens", [5, 7])

    ours = read(tmp_path, write_vocabulary, "gemma4")
    for text in [*TEXTS, "<table>  x</td>\n\n\n" + " " * 12 + "x\t\t"]:
        if "<s>" not in text:
            assert ours.encode(text, add_special_tokens=False) == theirs.encode(text), text
    assert ours.encode("x") == [1, *theirs.encode("x")]
    assert ours.suppress_tokens == (5, 7)


def test_special_tokens_in_text(tmp_path: Path) -> None:
    """Each part between them gets a space prefix, as in transformers and llama.cpp."""
    theirs = sentencepiece_model(True)
    ours = read(tmp_path, lambda writer: write_sentencepiece(writer, pieces(theirs)))
    assert ours.encode("one</s>two", add_special_tokens=False) == [
        *theirs.encode("one"),
        2,
        *theirs.encode("two"),
    ]


def test_equal_scores_use_the_order_of_ids(tmp_path: Path) -> None:
    """The converter did not know the scores."""
    theirs = sentencepiece_model(True)
    write = [(piece, -1000.0, kind) for piece, _, kind in pieces(theirs)]
    ours = read(tmp_path, lambda writer: write_sentencepiece(writer, write))
    for text in CORPUS:
        assert ours.encode(text, add_special_tokens=False) == theirs.encode(text)


def test_phi3_control_tokens_strip_spaces(tmp_path: Path) -> None:
    write = [
        *pieces(sentencepiece_model(True)),
        ("<|user|>", 0.0, TokenType.CONTROL),
        ("<|endoftext|>", 0.0, TokenType.CONTROL),
    ]
    ours = read(tmp_path, lambda writer: write_sentencepiece(writer, write), "phi3")
    plain = read(tmp_path, lambda writer: write_sentencepiece(writer, write), "llama")
    assert ours.encode("<|user|> \n x") == plain.encode("<|user|>x") != plain.encode("<|user|> \n x")
    assert ours.encode("<|endoftext|> x") == plain.encode("<|endoftext|> x")


# Invalid metadata

SMALL: dict[str, Any] = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "qwen2",
    "tokenizer.ggml.tokens": ["a", "b", "ab", "<e>"],
    "tokenizer.ggml.token_type": [1, 1, 1, 3],
    "tokenizer.ggml.merges": ["a b"],
    "tokenizer.ggml.eos_token_id": 3,
}
PIECES = {**SMALL, "tokenizer.ggml.model": "llama", "tokenizer.ggml.scores": [-1.0, -2.0, -3.0, 0.0]}


def test_builders_are_valid() -> None:
    assert build_gguf_tokenizer(SMALL, "x").encode("ab") == [2]
    assert build_gguf_tokenizer(PIECES, "x").decode([2]) == "ab"
    assert build_gguf_tokenizer({**SMALL, "tokenizer.ggml.merges": []}, "x").encode("ab") == [0, 1]


def test_only_control_tokens_end_an_answer() -> None:
    """<EOT> may be plain text."""
    values = {**SMALL, "tokenizer.ggml.tokens": ["a", "b", "ab", "<e>", "<EOT>", "<|im_end|>"]}
    assert build_gguf_tokenizer(
        {**values, "tokenizer.ggml.token_type": [1, 1, 1, 3, 1, 3]}, "x"
    ).eos_token_ids == (3, 5)


REFUSED: list[tuple[dict[str, Any], str, Any, str]] = [
    (SMALL, "model", None, "`tokenizer.ggml.model` is missing"),
    (SMALL, "model", "t5", "'t5' is not supported; known: gemma4, gpt2, llama"),
    (SMALL, "model", 7, "must be of type str, got 7"),
    (SMALL, "pre", None, "`tokenizer.ggml.pre` is missing"),
    (SMALL, "pre", "default", "'default' is not supported; known: bailingmoe, "),
    (SMALL, "tokens", None, "`tokenizer.ggml.tokens` must be a list of texts"),
    (SMALL, "tokens", [1, 2, 3, 4], "must be a list of texts"),
    (SMALL, "tokens", ["a", "b", "ab", "a"], "holds 'a' twice, as 0 and 3"),
    (SMALL, "token_type", [1, 1], "must be a list of 4 numbers"),
    (SMALL, "token_type", ["1"] * 4, "must be a list of 4 numbers"),
    (SMALL, "merges", None, "`tokenizer.ggml.merges` must be a list of texts"),
    (SMALL, "merges", ["ab"], "holds 'ab', which is not a pair of tokens"),
    (SMALL, "merges", ["a x"], "`tokenizer.ggml.merges` do not fit the tokens: "),
    (SMALL, "eos_token_id", 4, "`tokenizer.ggml.eos_token_id` is 4; the vocabulary has 4 tokens"),
    (SMALL, "eos_token_id", -1, "is -1"),
    (SMALL, "add_bos_token", True, "`tokenizer.ggml.add_bos_token` is true, but `bos_token_id` is missing"),
    (SMALL, "add_bos_token", 1, "must be of type bool"),
    (SMALL, "suppress_tokens", [1, 99999999], "`tokenizer.ggml.suppress_tokens` must be ids below"),
    (SMALL, "normalizer.lowercase", True, "is not supported"),
    (PIECES, "scores", None, "`tokenizer.ggml.scores` is missing"),
    (PIECES, "scores", [0.0], "must be a list of 4 numbers"),
    (
        PIECES,
        "remove_extra_whitespaces",
        True,
        "`tokenizer.ggml.remove_extra_whitespaces` True is not supported",
    ),
    (PIECES, "precompiled_charsmap", [1, 2], "is not supported"),
]


@pytest.mark.parametrize("values, key, value, message", REFUSED)
def test_invalid_metadata_is_refused(values: dict[str, Any], key: str, value: Any, message: str) -> None:
    changed = {**values, f"tokenizer.ggml.{key}": value}
    with pytest.raises(CheckpointError) as caught:
        build_gguf_tokenizer({name: item for name, item in changed.items() if item is not None}, "file.gguf")
    assert message in str(caught.value) and "file.gguf" in str(caught.value)


def test_chat_template_must_be_a_text() -> None:
    with pytest.raises(CheckpointError, match="chat_template"):
        build_gguf_tokenizer({**SMALL, "tokenizer.chat_template": 5}, "file.gguf")


def test_metadata_is_json(tmp_path: Path) -> None:
    """The reader's values have no types other than those of JSON."""
    read(tmp_path, lambda writer: write_byte_level(writer, byte_level("qwen2"), "qwen2"))
    assert (
        json.loads(json.dumps(open_gguf(tmp_path / "x.gguf").metadata))
        == open_gguf(tmp_path / "x.gguf").metadata
    )
