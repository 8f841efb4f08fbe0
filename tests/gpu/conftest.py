"""Triton kernels on whatever there is: a CUDA GPU, or Triton's interpreter on the CPU.

What neither it nor the CPU can do is skipped without a GPU, by name in tests/allowed_skips.txt.
"""

import os
from importlib.util import find_spec

import pytest
import torch

if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    raise pytest.UsageError("torch sees no GPU here: run these tests with TRITON_INTERPRET=1")

if find_spec("triton") is None:  # there is one for Linux alone
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where the kernels run."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
