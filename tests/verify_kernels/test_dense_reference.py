# SPDX-License-Identifier: Apache-2.0
"""SiTU and the row-by-row MLP against plain Python and vLLM's own activation."""

from __future__ import annotations

import math

import pytest
import torch

from verify_kernels.dense.reference import MlpWeights, mlp, project, rms_norm, situ

# Sums of at most 48 products of numbers of size 1 in fp64: an error of 48 x 1.1e-16 of
# their absolute sum (below 100), so 1e-12 is over a hundred times what they can show.
ATOL = 1e-12


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def situ_by_hand(gate: float, up: float) -> float:
    bent = 4.0 * math.tanh(gate / 4.0) / (1.0 + math.exp(-gate))
    return bent * 25.0 * math.tanh(up / 25.0)


def test_situ_is_the_formula() -> None:
    values = [-700.0, -30.0, -4.0, -0.1, 0.0, 1e-9, 2.5, 30.0, 700.0]
    pairs = torch.cartesian_prod(*2 * [torch.tensor(values, dtype=torch.float64)])
    hand = [situ_by_hand(*pair) for pair in pairs.tolist()]
    got = situ(pairs[:, 0], pairs[:, 1]).tolist()
    # tanh, exp and four products: a few ulps of 1.1e-16 each.
    assert got == pytest.approx(hand, rel=1e-14, abs=0)
    limits = situ(torch.tensor([1e30, -1e30]), torch.tensor([1e30, 1e30]))
    assert limits.tolist() == [100.0, 0.0]


def test_situ_is_the_engines() -> None:
    activation = pytest.importorskip("vllm.model_executor.layers.activation")
    x = 5 * normal(6, 40, dtype=torch.float32)
    theirs = activation.SituAndMul.forward_native(
        type("Betas", (), {"beta": 4.0, "linear_beta": 25.0})(), x
    )
    # The same fp32 operations in the same order; two ulps for another tanh.
    torch.testing.assert_close(situ(x[:, :20], x[:, 20:]), theirs, rtol=2.4e-7, atol=0)


def test_mlp_and_projection_by_hand() -> None:
    weights = MlpWeights(normal(7, 5, seed=1), normal(7, 5, seed=2), normal(3, 7))
    x = normal(4, 5, seed=3)
    got, plain = mlp(x, weights), project(x, weights.gate)
    for m in range(4):
        gate, up = (
            [
                sum(float(w[i, k]) * float(x[m, k]) for k in range(5))
                for i in range(len(w))
            ]
            for w in (weights.gate, weights.up)
        )
        inner = [situ_by_hand(g, u) for g, u in zip(gate, up, strict=True)]
        for o in range(3):
            hand = sum(float(weights.down[o, i]) * inner[i] for i in range(7))
            assert float(got[m, o]) == pytest.approx(hand, abs=ATOL)
        assert plain[m].tolist() == pytest.approx(gate, abs=ATOL)


@pytest.mark.parametrize("compute", [torch.float32, torch.float64])
def test_rows_do_not_depend_on_their_number_or_place(compute: torch.dtype) -> None:
    """Field case F40: the same row gives the same bits at M = 1 and inside any M."""
    weights = MlpWeights(*(normal(37, 37, seed=i).bfloat16() for i in (1, 2, 3)))
    x = normal(11, 37, seed=4).bfloat16()
    together = mlp(x, weights, compute=compute)
    assert together.dtype == compute
    for m in range(11):
        assert torch.equal(
            mlp(x[m : m + 1], weights, compute=compute), together[m, None]
        )
        again = project(x[m:], weights.gate, compute=compute)[0]
        alone = project(x[m : m + 1].clone(), weights.gate, compute=compute)[0]
        assert torch.equal(again, alone)


def test_rms_norm_by_hand() -> None:
    row, weight = normal(9, seed=1), normal(9, seed=2)
    size = math.sqrt(sum(v * v for v in row.tolist()) / 9 + 1e-2)
    hand = [v / size * w for v, w in zip(row.tolist(), weight.tolist(), strict=True)]
    assert rms_norm(row, weight, 1e-2).tolist() == pytest.approx(hand, rel=1e-14)


def test_shapes_are_refused_by_name() -> None:
    w = normal(7, 5)
    with pytest.raises(ValueError, match=r"x is \(2, 4\) and weight \(7, 5\)"):
        project(normal(2, 4), w)
    with pytest.raises(ValueError, match=r"down \(3, 6\)"):
        mlp(normal(2, 5), MlpWeights(w, w, normal(3, 6)))
