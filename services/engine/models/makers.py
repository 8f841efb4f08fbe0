"""Makers of a model's products, where neither torch nor a CPU's kernels make them."""

from dataclasses import dataclass

from services.engine.models.grouped_mlp import MakeCodedExperts, MakeExperts
from services.engine.models.linear import MakeCodedProduct, MakeProduct


@dataclass(frozen=True, slots=True, kw_only=True)
class Makers:
    """Makers of the products of a device; None: the usual way."""

    product: MakeProduct | None = None  # of all linear layers but the last
    coded: MakeCodedProduct | None = None  # of linear layers that are stored as codes
    experts: MakeExperts | None = None  # of what computes a layer's experts
    coded_experts: MakeCodedExperts | None = None  # of what computes a layer's experts that are stored as codes
