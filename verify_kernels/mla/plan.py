# SPDX-License-Identifier: Apache-2.0
"""Which keys go together, and who takes them: on the device, from lengths alone.

A row that sees n keys has splits of 2^b keys, b the least from 6 on with which they are
S at most. S is fixed for a deployment, so where a row's keys are cut depends on n
alone: not on the step, on other rows or on the GPU. Rows of one request may lie to
both sides of a change of b; they count as two entries then, each with one b.

The work of an entry is its tiles of 64 (row, head) pairs times its blocks of 64 keys.
All entries' blocks, one tile after the other, are one line. CTA c begins at the first
split that begins at or behind c / C of it, and ends where the next one begins.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32

from verify_kernels.batch import MAX_ROWS
from verify_kernels.common.shared import put, word

#: log2 of the keys of a block, of the most splits of a row, of the most keys of a row.
BLOCK_BITS = 6
SPLIT_BITS = 6
KEY_BITS = 24
BLOCK = 1 << BLOCK_BITS
#: (row, head) pairs of a tile.
TILE_BITS = 6
TILE = 1 << TILE_BITS
#: Two for each request.
ENTRIES = 2 * MAX_ROWS
_KEYS = 4 * ENTRIES
_SHAPE = 8 * ENTRIES
_TOTAL = 12 * ENTRIES
#: Of the plan in shared memory.
PLAN_BYTES = _TOTAL + 16


def keys_of_split(keys: int, most: int) -> int:
    """Keys of a split of a row that sees ``keys``, at most 2^``most`` splits."""
    bits = BLOCK_BITS
    while (keys - 1) >> (bits + most):
        bits += 1
    return 1 << bits


def split_bits(keys, most):
    """log2 of `keys_of_split`, traced."""
    bits = Int32(BLOCK_BITS)
    for more in range(KEY_BITS - BLOCK_BITS):
        bits = bits + Int32(((keys - 1) >> (most + (BLOCK_BITS + more))) > 0)
    return bits


def quotient(a, b):
    """Of numbers that are not negative."""
    return Int32(Uint32(a) // Uint32(b))


class Entry:
    """A plan's entry, read from shared memory."""

    def __init__(self, base, index):
        self.request = index >> 1
        self.keys = word(base + _KEYS + 4 * index)
        shape = word(base + _SHAPE + 4 * index)
        #: Rows of the request, and the step's row that its row 0 is.
        self.first = shape & 15
        self.end = shape >> 4 & 15
        self.row = shape >> 8 & 127
        self.bits = shape >> 16

    def pairs(self, heads):
        """The step's first (row, head) pair of the entry, and how many it has."""
        return (self.row + self.first) * heads, (self.end - self.first) * heads


@cute.jit
def make(base, lane, row_start, history, slots, heads, most, causal, counted):
    """Writes the plan to shared memory, by one warp; a barrier must follow.

    ``causal``: row t sees the history and rows 0 .. t, else all rows. ``counted``: the
    history's lengths count the step's rows.
    """
    requests = history.shape[0]
    before = Int32(0)
    for half in cutlass.range_constexpr(MAX_ROWS // 32):
        index = lane + 32 * half
        there = index < requests
        request = cutlass.select_(there, index, requests - 1)
        row = row_start[request]
        width = row_start[request + 1] - row
        past = history[request] - cutlass.select_(counted != 0, width, Int32(0))
        # Whatever the length of no request is, and of one without rows: blocks are
        # looked up behind the end too.
        there = there & (slots[request] > 0) & (width > 0)
        width = cutlass.select_(there, width, Int32(0))
        past = cutlass.select_(there, past, Int32(0))
        keys = past + width
        least = cutlass.select_(causal != 0, past + 1, keys)
        bits = split_bits(least, most)
        # Rows that see as few keys as these.
        cut = (Int32(1) << (most + bits)) - past
        cut = cutlass.select_(causal != 0, cutlass.min(cut, width), width)
        near = cutlass.select_(causal != 0, past + cut, keys)
        costs = []
        for rows, seen in ((cut, near), (width - cut, keys)):
            tiles = (rows * heads + (TILE - 1)) >> TILE_BITS
            costs.append(tiles * ((seen + (BLOCK - 1)) >> BLOCK_BITS))
        own = costs[0] + costs[1]
        place = own
        for step in cutlass.range_constexpr(5):
            up = cute.arch.shuffle_sync_up(place, offset=1 << step)
            place = place + cutlass.select_(lane >= 1 << step, up, Int32(0))
        end = before + place
        before = before + cute.arch.shuffle_sync(place, 31)
        at = base + 8 * index
        put(at, end - own)
        put(at + 4, end - costs[1])
        put(at + _KEYS, near)
        put(at + _KEYS + 4, keys)
        shape = row << 8
        put(at + _SHAPE, shape | cut << 4 | bits << 16)
        bits = split_bits(keys, most)
        put(at + _SHAPE + 4, shape | width << 4 | cut | bits << 16)
    if lane == 0:
        put(base + _TOTAL, before)


def find(base, place, lane):
    """The block there: entry, tile, block of the tile, how many it has, log2 of the
    keys of a split. By a whole warp, all with one ``place``."""
    count = Int32(0)
    for first in range(0, ENTRIES, 32):
        begun = word(base + 4 * (first + lane)) <= place
        count = count + cute.arch.popc(cute.arch.vote_ballot_sync(begun))
    index = count - 1
    entry = Entry(base, index)
    # An entry without rows is found behind the end only.
    blocks = cutlass.max((entry.keys + (BLOCK - 1)) >> BLOCK_BITS, Int32(1))
    within = place - word(base + 4 * index)
    tile = quotient(within, blocks)
    return index, tile, within - tile * blocks, blocks, entry.bits


def share(base, lane, cta, ctas):
    """Where this CTA's blocks begin and end; both at beginnings of splits."""
    total = word(base + _TOTAL)
    bounds = []
    for c in (cta, cta + 1):
        place = quotient(c * total, ctas)
        _, _, block, blocks, bits = find(base, place, lane)
        rest = (Int32(1) << (bits - BLOCK_BITS)) - 1
        up = cutlass.min((block + rest) & ~rest, blocks)
        bounds.append(cutlass.min(place + up - block, total))
    return bounds
