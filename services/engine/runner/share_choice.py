"""Decides whether workers share their weights with others of their host: without torch, before any is started."""

from services.config import Kernels, ShareWeights
from services.config.engine import EngineConfig
from services.engine.kernels.cpu.shared_file import why_no_huge_pages
from services.protocol.model_files.base import ModelError


def why_not_shared(engine: EngineConfig, not_fused: str | None) -> str | None:
    """Returns why a worker on the CPU has weights of its own; None: it shares them if it can.

    not_fused: why torch computes; None: kernels do. Raises ModelError for an option that asks for what cannot be.
    """
    if engine.share_weights is ShareWeights.OFF:
        return "the configuration says so"
    if engine.kernels is not Kernels.AUTO or not_fused is not None:
        if engine.share_weights is ShareWeights.ON:
            raise ModelError("--share-weights on is for weights that kernels have packed, and torch computes here")
        return "torch computes, by weights of its own"
    return None if engine.share_weights is ShareWeights.ON else why_no_huge_pages()
