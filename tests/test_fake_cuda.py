"""Engines on a pretended GPU: what a card would refuse is refused, tokens are those of the same kernels on the CPU, and what
a step waits for is counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from foreword.cli import check, env
from foreword.config.options import Config
from foreword.core.images import expand_placeholders
from foreword.core.outputs import Event
from foreword.core.params import SamplingParams
from foreword.core.request import Request
from foreword.core.structured import StructuredOutput
from foreword.engine import loader as loading
from foreword.engine import profiler as largest
from foreword.engine.engine import Engine
from foreword.engine.loader import load
from foreword.executor.cuda_graphs import CudaGraphPool
from foreword.kernels.ops import Ops
from foreword.kernels.reference.backend import ReferenceOps
from foreword.kernels.triton.backend import TritonOps
from tests.support.checkpoints import EOS, write_checkpoint
from tests.support.device import DEVICE
from tests.support.fake_cuda import FakeCuda
from tests.support.gguf_files import Kind, write_gguf
from tests.support.graph_capture_fake import GraphCapturableOps
from tests.support.triton_interpreter import exact_dot, patch_once_per_launch
from tests.support.vision_checkpoints import IMAGE_TOKEN_ID, random_image, write_vision_checkpoint
from tests.test_exact_overlap import VOCABULARY, told

pytestmark = [
    pytest.mark.skipif(DEVICE != "cpu", reason="there is a real one"),
    # Rows of padding are divided by a temperature of 0: nobody reads what comes of it.
    pytest.mark.filterwarnings("ignore:(divide by zero|invalid value):RuntimeWarning"),
]

SMALL = {
    "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 1,
}  # fmt: skip
WHOLE_BLOCKS = {
    "hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 8, "head_dim": 32, "num_hidden_layers": 1,
}  # fmt: skip
VOLTA, TURING, AMPERE, ADA, HOPPER = (7, 0), (7, 5), (8, 0), (8, 9), (9, 0)
PARAMS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.8, "top_k": 9, "top_p": 0.9, "min_p": 0.01},
    {
        "temperature": 0.9, "typical_p": 0.9, "top_n_sigma": 2.0, "xtc_probability": 0.5, "xtc_threshold": 0.05,
        "presence_penalty": 0.5, "frequency_penalty": 0.2, "repetition_penalty": 1.2, "logit_bias": {65: 3.0}, "min_tokens": 2,
        "logprobs": 2, "logprob_token_ids": (3, 4),
    },
    {"temperature": 0.7, "prompt_logprobs": 1, "dry_multiplier": 0.8},
    {"temperature": 1.0, "structured": StructuredOutput("json_object"), "ignore_eos": False},
    {"temperature": 1.0, "allowed_token_ids": (70, 71, 72, 73)},
)  # fmt: skip
EVERYBODY, FEW = range(len(PARAMS)), (0, 1)
PROMPT = (40, 41, 42, 40, 41, 42, 40, 41)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The interpreter is slow: few graphs, of few rows."""
    monkeypatch.setattr(largest, "DEFAULT_GRAPH_ROWS", 2)
    with patch_once_per_launch(), exact_dot():
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("pretended") / "model", "llama", seed=5, **SMALL)


@pytest.fixture(scope="module")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """It is right now and then."""
    return write_checkpoint(
        tmp_path_factory.mktemp("pretended") / "drafter", "llama", seed=5, dtype="bfloat16", **SMALL
    )


def requests(which: Sequence[int] = EVERYBODY, num_tokens: int = 5, pools: bool = True) -> list[Request]:
    found = [
        Request(
            str(n),
            (*PROMPT, 50 + n),
            SamplingParams(**{"max_tokens": num_tokens, "ignore_eos": True, **PARAMS[n]}),
            n,
            (EOS,),
        )
        for n in which
    ]
    vectors = [
        Request(f"v{n}", PROMPT, SamplingParams(), 0, (EOS,), pooling=how)
        for n, how in enumerate(("last", "mean"))
    ]
    return found + vectors if pools else found


def shown(model: Path) -> list[Request]:
    """Requests with a picture."""
    token_ids, pictures = expand_placeholders(
        (40, 41, IMAGE_TOKEN_ID, 42), IMAGE_TOKEN_ID, [random_image(model, 1)]
    )
    params = [SamplingParams(**{"max_tokens": 4, "ignore_eos": True, **PARAMS[n]}) for n in (0, 2)]
    return [Request(str(n), token_ids, one, n, (EOS,), images=pictures) for n, one in enumerate(params)]


