# SPDX-License-Identifier: Apache-2.0
"""The skinny GEMM at the K of other TP sizes and of a tiny model, on the CPU: every
kernel that serves them, right, and of one mind about the bits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.verify_kernels.machine.kernels import gemm
from tests.verify_kernels.test_skinny_gemm import bits, check_accuracy, inputs
from verify_kernels.skinny_gemm import choice
from verify_kernels.skinny_gemm.choice import Cut, Outputs

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

#: K, rows of W, M at most. Large ones are slow to run: few rows and tokens, so that of
#: their kernels the tiles past the first are idle.
WIDTHS = [
    (64, 37, 64),
    (192, 37, 64),
    (256, 37, 64),
    (512, 37, 64),
    (1056, 17, 33),
    (3072, 5, 33),
    (8448, 2, 1),
    (16896, 2, 1),
]


def served(k: int, outputs: Outputs) -> list[tuple[int, Cut, int]]:
    """M at most, kernel and rows of a cluster, of all that serve a weight."""
    found = choice.choices(k, 7168, outputs, True)
    return [(rows, best.cut, best.run) for rows, best in found.items()]


@pytest.mark.parametrize(("k", "n", "most"), WIDTHS)
def test_every_kernel_of_a_width_is_right_and_gives_the_same_bits(
    k: int, n: int, most: int
) -> None:
    """Field case F40: at the most rows that a kernel takes and at one. fp32 outputs
    are the sums before their rounding; of several matrices each has a part of the
    weights. The smaller ones with the race checker."""
    x, w = inputs(n, k, "noise", 64, device="cpu")
    found: list[tuple[str, Tensor]] = []
    for outputs in choice.outputs_of(k):
        parts = [part.contiguous() for part in w.tensor_split(len(outputs))]
        for rows, cut, run in served(k, outputs):
            clusters = -(-n // run) if run else 2
            for m in {min(rows, most), 1}:
                ys = gemm(cut, x[:m], parts, clusters, outputs, seed=m, races=k <= 512)
                for y, part in zip(ys, parts, strict=True):
                    check_accuracy(y, x[:m], part)
                y = torch.cat([y.bfloat16() for y in ys], 1)
                found.append((cut.name, y))
    _, longest = max(found, key=lambda one: len(one[1]))
    for name, y in found:
        assert torch.equal(bits(y), bits(longest[: len(y)])), (name, len(y))


def test_noise_shows_another_order_of_the_sums() -> None:
    """The test above can fail: of two orders for one K the bits differ."""
    x, w = inputs(37, 512, "noise", 8, device="cpu")
    (_, cut, run), *_ = served(512, ("bf16",))
    (y,) = gemm(cut, x, [w], -(-37 // run))
    halves = [slice(0, 256), slice(256, 512)]
    other = sum(x[:, part].float() @ w[:, part].float().t() for part in halves)
    assert isinstance(other, Tensor)
    assert (bits(other.bfloat16()) != bits(y)).float().mean() > 0.1
