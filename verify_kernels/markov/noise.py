# SPDX-License-Identifier: Apache-2.0
"""The noise of vLLM 0.33's ``gumbel_sample`` with its bits.

    h     the murmur3 hash of seed, position and token id (`begin`, then one word more)
    u     (h + 1/2) 2^-32, both halves of h as floats
    l     log(1 - u): below u = 1/4 a polynomial, else the log of max(1 - u, 2^-24)
    noise -log(-l)

The operations are those of the PTX that Triton 3.9 makes of it for sm_90 (read on
2026-12-01): polynomials are chains of fma, the logarithm is libdevice's ``__nv_logf``,
and a logit is divided by the temperature with ``div.full.f32``. Of ``__nv_logf`` only
what normal numbers below infinity take is here: its argument lies in 2^-33 .. 17. No
sum has a product that ptxas could contract but those that are written as fma.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from verify_kernels.common import ptx

#: Of positions that drafts are sampled for, so that no draft and its verification share
#: noise.
DRAFT_SALT = 1 << 30
#: log(1 - u) = -u P(u), highest coefficient first.
SERIES = (1 / 8, 1 / 7, 1 / 6, 1 / 5, 1 / 4, 1 / 3, 1 / 2, 1.0)
#: log(1 + f) = f + f^2 Q(f), by the bits of its coefficients, highest first.
LOG_SERIES = (
    0xBE055027, 0x3E1039F6, 0xBDF8CDCC, 0x3E0F2955, 0xBE2AD8B9, 0x3E4CED0B,
    0xBE7FFF22, 0x3EAAAA78, 0xBF000000,
)  # fmt: skip
LN_2_BITS = 0x3F317218


def constant(bits):
    """The Float32 of some bits."""
    return ptx.float_from_bits(Int32(bits - (bits >> 31 << 32)))


def chain(coefficients, x):
    """A polynomial of x, highest coefficient first."""
    total = coefficients[0]
    for coefficient in coefficients[1:]:
        total = cute.math.fma(total, x, coefficient)
    return total


def rotated(value, count):
    return (value << count) | (value >> (32 - count))


def scrambled(word):
    """A word as it enters a hash."""
    return rotated(word * Uint32(0xCC9E2D51), 15) * Uint32(0x1B873593)


def mixed(h, word):
    """A hash with a scrambled word."""
    return rotated(h ^ word, 13) * Uint32(5) + Uint32(0xE6546B64)


def begin(seed, position):
    """The Uint32 hash of a request's Int64 seed and of the position before a draft."""
    h = Uint32(0)
    for word in (seed, seed >> Int64(32), position + Int64(DRAFT_SALT)):
        h = mixed(h, scrambled(Uint32(word)))
    return h


def finished(h):
    """A hash of 16 bytes when all have been mixed in."""
    h = h ^ Uint32(16)
    h = (h ^ (h >> 16)) * Uint32(0x85EBCA6B)
    h = (h ^ (h >> 13)) * Uint32(0xC2B2AE35)
    return h ^ (h >> 16)


def logarithm(x):
    """Of a normal number below infinity."""
    bits = ptx.float_bits(x)
    exponent = (bits - 0x3F2AAAAB) & -0x00800000
    f = ptx.float_from_bits(bits - exponent) - Float32(1.0)
    whole = exponent.to(Float32) * Float32(2.0**-23)
    q = chain([constant(c) for c in LOG_SERIES], f)
    return cute.math.fma(whole, constant(LN_2_BITS), cute.math.fma(f * q, f, f))


def noise_log(h):
    """log(-l) of a finished hash: what is taken from a logit."""
    high = (h >> 16).to(Float32)
    low = (h & Uint32(0xFFFF)).to(Float32)
    u = cute.math.fma(high, Float32(2.0**-16), (low + Float32(0.5)) * Float32(2.0**-32))
    small = chain([Float32(c) for c in SERIES], u) * -u
    large = logarithm(cute.arch.fmax(Float32(1.0) - u, Float32(2.0**-24)))
    return logarithm(-cutlass.select_(u < Float32(0.25), small, large))
