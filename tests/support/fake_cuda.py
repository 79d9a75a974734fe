"""A fake GPU: its tensors are in host memory, report "cuda:0", and are as strict as GPU tensors.

It finds the errors of a first run on a GPU: host tensors mixed with device tensors, hidden device reads,
blocking copies, pinned memory that is read before a copy is done or changed before it is read, and work that
a CUDA graph cannot hold. Triton kernels run in the interpreter and accept device tensors only. Timings mean
nothing.

The fake is active in the thread that enters `FakeCuda`, for calls from Python.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map
from triton.runtime import interpreter

from foreword.cuda_graphs import capture as cuda_graphs
from foreword.kernels import gpu
from foreword.kernels.triton import checks
from tests.support.graph_capture_fake import OpTape

DEVICE = torch.device("cuda:0")
TOTAL_BYTES = 1 << 30
CONTEXT_BYTES = 480 << 20  # bytes beside tensors
POISON = 0x5A  # byte value of memory before a copy reaches it
NO_TORCH_FUNCTION = torch._C._disabled_torch_function_impl

# Calls that wait for the device if given a device tensor.
HOST_READS = frozenset(
    {"item", "tolist", "__bool__", "__int__", "__float__", "__index__", "__contains__", "equal", "allclose",
     "nonzero", "masked_select", "unique", "bincount", "repeat_interleave", "argwhere", "is_nonzero",
     "__format__", "__repr__"}
)  # fmt: skip
FORBIDDEN = frozenset({"numpy", "__array__", "data_ptr", "from_numpy", "__dlpack__"})  # on device tensors
# Operations without a float8 kernel on GPUs, though some exist for CPUs.
NOT_IN_FLOAT8 = frozenset(
    {"index_select", "index_copy_", "gather", "scatter_", "where", "abs", "take_along_dim"}
    | {f"__{name}__" for name in ("add", "sub", "mul", "truediv", "lt", "gt", "le", "ge", "eq", "ne")}
)
# Operations that refuse even a host scalar among device tensors.
SAME_DEVICE_OPS = frozenset(
    {"cat", "stack", "gather", "index_select", "matmul", "__matmul__", "mm", "bmm", "linear", "scatter_",
     "index_copy_"}
)  # fmt: skip


class FakeCudaTensor(Tensor):
    """A tensor on the fake device."""

    __torch_function__ = NO_TORCH_FUNCTION
    device = property(lambda self: DEVICE)  # type: ignore[assignment]
    is_cuda = property(lambda self: True)  # type: ignore[assignment]
    is_cpu = property(lambda self: False)  # type: ignore[assignment]


class PinnedTensor(Tensor):
    """A tensor in pinned host memory."""

    __torch_function__ = NO_TORCH_FUNCTION


class _FakeEvent:
    """Copies queued before record() are done when synchronize() returns."""

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
        """All work is in order."""

    def query(self) -> bool:
        return self._gpu.settled >= self._queued


class _FakeStream:
    """All streams are value."""

    def __init__(self, gpu: FakeCuda) -> None:
        self._gpu = gpu
        self.device = DEVICE

    def synchronize(self) -> None:
        self._gpu.forbid("a wait")
        self._gpu.counts["wait"] += 1
        self._gpu.finish_copies(self._gpu.queued)

    def wait_stream(self, other: object) -> None:
        """All work is in order."""

    wait_event = wait_stream


class _FakeGenerator(torch.Generator):
    """A device generator is a host generator."""

    def __new__(cls, device: object = "cpu") -> _FakeGenerator:
        return super().__new__(cls, "cpu")


class _FakeGraph:
    """Operations and launches during capture, replayed on the same memory."""

    def __init__(self) -> None:
        self.tape = OpTape()

    def replay(self) -> None:
        with torch._C.DisableTorchFunction():
            self.tape.replay()


@dataclass(slots=True)
class _PendingCopy:
    """A queued copy; `finish` makes its effect visible to the host."""

    finish: Callable[[], None]


@dataclass(eq=False)
class FakeCuda(TorchFunctionMode):
    """A GPU of this compute capability, while entered."""

    capability: tuple[int, int] = (9, 0)
    # "look": reads that wait for the device; "upload", "download": queued copies from and to pinned memory;
    # "blocking upload"; "wait": for an event; "launch": of kernels; "replay": of graphs
    counts: Counter[str] = field(default_factory=Counter)
    refused: list[str] = field(default_factory=list)  # operations that a GPU would refuse

    def __post_init__(self) -> None:
        super().__init__()
        self.capturing: OpTape | None = None
        self.queued = self.settled = 0
        self._copies: list[_PendingCopy] = []
        self._tensors: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()
        self._patches = pytest.MonkeyPatch()
        self._pinned: set[int] = set()
        self._pins: list[Tensor] = []
        self._registered: list[range] = []  # addresses of host memory that is pinned in place

    # Device

    def __enter__(self) -> FakeCuda:
        patches, cuda = self._patches, torch.cuda
        fakes: dict[str, Any] = {
            "is_available": lambda: True,
            "device_count": lambda: 1,
            "current_device": lambda: 0,
            "get_device_name": lambda device=None: "Fake GPU",
            "get_device_capability": lambda device=None: self.capability,
            "get_device_properties": lambda device=None: SimpleNamespace(
                name="Fake GPU", total_memory=TOTAL_BYTES, multi_processor_count=132
            ),
            "is_current_stream_capturing": lambda: self.capturing is not None,
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
            "current_stream": lambda device=None: _FakeStream(self),
            "Stream": lambda device=None: _FakeStream(self),
            "cudart": lambda: SimpleNamespace(
                cudaHostRegister=self._register, cudaHostUnregister=lambda address: 0
            ),
            "Event": lambda **_: _FakeEvent(self),
            "stream": lambda stream: nullcontext(),
            "graph_pool_handle": lambda: (0, 1),
            "CUDAGraph": _FakeGraph,
            "graph": self._capture,
        }
        for name, fake in fakes.items():
            patches.setattr(cuda, name, fake)
        patches.setattr(torch.version, "cuda", "fake")
        patches.setattr(torch, "Generator", _FakeGenerator)
        builder, launch = interpreter.interpreter_builder, interpreter.GridExecutor.__call__
        # Overflow checks take most of the time.
        patches.setattr(builder, "options", replace(builder.options, sanitize_overflow=False))
        patches.setattr(cuda_graphs, "NUM_WARM_UPS", 0)
        patches.setattr(
            interpreter.GridExecutor,
            "__call__",
            lambda executor, *args, **kwargs: self._launch(launch, executor, args, kwargs),
        )
        small = {"shapes": [(64, 64)] * 2, "row_counts": (1, 9)}
        patches.setattr(checks, "row_mismatches", partial(checks.row_mismatches, **small))
        patches.setattr(checks, "attention_mismatches", lambda *_: iter(()))
        patches.setattr(gpu, "_reasons", {})
        return super().__enter__()  # type: ignore[no-any-return]

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._patches.undo()

    def forbid(self, what: str) -> None:
        """Refuse `what` while a graph is captured."""
        if self.capturing is not None:
            raise self._refusal(f"{what} while a graph is captured")

    def finish_copies(self, count: int) -> None:
        """Finish the first `count` copies."""
        while self.settled < count:
            self.settled += 1
            self._copies.pop(0).finish()

    @contextmanager
    def count_calls(self) -> Iterator[Counter[str]]:
        """Counts within the block, filled at its end."""
        before, within = Counter(self.counts), Counter[str]()
        yield within
        within.update(self.counts - before)

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
        """Launch a kernel: its tensors must be on the device."""
        for value in tree_leaves((args, kwargs)):
            if isinstance(value, Tensor) and not isinstance(value, FakeCudaTensor):
                raise self._refusal(f"kernel {executor.fn.__name__} gets a host tensor")
        self.counts["launch"] += 1

        def run() -> None:
            with torch._C.DisableTorchFunction(), _disable_current_modes():
                plain = tree_map(
                    lambda x: x.as_subclass(Tensor) if isinstance(x, Tensor) else x, (args, kwargs)
                )
                launch(executor, *plain[0], **plain[1])

        if self.capturing is not None:
            self.capturing.record_call(run)
        run()

    # Calls

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
        on_device = self._compute(name, args, kwargs)
        return self._wrap_result(func(*args, **kwargs), on_device)

    def _compute(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether the result is on the device; refuse or count the rest, and pop `device`."""
        tensors = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
        on_device = any(map(_is_on_device, tensors))
        if on_device:
            if name in FORBIDDEN:
                raise self._refusal(f"{name}() of a device tensor")
            if name in HOST_READS and not (
                name == "repeat_interleave" and isinstance((args[1:] or (None,))[0], int)
            ):
                self._count_host_read(name)
            if name in NOT_IN_FLOAT8 and any(tensor.dtype == torch.float8_e4m3fn for tensor in tensors):
                raise self._refusal(f"{name}() of float8")
            on_host = [
                tuple(tensor.shape)
                for tensor in tensors
                if not _is_on_device(tensor) and (tensor.dim() > 0 or name in SAME_DEVICE_OPS)
            ]
            if on_host:
                raise self._refusal(f"{name}(): device tensors and host tensors {on_host}")
        device = kwargs.pop("device", None)
        return on_device if device is None else torch.device(device).type == "cuda"

    def _wrap_result(self, result: Any, on_device: bool) -> Any:
        """Mark tensors of a result as on the device, or as sharing pinned memory."""
        if not on_device and not (self._pins or self._registered):
            return result
        if isinstance(result, Tensor):
            return self._to_device(result) if on_device else self._share_memory(result)
        if isinstance(result, tuple | list) and any(isinstance(value, Tensor) for value in result):
            return type(result)([self._wrap_result(value, on_device) for value in result])
        return result

    def _to_device(self, result: Tensor) -> Tensor:
        if not isinstance(result, FakeCudaTensor):
            result = result.as_subclass(FakeCudaTensor)
        self._tensors[id(result)] = result
        return result

    def _register(self, address: int, num_bytes: int, flags: int) -> int:
        self._registered.append(range(address, address + num_bytes))
        return 0

    def _share_memory(self, result: Tensor) -> Tensor:
        pinned = type(result) is Tensor and (
            result.untyped_storage().data_ptr() in self._pinned
            or any(result.data_ptr() in addresses for addresses in self._registered)
        )
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

    def _move(self, source: Tensor, target: Tensor, on_device: bool, non_blocking: bool) -> None:
        """Count a copy, and delay its effect as long as a GPU could."""
        if _is_on_device(source) == on_device:
            return
        queued = non_blocking and isinstance(source if on_device else target, PinnedTensor)
        if on_device and queued:
            queued = source.is_contiguous() and source.dtype == target.dtype
        self.forbid("a copy between host and device")
        if not queued:
            self.counts["blocking upload" if on_device else "look"] += 1
            self.finish_copies(self.queued)
            return
        self.counts["upload" if on_device else "download"] += 1
        if on_device:
            before = source.clone()
            self._queue(lambda: self._check_unchanged(source, before))
        else:
            value = target.clone()
            _bytes(target).fill_(POISON)
            self._queue(lambda: target.copy_(value))

    def _queue(self, finish: Callable[[], Any]) -> None:
        def run() -> None:
            with torch._C.DisableTorchFunction(), torch.inference_mode():
                finish()

        self._copies.append(_PendingCopy(run))
        self.queued += 1

    def _check_unchanged(self, source: Tensor, before: Tensor) -> None:
        if not torch.equal(_bytes(source), _bytes(before)):
            self.refused.append("pinned memory was changed before it was copied")

    def _do_to(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        source, *rest = args
        device, dtype = kwargs.pop("device", None), kwargs.pop("dtype", None)
        for value in rest:
            if isinstance(value, Tensor):
                device, dtype = value.device, value.dtype
            elif isinstance(value, torch.dtype):
                dtype = value
            elif isinstance(value, str | torch.device):
                device = value
            elif value is not None:
                raise AssertionError(f"to({value!r})")
        on_device = _is_on_device(source) if device is None else torch.device(device).type == "cuda"
        non_blocking = kwargs.pop("non_blocking", False)
        copy = kwargs.pop("copy", False) or on_device != _is_on_device(source)
        target = source.to(dtype or source.dtype, copy=copy, **kwargs)
        if on_device != _is_on_device(source):
            target = target.as_subclass(Tensor)
        self._move(source, target, on_device, non_blocking)
        return self._wrap_result(target, on_device)

    def _do_cpu(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._do_to(func, (args[0], "cpu"), kwargs)

    def _do_cuda(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._do_to(func, (args[0], "cuda"), kwargs)

    def _do_pin_memory(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if _is_on_device(args[0]):
            raise self._refusal("pin_memory() of a device tensor")
        self.forbid("pinned memory")
        return self._pin(args[0].clone())

    def _do_is_pinned(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        return isinstance(args[0], PinnedTensor)

    def _pin(self, tensor: Tensor) -> Tensor:
        tensor = tensor.contiguous()
        self._pinned.add(tensor.untyped_storage().data_ptr())
        self._pins.append(tensor)  # keeps the address from being reused
        return tensor.as_subclass(PinnedTensor)

    def _do_empty(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        pinned = kwargs.pop("pin_memory", False)
        on_device = self._compute("empty", args, kwargs)
        result = func(*args, **kwargs)
        _bytes(result).fill_(POISON)
        if pinned:
            assert not on_device
            return self._pin(result)
        return self._wrap_result(result, on_device)

    def _do_tensor(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if any(map(_is_on_device, tree_leaves(args[0]))):
            self._count_host_read("tensor")
        on_device = torch.device(kwargs.pop("device", None) or "cpu").type == "cuda"
        if on_device:
            self._blocking_upload("torch.tensor")
        return self._wrap_result(func(*args, **kwargs), on_device)

    def _blocking_upload(self, name: str) -> None:
        self.forbid(f"{name} of host values")
        self.counts["blocking upload"] += 1
        self.finish_copies(self.queued)

    # Indices

    def _do_getitem(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._indexed(args[0], args[1])
        return self._wrap_result(func(*args), _is_on_device(args[0]))

    def _do_setitem(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        target, index, value = args
        self._indexed(target, index, count_masks=isinstance(value, Tensor))
        if isinstance(value, Tensor) and (value.dim() or _is_on_device(value)):
            if not _has_tensor_index(index):
                self._move(value, target, _is_on_device(target), non_blocking=False)
            elif _is_on_device(value) != _is_on_device(target):
                raise self._refusal("an index with values on the other device")
        return func(*args)

    def _indexed(self, tensor: Tensor, index: Any, count_masks: bool = True) -> None:
        """Count the cost of an index: host values are copied, masks are read."""
        on_device = _is_on_device(tensor)
        for value in index if isinstance(index, tuple) else (index,):
            if isinstance(value, list | range | np.ndarray) and on_device:
                self._blocking_upload("an index")
            elif isinstance(value, Tensor):
                if _is_on_device(value) and not on_device:
                    raise self._refusal("a host tensor is indexed by a device tensor")
                if on_device and not _is_on_device(value):
                    self._blocking_upload("an index")
                if on_device and (value.dtype in (torch.bool, torch.uint8)) and count_masks:
                    self._count_host_read("a mask")
                if _is_on_device(value) and value.dim() == 0 and value.dtype != torch.bool:
                    self._count_host_read("an index of no dimension")


def _is_on_device(value: Any) -> bool:
    return isinstance(value, FakeCudaTensor)


def _has_tensor_index(index: Any) -> bool:
    return any(
        isinstance(value, Tensor | list) for value in (index if isinstance(index, tuple) else (index,))
    )


def _bytes(tensor: Tensor) -> Tensor:
    """The bytes of a tensor: floats may differ from themselves."""
    if not tensor.numel():
        return tensor.new_empty(0)
    return tensor.as_subclass(Tensor).contiguous().view(-1).view(torch.uint8)
