# SPDX-License-Identifier: Apache-2.0
"""What the experts' kernels share on the device: MXFP4 to bf16 in registers, SiTU."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from verify_kernels.common import ptx
from verify_kernels.moe.layout import TILE_BYTES

#: Pairs of a row and an expert that one mma has columns for.
PAIRS = 8
#: Weights are read once: not kept in L1.
STREAM = ".L1::no_allocate"
LOG2_E = 1.4426950408889634
#: Sign and magnitude of two numbers in their places in a bf16, as a signed word.
MASK = 0x81C081C0 - 2**32
SIGNS = 0x80008000 - 2**32
#: Below it tanh is a polynomial: 1 - 2^(-2 x log2 e) would cancel.
SMALL = 0.25


def word(address, kind=Int32):
    """A number in shared memory."""
    pointer = cute.make_ptr(kind, address, cute.AddressSpace.smem, assumed_align=4)
    return cute.make_tensor(pointer, cute.make_layout(1))[0]


def put(address, value, kind=Int32):
    """Writes a number to shared memory."""
    pointer = cute.make_ptr(kind, address, cute.AddressSpace.smem, assumed_align=4)
    cute.make_tensor(pointer, cute.make_layout(1))[0] = value


@cute.jit
def stage(to, source, count, thread, threads):
    """Copies ``count`` numbers to shared memory, all requested at once."""
    for i in cutlass.range_constexpr(-(-count // threads)):
        at = threads * i + thread
        if at < count:
            put(to + 4 * at, source[at])


@cute.jit
def load_tile(tiles, t, at, live, old):
    """The t-th of a run of tiles from the lane's ``at`` on, where the Int32 ``live`` is
    not 0."""
    loaded = ptx.load_global_128_if(at, live, TILE_BYTES * t, old, STREAM)
    for i in cutlass.range_constexpr(4):
        tiles[4 * t + i] = loaded[i]


@cute.jit
def load_scales(exponents, scales, number, slots, lane, live):
    """This lane's scales of a run of tiles, if it is there."""
    pair = (lane >> 2) * 2 + ((lane & 3) >> 1)
    at = scales.iterator.toint() + number * (32 * slots)
    at = at + 2 * slots * pair
    if live:
        pointer = cute.make_ptr(
            Int32, at, cute.AddressSpace.gmem, assumed_align=2 * slots
        )
        layout = cute.make_layout(slots // 2)
        cute.autovec_copy(cute.make_tensor(pointer, layout), exponents)


def factors(scales):
    """2^126 and a tile's scales as bf16 pairs: of row g, and of row g + 8."""
    # An exponent stands at bit 7 of a bf16.
    low = (scales & 0xFF) * 0x00800080
    high = ((scales >> 8) & 0xFF) * 0x00800080
    return low, high


def weights_of(word, low, high):
    """The A registers of one mma: four pairs of bf16 weights of a word's eight."""
    pairs = (
        word & MASK,
        (word << 3) & MASK,
        (word << 6) & MASK,
        ((word << 1) & SIGNS) | ((word >> 4) & 0x00C000C0) | ((word >> 5) & 0x01000100),
    )
    return [
        ptx.mul_bf16x2(pair, factor)
        for pair, factor in zip(pairs, (low, high, low, high), strict=True)
    ]


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


def halfword(words, i):
    """The i-th 16 bits of some Int32."""
    word = words[i // 2]
    return (word >> 16) & 0xFFFF if i % 2 else word & 0xFFFF


def product(acc, words, tokens, low, high):
    """Adds a tile times 8 tokens: four words of weights, eight of the lane's token."""
    for j in range(4):
        a = weights_of(words[j], low, high)
        acc = ptx.mma_16816(a, (tokens[2 * j], tokens[2 * j + 1]), acc)
    return acc


def zeros():
    return (Float32(0.0),) * 4


def no_words():
    return (Int32(0),) * 4
