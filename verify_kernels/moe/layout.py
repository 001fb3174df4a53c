# SPDX-License-Identifier: Apache-2.0
"""MXFP4 matrices as Humming holds them for bf16 activations: blocks of 64 x 16.

Source: humming-kernels 0.1.19, ``process.cuh`` (``weight_repack_nk``, interleave mode
3) and ``transform.py`` (``transform_humming_weight_scale``).

    words   int32 [E, K / 16, N / 64, 128]. A block is 512 bytes in the order of a
            warp's lanes. Word j of lane 4 g + c belongs to tile j, rows 16 j .. + 15,
            an A operand of m16n8k16. Four bits of a half of it are

                 3 .. 0   row g,     column 2 c      (low half), 2 c + 1 (high half)
                 7 .. 4   row g,     column 2 c + 8, 2 c + 9
                11 .. 8   row g + 8, column 2 c,     2 c + 1
                15 .. 12  row g + 8, column 2 c + 8, 2 c + 9

    scales  uint8 [E, K / 32, N]. Of 64 rows place 8 g + i is row 8 i + g, so a lane
            reads the eight that it needs at once.

vLLM has N filled up with zeros to a multiple of 256 and K to one of 128.

The kernels multiply bf16 numbers times 2^-126 by 2^126 and the scale, which therefore
must be at most 2^1.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from verify_kernels.moe.mxfp4 import GROUP, Mxfp4

ROWS, COLUMNS = 64, 16
#: A scale byte that, with 2^126, is the largest finite bf16's exponent.
LARGEST_SCALE = 254 - 126
BLOCK_BYTES = 512
#: Groups of scales along K are two blocks wide.
STEPS_OF_GROUP = GROUP // COLUMNS
_ROWS_MULTIPLE, _COLUMNS_MULTIPLE = 256, 128
#: Of a part. K3's I at TP 1 has two, so that one row makes 1,792 items of work for the
#: 2,112 warps that an H200 has for them.
_PART_COLUMNS = 1536


@dataclass(frozen=True)
class Blocks:
    """Matrices [E, N, K]; see the module.

    Attributes:
        words: int32 [E, K / 16, N / 64, 128].
        scales: uint8 [E, K / 32, N].

    Raises:
        ValueError: the two do not belong together.
    """

    words: Tensor
    scales: Tensor

    def __post_init__(self) -> None:
        experts, steps, blocks = self.words.shape[:3]
        shapes = (
            (self.words, torch.int32, (experts, steps, blocks, 128)),
            (self.scales, torch.uint8, (experts, steps // 2, ROWS * blocks)),
        )
        for tensor, dtype, shape in shapes:
            if tensor.dtype != dtype or tuple(tensor.shape) != shape:
                raise ValueError(
                    f"words are {self.words.dtype} {tuple(self.words.shape)} and "
                    f"scales {self.scales.dtype} {tuple(self.scales.shape)}; they must "
                    "be torch.int32 [E, K / 16, N / 64, 128] and torch.uint8 "
                    "[E, K / 32, N]"
                )

    @classmethod
    def of_layer(cls, weight: Tensor, scale: Tensor) -> Blocks:
        """From the parameters of a Humming layer, int32 [E, K / 16, 2 N] and one byte
        an element [E, K / 32, N]; nothing is copied.

        Raises:
            ValueError: the layer holds something else.
        """
        if weight.dim() != 3 or weight.shape[2] % 128 or not weight.is_contiguous():
            raise ValueError(
                f"the layer's weight is {weight.dtype} {tuple(weight.shape)}; Humming "
                "holds MXFP4 for bf16 activations as contiguous int32 [E, K / 16, 2 N]"
            )
        if not scale.is_contiguous():
            raise ValueError(
                f"the layer's scales have strides {scale.stride()}; Humming holds them "
                "contiguous, [E, K / 32, N]"
            )
        return cls(weight.unflatten(2, (-1, 128)), scale.view(torch.uint8))


def parts_of(inner: int) -> int:
    """Parts of I that the second half sums on their own."""
    return max(inner // _PART_COLUMNS, 1)


def whole_blocks(rows: int) -> int:
    """Rows of gate that vLLM makes of these."""
    return -(-rows // ROWS) * ROWS


def filled_rows(rows: int) -> int:
    """N with what it is filled up with."""
    return -(-rows // _ROWS_MULTIPLE) * _ROWS_MULTIPLE


def filled_columns(columns: int) -> int:
    """K with what it is filled up with."""
    return -(-columns // _COLUMNS_MULTIPLE) * _COLUMNS_MULTIPLE


def pack(weight: Mxfp4) -> Blocks:
    """The blocks of matrices [E, N, K], filled up.

    Raises:
        ValueError: a scale is above 2^1 or NaN, which the kernels do not compute.
    """
    experts, rows, groups = weight.scales.shape
    more_rows = filled_rows(rows) - rows
    more_groups = filled_columns(groups * GROUP) // GROUP - groups
    pad = torch.nn.functional.pad
    weight = Mxfp4(
        pad(weight.packed, (0, more_groups * GROUP // 2, 0, more_rows)),
        pad(weight.scales, (0, more_groups, 0, more_rows)),
    )
    experts, rows, groups = weight.scales.shape
    codes = torch.stack((weight.packed & 0xF, weight.packed >> 4), -1).flatten(-2)
    # [E, block, tile, row half, g, step, column half, c, column of a pair]
    codes = codes.view(experts, rows // ROWS, 4, 2, 8, groups * 2, 2, 4, 2)
    words = torch.zeros((), dtype=torch.int64, device=codes.device)
    for row_half in range(2):
        for column_half in range(2):
            for column in range(2):
                code = codes[:, :, :, row_half, :, :, column_half, :, column]
                place = 4 * (2 * row_half + column_half) + 16 * column
                words = words | code.to(torch.int64) << place
    words = torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)
    # [E, block, tile, g, step, c] -> [E, step, block, g, c, tile]
    words = words.permute(0, 4, 1, 3, 5, 2).flatten(3).contiguous()
    scales = weight.scales.view(experts, rows // ROWS, 8, 8, groups)
    scales = scales.permute(0, 4, 1, 3, 2).reshape(experts, groups, rows)
    found = Blocks(words, scales.contiguous())
    check_scales(found)
    return found


def check_scales(blocks: Blocks) -> None:
    """Raise ValueError for a scale that the kernels do not compute."""
    if (largest := int(blocks.scales.max())) > LARGEST_SCALE:
        raise ValueError(
            f"a scale byte is {largest}; the kernels take scales up to "
            f"2^{LARGEST_SCALE - 127}, byte {LARGEST_SCALE}, and no NaN"
        )


def pack_stacked(gate: Mxfp4, up: Mxfp4) -> Blocks:
    """Gate's rows, then up's, each [E, I, K]; as `pack`."""
    return pack(
        Mxfp4(
            torch.cat((gate.packed, up.packed), 1),
            torch.cat((gate.scales, up.scales), 1),
        )
    )


def place_of(column: int) -> int:
    """Where a column of 32 stands in the rows between the kernels: the eight that a
    lane multiplies lie side by side."""
    step, inside = divmod(column, COLUMNS)
    half, pair = divmod(inside, 8)
    return 8 * (pair // 2) + 4 * step + 2 * half + pair % 2
