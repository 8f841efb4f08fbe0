"""Shapes of a checkpoint's tensors."""

Shapes = dict[str, tuple[int, ...]]  # by tensors' names


def linear_shapes(name: str, out: int, hidden: int, bias: bool) -> Shapes:
    """Returns the shapes of one linear layer's tensors."""
    weight: Shapes = {f"{name}.weight": (out, hidden)}
    return weight | {f"{name}.bias": (out,)} if bias else weight
