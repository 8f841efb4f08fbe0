"""A decoder's operations on Triton are those on torch."""

import numpy as np
import pytest
import torch
from torch import Tensor

from services.engine.kernels.gpu.operations import TritonOperations
from services.engine.kernels.torch_operations import TorchOperations

EPS = 1e-5


def both(device, *shapes: tuple[int, ...]) -> tuple[list[Tensor], list[Tensor]]:
    """The same random float32 tensors for either."""
    generator = torch.Generator().manual_seed(len(shapes))
    made = [torch.randn(shape, generator=generator).to(device) for shape in shapes]
    return made, [tensor.clone() for tensor in made]


def test_norm_is_torchs(device):
    (x, weight), (same_x, same_weight) = both(device, (3, 200), (200,))

    torch.testing.assert_close(
        TritonOperations().norm(x, weight, EPS), TorchOperations().norm(same_x, same_weight, EPS)
    )


def test_add_norm_is_torchs_and_changes_x_alone(device):
    (x, y, weight), (same_x, same_y, same_weight) = both(device, (3, 200), (3, 200), (200,))

    normed = TritonOperations().add_norm(x, y, weight, EPS)

    torch.testing.assert_close(normed, TorchOperations().add_norm(same_x, same_y, same_weight, EPS))
    assert torch.equal(x, same_x)
    assert torch.equal(y, same_y)
    assert torch.equal(weight, same_weight)


def test_norms_that_are_added_or_written_in_place_are_torchs(device):
    (x, y, weight), (same_x, same_y, same_weight) = both(device, (3, 200), (3, 260), (200,))

    for operations, into, of, scale in (
        (TritonOperations(), x, y, weight),
        (TorchOperations(), same_x, same_y, same_weight),
    ):
        operations.add_norm(into, of[:, 30:230], scale, EPS, 0.22)
        operations.add_normed(into, of[:, 30:230], scale, EPS)
        operations.norm_in_place(of[:, 30:230], scale, EPS)

    torch.testing.assert_close(x, same_x)
    torch.testing.assert_close(y, same_y)


@pytest.mark.parametrize("with_norm", [False, True])
@pytest.mark.parametrize("turned", [48, 36, 2])
def test_rotation_of_leading_heads_is_torchs(device, with_norm, turned):
    (heads, cos, sin, weight), (same, *_) = both(device, (3, 6, 48), (3, 1, turned), (3, 1, turned), (4, 48))
    scale = weight if with_norm else None

    TritonOperations().rotate(heads[:, :4], cos, sin, scale, EPS)

    TorchOperations().rotate(same[:, :4], cos, sin, scale, EPS)
    torch.testing.assert_close(heads, same)


def test_silu_mul_is_torchs_where_the_gate_is_large(device):
    (gate_up,), (same,) = both(device, (3, 80))
    gate_up[0, :4] = same[0, :4] = torch.tensor([-200.0, -80.0, 80.0, 200.0])

    with np.errstate(over="ignore"):  # e ** 200 is infinite, and 1 / (1 + that) is 0
        found = TritonOperations().silu_mul(gate_up)

    torch.testing.assert_close(found, TorchOperations().silu_mul(same))


def test_what_is_run_by_rows_or_replayed_is_run(device):
    operations = TritonOperations()
    (x,), _ = both(device, (3, 4))

    assert operations.by_rows(3, 16, lambda: x) is x
    assert operations.replay("step", (x,), lambda: x) is x
