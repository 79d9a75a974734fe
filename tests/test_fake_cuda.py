"""Engines on a fake GPU: no refused operations, tokens of the same kernels on the CPU, counted syncs."""

from __future__ import annotations

import re
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
from foreword.core.states import SEGMENT
from foreword.core.structured_output import StructuredOutput
from foreword.cuda_graphs.capture import CudaGraphPool
from foreword.engine import loader, memory_profiler
from foreword.engine.engine import Engine
from foreword.engine.loader import load
from foreword.errors import ConfigError
from foreword.kernels import gpu
from foreword.kernels.ops import Ops
from foreword.kernels.quantization import QUANT_BLOCKS
from foreword.kernels.reference.backend import ReferenceOps
from foreword.kernels.triton.backend import TritonOps
from tests.support.checkpoints import EOS, write_checkpoint
from tests.support.device import DEVICE
from tests.support.fake_cuda import FakeCuda
from tests.support.gguf_files import Kind, write_gguf
from tests.support.graph_capture_fake import GraphCapturableOps
from tests.support.triton_interpreter import exact_dot, fast_interpreter
from tests.support.vision_checkpoints import IMAGE_TOKEN_ID, random_image, write_vision_checkpoint
from tests.test_exact_overlap import VOCABULARY, observe

pytestmark = [
    pytest.mark.skipif(DEVICE != "cpu", reason="there is a real GPU"),
    # Padding rows are divided by temperature 0; their results are not read.
    pytest.mark.filterwarnings("ignore:(divide by zero|invalid value):RuntimeWarning"),
]

SMALL = {
    "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_key_value_heads": 1,
    "num_hidden_layers": 1,
}  # fmt: skip
WHOLE_BLOCKS = {
    "hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 8, "head_dim": 32,
    "num_hidden_layers": 1,
}  # fmt: skip
VOLTA, TURING, AMPERE, ADA, HOPPER = (7, 0), (7, 5), (8, 0), (8, 9), (9, 0)
PARAMS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.8, "top_k": 9, "top_p": 0.9, "min_p": 0.01},
    {
        "temperature": 0.9, "typical_p": 0.9, "top_n_sigma": 2.0, "xtc_probability": 0.5,
        "xtc_threshold": 0.05, "presence_penalty": 0.5, "frequency_penalty": 0.2, "repetition_penalty": 1.2,
        "logit_bias": {65: 3.0}, "min_tokens": 2, "logprobs": 2, "logprob_token_ids": (3, 4),
    },
    {"temperature": 0.7, "prompt_logprobs": 1, "dry_multiplier": 0.8},
    {"temperature": 1.0, "structured": StructuredOutput("json_object"), "ignore_eos": False},
    {"temperature": 1.0, "allowed_token_ids": (70, 71, 72, 73)},
)  # fmt: skip
ALL, SIMPLE = range(len(PARAMS)), (0, 1)
PROMPT = (40, 41, 42, 40, 41, 42, 40, 41)


@pytest.fixture(autouse=True)
def small_graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Few graphs of few rows: the interpreter is slow."""
    monkeypatch.setattr(memory_profiler, "MIN_GRAPH_ROWS", 2)
    with fast_interpreter(), exact_dot():
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("fake-cuda") / "model", "llama", seed=5, **SMALL)


@pytest.fixture(scope="module")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A draft model whose tokens are accepted now and then."""
    return write_checkpoint(
        tmp_path_factory.mktemp("fake-cuda") / "drafter", "llama", seed=5, dtype="bfloat16", **SMALL
    )


