"""Shapes of a checkpoint's tensors, and the shares of them that belong to one rank of several."""

import re
from typing import NamedTuple

OF_LAYER = re.compile(r"\.layers\.(\d+)\.")  # in the name of a layer's tensor: the layer
Shapes = dict[str, tuple[int, ...]]  # by tensors' names


class Share(NamedTuple):
    """The part of a tensor that a rank reads: tensor[rows, columns]; None: all of them. Several pieces of rows become
    one below the other.
    """

    rows: tuple[slice, ...] | None = None
    columns: slice | None = None


Shares = dict[
    str, Share | None
]  # by tensors' names; None: the tensor is another rank's. Without an entry it is read whole


def linear_shapes(name: str, out: int, hidden: int, bias: bool) -> Shapes:
    """Returns the shapes of one linear layer's tensors."""
    weight: Shapes = {f"{name}.weight": (out, hidden)}
    return weight | {f"{name}.bias": (out,)} if bias else weight


def shares_of_outputs(name: str, outputs: range, bias: bool) -> Shares:
    """Returns the shares of one linear layer's tensors that make these outputs."""
    share = Share(rows=(slice(outputs.start, outputs.stop),))
    weight: Shares = {f"{name}.weight": share}
    return weight | {f"{name}.bias": share} if bias else weight


def shares_of_inputs(name: str, inputs: range, bias: bool) -> Shares:
    """Returns the shares of one linear layer's tensors that take these inputs.

    The ranks' results are summed, so the bias is that of the rank with the first inputs alone.
    """
    weight: Shares = {f"{name}.weight": Share(columns=slice(inputs.start, inputs.stop))}
    return weight | {f"{name}.bias": None} if bias and inputs.start else weight


def shares_of_vocabulary(embedding: str, tokens: range, *, tied: bool) -> Shares:
    """Returns the shares of the embedding, and of the output layer if it is not the same matrix, of these tokens."""
    share = Share(rows=(slice(tokens.start, tokens.stop),))
    return {embedding: share} if tied else {embedding: share, "lm_head.weight": share}


def widened(heads: range, head_dim: int) -> range:
    """Returns the places of these heads' numbers, where each head has `head_dim`."""
    return range(heads.start * head_dim, heads.stop * head_dim)
