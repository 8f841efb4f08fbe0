"""Which kernels ran: for each class of processors that this one can be, a model's steps are made of its instructions.

A step that falls back on torch's products or attention computes the same, slower. So what ran is looked at.
"""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from services.engine.kernels.cpu.isa import Isa
from tests.checkpoints import write_checkpoint
from tests.engine.kernels.class_process import run_as, runnable
from tests.engine.kernels.machine_code import above_class, instructions, multiply_adds, tile_products
from tests.engine.kernels.proof import Proof, prove
from tests.engine.oracle import Reference, prompts_of

NUM_TOKENS = 8
SHAPE: dict[str, Any] = {
    "hidden_size": 128,
    "head_dim": 32,
    "num_key_value_heads": 2,
    "intermediate_size": 192,
}  # that AMX takes, too
# Between kernels: the embedding's rows, angles of rotation, block tables, views; what samples, and what looks whether a
# chunk's last hidden state is finite.
_NAMES = """
    alias all cat cos detach empty flatten index index_fill_ isfinite lift_fresh mul neg new_empty resolve_conj
    resolve_neg sin slice
    split_with_sizes to unflatten unsqueeze view
"""
OPERATORS = frozenset(f"aten.{name}" for name in _NAMES.split())
SMALL = {"small.make_add_norm", "small.make_rotate", "small.make_store_kv"}
PRODUCTS = {"matmul.make_matmul", "decode_attention._make_kernel", "tile_attention._make_kernel"}
PRODUCTS_BY_AMX = {"amx.matmul.make_matmul", "amx.decode_attention._make_kernel", "tile_attention._make_kernel"}
# How far logits of two classes, which are up to 4.3, may be apart. float32: products are added up in other orders.
FLOAT32_BOUND = 1e-4
# bfloat16: so do some thirty roundings come out differently. 8 units in the last place of a logit of 4.3.
BFLOAT16_BOUND = 0.25


def in_float32() -> list[Isa]:
    """The highest of those whose vectors are of one size: their kernels for float32 are the same."""
    return [
        next(isa for isa in runnable() if isa.has_avx512 == size) for size in {isa.has_avx512 for isa in runnable()}
    ]


PAIRS = [(isa, "bfloat16") for isa in runnable()] + [(isa, "float32") for isa in in_float32()]
# Tests of engines and of whole stacks run the highest class, so others are tried with `--long` alone.
CASES = [
    pytest.param(isa, dtype, id=f"{isa.name}-{dtype}", marks=() if number == 0 else pytest.mark.long)
    for number, (isa, dtype) in enumerate(PAIRS)
]
EACH = pytest.mark.parametrize(("isa", "dtype"), CASES)
Prove = Callable[[Isa, str], Proof]


class Model:
    """A checkpoint, what it is asked, and what `transformers` answers in float32."""

    def __init__(self, directory: Path) -> None:
        self.directory = write_checkpoint(directory, **SHAPE)
        self.prompts = prompts_of([1, 37, 150])
        reference = Reference(self.directory)
        runs = [reference.run(prompt, NUM_TOKENS) for prompt in self.prompts]
        self.answers = [tokens for tokens, _ in runs]
        self.logprobs = np.concatenate([logprobs.numpy() for _, logprobs in runs])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def proof(model: Model) -> Prove:
    """Runs in one process for each class and dtype."""

    @cache
    def run(isa: Isa, dtype: str) -> Proof:
        arguments = model.directory, dtype, model.prompts, model.answers
        found: Proof = run_as(isa.name, "tests.engine.kernels.proof:prove", *arguments)
        return found

    return run


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(axis=-1, keepdims=True)
    logprobs: np.ndarray = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return logprobs


@pytest.mark.long
@EACH
def test_no_product_or_attention_is_torchs(isa: Isa, dtype: str, proof: Prove) -> None:
    found = proof(isa, dtype)
    assert found.kernels == isa.name
    assert found.operators <= OPERATORS, found.operators - OPERATORS


@pytest.mark.long
@EACH
def test_every_kernel_that_a_step_is_made_of_ran(isa: Isa, dtype: str, proof: Prove) -> None:
    by_amx = isa.has_amx and dtype == "bfloat16"
    assert proof(isa, dtype).code.keys() == SMALL | (PRODUCTS_BY_AMX if by_amx else PRODUCTS)


@pytest.mark.long
@EACH
def test_kernels_have_the_instructions_of_their_class_and_none_above_it(isa: Isa, dtype: str, proof: Prove) -> None:
    code = proof(isa, dtype).code
    for name, assembly in code.items():
        assert above_class(assembly, isa.name) == [], name
        assert ("%zmm" in assembly) == isa.has_avx512, name
    for name in code.keys() - SMALL:
        assert is_made_of_products(code[name], isa, dtype), name


def is_made_of_products(assembly: str, isa: Isa, dtype: str) -> bool:
    """By the best instruction that the class has for the dtype, over whole registers."""
    lines = list(instructions(assembly))
    if isa.has_amx and dtype == "bfloat16":
        return bool(tile_products(lines))
    instruction = "vdpbf16ps" if isa.has_bfloat16 and dtype == "bfloat16" else "vfmadd"
    register = "%zmm" if isa.has_avx512 else "%ymm"
    return any(line.startswith(instruction) and register in line for line in multiply_adds(lines))


@pytest.mark.long
@pytest.mark.parametrize("isa", in_float32(), ids=lambda isa: isa.name)
def test_greedy_tokens_in_float32_are_those_of_transformers(isa: Isa, model: Model, proof: Prove) -> None:
    found = proof(isa, "float32")
    assert found.likeliest == model.answers
    assert np.abs(log_softmax(found.logits) - model.logprobs).max() < FLOAT32_BOUND


@pytest.mark.long
@pytest.mark.parametrize(
    ("dtype", "isas", "bound"),
    [("float32", in_float32(), FLOAT32_BOUND), ("bfloat16", runnable(), BFLOAT16_BOUND)],
    ids=["float32", "bfloat16"],
)
def test_logits_of_all_classes_agree(dtype: str, isas: list[Isa], bound: float, proof: Prove) -> None:
    first, *others = [proof(isa, dtype).logits for isa in isas]
    differences = [float(np.abs(logits - first).max()) for logits in others]
    assert all(difference < bound for difference in differences), differences


def test_torchs_own_products_and_attention_are_seen(model: Model) -> None:
    """Else nothing above would tell."""
    found = prove(model.directory, "bfloat16", model.prompts, model.answers, kernels="torch")
    assert found.kernels == "torch"
    assert not found.code
    others = found.operators - OPERATORS
    assert "aten.silu" in others
    # Where the processor has no bfloat16 at all, weights are not packed for oneDNN
    assert others & {"mkldnn._linear_pointwise", "aten.linear", "aten.mm"}, others
