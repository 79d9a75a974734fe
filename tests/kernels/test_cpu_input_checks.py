"""Ids, sizes and offsets that lead outside of memory: an error, and nothing is written."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from foreword.core.batch import Batch, Chunk, KVLayer, StateLayer, build_batch
from foreword.core.states import NO_ANCHOR, StateShape
from foreword.errors import CheckpointError
from foreword.kernels.cpu.backend import CpuOps
from foreword.kernels.cpu.library import FORMAT_IDS, ISAS, supported_isas
from foreword.kernels.cpu.program import Program
from foreword.kernels.cpu.sampling import NativeSampling
from foreword.kernels.ops import Float8Blocks, GroupedInts, LoraTable, MRopeSections, QuantizedBlocks
from foreword.speculation.drafters.suffix import SuffixIndex
from tests.kernels.test_cpu_draft import NEVER_SAMPLED, make_job
from tests.kernels.test_cpu_program import BLOCK_SIZE, NUM_BLOCKS, VOCAB, SmallModel, batches

pytestmark = pytest.mark.skipif(not supported_isas(), reason="the native library is not built")

SENTINEL = 7
NUM_SLOTS = (NUM_BLOCKS + 1) * BLOCK_SIZE
NUM_POSITIONS = 200  # of SmallModel's RoPE table
HUGE = (-1, -(2**31), 2**31 - 1, 2**31, 2**40)  # and the first value beyond the end
# Field of the batch, the first value beyond its end, the error.
FIELDS = [
    ("token_ids", VOCAB, "a token id"),
    ("positions", NUM_POSITIONS, "a position"),
    ("slots", NUM_SLOTS, "a slot"),
    ("block_tables", NUM_BLOCKS + 1, "a block"),
    ("sample_rows", None, "a row"),
    ("mrope_positions", NUM_POSITIONS, "a position"),
]


def guarded(shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """A tensor of sentinels, and all of the memory around it."""
    size = math.prod(shape)
    memory = torch.full((size + 8192,), float(SENTINEL))
    return memory[4096 : 4096 + size].view(shape), memory


def model_with_guards(axes: MRopeSections | None) -> tuple[SmallModel, list[Tensor]]:
    model = SmallModel(CpuOps(threads=2), torch.float32, "float32", axes)
    (k, around_k), (v, around_v) = guarded(model.kv.k.shape), guarded(model.kv.v.shape)
    model.kv = KVLayer(k, v)
    return model, [around_k, around_v]


def with_value(batch: Batch, field: str, value: int) -> Batch:
    """The batch with a last entry that its rows read."""
    tensor: Tensor = getattr(batch, field).clone()
    if field == "block_tables":
        tensor[0, 0] = value  # the last line is for padding
    else:
        tensor.view(-1)[-1] = value
    return replace(batch, **{field: tensor})


@pytest.mark.parametrize(("field", "end", "message"), FIELDS)
def test_program_writes_nothing_for_a_batch_outside_of_its_memory(
    field: str, end: int | None, message: str
) -> None:
    mrope = field == "mrope_positions"
    model, around = model_with_guards(MRopeSections((1, 1, 1)) if mrope else None)
    program = model.ops.compile(model)
    assert isinstance(program, Program)
    good = batches(mrope)[1]
    program(good)
    for memory in (*around, program._output, program._arena):
        memory.fill_(SENTINEL)
    for value in (*HUGE, end or len(good.token_ids)):
        with pytest.raises(ValueError, match=message):
            program(with_value(good, field, value))
        with pytest.raises(ValueError, match=message):
            model(with_value(good, field, value))  # its operations one by one
    before_the_error = field in ("block_tables", "sample_rows")  # single operations that were right
    for memory in (program._output, program._arena, *(() if before_the_error else around)):
        assert bool((memory == SENTINEL).all())
    assert torch.isfinite(program(good)).all()


@pytest.mark.parametrize("starts", [(0, 99), (-1, 5), (3, 1, 5)])
def test_rows_of_requests_are_those_of_the_batch(starts: tuple[int, ...]) -> None:
    model, _ = model_with_guards(None)
    good = batches()[1]
    tables = good.block_tables[:1].repeat(len(starts), 1)
    bad = replace(good, query_start_loc=starts, seq_lens=(8,) * (len(starts) - 1), block_tables=tables)
    with pytest.raises(ValueError, match="the rows of the requests"):
        model.ops.compile(model)(bad)


def test_position_beyond_the_block_table_is_refused() -> None:
    """Within the RoPE table, but the request has too few blocks."""
    model, _ = model_with_guards(None)
    good = batches()[1]
    with pytest.raises(ValueError, match="a position"):
        model.ops.compile(model)(with_value(good, "positions", good.block_tables.shape[1] * BLOCK_SIZE))


def test_blocks_that_no_row_reads_may_be_any() -> None:
    """A layer with a window reads the last ones; those before it may be freed."""
    model, _ = model_with_guards(None)
    program = model.ops.compile(model)
    good = batches()[3]
    assert good.positions[3] == 17, "the second request has one row, whose window of 9 begins at block 2"
    tables = good.block_tables.clone()
    tables[1, :2] = -1
    expected = program(good).clone()
    assert torch.equal(program(replace(good, block_tables=tables)), expected)


@pytest.mark.parametrize("slot", [3, *HUGE[1:]])
def test_adapter_slot_outside_of_the_table_is_refused(slot: int) -> None:
    ops = CpuOps(threads=1)
    y, around = guarded((5, 64))
    a, b = torch.ones(3, 1, 4, 32), torch.ones(3, 4, 64)
    table = LoraTable((64,), a, b, torch.full((3, 1), 4), torch.ones(3, 1))
    batch = replace(batches()[1], lora_slots=torch.tensor([0, -1, 2, 1, slot]))
    with pytest.raises(ValueError, match="an adapter's slot"):
        ops.add_lora(y, torch.ones(5, 32), table, batch)
    assert bool((around == SENTINEL).all())


@pytest.mark.parametrize("slot", [6, *HUGE[1:], -1])
def test_slot_of_a_hidden_state_outside_of_the_cache_is_refused(slot: int) -> None:
    ops = CpuOps(threads=1)
    cache, around = guarded((6, 16))
    slots = torch.tensor([1, slot])
    with pytest.raises(ValueError, match="a slot"):
        ops.write_hidden(torch.ones(2, 16), cache, slots)
    with pytest.raises(ValueError, match="a slot"):
        ops.read_hidden(cache, slots)
    assert bool((around == SENTINEL).all())


STATE_SHAPE = StateShape(64, 4, key_heads=1, value_heads=2, key_dim=16, value_dim=16)
NUM_STATES, NUM_ANCHORS = 3, 5


def state_with_guards() -> tuple[StateLayer, list[Tensor]]:
    shape = STATE_SHAPE
    rows = NUM_STATES, shape.ring_size(1)
    shapes = [(*rows, shape.channels), (NUM_ANCHORS, shape.kernel_size - 1, shape.channels)]
    shapes += [(*rows, 1, 16), (*rows, 2, 16), (*rows, 2), (NUM_ANCHORS, 2, 16, 16)]
    guards = [guarded(each) for each in shapes]
    return StateLayer(shape, *(tensor for tensor, _ in guards)), [memory for _, memory in guards]


def state_batch(**changes: object) -> Batch:
    """Rows 62..65 of one request and rows 130..131 of another."""
    chunks = [
        Chunk([1] * 4, 62, [1] * 17, 0, state_slot=1, anchors=[NO_ANCHOR, 2]),
        Chunk([1] * 2, 130, [1] * 33, 0, state_slot=2, anchors=[4]),
    ]
    return replace(build_batch(chunks, BLOCK_SIZE, 1, "cpu", with_states=True), **changes)  # type: ignore[arg-type]


BAD_STATES: dict[str, dict[str, object]] = {
    **{f"slot {value}": {"state_slots": torch.tensor([1, value])} for value in (NUM_STATES, *HUGE)},
    **{
        f"{name} anchor {value}": {"anchor_tables": torch.tensor(table)}
        for value in (NUM_ANCHORS, -2, *HUGE[1:])
        for name, table in (("written", [[-1, value], [4, -1]]), ("read", [[-1, 2], [value, -1]]))
    },
    "no anchor to read": {"anchor_tables": torch.tensor([[-1, 2], [-1, -1]])},
    "a narrow table": {"anchor_tables": torch.tensor([[-1], [4]])},
    "no slots": {"state_slots": None},
    "no table": {"anchor_tables": None},
    "a negative position": {"positions": torch.tensor([-1, 0, 1, 2, 130, 131])},
    "a gap": {"positions": torch.tensor([62, 63, 65, 66, 130, 131])},
    "a position twice": {"positions": torch.tensor([62, 63, 64, 65, 130, 130])},
}


def test_state_outside_of_its_memory_is_refused() -> None:
    for case in BAD_STATES:
        ops, (state, around) = CpuOps(threads=2), state_with_guards()
        x, weight, vector = torch.ones(6, 64), torch.ones(4, 64), torch.ones(2)
        bad = state_batch(**BAD_STATES[case])
        with pytest.raises(ValueError, match="a request's state is outside of its memory"):
            ops.causal_conv(x, weight, None, "silu", state, bad)
        with pytest.raises(ValueError, match="a request's state is outside of its memory"):
            ops.gated_delta_rule(x, x[:, :2], x[:, :2], vector, vector, state, bad)
        with pytest.raises(ValueError, match="a request's state is outside of its memory"):
            ops.ssm_scan(x, x[:, :2], vector, vector, vector, (0.0, 1.0), state, bad)
        assert all(bool((memory == SENTINEL).all()) for memory in around)


@pytest.mark.parametrize("starts", [(0, 4, 7), (-1, 4, 6), (0, 4, 3), (0, 8, 6)])
def test_states_rows_of_requests_are_those_of_the_batch(starts: tuple[int, ...]) -> None:
    ops, (state, around) = CpuOps(threads=1), state_with_guards()
    with pytest.raises(ValueError, match="the rows of the requests"):
        ops.causal_conv(
            torch.ones(6, 64), torch.ones(4, 64), None, "none", state, state_batch(query_start_loc=starts)
        )
    assert all(bool((memory == SENTINEL).all()) for memory in around)


def test_states_are_written_within_their_memory() -> None:
    """Otherwise the refusals would prove little."""
    ops, (state, around) = CpuOps(threads=2), state_with_guards()
    x, batch = torch.ones(6, 64), state_batch()
    sizes = [
        tensor.numel()
        for tensor in (state.inputs, state.tails, state.keys, state.updates, state.decays, state.matrices)
    ]
    ops.causal_conv(x, torch.ones(4, 64), None, "silu", state, batch)
    vector = torch.ones(2)
    ops.gated_delta_rule(x, x[:, :2], x[:, :2], vector, vector, state, batch)
    ops.ssm_scan(x, x[:, :2], vector, vector, vector, (0.0, 1.0), state, batch)
    for memory, size in zip(around, sizes, strict=True):
        inner = memory[4096 : 4096 + size]
        assert bool((inner != SENTINEL).any())
        inner.fill_(SENTINEL)
        assert bool((memory == SENTINEL).all())


@pytest.mark.parametrize(
    "changes",
    [
        {"start_position": -1},
        {"start_position": 2**31},
        {"max_tokens": -1},
        {"token_ids": []},
        {"token_ids": [5, VOCAB]},
        {"token_ids": [-1]},
        {"block_table": [2**31] * 8},
        {"block_table": [-1] * 8},
        {"mrope_offset": 2**31},
        {"mrope_offset": -1},
    ],
)
def test_draft_outside_of_its_memory_is_refused(
    changes: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, around = model_with_guards(MRopeSections((1, 1, 1)))
    program = model.ops.compile(model)
    assert isinstance(program, Program)
    never = torch.tensor(NEVER_SAMPLED)
    program.draft([make_job(0)], BLOCK_SIZE, never)
    for memory in around:
        memory.fill_(SENTINEL)
    job = make_job(1, **changes)
    with pytest.raises((ValueError, AssertionError)):  # Python's own check of the size
        program.draft([job], BLOCK_SIZE, never)
    assert all(bool((memory == SENTINEL).all()) for memory in around)


def test_machine_of_no_threads_or_another_processor_is_refused(library: ctypes.CDLL) -> None:
    for isa, threads in ((0, 0), (0, -1), (-1, 1), (len(ISAS), 1), (2**31 - 1, 1)):
        assert not library.foreword_machine_new(isa, threads)


@pytest.mark.parametrize("k", [-1, 12, 2**31, 2**40])
def test_more_top_ids_than_logits_are_refused(library: ctypes.CDLL, k: int) -> None:
    out, around = guarded((2 * 11,))
    logits = torch.zeros(1, 11)
    context = NativeSampling(library)._cpu_context
    with pytest.raises(ValueError, match="more ids are wanted"):
        library.foreword_top_ids(context, logits.data_ptr(), 1, 11, k, out.data_ptr())
    assert bool((around == SENTINEL).all())


@pytest.mark.parametrize("starts", [(-1, 2), (0, 3), (0, 2**31), (2, 0), (0, -1)])
def test_starts_of_ids_are_checked(library: ctypes.CDLL, starts: tuple[int, int]) -> None:
    native, ids = NativeSampling(library), torch.tensor([1, 2])
    logits, around = guarded((1, 11))
    for call in (
        lambda: native.add_bias(logits, torch.tensor(starts), ids, torch.ones(2)),
        lambda: native.apply_repetition_penalty(logits, torch.tensor(starts), ids, torch.full((1,), 2.0)),
    ):
        with pytest.raises(ValueError, match="the rows' ids"):
            call()
    assert bool((around == SENTINEL).all())


def test_weights_whose_format_and_shape_do_not_match_are_refused(library: ctypes.CDLL) -> None:
    for formats, shape in [
        (("q4_k", "q4_k"), (1, 255, 0)),  # parts of a block
        (("q8_0", "q8_0"), (1, 31, 0)),
        (("q8_0", "bfloat16"), (1, 64, 0)),  # a format of files only
        (("float32", "int8"), (1, 64, 0)),  # files have no int8
        (("float32", "grouped4"), (1, 64, 32)),
        (("grouped8", "grouped8"), (1, 64, 0)),  # no group
        (("grouped8", "grouped8"), (1, 64, 33)),
        (("float8", "float8"), (1, 128, 32)),
        (("float32", "float32"), (-1, 64, 0)),
        (("float32", "float32"), (1, 0, 0)),
        (("float32", "float32"), (1, 2**62, 0)),
        (("float32", "float32"), (1, 65, 0)),  # the rows have 64 values
        (("bfloat16", "q8_0"), (1, 256, 0)),
    ]:
        context = NativeSampling(library)._cpu_context
        tiles, around = guarded((64,))
        values = torch.zeros(64)
        rows = np.array([values.data_ptr()], np.uint64)
        target, source = (FORMAT_IDS[name] for name in formats)
        with pytest.raises(ValueError, match="the weight's format and shape"):
            library.foreword_pack(
                context, target, source, rows.ctypes.data, values.nbytes, *shape, tiles.data_ptr()
            )
        assert bool((around == SENTINEL).all())


@pytest.mark.parametrize("target", [-1, len(FORMAT_IDS), 2**31 - 1])
def test_unknown_format_has_no_size(library: ctypes.CDLL, target: int) -> None:
    assert library.foreword_packed_bytes(target, 16, 64, 0) == -1


BAD_PARTS: dict[str, Callable[[], object]] = {
    "a row is short": lambda: QuantizedBlocks("q8_0", torch.zeros(4, 34, dtype=torch.uint8), 64),
    "half a block": lambda: QuantizedBlocks("q8_0", torch.zeros(4, 68, dtype=torch.uint8), 33),
    "a group without a scale": lambda: GroupedInts(
        8, 32, torch.zeros(4, 64, dtype=torch.uint8), torch.ones(4, 1), torch.zeros(4, 1, dtype=torch.uint8)
    ),
    "a block without a scale": lambda: Float8Blocks(
        torch.zeros(4, 256).to(torch.float8_e4m3fn), torch.ones(1, 1), (128, 128)
    ),
}


@pytest.mark.parametrize("name", BAD_PARTS)
def test_part_of_a_weight_that_is_too_short_is_refused(name: str) -> None:
    with pytest.raises((ValueError, AssertionError, CheckpointError)):
        CpuOps("portable").pack_linear([BAD_PARTS[name]()], "bfloat16")  # type: ignore[list-item]


def test_queries_of_no_text_change_nothing(library: ctypes.CDLL) -> None:
    index = SuffixIndex(library, 64, ())
    text = index.start(1)
    for query in ((text + 1, 4, [1]), (-1, 4, [1]), (2**31 - 1, 4, [1]), (text, -1, [1])):
        with pytest.raises(ValueError, match="a query of no text"):
            index.propose([(text, 4, [1, 2, 1, 2]), query])  # none of them takes effect
    assert index.propose([(text, 4, [])]) == [((), ())], "the text is empty"
    for handle in (text + 1, -1, 2**31 - 1):
        with pytest.raises(ValueError, match="the text is not in the index"):
            index.finish(handle, [1])
    index.finish(text, [1])
    with pytest.raises(ValueError, match="the text is not in the index"):
        index.finish(text, [1])
    assert index.num_texts() == 0


@pytest.mark.parametrize("values", [(0, 4, 3, 1, 2), (0, 4, -1), (0, 4), (0, 4, 2**31 - 1, 1)])
def test_query_longer_than_its_values_is_refused(library: ctypes.CDLL, values: tuple[int, ...]) -> None:
    index = SuffixIndex(library, 0, ())
    assert index.start(1) == 0
    packed = np.array(values, np.int32)
    lengths, ids, confidence = np.zeros(1, np.int32), np.zeros(4, np.int32), np.zeros(4)
    out = (lengths.ctypes.data, 4, ids.ctypes.data, confidence.ctypes.data)
    answered = library.foreword_suffix_propose(index._index, packed.ctypes.data, len(packed), 1, *out)
    assert answered == -1
    one = np.array((0, 5, 1, 9), np.int32)  # more draft tokens than places
    assert library.foreword_suffix_propose(index._index, one.ctypes.data, len(one), 1, *out) == -1


def test_ids_of_no_vocabulary_match_nothing(library: ctypes.CDLL) -> None:
    for token_id in (-1, -(2**31), 2**31 - 1):
        index = SuffixIndex(library, 64, ())
        text = index.start(1)
        assert index.propose([(text, 4, [5, token_id, 5, token_id, 5])]) == [((), ())]
        index.finish(text, [token_id] * 100)


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_corpus_of_a_few_slots_stays_within_them(library: ctypes.CDLL, slots: int) -> None:
    index = SuffixIndex(library, slots, ())
    for _ in range(3):
        text = index.start(1)
        index.propose([(text, 4, [1, 2, 3] * 9)])
        index.finish(text, [1, 2, 3] * 9)
