# SPDX-License-Identifier: Apache-2.0
"""Humming's layout: where a weight is, anywhere; Humming's own repack on a GPU."""

from __future__ import annotations

import pytest
import torch

from tests.verify_kernels.test_moe_experts import experts_of, filled, mxfp4
from verify_kernels.moe import ExpertBank, layout
from verify_kernels.moe.mxfp4 import Mxfp4, dequantise


def test_a_block_unpacks_to_its_weights() -> None:
    """Every word's bits by the module's table, scales by theirs."""
    weight = mxfp4((2, 128, 96), 3)
    blocks = layout.pack(weight)
    # Filled up to 256 rows and 128 columns.
    assert blocks.words.shape == (2, 8, 4, 128)
    assert blocks.scales.shape == (2, 4, 256)
    assert not blocks.words[:, 6:].any() and not blocks.words[:, :, 2:].any()
    dense = dequantise(weight)
    grid = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
    seen = torch.zeros_like(dense)
    lane, j = torch.meshgrid(torch.arange(32), torch.arange(4), indexing="ij")
    g, c = lane // 4, lane % 4
    words = blocks.words.view(2, 8, 4, 32, 4).to(torch.int64) & 0xFFFFFFFF
    for step in range(6):
        for block in range(2):
            for place, (half, behind) in enumerate(((0, 0), (0, 8), (8, 0), (8, 8))):
                row = 64 * block + 16 * j + g + half
                inside = 8 * g + 2 * j + half // 8
                scale = blocks.scales[:, step // 2, 64 * block + inside]
                power = torch.pow(2.0, scale.double() - 127)
                for column in range(2):
                    word = words[:, step, block] >> (4 * place + 16 * column)
                    value = grid[word & 7] * (1 - 2 * (word >> 3 & 1)) * power
                    k = 16 * step + 2 * c + behind + column
                    assert torch.equal(value, dense[:, row, k])
                    seen[:, row, k] += 1
    assert (seen == 1).all()


def test_columns_between_the_kernels_are_a_permutation() -> None:
    """A lane finds the four of each of two blocks side by side, block by block."""
    places = [layout.place_of(k) for k in range(32)]
    assert sorted(places) == list(range(32))
    for c in range(4):
        columns = [places.index(8 * c + i) for i in range(8)]
        for step in range(2):
            first = 16 * step + 2 * c
            wanted = [first, first + 1, first + 8, first + 9]
            assert columns[4 * step : 4 * step + 4] == wanted


def test_a_layer_is_seen_where_it_is() -> None:
    """The views of a layer's parameters have the weights' memory."""
    bank = experts_of((128, 64, 16, 4)).bank()
    w13, w2 = (b.words.flatten(2) for b in (bank.up, bank.down))
    sizes = 128, 64, 64
    seen = ExpertBank.of_layer(w13, bank.up.scales, w2, bank.down.scales, *sizes)
    assert seen.experts == 16
    for one, other in ((seen.up, bank.up), (seen.down, bank.down)):
        assert one.words.data_ptr() == other.words.data_ptr()
        assert one.words.shape == other.words.shape
        assert one.scales.data_ptr() == other.scales.data_ptr()


def test_rows_that_are_filled_up_must_be_zero() -> None:
    for byte in (0, 0x10):
        bank = filled(experts_of((128, 64, 16, 4)), 192, byte)
        w13, w2 = (b.words.flatten(2) for b in (bank.up, bank.down))
        arguments = (w13, bank.up.scales, w2, bank.down.scales, 128, 64, 192)
        if byte:
            with pytest.raises(ValueError, match="of 192 rows of gate those from 64"):
                ExpertBank.of_layer(*arguments)
        else:
            assert ExpertBank.of_layer(*arguments).inner == 64


def large(shape: tuple[int, ...]) -> Mxfp4:
    weight = mxfp4(shape, 0)
    weight.scales[0, 0, 0] = 129
    return weight


def test_weights_that_the_kernels_do_not_take() -> None:
    with pytest.raises(ValueError, match=r"a scale byte is 129; .* up to 2\^1"):
        layout.pack(large((1, 64, 64)))
    with pytest.raises(ValueError, match=r"words are .* and scales torch.uint8"):
        blocks = layout.pack(mxfp4((1, 64, 64), 0))
        layout.Blocks(blocks.words, blocks.scales[:, :1])
    with pytest.raises(ValueError, match=r"weight is torch.int32 \(1, 4, 64\)"):
        words = torch.zeros(1, 4, 64, dtype=torch.int32)
        layout.Blocks.of_layer(words, torch.zeros(1, 2, 32, dtype=torch.uint8))
    bank = experts_of((128, 64, 16, 4)).bank()
    with pytest.raises(
        ValueError, match=r"up has words \(16, 8, 4, 128\); .* are \(16, 16, 4, 128\)"
    ):
        ExpertBank(bank.up, bank.down, 256, 64, 64)


@pytest.mark.gpu
def test_humming_itself_packs_so() -> None:
    """Words and scales bit for bit."""
    dtypes = pytest.importorskip("humming.dtypes")
    from humming.transform import (
        transform_humming_weight,
        transform_humming_weight_scale,
    )

    weight = mxfp4((3, 256, 384), 5, "cuda")
    ours = layout.pack(weight)
    words = transform_humming_weight(
        weight.packed.view(torch.int32),
        dtypes.float4e2m1,
        dtypes.bfloat16,
        packed=True,
    )
    scales = transform_humming_weight_scale(weight.scales)
    theirs = layout.Blocks.of_layer(words.view(torch.int32), scales)
    assert torch.equal(theirs.words, ours.words)
    assert torch.equal(theirs.scales, ours.scales)