def requests(which: Sequence[int] = ALL, num_tokens: int = 5, pools: bool = True) -> list[Request]:
    completions = [
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
    return completions + vectors if pools else completions


def image_requests(model: Path) -> list[Request]:
    """Requests with an image."""
    token_ids, images = expand_placeholders(
        (40, 41, IMAGE_TOKEN_ID, 42), IMAGE_TOKEN_ID, [random_image(model, 1)]
    )
    params = [SamplingParams(**{"max_tokens": 4, "ignore_eos": True, **PARAMS[n]}) for n in (0, 2)]
    return [
        Request(str(n), token_ids, sampling, n, (EOS,), images=images) for n, sampling in enumerate(params)
    ]


def make_engine(model: Path, device: str, **options: Any) -> Engine:
    defaults: dict[str, Any] = {
        "max_model_len": 64, "max_num_seqs": 2, "max_num_batched_tokens": 8, "block_size": 16,
        "speculate": "off", "threads": 1, "dtype": "float32", "test_mode": True,
    }  # fmt: skip
    return load(Config(model=str(model), device=device, **(defaults | options)), never_sampled_ids=(7, 8))


def serve(engine: Engine, submitted: Sequence[Request]) -> dict[str, list[Any]]:
    engine.set_vocabulary(VOCABULARY)
    events_by_id: dict[str, list[Event]] = {request.id: [] for request in submitted}
    for request in submitted:
        engine.submit(request)
    while not engine.idle:
        for event in engine.step().events:
            events_by_id[event.request_id].append(event)
        engine.check()
    return {name: observe(events) for name, events in events_by_id.items()}


def serve_on_cpu(
    ops: Callable[[], Ops], model: Path, submitted: Sequence[Request], **options: Any
) -> dict[str, list[Any]]:
    """Tokens of the same kernels on the CPU, without drafts or overlap."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loader, "select_backend", lambda *_, **__: ops())
        known = {
            name: value
            for name, value in options.items()
            if name not in ("speculate", "draft_model", "num_speculative_tokens")
        }
        return serve(
            make_engine(model, "cpu", kv_cache_memory="2000tokens", **{**known, "overlap": False}), submitted
        )


def check_equal(
    ops: Callable[[], Ops],
    model: Path,
    capability: tuple[int, int],
    submitted: Sequence[Request],
    **options: Any,
) -> Engine:
    plain = serve_on_cpu(ops, model, submitted, **options)
    with FakeCuda(capability) as gpu:
        engine = make_engine(model, "cuda", **options)
        tokens = serve(engine, submitted)
    assert tokens == plain
    assert gpu.refused == [] and not engine.proposer.errors
    return engine


def test_reference_runs_on_old_gpus(model: Path, drafter: Path) -> None:
    engine = check_equal(ReferenceOps, model, VOLTA, requests(), speculate="auto", draft_model=str(drafter))
    assert engine.info.backend == "reference" and "compute capability 7.5" in " ".join(engine.info.warnings)


def test_gpu_without_triton_is_refused_unless_torch_is_allowed(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "find_spec", lambda name: None)
    with FakeCuda(HOPPER):
        with pytest.raises(ConfigError) as caught:
            make_engine(model, "cuda")
        mend = "pip install 'triton>=3.6,<3.10'; --allow-torch-on-gpu computes in torch instead"
        assert f"Triton is not installed: {mend}" in caught.value.message
        engine = make_engine(model, "cuda", allow_torch_on_gpu=True)
        assert engine.info.backend == "reference" and "not installed" in " ".join(engine.info.warnings)
        with pytest.raises(ConfigError, match="not installed"):  # a restart as well
            load(Config(model=str(model), device="cuda"), (), engine.info.resolved)


def test_trial_is_of_the_types_in_use(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[gpu.ComputeTypes] = []

    def find_mismatches(types: gpu.ComputeTypes) -> Iterator[str]:
        tried.append(types)
        return iter(["row 3 differs"] if types.dtype == "float16" else ())

    monkeypatch.setattr(gpu, "trial_mismatches", find_mismatches)
    with FakeCuda(HOPPER):
        make_engine(model, "cuda", dtype="bfloat16", quantization="int4", enforce_eager=True)
        assert set(tried) == {gpu.ComputeTypes("bfloat16", "int4", "int8")}
        with pytest.raises(ConfigError, match=r"not exact on Fake GPU .*: row 3 differs"):
            make_engine(model, "cuda", dtype="float16")
        assert set(tried[-2:]) == {gpu.ComputeTypes("float16", "float16", "float16")}


@pytest.mark.parametrize("family", ["phi3", "gemma2", "gemma3_text"])
def test_families_match_cpu(tmp_path: Path, family: str) -> None:
    check_equal(ReferenceOps, write_checkpoint(tmp_path, family, seed=5), VOLTA, requests(SIMPLE))


@pytest.mark.parametrize("family", ["llava_next", "qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_vision_families_match_cpu(tmp_path: Path, family: str) -> None:
    model = write_vision_checkpoint(tmp_path / "model", family, seed=1)
    draft_model = write_vision_checkpoint(tmp_path / "draft_model", family, seed=1, dtype="bfloat16")
    options = {
        "max_model_len": 128,
        "max_num_batched_tokens": 32,
        "speculate": "draft",
        "draft_model": str(draft_model),
    }
    check_equal(ReferenceOps, model, VOLTA, image_requests(model), **options)


def test_gguf_formats_match_cpu(tmp_path: Path) -> None:
    """A layer of each format."""
    kinds = [Kind[name.upper()] for name in QUANT_BLOCKS]
    shape = WHOLE_BLOCKS | {"num_hidden_layers": len(kinds)}
    checkpoint = write_checkpoint(tmp_path / "made", "llama", seed=5, **shape)

    def kind_of(name: str) -> Kind:
        layer = re.match(r"blk\.(\d+)\.", name)
        return kinds[int(layer[1])] if layer else Kind.Q8_0

    file = write_gguf(checkpoint, tmp_path / "model.gguf", kind_of)
    check_equal(ReferenceOps, file, VOLTA, requests((1,), 3, pools=False))


@pytest.mark.parametrize(
    "options",
    [
        {"quantization": "int4", "kv_cache_dtype": "int8"},
        {"load_format": "dummy", "dtype": "auto"},
        {"fast_math": True},
    ],
)
def test_weight_formats_run(model: Path, options: dict[str, Any]) -> None:
    with FakeCuda(VOLTA) as gpu:
        serve(make_engine(model, "cuda", **options), requests(SIMPLE, 3))
    assert gpu.refused == []


def test_triton_with_graphs_and_overlap(model: Path) -> None:
    engine = check_equal(
        TritonOps, model, HOPPER, requests((1,), 4, pools=False), max_num_seqs=1, max_num_batched_tokens=4
    )
    assert engine.info.backend == "triton" and engine.info.num_cuda_graphs > 0
    assert engine.overlap is not None and engine.overlap.num_device_steps > 0 == engine.overlap.num_errors


def test_triton_with_all_sampling_options(model: Path) -> None:
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
    "options", [{"quantization": "int8", "kv_cache_dtype": "int8"}, {"quantization": "int4"}], ids=str
)
def test_triton_eager(model: Path, options: dict[str, Any]) -> None:
    engine = check_equal(
        TritonOps, model, TURING, requests((1,), 3, pools=False), enforce_eager=True, **options
    )
    assert engine.info.backend == "triton" and engine.info.num_cuda_graphs == 0


@pytest.mark.parametrize(
    "options",
    [
        {"dtype": "float16", "quantization": "fp8", "kv_cache_dtype": "fp8"},
        {"dtype": "bfloat16"},
        {"fast_math": True},
    ],
    ids=str,
)
def test_triton_formats_without_cpu_support(model: Path, options: dict[str, Any]) -> None:
    with FakeCuda(ADA) as gpu:
        tokens = serve(
            make_engine(model, "cuda", enforce_eager=True, **options), requests((1,), 3, pools=False)
        )
    assert gpu.refused == [] and tokens["1"][-1] == ("end", "length", None)


def test_triton_with_states(tmp_path: Path) -> None:
    """Suffix drafts before and after the end of a segment change no token."""
    layers = ["linear_attention", "full_attention"]
    shape = SMALL | {"num_hidden_layers": 2, "linear_num_key_heads": 1, "linear_num_value_heads": 1}
    model = write_checkpoint(tmp_path, "qwen3_5_text", seed=5, layer_types=layers, **shape)
    prompt = (*PROMPT * (SEGMENT // len(PROMPT)),)[3:]
    sampling = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    options = {
        "max_model_len": 80,
        "max_num_seqs": 1,
        "max_num_batched_tokens": 16,
        "speculate": "suffix",
        "draft_length": "fixed",
        "num_speculative_tokens": 3,
    }
    engine = check_equal(TritonOps, model, HOPPER, [Request("0", prompt, sampling, 0, (EOS,))], **options)
    assert engine.info.backend == "triton" and engine.info.num_cuda_graphs == 0


def count_steps(engine: Engine, gpu: FakeCuda, submitted: Sequence[Request]) -> list[Counter[str]]:
    """Counts of each step, without kernel launches."""
    for request in submitted:
        engine.submit(request)
    steps = []
    while not engine.idle:
        with gpu.count_calls() as counts:
            engine.step()
        steps.append(Counter({name: count for name, count in counts.items() if name != "launch"}))
    assert gpu.refused == []
    return steps


@pytest.fixture
def torch_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs of torch operations: the host does the same, in less time."""
    monkeypatch.setattr(loader, "select_backend", lambda *_, **__: GraphCapturableOps())


GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
FILTERED = SamplingParams(temperature=0.8, top_k=9, top_p=0.9, max_tokens=16, ignore_eos=True)
BOTH = [
    Request("greedy", PROMPT[:6], GREEDY, 1, (EOS,)),
    Request("filtered", PROMPT[:6], FILTERED, 2, (EOS,)),
]
QUIET: dict[str, Any] = {"test_mode": False, "block_size": 4}
# Uploads: batch and sampling parameters; download and wait: sampled ids.
PLAIN_STEP = {"upload": 2, "replay": 1, "download": 1, "wait": 1}
# Upload: active slots; download and wait: results of the previous step.
DEVICE_STEP = {"upload": 1, "replay": 1, "download": 1, "wait": 1}


@pytest.mark.usefixtures("torch_graphs")
def test_plain_step_syncs_once(model: Path) -> None:
    with FakeCuda() as gpu:
        steps = count_steps(make_engine(model, "cuda", overlap=False, **QUIET), gpu, BOTH)
    assert [dict(step) for step in steps[2:]] == [PLAIN_STEP] * (len(steps) - 2)


@pytest.mark.usefixtures("torch_graphs")
def test_prompt_beside_a_decode_is_one_graph(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of more rows than a draft has, with the bits of eager steps."""
    monkeypatch.setattr(memory_profiler, "MIN_GRAPH_ROWS", 32)
    first, second = BOTH[0], Request("prompt", tuple(range(40, 66)), FILTERED, 2, (EOS,))
    options = {**QUIET, "max_num_batched_tokens": 64, "overlap": False}
    with FakeCuda() as gpu:
        engine = make_engine(model, "cuda", **options)
        engine.submit(first)
        engine.step()
        assert dict(count_steps(engine, gpu, [second])[0]) == PLAIN_STEP
        tokens = serve(make_engine(model, "cuda", **(options | {"test_mode": True})), [first, second])
    chunks = {"max_num_batched_tokens": 4, "max_num_seqs": 1, "block_size": 4}
    assert tokens == serve_on_cpu(GraphCapturableOps, model, [first, second], **chunks)


@pytest.mark.usefixtures("torch_graphs")
def test_verify_step_syncs_once(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_profiler, "MIN_GRAPH_ROWS", 8)
    options = {
        "speculate": "ngram",
        "draft_length": "fixed",
        "num_speculative_tokens": 2,
        "overlap": False,
        **QUIET,
    }
    with FakeCuda() as gpu:
        engine = make_engine(model, "cuda", **options)
        steps = count_steps(engine, gpu, BOTH)
    assert sum(engine.proposer.stats().draft_length_counts["ngram"].values()) > 0
    assert [dict(step) for step in steps[2:]] == [PLAIN_STEP] * (len(steps) - 2)


def small_blocks(drafter: Path, num_drafts: int) -> dict[str, Any]:
    """Options of an engine that drafts `num_drafts` tokens with a model."""
    options: dict[str, Any] = {**QUIET, "block_size": 16}
    if not num_drafts:
        return options
    draft = {"speculate": "draft", "draft_model": str(drafter), "draft_length": "fixed"}
    return options | draft | {"num_speculative_tokens": num_drafts}


@pytest.mark.usefixtures("torch_graphs")
@pytest.mark.parametrize("num_drafts", [0, 1])
def test_device_step_waits_for_the_previous_one(
    model: Path, drafter: Path, num_drafts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Graphs of both models are captured, and no step waits at its own launch."""
    monkeypatch.setattr(memory_profiler, "MIN_GRAPH_ROWS", 4)
    options = small_blocks(drafter, num_drafts)
    with FakeCuda() as gpu:
        engine = make_engine(model, "cuda", **options)
        steps = count_steps(engine, gpu, BOTH)
    assert engine.info.num_cuda_graphs > 0 and engine.overlap is not None and engine.overlap.num_errors == 0
    assert not engine.proposer.errors and engine.overlap.num_device_steps > 2
    steady = [step for step in steps if step["wait"] and step["upload"] == 1]
    expected = {**DEVICE_STEP, "replay": 1 + num_drafts}
    assert len(steady) > 2 and [dict(step) for step in steady] == [expected] * len(steady)


@pytest.mark.usefixtures("torch_graphs")
@pytest.mark.parametrize(
    ("params", "num_drafts"),
    [({"logprobs": 2}, 0), ({"structured": StructuredOutput.regex("[a-z ]{40}")}, 1)],
    ids=["logprobs", "grammar and drafts"],
)
def test_host_sampled_step_waits_for_the_previous_one(
    model: Path, drafter: Path, params: dict[str, Any], num_drafts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For its samples, after the next forward pass was launched; with drafts, for its draft as well.

    Uploads: active slots and sampling parameters.
    """
    monkeypatch.setattr(memory_profiler, "MIN_GRAPH_ROWS", 4)
    options = small_blocks(drafter, num_drafts)
    sampling = SamplingParams(**{"temperature": 0.8, "max_tokens": 16, "ignore_eos": True, **params})
    submitted = [BOTH[1], Request("by the host", PROMPT[:6], sampling, 3, (EOS,))]
    with FakeCuda() as gpu:
        engine = make_engine(model, "cuda", **options)
        engine.set_vocabulary(VOCABULARY)
        steps = count_steps(engine, gpu, submitted)
    assert engine.overlap is not None and engine.overlap.num_errors == 0 and not engine.proposer.errors
    downloads = 1 + ("logprobs" in params) + num_drafts  # ids, log-probabilities, draft
    expected = {"upload": 2, "replay": 1 + num_drafts, "download": downloads, "wait": 1 + num_drafts}
    assert sum(dict(step) == expected for step in steps) > 2, [dict(step) for step in steps]
    assert not any(step["look"] or step["blocking upload"] for step in steps[4:])


@pytest.mark.usefixtures("torch_graphs")
def test_drafts_and_device_steps_keep_tokens(model: Path, drafter: Path) -> None:
    options = {
        "speculate": "draft",
        "draft_model": str(drafter),
        "draft_length": "fixed",
        "num_speculative_tokens": 2,
    }
    check_equal(GraphCapturableOps, model, HOPPER, requests(num_tokens=8), block_size=4, **options)


@pytest.mark.parametrize("capability", [VOLTA, TURING, HOPPER])
def test_check_and_env_report_the_gpu(model: Path, capability: tuple[int, int]) -> None:
    with FakeCuda(capability):
        findings = [
            finding.text
            for finding in check.run_checks(Config(model=str(model), device="cuda"))
            if finding.ok is not False
        ]
        backends = env.collect()["backends"]
    assert any("Fake GPU" in text for text in findings)
    assert backends["triton"].startswith("no: " if capability == VOLTA else "available: ")


def test_graph_memory_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that warm-up left in the allocator does not count."""
    held = Counter[str]()
    with FakeCuda() as gpu:
        monkeypatch.setattr("foreword.cuda_graphs.capture.NUM_WARM_UPS", 2)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1000 - held.total(), 1000))
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: held.pop("cached", None))
        graphs = CudaGraphPool(torch.device("cuda"))

        def run() -> None:
            held["cached" if gpu.capturing is None else "captured"] += 10

        graphs.capture(run)
    assert held == {"captured": 10} and graphs.num_bytes == 10