def engine_of(model: Path, device: str, **options: Any) -> Engine:
    defaults: dict[str, Any] = {
        "max_model_len": 64, "max_num_seqs": 2, "max_num_batched_tokens": 8, "block_size": 16, "speculate": "off", "threads": 1,
        "dtype": "float32", "test_mode": True,
    }  # fmt: skip
    return load(Config(model=str(model), device=device, **(defaults | options)), never_sampled_ids=(7, 8))


def serve(engine: Engine, crowd: Sequence[Request]) -> dict[str, list[Any]]:
    engine.set_vocabulary(VOCABULARY)
    heard: dict[str, list[Event]] = {request.id: [] for request in crowd}
    for request in crowd:
        engine.submit(request)
    while not engine.idle:
        for event in engine.step().events:
            heard[event.request_id].append(event)
        engine.check()
    return {name: told(events) for name, events in heard.items()}


def plainly(
    ops: Callable[[], Ops], model: Path, crowd: Sequence[Request], **options: Any
) -> dict[str, list[Any]]:
    """What the same kernels say on the CPU, without drafts, without overlap."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loading, "select_backend", lambda *_, **__: ops())
        known = {
            name: value
            for name, value in options.items()
            if name not in ("speculate", "draft_model", "num_speculative_tokens")
        }
        return serve(
            engine_of(model, "cpu", kv_cache_memory="2000tokens", **{**known, "overlap": False}), crowd
        )


def check_equal(
    ops: Callable[[], Ops], model: Path, capability: tuple[int, int], crowd: Sequence[Request], **options: Any
) -> Engine:
    plain = plainly(ops, model, crowd, **options)
    with FakeCuda(capability) as gpu:
        engine = engine_of(model, "cuda", **options)
        found = serve(engine, crowd)
    assert found == plain
    assert gpu.refused == [] and not engine.proposer.errors
    return engine


def test_torch_computes_for_old_cards(model: Path, drafter: Path) -> None:
    engine = check_equal(ReferenceOps, model, VOLTA, requests(), speculate="auto", draft_model=str(drafter))
    assert engine.info.backend == "reference" and "compute capability 7.5" in " ".join(engine.info.warnings)


@pytest.mark.parametrize("family", ["qwen3", "phi3", "gemma2", "gemma3_text"])
def test_families(tmp_path: Path, family: str) -> None:
    check_equal(ReferenceOps, write_checkpoint(tmp_path, family, seed=5), VOLTA, requests(FEW))


@pytest.mark.parametrize("family", ["llava_next", "qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_families_that_see(tmp_path: Path, family: str) -> None:
    model = write_vision_checkpoint(tmp_path / "model", family, seed=1)
    sees = write_vision_checkpoint(tmp_path / "sees", family, seed=1, dtype="bfloat16")
    options = {
        "max_model_len": 128,
        "max_num_batched_tokens": 32,
        "speculate": "draft",
        "draft_model": str(sees),
    }
    check_equal(ReferenceOps, model, VOLTA, shown(model), **options)


@pytest.mark.parametrize("kind", [Kind.Q8_0, Kind.Q4_0, Kind.Q5_0, Kind.Q4_K, Kind.Q5_K, Kind.Q6_K])
def test_blocks_of_files(tmp_path: Path, kind: Kind) -> None:
    file = write_gguf(
        write_checkpoint(tmp_path / "made", "llama", seed=5, **WHOLE_BLOCKS), tmp_path / "model.gguf", kind
    )
    check_equal(ReferenceOps, file, VOLTA, requests((1,), 3, pools=False))


@pytest.mark.parametrize(
    "options",
    [
        {"quantization": "int4", "kv_cache_dtype": "int8"},
        {"load_format": "dummy"},
        {"dtype": "auto"},
        {"fast_math": True},
    ],
)
def test_kinds_of_weights(model: Path, options: dict[str, Any]) -> None:
    with FakeCuda(VOLTA) as gpu:
        serve(engine_of(model, "cuda", **options), requests(FEW, 3))
    assert gpu.refused == []


def test_triton_with_graphs_and_overlap(model: Path) -> None:
    engine = check_equal(
        TritonOps, model, HOPPER, requests((1,), 4, pools=False), max_num_seqs=1, max_num_batched_tokens=4
    )
    assert engine.info.backend == "triton" and engine.info.num_cuda_graphs > 0
    assert engine.overlap is not None and engine.overlap.num_device_steps > 0 == engine.overlap.num_errors


def test_triton_with_all_that_is_asked_for(model: Path) -> None:
    check_equal(TritonOps, model, AMPERE, requests(num_tokens=2), enforce_eager=True)


def test_triton_with_a_draft_model(model: Path, drafter: Path) -> None:
    options = {
        "speculate": "draft",
        "draft_model": str(drafter),
        "draft_length": "fixed",
        "num_speculative_tokens": 1,
    }
    check_equal(TritonOps, model, AMPERE, requests((1,), 3, pools=False), enforce_eager=True, **options)


@pytest.mark.parametrize(
    "options",
    [{"quantization": "int8", "kv_cache_dtype": "int8"}, {"quantization": "int4"}],
    ids=str,
)
def test_triton_one_by_one(model: Path, options: dict[str, Any]) -> None:
    engine = check_equal(
        TritonOps, model, TURING, requests((1,), 3, pools=False), enforce_eager=True, **options
    )
    assert engine.info.backend == "triton" and engine.info.num_cuda_graphs == 0


@pytest.mark.parametrize(
    "options",
    [
        {"quantization": "fp8", "kv_cache_dtype": "fp8"},
        {"dtype": "bfloat16"},
        {"dtype": "float16"},
        {"fast_math": True},
    ],
    ids=str,
)
def test_triton_where_a_cpu_has_no_such_thing(model: Path, options: dict[str, Any]) -> None:
    with FakeCuda(ADA) as gpu:
        found = serve(engine_of(model, "cuda", enforce_eager=True, **options), requests((1,), 3, pools=False))
    assert gpu.refused == [] and found["1"][-1] == ("end", "length", None)


def steps_of(engine: Engine, gpu: FakeCuda, crowd: Sequence[Request]) -> list[Counter[str]]:
    """What each step did, beside kernels."""
    for request in crowd:
        engine.submit(request)
    steps = []
    while not engine.idle:
        with gpu.count_calls() as found:
            engine.step()
        steps.append(Counter({name: count for name, count in found.items() if name != "launch"}))
    assert gpu.refused == []
    return steps


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs of torch's operations: what the host does beside kernels is the same, and takes less time."""
    monkeypatch.setattr(loading, "select_backend", lambda *_, **__: GraphCapturableOps())


GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
FILTERED = SamplingParams(temperature=0.8, top_k=9, top_p=0.9, max_tokens=16, ignore_eos=True)
BOTH = [
    Request("greedy", PROMPT[:6], GREEDY, 1, (EOS,)),
    Request("filtered", PROMPT[:6], FILTERED, 2, (EOS,)),
]
QUIET: dict[str, Any] = {"test_mode": False, "block_size": 4}
PLAIN_STEP = {
    "upload": 2,
    "look": 1,
    "replay": 1,
}  # its rows, what sampling must know; the ids that were sampled
ROUND = {"upload": 1, "replay": 1, "download": 1, "wait": 1}  # who takes part; what the round before yielded


@pytest.mark.usefixtures("recorded")
def test_a_plain_step_waits_once(model: Path) -> None:
    with FakeCuda() as gpu:
        steps = steps_of(engine_of(model, "cuda", overlap=False, **QUIET), gpu, BOTH)
    assert [dict(step) for step in steps[2:]] == [PLAIN_STEP] * (len(steps) - 2)


@pytest.mark.usefixtures("recorded")
def test_a_verified_step_waits_once(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(largest, "DEFAULT_GRAPH_ROWS", 8)
    options = {
        "speculate": "ngram",
        "draft_length": "fixed",
        "num_speculative_tokens": 2,
        "overlap": False,
        **QUIET,
    }
    with FakeCuda() as gpu:
        engine = engine_of(model, "cuda", **options)
        steps = steps_of(engine, gpu, BOTH)
    assert sum(engine.proposer.stats().draft_length_counts["ngram"].values()) > 0
    assert [dict(step) for step in steps[2:]] == [PLAIN_STEP] * (len(steps) - 2)


@pytest.mark.usefixtures("recorded")
@pytest.mark.parametrize("guesses", [0, 1])
def test_a_round_waits_for_the_one_before(
    model: Path, drafter: Path, guesses: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory is measured, passes of both models and rounds are captured, and no round waits where it is launched."""
    monkeypatch.setattr(largest, "DEFAULT_GRAPH_ROWS", 4)
    options: dict[str, Any] = {**QUIET, "block_size": 16}
    if guesses:
        options |= {
            "speculate": "draft",
            "draft_model": str(drafter),
            "draft_length": "fixed",
            "num_speculative_tokens": guesses,
        }
    with FakeCuda() as gpu:
        engine = engine_of(model, "cuda", **options)
        steps = steps_of(engine, gpu, BOTH)
    assert engine.info.num_cuda_graphs > 0 and engine.overlap is not None and engine.overlap.num_errors == 0
    assert not engine.proposer.errors and engine.overlap.num_device_steps > 2
    steady = [step for step in steps if step["wait"] and step["upload"] == 1]
    expected = {**ROUND, "replay": 1 + guesses}
    assert len(steady) > 2 and [dict(step) for step in steady] == [expected] * len(steady)


@pytest.mark.usefixtures("recorded")
def test_the_same_tokens_with_drafts_and_rounds(model: Path, drafter: Path) -> None:
    options = {
        "speculate": "draft",
        "draft_model": str(drafter),
        "draft_length": "fixed",
        "num_speculative_tokens": 2,
    }
    check_equal(GraphCapturableOps, model, HOPPER, requests(num_tokens=8), block_size=4, **options)


@pytest.mark.parametrize("capability", [VOLTA, TURING, HOPPER])
def test_check_and_env(model: Path, capability: tuple[int, int]) -> None:
    with FakeCuda(capability):
        told = [
            finding.text
            for finding in check.run_checks(Config(model=str(model), device="cuda"))
            if finding.ok is not False
        ]
        backends = env.collect()["backends"]
    assert any("Pretended GPU" in text for text in told)
    assert backends["triton"].startswith("no: " if capability == VOLTA else "available: ")


def test_what_a_graph_took_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """What warming up left in the allocator's hands is none of it."""
    held = Counter[str]()
    with FakeCuda() as gpu:
        monkeypatch.setattr("foreword.executor.cuda_graphs.NUM_WARM_UPS", 2)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1000 - held.total(), 1000))
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: held.pop("cached", None))
        graphs = CudaGraphPool(torch.device("cuda"))

        def run() -> None:
            held["cached" if gpu.capturing is None else "captured"] += 10

        graphs.capture(run)
    assert held == {"captured": 10} and graphs.num_bytes == 10


