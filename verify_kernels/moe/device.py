# SPDX-License-Identifier: Apache-2.0
"""What the experts' kernels share on the device: MXFP4 to bf16 in registers, SiTU."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int16, Int32

from verify_kernels.common import ptx
from verify_kernels.common.shared import put
from verify_kernels.moe.mxfp4 import GROUP

#: Pairs of a row and an expert that one mma has columns for.
PAIRS = 8
#: Operands of 16 rows in a block of weights.
TILES = 4
#: Bytes that a lane copies at once.
CHUNK = 16
#: Of a pair's row, or of h, in a group of 32 columns.
ROW_BYTES = 2 * GROUP
LOG2_E = 1.4426950408889634
#: Sign and magnitude of two numbers in their places in a bf16, as signed words.
MASK = 0x81C081C0 - 2**32
SIGNS = 0x80008000 - 2**32
MAGNITUDES = 0x01C001C0
#: 2^126 as a bf16, twice: its exponent and a scale's are added.
SHIFTS = 0x3F003F00
#: Below it tanh is a polynomial: 1 - 2^(-2 x log2 e) would cancel.
SMALL = 0.25


@cute.jit
def open_once(address, mine, size):
    """Makes a barrier there that opens when ``size`` bytes have arrived; by the thread
    that is ``mine``, and all threads of its warp call it."""
    barrier = cute.make_ptr(
        cutlass.Int64, address, cute.AddressSpace.smem, assumed_align=8
    )
    if mine:
        cute.arch.mbarrier_init(barrier, 1)
        cute.arch.mbarrier_init_fence()
    # ptxas makes a barrier from the uniform datapath, which racecheck takes for another
    # lane than the one that arrives (RouteKernel, H200, 2026-11-30).
    cute.arch.sync_warp()
    if mine:
        cute.arch.mbarrier_arrive_and_expect_tx(barrier, size)


class Plan:
    """An `ExpertPlan` in shared memory, as 16-bit numbers.

    Read from global memory item by item it holds every turn up by two latencies.

    Args:
        at: where it begins, from the CTA's shared memory on.
        experts: E, experts that there are.
        pairs: that there can be.
        threads: of the CTA.
    """

    def __init__(self, at: int, experts: int, pairs: int, threads: int):
        self._threads = threads
        #: Of the distinct experts, where each one's pairs begin, and the pairs.
        self._sizes = (experts, experts + 1, pairs)
        self._places = []
        for size in self._sizes:
            self._places.append(at)
            # Filled up, so that no store is conditional.
            at += 2 * threads * -(-size // threads)
        self.end = at

    def copy(self, base, tensors, thread):
        """From the three tensors, all of it under way at once; for all threads, and a
        barrier must follow."""
        copies = []
        for tensor, size, to in zip(tensors, self._sizes, self._places, strict=True):
            for first in range(0, size, self._threads):
                index = first + thread
                value = tensor[cutlass.min(index, size - 1)]
                copies.append((base + to + 2 * index, value.to(Int16)))
        for copy in copies:
            put(*copy, Int16)

    def expert(self, base, index):
        """The ``index``-th distinct expert; 0 if there are not so many."""
        return cutlass.max(self._number(base, 0, index), Int32(0))

    def pairs_of(self, base, index):
        """Where its pairs begin, and how many they are."""
        begin = self._number(base, 1, index)
        return begin, self._number(base, 1, index + 1) - begin

    def pair(self, base, index):
        """The pair there."""
        return self._number(base, 2, index)

    def _number(self, base, which, index):
        return ptx.load_shared_16(base + self._places[which] + 2 * index)


def clear(address, lane):
    """Zeros for eight pairs' rows of a group; before the wait. So the columns that no
    pair is copied to switch nothing in the tensor cores, for which power is short."""
    ptx.store_shared_128_if(address + CHUNK * lane, Int32(1), (Int32(0),) * 4)


def read_block(address, offset, lane):
    """A lane's four words of a block in shared memory."""
    return ptx.load_shared_128(address + 16 * lane, offset)


def read_factors(address, offset, lane):
    """2^126 and a group's scales in shared memory, as bf16 pairs: of each tile's row g
    and row g + 8."""
    found = []
    for word in ptx.load_shared_64(address + 8 * (lane >> 2), offset):
        # An exponent stands at bit 7 of a bf16.
        bytes_of = [ptx.permute(word, Int32(0), 0x4440 + i) for i in range(4)]
        found += [byte * 0x00800080 + SHIFTS for byte in bytes_of]
    return [(found[2 * j], found[2 * j + 1]) for j in range(TILES)]


def weights_of(word, low, high):
    """The A registers of one mma: four pairs of bf16 weights of a word's eight."""
    # A product with two powers of two is two shifts, and their sum.
    shifted = word >> 6
    pairs = (
        ((word & 0x000F000F) * 0x1040) & MASK,
        ((shifted & 0x003C003C) * 0x0410) & MASK,
        ((word & 0x00F000F0) * 0x0104) & MASK,
        (word & SIGNS) | (shifted & MAGNITUDES),
    )
    return [
        ptx.mul_bf16x2(pair, factor)
        for pair, factor in zip(pairs, (low, high, low, high), strict=True)
    ]


def product(acc, words, tokens, factors):
    """Adds a block times 16 columns of 8 tokens to the sums of its four tiles."""
    return [
        ptx.mma_16816(weights_of(word, *pair), tokens, sums)
        for word, pair, sums in zip(words, factors, acc, strict=True)
    ]


def no_sums():
    return [(Float32(0.0),) * 4 for _ in range(TILES)]


def hidden_zero(number):
    """0, of a number from 0 on, and the compiler does not know it: through an asm, as
    where an expert has one item ``item < number`` told it in the loop."""
    return ptx.permute(number, Int32(0), 0x3210) >> 31


def after(acc, zero):
    """0, known when all sums are; ``zero`` is a `hidden_zero`."""
    a, b, c, d = (ptx.float_bits(sums[0]) for sums in acc)
    return (a | b | c | d) & zero


def sigmoid(x):
    """1 / (1 + e^-x): 0 below -88.8 and at -inf, NaN for NaN."""
    return cute.arch.rcp_approx(1.0 + cute.math.exp2(x * -LOG2_E, fastmath=True))


def tanh(x):
    """To a few units in the last place, also near 0."""
    size = cutlass.max(x, -x)
    power = cute.math.exp2(size * (-2.0 * LOG2_E), fastmath=True)
    large = (1.0 - power) * cute.arch.rcp_approx(1.0 + power)
    large = cutlass.select_(x < 0.0, -large, large)
    square = x * x
    series = Float32(62.0 / 2835.0)
    for term in (-17.0 / 315.0, 2.0 / 15.0, -1.0 / 3.0, 1.0):
        series = cute.math.fma(series, square, Float32(term))
    return cutlass.select_(size < SMALL, x * series, large)


def situ(gate, up, beta, linear):
    """beta tanh(gate / beta) sigmoid(gate) * linear tanh(up / linear)."""
    bent = beta * tanh(gate / beta) * sigmoid(gate)
    return bent * (linear * tanh(up / linear))
