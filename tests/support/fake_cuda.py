"""A pretended GPU: its tensors lie in the host's memory, say that they are on "cuda:0", and are as strict as if they were.

What a first run on a card would find, it finds: tensors of the host among those of the device, reads of the device that nobody
counted, copies that are awaited, pinned memory that is read before the copy is done or changed before it was read, and work that
a graph cannot hold. Triton's kernels run in the interpreter; what they get must be on the device. Figures mean nothing here.

The pretence holds in the thread that enters `Pretended`, and for calls from Python.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map
from triton.runtime import interpreter

from foreword.executor import cuda_graphs as graphs
from foreword.kernels import gpu as cards
from foreword.kernels.triton import checks
from tests.support.graph_capture_fake import OpTape

__all__ = ["FakeCuda", "FakeCudaTensor"]

DEVICE = torch.device("cuda:0")
TOTAL_BYTES = 1 << 30
CONTEXT_BYTES = 480 << 20  # that nobody's tensors take
POISON = 0x5A  # bytes of memory that a copy has yet to reach
NO_TORCH_FUNCTION = torch._C._disabled_torch_function_impl

# Whoever calls one of these waits for the device, if it is given a tensor that lies there.
HOST_READS = frozenset(
    {"item", "tolist", "__bool__", "__int__", "__float__", "__index__", "__contains__", "equal", "allclose", "nonzero",
     "masked_select", "unique", "bincount", "repeat_interleave", "argwhere", "is_nonzero", "__format__", "__repr__"}
)  # fmt: skip
FORBIDDEN = frozenset(
    {"numpy", "__array__", "data_ptr", "from_numpy", "__dlpack__"}
)  # of a tensor on the device
# What has no kernel for float8 on a GPU, whatever there is for a CPU.
NOT_IN_FLOAT8 = frozenset(
    {"index_select", "index_copy_", "gather", "scatter_", "where", "abs", "take_along_dim"}
    | {f"__{name}__" for name in ("add", "sub", "mul", "truediv", "lt", "gt", "le", "ge", "eq", "ne")}
)
SAME_DEVICE_OPS = frozenset(
    {
        "cat",
        "stack",
        "gather",
        "index_select",
        "matmul",
        "__matmul__",
        "mm",
        "bmm",
        "linear",
        "scatter_",
        "index_copy_",
    }
)


class FakeCudaTensor(Tensor):
    """A tensor of the pretended device."""

    __torch_function__ = NO_TORCH_FUNCTION
    device = property(lambda self: DEVICE)  # type: ignore[assignment]
    is_cuda = property(lambda self: True)  # type: ignore[assignment]
    is_cpu = property(lambda self: False)  # type: ignore[assignment]


class PinnedTensor(Tensor):
    """A tensor in pinned memory of the host."""

    __torch_function__ = NO_TORCH_FUNCTION


class _FakeEvent:
    """What was queued before record() is done when synchronize() returns."""

    def __init__(self, gpu: FakeCuda) -> None:
        self._gpu = gpu
        self._queued = 0

    def record(self, stream: object = None) -> None:
        self._gpu.forbid("an event")
        self._queued = self._gpu.queued

    def synchronize(self) -> None:
        self._gpu.forbid("a wait")
        self._gpu.counts["wait"] += 1
        self._gpu.finish_copies(self._queued)

    def wait(self, stream: object = None) -> None:
        """Everything here is in order."""

    def query(self) -> bool:
        return self._gpu.settled >= self._queued


class _FakeStream:
    """There is but one, in truth."""

    def __init__(self, device: object = None) -> None:
        self.device = DEVICE

    def wait_stream(self, other: object) -> None:
        """Everything here is in order."""

    wait_event = wait_stream


class _FakeGenerator(torch.Generator):
    """A generator of the device is one of the host in disguise."""

    def __new__(cls, device: object = "cpu") -> _FakeGenerator:
        return super().__new__(cls, "cpu")


class _FakeGraph:
    """What was dispatched and launched while it was captured, to be done again on the same memory."""

    def __init__(self) -> None:
        self.tape = OpTape()

    def replay(self) -> None:
        with torch._C.DisableTorchFunction():
            self.tape.replay()


@dataclass(slots=True)
class _PendingCopy:
    """Queued, not awaited: `finish` is what the host sees of it when it is done."""

    finish: Callable[[], None]


@dataclass(eq=False)
class FakeCuda(TorchFunctionMode):
    """A card of this compute capability, while it is entered.

    counts   "look": reads that wait for the device; "upload", "download": copies that are queued, out of and into pinned memory;
             "blocking upload": those that are awaited; "wait": for an event; "launch" of kernels, "replay" of graphs
    refused  what a GPU would not have done, whatever became of it
    where    of each kind that was counted, the last places that it came from
    """

    capability: tuple[int, int] = (9, 0)
    counts: Counter[str] = field(default_factory=Counter)
    refused: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()
        self.capturing: OpTape | None = None
        self.queued = self.settled = 0
        self._copies: list[_PendingCopy] = []
        self._tensors: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()
        self._patches = pytest.MonkeyPatch()
        self._pinned: set[int] = set()
        self._pins: list[Tensor] = []

    # The machine

    def __enter__(self) -> FakeCuda:
        patches, cuda = self._patches, torch.cuda
        stand_ins: dict[str, Any] = {
            "is_available": lambda: True,
            "device_count": lambda: 1,
            "current_device": lambda: 0,
            "get_device_name": lambda device=None: "Pretended GPU",
            "get_device_capability": lambda device=None: self.capability,
            "mem_get_info": lambda device=None: (
                TOTAL_BYTES - CONTEXT_BYTES - self._allocated(),
                TOTAL_BYTES,
            ),
            "memory_allocated": lambda device=None: self._allocated(),
            "memory_reserved": lambda device=None: self._allocated(),
            "max_memory_reserved": lambda device=None: self._allocated(),
            "synchronize": self._synchronize,
            "empty_cache": lambda: None,
            "reset_peak_memory_stats": lambda device=None: None,
            "current_stream": _FakeStream,
            "Stream": _FakeStream,
            "Event": lambda **_: _FakeEvent(self),
            "stream": lambda stream: nullcontext(),
            "graph_pool_handle": lambda: (0, 1),
            "CUDAGraph": _FakeGraph,
            "graph": self._capture,
        }
        for name, stand_in in stand_ins.items():
            patches.setattr(cuda, name, stand_in)
        patches.setattr(torch.version, "cuda", "pretended")
        patches.setattr(torch, "Generator", _FakeGenerator)
        builder, launch = interpreter.interpreter_builder, interpreter.GridExecutor.__call__
        patches.setattr(
            builder, "options", replace(builder.options, sanitize_overflow=False)
        )  # takes most of the time
        patches.setattr(graphs, "NUM_WARM_UPS", 0)
        patches.setattr(
            interpreter.GridExecutor,
            "__call__",
            lambda executor, *args, **kwargs: self._launch(launch, executor, args, kwargs),
        )
        small = {"shapes": [(64, 64)], "row_counts": (1, 9)}
        check = checks.check_row_invariance
        patches.setattr(checks, "check_row_invariance", lambda ops, device: check(ops, device, **small))
        patches.setattr(checks, "check_attention_invariance", lambda ops, device: None)
        cards.triton_unavailable_reason.cache_clear()
        return super().__enter__()  # type: ignore[no-any-return]

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._patches.undo()
        cards.triton_unavailable_reason.cache_clear()

    def forbid(self, what: str) -> None:
        """Nothing of the kind while a graph is captured."""
        if self.capturing is not None:
            raise self._refusal(f"{what} while a graph is captured")

    def finish_copies(self, count: int) -> None:
        """The first `count` copies are done."""
        while self.settled < count:
            self.settled += 1
            self._copies.pop(0).finish()

    @contextmanager
    def count_calls(self) -> Iterator[Counter[str]]:
        """What happens meanwhile."""
        before, found = Counter(self.counts), Counter[str]()
        yield found
        found.update(self.counts - before)

    def _allocated(self) -> int:
        with torch._C.DisableTorchFunction():
            storages = [tensor.untyped_storage() for tensor in list(self._tensors.values())]
            return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())

    def _synchronize(self, device: object = None) -> None:
        self.forbid("a wait")
        self.finish_copies(self.queued)

    @contextmanager
    def _capture(
        self, graph: _FakeGraph, pool: object = None, capture_error_mode: str = "global"
    ) -> Iterator[None]:
        assert self.capturing is None
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        self.capturing = graph.tape
        replay = graph.replay

        def counted() -> None:
            self.counts["replay"] += 1
            replay()

        graph.replay = counted  # type: ignore[method-assign]
        try:
            with graph.tape:
                yield
        finally:
            self.capturing = None

    def _launch(
        self, launch: Callable[..., Any], executor: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """A kernel reads addresses: they must be the device's."""
        for one in tree_leaves((args, kwargs)):
            if isinstance(one, Tensor) and not isinstance(one, FakeCudaTensor):
                raise self._refusal(f"the kernel {executor.fn.__name__} gets a tensor of the host")
        self.counts["launch"] += 1

        def run() -> None:
            with torch._C.DisableTorchFunction(), _disable_current_modes():
                plain = tree_map(
                    lambda one: one.as_subclass(Tensor) if isinstance(one, Tensor) else one, (args, kwargs)
                )
                launch(executor, *plain[0], **plain[1])

        if self.capturing is not None:
            self.capturing.record_call(run)
        run()

    # What is called

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if name == "__get__" or name == "__set__":
            return self._wrap_result(func(*args, **kwargs), _is_on_device(args[0]))
        special: Callable[..., Any] | None = getattr(
            self, f"_do_{name.strip('_') if name.startswith('__') else name}", None
        )
        if special is not None:
            return special(func, args, kwargs)
        there = self._compute(name, args, kwargs)
        return self._wrap_result(func(*args, **kwargs), there)

    def _compute(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether the result is on the device; all that is asked for beside computing is refused, or counted and taken out of
        `kwargs`."""
        tensors = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
        there = any(map(_is_on_device, tensors))
        if there:
            if name in FORBIDDEN:
                raise self._refusal(f"{name}() of a tensor on the device")
            if name in HOST_READS and not (
                name == "repeat_interleave" and isinstance((args[1:] or (None,))[0], int)
            ):
                self._count_host_read(name)
            if name in NOT_IN_FLOAT8 and any(one.dtype == torch.float8_e4m3fn for one in tensors):
                raise self._refusal(f"{name}() of float8")
            strangers = [
                one
                for one in tensors
                if not _is_on_device(one) and (one.dim() > 0 or name in SAME_DEVICE_OPS)
            ]
            if strangers:
                raise self._refusal(
                    f"{name}(): tensors of the device and of the host, {[tuple(one.shape) for one in strangers]}"
                )
        device = kwargs.pop("device", None)
        return there if device is None else torch.device(device).type == "cuda"

    def _wrap_result(self, result: Any, there: bool) -> Any:
        """Tensors of a result are on the device, or in pinned memory that they share."""
        if not there and not self._pins:
            return result
        if isinstance(result, Tensor):
            return self._to_device(result) if there else self._share_memory(result)
        if isinstance(result, tuple | list) and any(isinstance(one, Tensor) for one in result):
            return type(result)([self._wrap_result(one, there) for one in result])
        return result

    def _to_device(self, result: Tensor) -> Tensor:
        if not isinstance(result, FakeCudaTensor):
            result = result.as_subclass(FakeCudaTensor)
        self._tensors[id(result)] = result
        return result

    def _share_memory(self, result: Tensor) -> Tensor:
        pinned = type(result) is Tensor and result.untyped_storage().data_ptr() in self._pinned
        return result.as_subclass(PinnedTensor) if pinned else result

    def _refusal(self, what: str) -> RuntimeError:
        self.refused.append(what)
        return RuntimeError(what)

    def _count_host_read(self, name: str) -> None:
        self.forbid(f"{name}()")
        self.counts["look"] += 1
        self.finish_copies(self.queued)

    # Between host and device

    def _do_copy_(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        target, source = args[0], args[1]
        non_blocking = kwargs.pop("non_blocking", args[2] if len(args) > 2 else False)
        result = func(target, source)
        if isinstance(source, Tensor):
            self._move(source, target, _is_on_device(target), non_blocking)
        return self._wrap_result(result, _is_on_device(target))

    def _move(self, source: Tensor, target: Tensor, there: bool, non_blocking: bool) -> None:
        """Count a copy, and let the host see no more of it than it would."""
        if _is_on_device(source) == there:
            return
        queued = non_blocking and isinstance(source if there else target, PinnedTensor)
        if there and queued:
            queued = source.is_contiguous() and source.dtype == target.dtype
        self.forbid("a copy between host and device")
        if not queued:
            self.counts["blocking upload" if there else "look"] += 1
            self.finish_copies(self.queued)
            return
        self.counts["upload" if there else "download"] += 1
        if there:
            before = source.clone()
            self._queue(lambda: self._check_unchanged(source, before))
        else:
            value = target.clone()
            _bytes(target).fill_(POISON)
            self._queue(lambda: target.copy_(value))

    def _queue(self, finish: Callable[[], Any]) -> None:
        def plainly() -> None:
            with torch._C.DisableTorchFunction(), torch.inference_mode():
                finish()

        self._copies.append(_PendingCopy(plainly))
        self.queued += 1

    def _check_unchanged(self, source: Tensor, before: Tensor) -> None:
        if not torch.equal(_bytes(source), _bytes(before)):
            self.refused.append("pinned memory was changed before it was copied")

    def _do_to(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        source, *rest = args
        device, dtype = kwargs.pop("device", None), kwargs.pop("dtype", None)
        for one in rest:
            if isinstance(one, Tensor):
                device, dtype = one.device, one.dtype
            elif isinstance(one, torch.dtype):
                dtype = one
            elif isinstance(one, str | torch.device):
                device = one
            elif one is not None:
                raise AssertionError(f"to({one!r})")
        there = _is_on_device(source) if device is None else torch.device(device).type == "cuda"
        non_blocking = kwargs.pop("non_blocking", False)
        copy = kwargs.pop("copy", False) or there != _is_on_device(source)
        target = source.to(dtype or source.dtype, copy=copy, **kwargs)
        if there != _is_on_device(source):
            target = target.as_subclass(Tensor)
        self._move(source, target, there, non_blocking)
        return self._wrap_result(target, there)

    def _do_cpu(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._do_to(func, (args[0], "cpu"), kwargs)

    def _do_cuda(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._do_to(func, (args[0], "cuda"), kwargs)

    def _do_pin_memory(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if _is_on_device(args[0]):
            raise self._refusal("pin_memory() of a tensor on the device")
        self.forbid("pinned memory")
        return self._pin(args[0].clone())

    def _do_is_pinned(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        return isinstance(args[0], PinnedTensor)

    def _pin(self, tensor: Tensor) -> Tensor:
        tensor = tensor.contiguous()
        self._pinned.add(tensor.untyped_storage().data_ptr())
        self._pins.append(tensor)  # so that nobody else gets its address
        return tensor.as_subclass(PinnedTensor)

    def _do_empty(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        pinned = kwargs.pop("pin_memory", False)
        there = self._compute("empty", args, kwargs)
        result = func(*args, **kwargs)
        _bytes(result).fill_(POISON)
        if pinned:
            assert not there
            return self._pin(result)
        return self._wrap_result(result, there)

    def _do_tensor(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if any(map(_is_on_device, tree_leaves(args[0]))):
            self._count_host_read("tensor")
        there = torch.device(kwargs.pop("device", None) or "cpu").type == "cuda"
        if there:
            self._blocking_upload("torch.tensor")
        return self._wrap_result(func(*args, **kwargs), there)

    def _blocking_upload(self, name: str) -> None:
        self.forbid(f"{name} of values of the host")
        self.counts["blocking upload"] += 1
        self.finish_copies(self.queued)

    # Indices

    def _do_getitem(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._indexed(args[0], args[1])
        return self._wrap_result(func(*args), _is_on_device(args[0]))

    def _do_setitem(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        target, index, value = args
        self._indexed(target, index, masks_are_looks=isinstance(value, Tensor))
        if isinstance(value, Tensor) and (value.dim() or _is_on_device(value)):
            if not _has_tensor_index(index):
                self._move(value, target, _is_on_device(target), non_blocking=False)
            elif _is_on_device(value) != _is_on_device(target):
                raise self._refusal("an index with values of the other side")
        return func(*args)

    def _indexed(self, tensor: Tensor, index: Any, masks_are_looks: bool = True) -> None:
        """What an index costs: values of the host are copied, masks are looked at."""
        there = _is_on_device(tensor)
        for one in index if isinstance(index, tuple) else (index,):
            if isinstance(one, list | range | np.ndarray) and there:
                self._blocking_upload("an index")
            elif isinstance(one, Tensor):
                if _is_on_device(one) and not there:
                    raise self._refusal("a tensor of the host is indexed by one of the device")
                if there and not _is_on_device(one):
                    self._blocking_upload("an index")
                if there and (one.dtype in (torch.bool, torch.uint8)) and masks_are_looks:
                    self._count_host_read("a mask")
                if _is_on_device(one) and one.dim() == 0 and one.dtype != torch.bool:
                    self._count_host_read("an index of no dimension")


def _is_on_device(one: Any) -> bool:
    return isinstance(one, FakeCudaTensor)


def _has_tensor_index(index: Any) -> bool:
    return any(isinstance(one, Tensor | list) for one in (index if isinstance(index, tuple) else (index,)))


def _bytes(tensor: Tensor) -> Tensor:
    """Of its memory; what is no whole number may not be equal to itself."""
    return (
        tensor.as_subclass(Tensor).contiguous().view(-1).view(torch.uint8)
        if tensor.numel()
        else tensor.new_empty(0)
    )