def test_the_pretence_is_as_strict_as_a_card() -> None:
    """Tensors of the host meet those of the device only where torch lets them."""
    with FakeCuda() as gpu:
        there, here = torch.arange(6, device="cuda"), torch.arange(6)
        assert (
            there.is_cuda
            and there.device == torch.device("cuda:0")
            and there.view(2, 3)[1].is_cuda
            and not here.is_cuda
        )
        assert (
            (there + torch.tensor(2)).is_cuda
            and torch.zeros_like(there).is_cuda
            and there.to("cpu").device.type == "cpu"
        )
        for refused in (
            lambda: there + here,
            lambda: torch.cat((there, here)),
            lambda: here[there],
            lambda: there.index_select(0, here),
            lambda: there.numpy(),
            lambda: there.data_ptr(),
        ):
            with pytest.raises(RuntimeError):
                refused()
        assert len(gpu.refused) == 6


@pytest.mark.parametrize(
    ("does", "counted"),
    [
        (lambda there: there.tolist(), {"look": 1}),
        (lambda there: bool((there > 1).any()), {"look": 1}),
        (lambda there: there[there > 1], {"look": 1}),
        (lambda there: there.cpu(), {"look": 1}),
        (lambda there: there[[0, 1]], {"blocking upload": 1}),
        (lambda there: torch.tensor([1, 2], device="cuda"), {"blocking upload": 1}),
        (lambda there: there.copy_(torch.zeros(6, dtype=torch.int64)), {"blocking upload": 1}),
        (
            lambda there: there.copy_(torch.zeros(6, dtype=torch.int64).pin_memory(), non_blocking=True),
            {"upload": 1},
        ),
        (lambda there: there[1:3].add_(1).clamp(max=2), {}),
    ],
)
def test_what_waits_is_counted(does: Callable[[torch.Tensor], object], counted: dict[str, int]) -> None:
    """And cannot be part of a graph."""
    with FakeCuda() as gpu:
        there = torch.arange(6, device="cuda")
        with gpu.count_calls() as found:
            does(there)
        assert found == counted
        graph = torch.cuda.CUDAGraph()
        if counted:
            with pytest.raises(RuntimeError), torch.cuda.graph(graph):
                does(there)


def test_copies_are_done_when_they_were_awaited() -> None:
    with FakeCuda() as gpu:
        there, into = torch.arange(6, device="cuda"), torch.empty(6, dtype=torch.int64, pin_memory=True)
        into.copy_(there, non_blocking=True)
        done = torch.cuda.Event()
        done.record()
        there.fill_(7)
        assert into.tolist() != list(range(6)), "it is not there yet"
        done.synchronize()
        assert into.tolist() == list(range(6))
        source = torch.zeros(6, dtype=torch.int64).pin_memory()
        there.copy_(source, non_blocking=True)
        source.fill_(1)
        torch.cuda.synchronize()
        assert gpu.refused == ["pinned memory was changed before it was copied"]
