"""torch without its kernels of the meta device, and with them again."""

import subprocess
import sys

SKIPPED = """
import sys
from foreword.utils.torch_import import load_meta_kernels, skip_meta_kernels
skip_meta_kernels()
import torch
assert "torch._decomp" not in sys.modules
assert torch.cdist(torch.ones(2, 3), torch.zeros(2, 3)).shape == (2, 2)
load_meta_kernels()
load_meta_kernels()
data = torch.empty(2, 3, device="meta")
assert torch.where(data > 0, data, data).shape == (2, 3)
"""
KEPT = """
import sys, torch
from foreword.utils.torch_import import skip_meta_kernels
skip_meta_kernels()
assert sys.modules["torch._meta_registrations"].__spec__ is not None
"""


def test_skipped_kernels_can_be_loaded_later() -> None:
    subprocess.run([sys.executable, "-c", SKIPPED], check=True)


def test_imported_torch_is_left_whole() -> None:
    subprocess.run([sys.executable, "-c", KEPT], check=True)
