# SPDX-License-Identifier: Apache-2.0
"""What both kernels share on the device: blocks of weights, their scales, products."""

from cutlass import Float32, Int32

from verify_kernels.common import ptx
from verify_kernels.moe.device import MASK, STREAM

#: Sign and magnitude of two numbers in their places in a bf16, as signed words.
SIGNS = 0x80008000 - 2**32
MAGNITUDES = 0x01C001C0
#: 2^126 as a bf16, twice: its exponent and a scale's are added.
SHIFTS = 0x3F003F00
TILES = 4


def request(held, slot, at, offset, live, old):
    """A lane's four words of a block, at an address plus a constant, where ``live`` is
    not 0, into the place of the ``old`` ones, which have been used."""
    loaded = ptx.load_global_128_if(at, live, offset, old, STREAM)
    for i in range(4):
        held[4 * slot + i] = loaded[i]


def request_scales(exponents, slot, at, offset, live, old):
    """A lane's eight scales of a group, at an address plus a constant, as `request`."""
    loaded = ptx.load_global_64_if(at, live, offset, old)
    for i in range(2):
        exponents[2 * slot + i] = loaded[i]


def words_of(held, count, index):
    """The ``index``-th ``count`` words of some."""
    return [held[count * index + i] for i in range(count)]


def factors(exponents, group):
    """2^126 and a group's scales as bf16 pairs: of each tile's row g and row g + 8."""
    found = []
    for j in range(2):
        word = exponents[2 * group + j]
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


def product(acc, words, tokens, scales):
    """Adds a block times 16 columns of 8 tokens to the sums of its four tiles."""
    return [
        ptx.mma_16816(weights_of(word, *pair), tokens, sums)
        for word, pair, sums in zip(words, scales, acc, strict=True)
    ]


def no_sums():
    return [(Float32(0.0),) * 4 for _ in range(TILES)]


def read_block(address, offset, lane):
    """A lane's four words of a block in shared memory."""
    return ptx.load_shared_128(address + 16 * lane, offset)


def read_scales(address, offset, lane):
    """A lane's eight scales of a group in shared memory, two words."""
    return ptx.load_shared_64(address + 8 * (lane >> 2), offset)


def after(acc, zero):
    """0, known when all sums are; ``zero`` is 0 and the compiler does not know it."""
    a, b, c, d = (ptx.float_bits(sums[0]) for sums in acc)
    return (a | b | c | d) & zero
