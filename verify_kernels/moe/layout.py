# SPDX-License-Identifier: Apache-2.0
"""Where the experts' kernels find a weight: MXFP4 matrices as fragments of m16n8k16.

A tile has 16 rows and 64 columns of K, 512 bytes in the order of a warp's lanes. Lane
4 g + c has of the rows g and g + 8 the columns 16 c .. 16 c + 15: the columns that it
also holds of a token, 32 bytes of a bf16 row. Word j of its four has columns 16 c + 4 j
.. + 3, for one step of the mma:

    bits of a half   15  8 7 6   row g,     column 0 (low half) or 1 (high half)
                     12  5 4 3   row g + 8, column 0 or 1
                      9  2 1 0   row g,     column 2 or 3
                     14 13 11 10 row g + 8, column 2 or 3

sign first, then the magnitude's three bits: a shift and a mask make two bf16 that are
the numbers times 2^-126, and a product with 2^126 and the group's scale the weights.
The scale is stored as the exponent of that factor, byte + 126, so it must be at most
2^1. A lane needs two scales a tile, its rows' over its columns' group of 32.

An expert is a list of row blocks of 16, a block `parts` runs of tiles, one after the
other, in tiles [E, blocks, parts, run, 128] int32 and scales [E, blocks, parts, 16,
slots] int16: 16 lane pairs 2 g + c / 2, the low byte row g's. ``slots`` is the run
rounded up so that a lane reads its scales at once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from verify_kernels.moe.mxfp4 import GROUP, Mxfp4

ROWS, COLUMNS = 16, 64
TILE_BYTES = 512
#: Of a CTA of either kernel; those of the first half share K.
WARPS = 8
#: That an SM holds.
CTAS_PER_SM = 2
#: Rows of gate, and of up, in a block of the first matrix: SiTU pairs row g and g + 8.
HALF = ROWS // 2
#: 2^126 in the exponent of a bf16; the byte's own bias is that of the scale.
SHIFT = 126
LARGEST_SCALE = 254 - SHIFT
#: Bit of sign and of the magnitude's three, by (row half, column pair).
PLACES = {
    (0, 0): (15, 8, 7, 6),
    (1, 0): (12, 5, 4, 3),
    (0, 1): (9, 2, 1, 0),
    (1, 1): (14, 13, 11, 10),
}


@dataclass(frozen=True)
class Tiles:
    """Matrices [E, N, K] as the kernels read them; see the module.

    Attributes:
        words: int32 [E, N / 16, parts, run, 128].
        scales: int16 [E, N / 16, parts, 16, slots].
    """

    words: Tensor
    scales: Tensor

    def bytes(self) -> int:
        """Of both."""
        return self.words.nbytes + self.scales.nbytes


def slots_of(run: int) -> int:
    """Scales of a lane that are stored for ``run`` tiles: what 4, 8 or 16 bytes hold.

    ValueError for a run of more than 8 tiles.
    """
    if not 1 <= run <= 8:
        raise ValueError(f"a run has {run} tiles; it must have 1 to 8")
    return next(n for n in (2, 4, 8) if run <= n)


def chunk_of(inner: int) -> int:
    """Tiles of a run of the second matrix, whose K is ``inner``."""
    tiles = inner // COLUMNS
    return next(n for n in (4, 3, 2, 1) if tiles % n == 0)


def pack(weight: Mxfp4, parts: int) -> Tiles:
    """Rows of [E, N, K] in their order; K is cut into ``parts`` runs.

    If the tiles do not divide, the last runs are filled up with zeros.

    Raises:
        ValueError: N is not a multiple of 16 or K not of 64, or a scale is above 2^1
            or NaN, which the kernels do not compute.
    """
    experts, rows, groups = weight.scales.shape
    columns = groups * GROUP
    if rows % ROWS or columns % COLUMNS:
        raise ValueError(
            f"the matrices are {rows} x {columns}; the kernels take multiples of "
            f"{ROWS} x {COLUMNS}"
        )
    if int(weight.scales.max()) > LARGEST_SCALE:
        raise ValueError(
            f"a scale byte is {int(weight.scales.max())}; the kernels take scales up "
            f"to 2^{LARGEST_SCALE - 127}, byte {LARGEST_SCALE}, and no NaN"
        )
    tiles = columns // COLUMNS
    run = -(-tiles // parts)
    words = _words(weight.packed, experts, rows // ROWS, tiles)
    scales = _scales(weight.scales, experts, rows // ROWS, tiles)
    empty = parts * run - tiles
    words = torch.nn.functional.pad(words, (0, 0, 0, empty))
    scales = torch.nn.functional.pad(scales, (0, 0, 0, empty))
    scales = scales.unflatten(2, (parts, run)).transpose(-1, -2)
    scales = torch.nn.functional.pad(scales, (0, slots_of(run) - run))
    return Tiles(words.unflatten(2, (parts, run)).contiguous(), scales.contiguous())


def pack_gate_up(gate: Mxfp4, up: Mxfp4, parts: int) -> Tiles:
    """Gate and up [E, I, K], 8 rows of each in turn: row g + 8 of a block is row g's.

    Raises:
        ValueError: as `pack`, or the two differ in shape.
    """
    if gate.packed.shape != up.packed.shape:
        raise ValueError(
            f"gate is {tuple(gate.packed.shape)} and up {tuple(up.packed.shape)}; they "
            "must have one shape"
        )

    def mixed(one: Tensor, other: Tensor) -> Tensor:
        halves = [x.unflatten(1, (-1, HALF)) for x in (one, other)]
        return torch.stack(halves, 2).flatten(1, 3)

    both = Mxfp4(mixed(gate.packed, up.packed), mixed(gate.scales, up.scales))
    return pack(both, parts)


def _words(packed: Tensor, experts: int, blocks: int, tiles: int) -> Tensor:
    """int32 [E, blocks, tiles, 128]."""
    codes = torch.stack((packed & 0xF, packed >> 4), -1).flatten(-2)
    # [E, block, row half, g, tile, c, j, column pair, column of it]
    codes = codes.view(experts, blocks, 2, 8, tiles, 4, 4, 2, 2).to(torch.int64)
    words = torch.zeros(
        (experts, blocks, 8, tiles, 4, 4), dtype=torch.int64, device=packed.device
    )
    for (half, pair), bits in PLACES.items():
        for column in range(2):
            code = codes[:, :, half, :, :, :, :, pair, column]
            for source, place in zip((3, 2, 1, 0), bits, strict=True):
                words |= ((code >> source) & 1) << (place + 16 * column)
    words = torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)
    # Lane 4 g + c, its four words.
    return words.permute(0, 1, 3, 2, 4, 5).reshape(experts, blocks, tiles, 128)


def _scales(scales: Tensor, experts: int, blocks: int, tiles: int) -> Tensor:
    """int16 [E, blocks, tiles, 16]: lane pair 2 g + group, row g's byte the low one."""
    # [E, block, row half, g, tile, group]
    exponents = scales.view(experts, blocks, 2, 8, tiles, 2).to(torch.int64) + SHIFT
    both = exponents[:, :, 0] | exponents[:, :, 1] << 8
    both = torch.where(both >= 2**15, both - 2**16, both).to(torch.int16)
    return both.permute(0, 1, 3, 2, 4).reshape(experts, blocks, tiles, 16)
