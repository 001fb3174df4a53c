# SPDX-License-Identifier: Apache-2.0
"""MXFP4 against the format's definition, torch's own E8M0 and compressed-tensors."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from verify_kernels.moe.mxfp4 import E2M1, GROUP, Mxfp4, dequantise, quantise


def value_of(code: int) -> float:
    """E2M1 from its bits: s e1 e0 m, bias 1, exponent 0 subnormal."""
    sign, exponent, mantissa = code >> 3, (code >> 1) & 3, code & 1
    size = mantissa / 2 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1)
    return -size if sign else size


def every_code_and_scale() -> Mxfp4:
    """[256, 32]: row s has scale byte s and the codes 0 .. 15 twice, in order."""
    line = torch.tensor([(2 * i) % 16 | ((2 * i + 1) % 16) << 4 for i in range(16)])
    scales = torch.arange(256, dtype=torch.uint8)[:, None]
    return Mxfp4(line.to(torch.uint8).expand(256, 16).contiguous(), scales)


def test_every_code_under_every_scale_is_exact() -> None:
    got = dequantise(every_code_and_scale())
    assert torch.isnan(got[255]).all()
    for byte in range(255):
        expected = [math.ldexp(value_of(k % 16), byte - 127) for k in range(32)]
        assert got[byte].tolist() == expected
    assert math.copysign(1, got[0, 8].item()) == -1  # code 8 is -0
    powers = torch.arange(256, dtype=torch.uint8).view(torch.float8_e8m0fnu).double()
    assert torch.equal(got[:255, 2], powers[:255])  # code 2 is 1.0
    single = dequantise(every_code_and_scale(), torch.float32)
    assert torch.equal(single[1:253].double(), got[1:253])
    assert single[254, 7].item() == math.inf


def test_nibbles_and_groups_lie_where_the_checkpoint_puts_them() -> None:
    packed = torch.zeros(2, 32, dtype=torch.uint8)
    packed[1, 17] = 0x2 | 0xF << 4  # k = 34: code 2, k = 35: code 15
    scales = torch.tensor([[127, 127], [127, 130]], dtype=torch.uint8)
    expected = torch.zeros(2, 64, dtype=torch.float64)
    expected[1, 34], expected[1, 35] = 8.0, -48.0
    assert torch.equal(dequantise(Mxfp4(packed, scales)), expected)


def test_agrees_with_compressed_tensors() -> None:
    """The checkpoint's own library unpacks our bytes to the same numbers."""
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors.mx_utils import decompress_mx_scale
    from compressed_tensors.compressors.nvfp4.helpers import (
        pack_fp4_to_uint8,
        unpack_fp4_from_uint8,
    )

    generator = torch.Generator().manual_seed(0)
    weight = quantise(torch.randn(6, 96, generator=generator))
    theirs = unpack_fp4_from_uint8(weight.packed, 6, 96, torch.float64)
    scale = decompress_mx_scale(weight.scales).double()
    assert torch.equal(
        dequantise(weight), theirs * scale.repeat_interleave(GROUP, dim=1)
    )
    assert torch.equal(pack_fp4_to_uint8(theirs), weight.packed)


def test_numbers_on_the_grid_survive() -> None:
    """Quantising a dequantised weight gives its bytes back where 4 or 6 occurs."""
    weight = every_code_and_scale()
    inside = Mxfp4(weight.packed[:255], weight.scales[:255])
    again = quantise(dequantise(inside))
    assert torch.equal(again.packed, inside.packed)
    assert torch.equal(again.scales, inside.scales)


def group_of(values: list[float]) -> Tensor:
    return torch.tensor([values + [0.0] * (GROUP - len(values))], dtype=torch.float64)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0.25, 0.0), (0.75, 1.0), (1.25, 1.0), (1.75, 2.0), (2.5, 2.0), (3.5, 4.0),
        (5.0, 4.0), (-0.25, -0.0), (-1.75, -2.0), (0.2500001, 0.5), (4.999, 4.0),
        (5.001, 6.0), (7.9, 6.0),
    ],
)  # fmt: skip
def test_ties_go_to_the_even_mantissa(value: float, expected: float) -> None:
    got = dequantise(quantise(group_of([4.0, value])))[0, 1].item()
    assert got == expected and math.copysign(1, got) == math.copysign(1, expected)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.floats(-8, 8, width=32), min_size=GROUP, max_size=GROUP),
    st.integers(-40, 40),
)
@example([0.0] * (GROUP - 1) + [2.0**-129], 0)
def test_each_value_goes_to_the_nearest_number(
    values: list[float], exponent: int
) -> None:
    x = torch.tensor([[math.ldexp(v, exponent) for v in values]], dtype=torch.float64)
    weight = quantise(x)
    largest = x.abs().max().item()
    if largest == 0:
        assert weight.scales.item() == 0
        return
    # The smallest scale of E8M0 is 2^-127.
    power = max(math.floor(math.log2(largest)) - 2, -127)
    scale = 2.0**power
    assert weight.scales.item() == 127 + power
    assert largest < 8 * scale and (power == -127 or 4 * scale <= largest)
    for got, want in zip(dequantise(weight)[0].tolist(), x[0].tolist(), strict=True):
        errors = [abs(number * scale - want) for number in E2M1]
        assert abs(got - want) == min(errors)


def test_bad_input_is_refused() -> None:
    with pytest.raises(ValueError, match="K = 40; it must be a multiple of 32"):
        quantise(torch.zeros(2, 40))
    with pytest.raises(ValueError, match="every value must be finite"):
        quantise(group_of([math.nan]))
    with pytest.raises(ValueError, match=r"packed is torch.uint8 \(2, 8\)"):
        Mxfp4(torch.zeros(2, 8, dtype=torch.uint8), torch.zeros(2, 1).byte())
