"""What the device allows, by torch alone: every share that `foreword bench gpu` tells is of these."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from foreword.bench.gpu.config import BenchConfig
from foreword.bench.gpu.device import BenchDevice
from foreword.bench.gpu.report import Measurement

__all__ = ["Roofline"]

LAUNCHES = 200
TINY = 64


@dataclass
class Roofline:
    """Measured once, when first asked for. All are medians over rounds.

    bandwidth  bytes a second of a copy within the device's memory, read and written
    product    operations a second of a product of square matrices; a multiply-add is two
    launch     seconds that the host takes to launch one small operation of torch
    """

    scale: BenchConfig
    device: BenchDevice

    @cached_property
    def bandwidth(self) -> float:
        source = torch.ones(self.scale.copy_bytes, dtype=torch.uint8, device=self.device.name)
        target = torch.empty_like(source)
        return 2 * source.nbytes / self._median(lambda: target.copy_(source))

    @cached_property
    def product(self) -> float:
        dtype = getattr(torch, self.scale.dtype)
        left = torch.randn(self.scale.product, self.scale.product, dtype=dtype, device=self.device.name)
        return 2 * self.scale.product**3 / self._median(lambda: left @ left)

    @cached_property
    def launch(self) -> float:
        value = torch.zeros(TINY, device=self.device.name)

        def many() -> None:
            for _ in range(LAUNCHES):
                value.add_(1.0)

        return self._median(many) / LAUNCHES

    def _median(self, run: Any) -> float:
        run()
        seconds = sorted(self.device.in_turn({"": run}, max(self.scale.rounds, 3))[""])
        return seconds[len(seconds) // 2]

    def parts(self) -> Iterator[Measurement]:
        yield Measurement("device", self._device)
        yield Measurement("copy", lambda: {"gb_s": self.bandwidth / 1e9})
        yield Measurement("product", lambda: {"tflop_s": self.product / 1e12})
        yield Measurement("launch", lambda: {"us": self.launch * 1e6})

    def _device(self) -> Mapping[str, Any]:
        if not self.device.cuda:
            return {"name": "cpu (rehearsal)"}
        about = torch.cuda.get_device_properties(0)
        capability = ".".join(map(str, torch.cuda.get_device_capability()))
        versions = {"torch": torch.__version__, "cuda": str(torch.version.cuda)}
        return {
            "name": about.name,
            "capability": capability,
            "gib": about.total_memory / (1 << 30),
            **versions,
        }
