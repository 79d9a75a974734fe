"""Every feature with every drafter: a test checks a row of docs/features.md.

All drafters run in a crowded engine: small cache, short chunks, sixteen requests at once. Each request
names its drafter. Trained heads exclude a draft model, so they have an engine of their own. The expected
answer has no speculation, one request at a time, ample cache and unchunked prompts. Default: drafters take
turns at the features; `--full`: each of them with each.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from foreword import LLM, RequestOutput, SamplingParams, Speculation
from foreword.config.drafters import DRAFTERS, HEAD_DRAFTERS
from foreword.errors import InvalidRequest
from tests.support.budget import is_full
from tests.support.checkpoints import write_checkpoint, write_related_drafter
from tests.support.feature_matrix import (
    CALLS,
    CHAT_ARGUMENTS,
    DRAFTER_COLUMNS,
    FEATURES,
    IMAGES,
    PAGE,
    render_page,
)
from tests.support.heads import train_head
from tests.support.images import png
from tests.support.tool_checkpoint import write_tool_checkpoint
from tests.support.vision_checkpoints import IMAGE_TOKEN_ID, write_vision_checkpoint
from tests.test_exact import fingerprint

MAX_MODEL_LEN = 127
NUM_PROMPTS = 3
PARTS = 8
PAIRS = 120  # random pairs of features; --full-product takes all
TURNS = 1 if is_full() else 3  # of the drafters


def drafters_of(features: Mapping[str, Any], feature: str) -> Sequence[str]:
    """The drafters that a feature is checked with."""
    return DRAFTER_COLUMNS[list(features).index(feature) % TURNS :: TURNS]


def prompts() -> list[dict[str, list[int]]]:
    """Prompts with repetitions and a shared prefix."""
    chance = random.Random(11)
    common = [chance.randrange(3, 250) for _ in range(20)]
    own = [[chance.randrange(3, 250) for _ in range(chance.randint(2, 9))] for _ in range(NUM_PROMPTS)]
    return [{"prompt_token_ids": common[: 10 * i] + part * 3} for i, part in enumerate(own)]


def params_of(settings: Mapping[str, Any]) -> list[SamplingParams]:
    sampled = {name: value for name, value in settings.items() if name not in CHAT_ARGUMENTS}
    return [SamplingParams(**{"max_tokens": 40, "seed": 100 * i, **sampled}) for i in range(NUM_PROMPTS)]


def prompts_with_images() -> list[dict[str, Any]]:
    """The same prompts with images before, within and after the text; one image twice."""
    shown = [[], [make_image(1)], [make_image(2), make_image(3), make_image(1)]]
    found = []
    for prompt, images in zip(prompts(), shown, strict=True):
        ids = prompt["prompt_token_ids"]
        for number in range(len(images)):
            ids = [*ids[: 9 * number], IMAGE_TOKEN_ID, *ids[9 * number :]]
        found.append({"prompt_token_ids": ids, "images": images})
    return found


def make_image(number: int) -> bytes:
    return png(("red", "lime", "blue")[number % 3], (20 + 17 * number, 40 - 9 * number))


@dataclass
class Engines:
    """The crowded engines, the plain engine, their prompts, and the plain answers so far."""

    crowded: LLM
    with_head: LLM
    plain: LLM
    prompts: Sequence[Any]  # of LLM.generate, or conversations of LLM.chat
    known: dict[str, list[Any]] = field(default_factory=dict)  # plain answers
    checked: set[str] = field(default_factory=set)

    def expected(self, settings: Mapping[str, Any]) -> list[Any]:
        key = repr(settings)
        if key not in self.known:
            self.known[key] = answers(self.plain, self.prompts, settings, params_of(settings))
        return self.known[key]

    def check(self, settings: Mapping[str, Any], drafters: Sequence[str]) -> None:
        """The crowded answers of these drafters, all asked at once, equal the plain ones."""
        key = repr((settings, drafters))
        if key in self.checked:
            return
        expected = self.expected(settings)
        for llm, names in (
            (self.crowded, [name for name in drafters if name not in HEAD_DRAFTERS]),
            (self.with_head, [name for name in drafters if name in HEAD_DRAFTERS]),
        ):
            asked = [prompt for _ in names for prompt in self.prompts]
            params = [speculated(one, drafter) for drafter in names for one in params_of(settings)]
            actual = answers(llm, asked, settings, params) if names else []
            size = len(self.prompts)
            parts = {drafter: actual[i * size : (i + 1) * size] for i, drafter in enumerate(names)}
            assert [drafter for drafter, part in parts.items() if part != expected] == []
        self.checked.add(key)

    def check_state(self) -> None:
        """Both crowded engines are sound."""
        for llm in (self.crowded, self.with_head):
            llm.check()
            assert not llm.stats.drafter_errors


def speculated(params: SamplingParams, drafter: str) -> SamplingParams:
    """With a prediction, which the `prediction` drafter needs."""
    expected = params.prediction or "the thing in the an the er on a the"
    return replace(params, speculation=Speculation(drafter), prediction=expected)


def run(
    llm: LLM, asked: Sequence[Any], settings: Mapping[str, Any], params: Sequence[SamplingParams]
) -> list[RequestOutput]:
    if isinstance(asked[0], Mapping):
        return llm.generate(list(asked), params)
    arguments = {name: settings[name] for name in CHAT_ARGUMENTS if name in settings}
    return llm.chat(list(asked), params, **arguments)


def answers(
    llm: LLM, asked: Sequence[Any], settings: Mapping[str, Any], params: Sequence[SamplingParams]
) -> list[Any]:
    """Fingerprints of the answers; the error of a request with contradictory parameters."""
    try:
        return [fingerprint(output) for output in run(llm, asked, settings, params)]
    except InvalidRequest:
        pairs = zip(asked, params, strict=True)
        return [_answer(llm, prompt, settings, choice) for prompt, choice in pairs]


def _answer(llm: LLM, prompt: Any, settings: Mapping[str, Any], params: SamplingParams) -> Any:
    try:
        return fingerprint(run(llm, [prompt], settings, [params])[0])
    except InvalidRequest as error:
        return type(error), str(error)


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    path = tmp_path_factory.mktemp("features")
    write_checkpoint(path / "model", "llama", seed=1)
    write_checkpoint(path / "drafter", "llama", seed=1, dtype="bfloat16")  # rounded: agrees often, not always
    made = engines_of(path, prompts(), FEATURES, max_model_len=MAX_MODEL_LEN, kv_cache_memory="240tokens")
    yield made
    made.check_state()


@pytest.fixture(scope="module")
def stateful(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    """A model with states with a draft model of another family."""
    path = tmp_path_factory.mktemp("stateful")
    write_related_drafter(path / "drafter", write_checkpoint(path / "model", "qwen3_5_text", seed=6))
    made = engines_of(path, prompts(), FEATURES, max_model_len=MAX_MODEL_LEN, kv_cache_memory="240tokens")
    yield made
    made.check_state()


@pytest.fixture(scope="module")
def multimodal(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    """A multimodal model with a multimodal draft model."""
    path = tmp_path_factory.mktemp("multimodal")
    write_vision_checkpoint(path / "model", "qwen2_5_vl", seed=1)
    write_vision_checkpoint(path / "drafter", "qwen2_5_vl", seed=1, dtype="bfloat16")
    asked = prompts_with_images()
    made = engines_of(
        path, asked, IMAGES, max_model_len=255, kv_cache_memory="256tokens", image_cache_memory="2kb"
    )
    yield made
    made.check_state()


@pytest.fixture(scope="module")
def calling(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    """A model that calls tools and reasons, with a draft model."""
    path = tmp_path_factory.mktemp("calling")
    write_tool_checkpoint(path / "model")
    write_tool_checkpoint(path / "drafter", dtype="bfloat16")
    asked = [[{"role": "user", "content": text}] for text in ("Weather in Bonn?", "the thing", "the time")]
    made = engines_of(path, asked, CALLS, max_model_len=1023, kv_cache_memory="1200tokens")
    yield made
    made.check_state()


def engines_of(path: Path, asked: Sequence[Any], features: Mapping[str, Any], **options: Any) -> Engines:
    """Engines of the checkpoints `model` and `drafter` in a directory."""
    options |= {"threads": 1, "test_mode": True}
    ample = {**options, "kv_cache_memory": "8000tokens"}
    plain = LLM(str(path / "model"), speculate="off", max_num_seqs=1, prefix_caching=False, **ample)
    outputs = [run(plain, asked, settings, params_of(settings)) for settings in features.values()]
    recording = path / "recording.jsonl"
    lines = list(recorded(output for each in outputs for output in each))
    recording.write_text("".join(lines))
    texts = [[*line["prompt_token_ids"], *line["token_ids"]] for line in map(json.loads, lines[::5])]
    head = train_head(path / "head", path / "model", texts[:24], steps=40)
    options |= {"draft_length": "fixed", "max_num_seqs": 16, "max_num_batched_tokens": 24}
    crowded = LLM(
        str(path / "model"),
        speculate=",".join(name for name in DRAFTERS if name not in HEAD_DRAFTERS),
        draft_model=str(path / "drafter"),
        replay_file=str(recording),
        replay_error_rate=0.3,
        **options,
    )
    with_head = LLM(str(path / "model"), speculate="eagle3", draft_model=str(head), **options)
    known = {
        repr(settings): list(map(fingerprint, each))
        for settings, each in zip(features.values(), outputs, strict=True)
    }
    return Engines(crowded, with_head, plain, asked, known)


def recorded(outputs: Iterable[RequestOutput]) -> Iterator[str]:
    """Lines of the replay drafter's file."""
    for output in outputs:
        for choice in output.outputs:
            line = {
                "prompt_token_ids": output.prompt_token_ids,
                "seed": choice.seed,
                "token_ids": choice.token_ids,
            }
            yield json.dumps(line) + "\n"


