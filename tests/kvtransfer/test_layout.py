"""The bytes of a block: a range of KV heads is one range of bytes, in the order of a layout of these heads."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtransfer.layer_groups import LayerGroups
from kvtransfer.layout import KvLayout, fingerprint

_DTYPES = {
    "float32": np.uint32,
    "bfloat16": np.uint16,
    "float16": np.uint16,
    "float8_e4m3fn": np.uint8,
    "int8": np.uint8,
}
LAYOUT = KvLayout(num_layers=3, num_kv_heads=6, head_dim=8, block_size=4, dtype="bfloat16")


@given(dtype=st.sampled_from(sorted(_DTYPES)), num_kv_heads=st.integers(1, 8), data=st.data())
def test_a_range_of_heads_is_a_block_of_a_layout_of_these_heads(
    dtype: str, num_kv_heads: int, data: st.DataObject
) -> None:
    layout = replace(LAYOUT, num_kv_heads=num_kv_heads, dtype=dtype)
    first, end = sorted(data.draw(st.tuples(*[st.integers(0, num_kv_heads)] * 2)))
    pool = np.random.default_rng(0).integers(0, 256, (2, layout.block_bytes), dtype=np.uint8)
    of_heads, part = layout.bytes_of(range(first, end)), replace(layout, num_kv_heads=end - first)
    assert len(of_heads) == part.block_bytes
    cut = np.ascontiguousarray(pool[:, of_heads.start : of_heads.stop])
    whole = pool.view(_DTYPES[dtype]).reshape(layout.shape(2))
    assert (cut.view(_DTYPES[dtype]).reshape(part.shape(2)) == whole[:, first:end]).all()


@pytest.mark.parametrize("head_dim", [8, 7])
@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
def test_scales_of_tokens_lie_behind_the_codes_of_their_plane(dtype: str, head_dim: int) -> None:
    """So a block has them, and a rank's heads have their own."""
    layout = replace(LAYOUT, dtype=dtype, head_dim=head_dim, token_scales=True)
    static = replace(layout, token_scales=False)
    assert layout.plane_bytes == static.plane_bytes + 4 * 4 == 4 * head_dim + 4 * 4
    assert layout.token_bytes == 6 * 3 * 2 * (head_dim + 4)
    assert layout.block_bytes == np.prod(layout.shape(1)) == 6 * 3 * 2 * layout.plane_bytes
    assert layout.bytes_of(range(2, 4)) == range(2 * 3 * 2 * layout.plane_bytes, 4 * 3 * 2 * layout.plane_bytes)
    digests = {fingerprint(each, "weights", {}) for each in (LAYOUT, layout, static)}
    assert len(digests) == 3


@pytest.mark.parametrize("size", [1, 2, 3, 6])
def test_ranks_cover_a_block_in_their_order(size: int) -> None:
    each = LAYOUT.num_kv_heads // size
    ranges = [LAYOUT.bytes_of(range(rank * each, (rank + 1) * each)) for rank in range(size)]
    assert [place for one in ranges for place in one] == list(range(LAYOUT.block_bytes))


@given(dtype=st.sampled_from(sorted(_DTYPES)), num_kv_heads=st.integers(1, 5), scales=st.booleans(), data=st.data())
def test_heads_and_layers_of_a_rank_lie_in_its_block_as_the_ranges_say(
    dtype: str, num_kv_heads: int, scales: bool, data: st.DataObject
) -> None:
    """Of a pipeline's stage too: some layers of some heads, here cut out of an array of heads and layers."""
    scales = scales and dtype in ("int8", "float8_e4m3fn")
    layout = replace(LAYOUT, num_kv_heads=num_kv_heads, dtype=dtype, head_dim=7, token_scales=scales)
    first, end = sorted(data.draw(st.tuples(*[st.integers(0, num_kv_heads)] * 2)))
    first_layer, end_layer = sorted(data.draw(st.tuples(*[st.integers(0, layout.num_layers)] * 2)))
    heads, layers = range(first, end), range(first_layer, end_layer)
    pool = np.random.default_rng(0).integers(0, 256, (2, layout.block_bytes), dtype=np.uint8)
    ranges = layout.ranges_of(heads, layers)
    rank = np.concatenate([pool[:, own.start : own.stop] for own in (*ranges, range(0))], axis=1)
    apart = pool.reshape(2, num_kv_heads, layout.num_layers, -1)[:, first:end, first_layer:end_layer]
    assert (rank == apart.reshape(2, -1)).all()
    assert rank.shape[1] == layout.part(heads, layers).block_bytes


def test_all_layers_of_a_rank_are_one_range() -> None:
    assert LAYOUT.ranges_of(range(2, 4)) == LAYOUT.ranges_of(range(2, 4), range(3)) == (LAYOUT.bytes_of(range(2, 4)),)
    assert LAYOUT.part(range(2, 4)) == replace(LAYOUT, num_kv_heads=2)
    assert LAYOUT.part(range(2, 4), range(1, 3)) == replace(LAYOUT, num_kv_heads=2, num_layers=2)


def test_heads_of_slices_are_divided_and_their_layers_are_not() -> None:
    """A slice has layers of one group, which are no range of the model's."""
    groups = LayerGroups((None, 5), (((0, 2),), ((1, 3),)))
    slices = replace(LAYOUT, num_layers=groups.num_layers, groups=groups)
    assert slices.ranges_of(range(1, 3)) == (replace(slices, groups=None).bytes_of(range(1, 3)),)
    assert slices.part(range(1, 3)).groups == groups
    for refused in (slices.ranges_of, slices.part):
        with pytest.raises(AssertionError, match="slice"):
            refused(range(1, 3), range(1))


@pytest.mark.parametrize("layers", [range(2, 4), range(-1, 2), range(0, 3, 2)])
def test_layers_that_are_no_range_of_the_layouts_are_refused(layers: range) -> None:
    with pytest.raises(AssertionError):
        LAYOUT.ranges_of(range(1), layers)


def test_latent_kv_is_one_plane_of_one_head_and_each_rank_has_all_of_it() -> None:
    latent = KvLayout(num_layers=3, num_kv_heads=1, head_dim=576, block_size=4, dtype="bfloat16", num_planes=1)
    assert latent.shape(5) == (5, 1, 3, 1, 4, 576)
    assert (latent.token_bytes, latent.block_bytes) == (3 * 576 * 2, 4 * 3 * 576 * 2)
    assert latent.bytes_of(range(1)) == range(latent.block_bytes)
    assert latent.part(range(1)) == latent


def test_layouts_of_k_and_v_have_the_fingerprints_that_they_had_before_there_were_others() -> None:
    digests = {planes: fingerprint(replace(LAYOUT, num_planes=planes), "weights", {"theta": 1e4}) for planes in (1, 2)}
    assert digests[2] == "631ea67ebbc835d7a407cc10d5d2209d"
    assert digests[1] != digests[2]


@pytest.mark.parametrize("heads", [range(5, 7), range(-1, 2), range(0, 4, 2)])
def test_heads_that_are_no_range_of_the_layouts_are_refused(heads: range) -> None:
    with pytest.raises(AssertionError):
        LAYOUT.bytes_of(heads)
