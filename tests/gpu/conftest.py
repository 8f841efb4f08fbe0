"""Triton kernels on whatever there is: a CUDA GPU, or Triton's interpreter on the CPU.

What the interpreter cannot run is marked with `needs_cuda`; the list of it is what `pytest tests/gpu -rs` prints
without a GPU.
"""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when a kernel is defined


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where the kernels run."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
