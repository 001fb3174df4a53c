# SPDX-License-Identifier: Apache-2.0
"""MXFP4 weights: E2M1 numbers in groups of 32 along K that share an E8M0 scale.

Layout of the ``mxfp4-pack-quantized`` checkpoints: ``packed`` uint8 [.., N, K / 2],
the low nibble holds the even k; ``scales`` uint8 [.., N, K / 32];
value = E2M1 * 2^(scale - 127), scale byte 255 is NaN (OCP Microscaling Formats 1.0).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

GROUP = 32
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
#: Value of each 4-bit code: sign, two exponent bits, one mantissa bit.
E2M1 = (*_MAGNITUDES, *(-value for value in _MAGNITUDES))
_LARGEST_EXPONENT = 2  # of E2M1: 6 = 1.5 * 2^2
_BIAS = 127
#: Value of each scale byte. A table, because exp2 need not be exact.
E8M0 = (*(2.0 ** (byte - _BIAS) for byte in range(255)), float("nan"))


@dataclass(frozen=True)
class Mxfp4:
    """packed uint8 [.., N, K / 2], scales uint8 [.., N, K / 32].

    Raises:
        ValueError: if the two do not belong together.
    """

    packed: Tensor
    scales: Tensor

    def __post_init__(self) -> None:
        groups = self.scales.shape[-1]
        expected = (*self.scales.shape[:-1], groups * GROUP // 2)
        if (
            self.packed.dtype != torch.uint8
            or self.scales.dtype != torch.uint8
            or tuple(self.packed.shape) != expected
        ):
            raise ValueError(
                f"packed is {self.packed.dtype} {tuple(self.packed.shape)} and scales "
                f"{self.scales.dtype} {tuple(self.scales.shape)}; they must be uint8 "
                f"[.., N, K / 2] and uint8 [.., N, K / {GROUP}]"
            )

    def __getitem__(self, index: int) -> Mxfp4:
        """One matrix of a stack, [E, N, ..] -> [N, ..]."""
        return Mxfp4(self.packed[index], self.scales[index])


def dequantise(weight: Mxfp4, dtype: torch.dtype = torch.float64) -> Tensor:
    """[.., N, K] in ``dtype``: exact in fp64, for every code and every scale.

    fp32 and bf16 are exact too except for the two ends of the scale, where values
    leave their range: 6 * 2^127 becomes inf, 0.5 * 2^-127 a subnormal or 0.
    """
    where = weight.packed.device
    grid = torch.tensor(E2M1, dtype=torch.float64, device=where)
    powers = torch.tensor(E8M0, dtype=torch.float64, device=where)
    codes = torch.stack((weight.packed & 0xF, weight.packed >> 4), -1).long()
    values = grid[codes].unflatten(-2, (-1, GROUP // 2)).flatten(-2)
    return (values * powers[weight.scales.long()][..., None]).flatten(-2).to(dtype)


def quantise(weight: Tensor) -> Mxfp4:
    """Quantise [.., N, K]: scale 2^(floor(log2 max|w|) - 2) a group, then the nearest.

    The rule of OCP MX 1.0, section 6.3: a value halfway between two E2M1 numbers goes
    to the one with an even mantissa, one beyond 6 scales to 6. Scales are at least
    2^-127, which a group of zeros gets: byte 0.

    Raises:
        ValueError: if K is not a multiple of 32 or a value is not finite.
    """
    if weight.shape[-1] % GROUP:
        raise ValueError(
            f"weight has K = {weight.shape[-1]}; it must be a multiple of {GROUP}"
        )
    if not bool(torch.isfinite(weight).all()):
        raise ValueError("weight has a NaN or an infinity; every value must be finite")
    groups = weight.double().unflatten(-1, (-1, GROUP))
    largest = groups.abs().amax(-1)
    # frexp gives largest = m * 2^e with m in [0.5, 1): e - 1 is the exact floor(log2).
    exponent = torch.frexp(largest).exponent - 1 - _LARGEST_EXPONENT
    exponent = torch.where(largest > 0, exponent, -_BIAS).clamp(-_BIAS, _BIAS)
    powers = torch.tensor(E8M0, dtype=torch.float64, device=weight.device)
    scaled = groups * powers[(_BIAS - exponent).long()][..., None]
    codes = _nearest(scaled)
    pairs = codes.flatten(-2).unflatten(-1, (-1, 2))
    packed = pairs[..., 0] | (pairs[..., 1] << 4)
    return Mxfp4(packed.to(torch.uint8), (exponent + _BIAS).to(torch.uint8))


def _nearest(values: Tensor) -> Tensor:
    """E2M1 codes (int64) of fp64 values, ties to the even code."""
    size = values.abs()
    # Between codes c and c + 1 the midpoint belongs to the even one of the two.
    code = torch.zeros_like(size, dtype=torch.int64)
    for low in range(7):
        midpoint = (_MAGNITUDES[low] + _MAGNITUDES[low + 1]) / 2
        above = size >= midpoint if low % 2 else size > midpoint
        code += above.long()
    return code | (torch.signbit(values).long() << 3)
