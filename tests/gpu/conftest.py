"""Triton kernels on whatever there is: a CUDA GPU, or Triton's interpreter on the CPU.

Tests that need CUDA itself are skipped without a GPU, by name in tests/allowed_skips.txt.
"""

import os
from collections.abc import Callable, Iterator
from importlib.util import find_spec

import pytest
import torch

if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    raise pytest.UsageError("torch sees no GPU here: run these tests with TRITON_INTERPRET=1")

if find_spec("triton") is None:  # there is one for Linux alone
    collect_ignore_glob = ["test_*.py"]
elif not torch.cuda.is_available():
    from tests.gpu.checks.interpreter import remember_builtins

    remember_builtins()


@pytest.fixture(scope="session")
def device() -> torch.device:
    """The device on which the kernels run."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=not torch.cuda.is_available())
def own_memory() -> Iterator[list[str]]:
    """Fails a test whose kernels, in the interpreter, touch memory beside their tensors or that of other programs.

    Yields the faults: a test may take out those that it allows.
    """
    from tests.gpu.checks.memory import watched_memory  # which needs Triton

    with watched_memory() as found:
        yield found
    assert found == []


@pytest.fixture
def allow_trial_steps(own_memory: list[str]) -> Callable[[], None]:
    """Returns a function that allows what trial steps do: all their tokens go to one block and overwrite each other."""

    def allow() -> None:
        kernels = "rotate_kernel", "store_latents_kernel"
        known = [f"{kernel}: two programs write different values to one place" for kernel in kernels]
        own_memory[:] = [each for each in own_memory if each not in known]

    return allow