@pytest.mark.parametrize("feature", FEATURES)
def test_feature_is_exact_with_every_drafter(engines: Engines, feature: str) -> None:
    engines.check(FEATURES[feature], drafters_of(FEATURES, feature))


@pytest.mark.full
@pytest.mark.parametrize("feature", FEATURES)
def test_feature_is_exact_with_states(stateful: Engines, feature: str) -> None:
    stateful.check(FEATURES[feature], DRAFTER_COLUMNS)


@pytest.mark.parametrize("feature", IMAGES)
def test_feature_is_exact_with_images(multimodal: Engines, feature: str) -> None:
    multimodal.check(IMAGES[feature], drafters_of(IMAGES, feature))


@pytest.mark.parametrize("feature", CALLS)
def test_feature_is_exact_with_calls(calling: Engines, feature: str) -> None:
    calling.check(CALLS[feature], drafters_of(CALLS, feature))


@pytest.mark.parametrize(
    ("fixture", "features"), [("engines", FEATURES), ("multimodal", IMAGES), ("calling", CALLS)]
)
def test_every_drafter_is_accepted_and_rejected(
    request: pytest.FixtureRequest, fixture: str, features: Mapping[str, Any]
) -> None:
    """Without accepted and rejected drafts the matrix would prove little."""
    engines: Engines = request.getfixturevalue(fixture)
    for feature, settings in features.items():
        engines.check(settings, drafters_of(features, feature))
    samples = {
        (sample.name, sample.labels.get("drafter")): sample.value
        for llm in (engines.with_head, engines.crowded)
        for metric in text_string_to_metric_families(llm.render_metrics().decode())
        for sample in metric.samples
    }
    # Forced tokens have no acceptance figures.
    assert samples["foreword_spec_forced_tokens_total", None] > 0
    assert ("foreword_spec_draft_tokens_total", "grammar") not in samples
    # Random tokens are no text: see test_equal_where_answers_copy_text()
    for drafter in {*DRAFTER_COLUMNS} - {"auto", "grammar", "text"}:
        drafted, accepted = (
            samples[f"foreword_spec_{kind}_tokens_total", drafter] for kind in ("draft", "accepted")
        )
        assert drafted > 0 and (0 < accepted < drafted or not is_full()), drafter
    drafted, accepted = (
        sum(value for (name, _), value in samples.items() if name == f"foreword_spec_{kind}_tokens_total")
        for kind in ("draft", "accepted")
    )
    assert 0 < accepted < drafted