def test_mixed_devices_are_refused() -> None:
    """Host and device tensors mix only where torch allows it."""
    with FakeCuda() as gpu:
        on_gpu, on_cpu = torch.arange(6, device="cuda"), torch.arange(6)
        assert (
            on_gpu.is_cuda
            and on_gpu.device == torch.device("cuda:0")
            and on_gpu.view(2, 3)[1].is_cuda
            and not on_cpu.is_cuda
        )
        assert (
            (on_gpu + torch.tensor(2)).is_cuda
            and torch.zeros_like(on_gpu).is_cuda
            and on_gpu.to("cpu").device.type == "cpu"
        )
        for refused in (
            lambda: on_gpu + on_cpu,
            lambda: torch.cat((on_gpu, on_cpu)),
            lambda: on_cpu[on_gpu],
            lambda: on_gpu.index_select(0, on_cpu),
            lambda: on_gpu.numpy(),
            lambda: on_gpu.data_ptr(),
        ):
            with pytest.raises(RuntimeError):
                refused()
        assert len(gpu.refused) == 6


@pytest.mark.parametrize(
    ("does", "counted"),
    [
        (lambda on_gpu: on_gpu.tolist(), {"look": 1}),
        (lambda on_gpu: bool((on_gpu > 1).any()), {"look": 1}),
        (lambda on_gpu: on_gpu[on_gpu > 1], {"look": 1}),
        (lambda on_gpu: on_gpu.cpu(), {"look": 1}),
        (lambda on_gpu: on_gpu[[0, 1]], {"blocking upload": 1}),
        (lambda on_gpu: torch.tensor([1, 2], device="cuda"), {"blocking upload": 1}),
        (lambda on_gpu: on_gpu.copy_(torch.zeros(6, dtype=torch.int64)), {"blocking upload": 1}),
        (
            lambda on_gpu: on_gpu.copy_(torch.zeros(6, dtype=torch.int64).pin_memory(), non_blocking=True),
            {"upload": 1},
        ),
        (lambda on_gpu: on_gpu[1:3].add_(1).clamp(max=2), {}),
    ],
)
def test_syncs_and_copies_are_counted(
    does: Callable[[torch.Tensor], object], counted: dict[str, int]
) -> None:
    """A counted call cannot be captured."""
    with FakeCuda() as gpu:
        on_gpu = torch.arange(6, device="cuda")
        with gpu.count_calls() as counts:
            does(on_gpu)
        assert counts == counted
        graph = torch.cuda.CUDAGraph()
        if counted:
            with pytest.raises(RuntimeError), torch.cuda.graph(graph):
                does(on_gpu)


def test_async_copies_finish_at_synchronize() -> None:
    with FakeCuda() as gpu:
        on_gpu, into = torch.arange(6, device="cuda"), torch.empty(6, dtype=torch.int64, pin_memory=True)
        into.copy_(on_gpu, non_blocking=True)
        done = torch.cuda.Event()
        done.record()
        on_gpu.fill_(7)
        assert into.tolist() != list(range(6)), "the copy has not finished"
        done.synchronize()
        assert into.tolist() == list(range(6))
        source = torch.zeros(6, dtype=torch.int64).pin_memory()
        on_gpu.copy_(source, non_blocking=True)
        source.fill_(1)
        torch.cuda.synchronize()
        assert gpu.refused == ["pinned memory was changed before it was copied"]
