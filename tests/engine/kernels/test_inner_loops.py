"""The loops that steps spend their time in, of every class of processors: what they are compiled to is looked at.

Nothing of it runs, so it does not matter which of the classes this machine can be.
"""

import pytest

from services.engine.kernels.cpu.isa import ISAS, Isa
from tests.engine.kernels.class_process import compile_for
from tests.engine.kernels.machine_code import (
    above_class,
    in_memory,
    inner_loops,
    instructions,
    multiply_adds,
    on_stack,
    tile_products,
)

WIDENED, SPLIT_BYTES = "widened", "split bytes"  # see `register_tiles.Arithmetic`
# What is on the stack in each step, by class and rows: of WIDENED, the largest tile needs registers for b, for its
# lower halves and for a mask. Of SPLIT_BYTES it is not looked at: LLVM multiplies several rows before it adds. Of other
# tiles nothing is.
MOST_ON_STACK = {("avx512", 13): 1, ("avx2", 6): 2}


@pytest.mark.few(1)
@pytest.mark.parametrize("isa", ISAS, ids=lambda isa: isa.name)
def test_register_tiles_keep_sums_in_registers_and_load_each_operand_once(isa: Isa) -> None:
    """For every number of rows up to the class's."""
    found = compile_for(isa.name, "tests.engine.kernels.compiled:register_tiles")
    assert len(found) == 3
    for arithmetic, assembly in found.items():
        assert above_class(assembly, isa.name) == []
        loops = sorted(filter(multiply_adds, inner_loops(assembly)), key=lambda loop: len(multiply_adds(loop)))
        per_row = list(range(1, isa.tile_rows + 1))
        registers = isa.tile_vectors * (1 if isa.has_avx512 else 2)  # of a row's sums
        parts = 2 if arithmetic in (WIDENED, SPLIT_BYTES) else 1
        loops_of_rows = 2 // isa.tile_vectors  # one for each vector of the columns, or both together
        expected = [rows * registers * parts for rows in per_row for _ in range(loops_of_rows)]
        assert [len(multiply_adds(loop)) for loop in loops] == expected
        if arithmetic == SPLIT_BYTES:
            continue
        for loop, rows in zip(loops, [rows for rows in per_row for _ in range(loops_of_rows)], strict=True):
            most_on_stack = MOST_ON_STACK.get((isa.name, rows), 0) if arithmetic == WIDENED else 0
            check_memory(loop, loads=rows * parts + registers, most_on_stack=most_on_stack)


@pytest.mark.few(1)
@pytest.mark.parametrize("isa", ISAS, ids=lambda isa: isa.name)
def test_tiles_of_codes_keep_sums_in_registers(isa: Isa) -> None:
    """For every number of rows, whose words are multiplied with each number of a step once."""
    found = compile_for(isa.name, "tests.engine.kernels.compiled:coded_tiles")
    assert len(found) == (4 if isa.has_bfloat16 else 2)
    for kind, assembly in found.items():
        assert above_class(assembly, isa.name) == []
        loops = sorted(filter(multiply_adds, inner_loops(assembly)), key=lambda loop: len(multiply_adds(loop)))
        words = (8 if kind.startswith("uint4") else 2) // (2 if "pairs" in kind else 1)  # of a step
        registers = isa.tile_vectors * (1 if isa.has_avx512 else 2)
        per_row = [rows for rows in range(1, isa.tile_rows - 1) for _ in range(2 // isa.tile_vectors)]
        assert [len(multiply_adds(loop)) for loop in loops] == [rows * registers * words for rows in per_row]
        for loop in loops:  # of the largest tiles, some addresses and constants are read from the stack
            vectors = [line for line in on_stack(loop) if "mm" in line]
            assert [line for line in vectors if line.endswith(")") or line in multiply_adds(loop)] == []


def check_memory(loop: list[str], loads: int, most_on_stack: int) -> None:
    """loads: a word of a for each row and part, and b."""
    spilled = on_stack(loop)
    assert len(spilled) <= most_on_stack, spilled
    assert len(in_memory(loop)) == loads + len(spilled)
    assert not [line for line in multiply_adds(loop) if line in spilled]


@pytest.mark.few(2)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("isa", ISAS, ids=lambda isa: isa.name)
def test_attention_of_single_tokens_keeps_sums_in_registers(isa: Isa, head_dim: int) -> None:
    """The loop over values loads each of them once for three heads, and a weight of each head."""
    heads, lanes = 3, 16 if isa.has_avx512 else 8  # of a register
    found = compile_for(isa.name, "tests.engine.kernels.compiled:decode_products", heads, head_dim)
    assert found.keys() == {"bfloat16", "float32"}
    for scores, values in found.values():
        assert above_class(scores + values, isa.name) == []
        assert multiply_adds(list(instructions(scores)))
        if isa.has_avx512 and not isa.has_amx:  # where there is AMX, few shapes come here
            assert on_stack(list(instructions(scores))) == []
        loops = [loop for loop in inner_loops(values) if multiply_adds(loop)]
        per_loop = head_dim // lanes // len(loops)
        for loop in loops:
            assert len(multiply_adds(loop)) == heads * per_loop
            check_memory(loop, loads=heads + per_loop, most_on_stack=0)


@pytest.fixture(scope="module")
def by_amx() -> dict[str, str]:
    found: dict[str, str] = compile_for("amx", "tests.engine.kernels.compiled:by_amx")
    return found


@pytest.mark.long
def test_amx_multiplies_in_products_and_attention(by_amx: dict[str, str]) -> None:
    assert by_amx.keys() == {"matmul", "int8_matmul", "decode_attention", "multiply_keys", "multiply_values"}
    for name, assembly in by_amx.items():
        assert tile_products(list(instructions(assembly))), name


@pytest.mark.long
def test_amx_multiplies_values_as_often_as_it_loads_tiles(by_amx: dict[str, str]) -> None:
    """Four products of four tiles for 32 keys and columns, and nothing on the stack."""
    loops = [loop for loop in inner_loops(by_amx["multiply_values"]) if tile_products(loop)]
    assert loops
    for loop in loops:
        assert len(tile_products(loop)) == 4
        assert [line.partition(" ")[0] for line in in_memory(loop)] == 2 * ["tileloaddt1"] + 2 * ["tileloadd"]