def test_features_of_calls_have_calls_and_reasoning(calling: Engines) -> None:
    for name, settings in CALLS.items():
        choices = [choice for answer in calling.expected(settings) for choice in answer["choices"]]
        if "tools" in settings:
            assert any(calls for *_, calls in choices), name
        if "reasoning" in name:
            assert any(reasoning for *_, reasoning, _ in choices), name


def compatible(pair: tuple[str, str]) -> bool:
    """Whether the two ask for different things that a request may ask for at once."""
    first, second = (FEATURES[name] for name in pair)
    return not first.keys() & second.keys() and {"min_tokens", "max_tokens"} > {*first, *second} & {
        "min_tokens",
        "max_tokens",
    }


def pairs() -> list[tuple[str, str, str]]:
    """Pairs of features, each with a drafter, in an order of chance."""
    found = [pair for pair in itertools.combinations(FEATURES, 2) if compatible(pair)]
    random.Random(5).shuffle(found)
    return [(*pair, DRAFTER_COLUMNS[i % len(DRAFTER_COLUMNS)]) for i, pair in enumerate(found)]


@pytest.mark.full
@pytest.mark.parametrize("number", range(PARTS))
def test_random_pairs(engines: Engines, number: int, request: pytest.FixtureRequest) -> None:
    """Two features in one request."""
    everything = pairs()
    taken = everything if request.config.getoption("--full-product") else everything[:PAIRS]
    for first, second, drafter in taken[number::PARTS]:
        engines.check({**FEATURES[first], **FEATURES[second]}, (drafter,))


@pytest.mark.parametrize("drafter", DRAFTER_COLUMNS if is_full() else ("auto", "eagle3"))
def test_embeddings_in_the_same_engine(engines: Engines, drafter: str) -> None:
    """Embedding requests between speculative steps: neither the answers nor the vectors change."""
    params = [speculated(one, drafter) for one in params_of({"temperature": 0.7})]
    texts = ["the thing", "an answer on the thing in the " * 3, "x"]
    llm = engines.with_head if drafter in HEAD_DRAFTERS else engines.crowded
    streams = [llm.stream(prompt, one) for prompt, one in zip(prompts(), params, strict=True)]
    pieces: list[list[str]] = [[] for _ in streams]
    vectors = []
    for round_ in itertools.zip_longest(*streams):
        for texts_of_stream, piece in zip(pieces, round_, strict=True):
            texts_of_stream.append("" if piece is None else piece.text)
        vectors.append([output.vector for output in llm.embed(texts, pooling="mean")])
    expected = [
        engines.plain.generate([prompt], one)[0].text
        for prompt, one in zip(prompts(), params_of({"temperature": 0.7}), strict=True)
    ]
    assert ["".join(parts) for parts in pieces] == expected
    alone = [engines.plain.embed(text, pooling="mean")[0].vector for text in texts]
    assert len(vectors) > 5 and all(batch == alone for batch in vectors)


def test_page_matches_the_tested_features() -> None:
    assert PAGE.read_text() == render_page(), "run python -m tests.support.feature_matrix"
