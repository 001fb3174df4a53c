# SPDX-License-Identifier: Apache-2.0
"""Routing and the latent MoE layer against the equations in numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from verify_kernels.dense.reference import MlpWeights
from verify_kernels.moe.mxfp4 import Mxfp4, dequantise, quantise
from verify_kernels.moe.reference import (
    MoeWeights,
    dense_experts,
    expert_plan,
    experts,
    moe,
    route,
)

HIDDEN, LATENT, INNER, SHARED, EXPERTS, TOP_K = 20, 32, 64, 12, 9, 4
NORM_EPS, SCALE = 0.05, 1.5  # far from the defaults, so that a lost one shows


def normal(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def layer(seed: int = 0) -> MoeWeights:
    def next_seed() -> int:
        nonlocal seed
        seed += 1
        return seed

    def matrix(*shape: int) -> Tensor:
        return normal(*shape, seed=next_seed()) * shape[-1] ** -0.5

    return MoeWeights(
        router=3 * matrix(EXPERTS, HIDDEN),
        bias=0.2 * matrix(EXPERTS),
        latent_down=matrix(LATENT, HIDDEN),
        latent_norm=matrix(LATENT) + 1,
        latent_up=matrix(HIDDEN, LATENT),
        w1=quantise(3 * matrix(EXPERTS, INNER, LATENT)),
        w3=quantise(matrix(EXPERTS, INNER, LATENT)),
        w2=quantise(matrix(EXPERTS, LATENT, INNER)),
        shared=MlpWeights(
            matrix(SHARED, HIDDEN), matrix(SHARED, HIDDEN), matrix(HIDDEN, SHARED)
        ),
        top_k=TOP_K,
        routed_scale=SCALE,
        norm_eps=NORM_EPS,
    )


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def mlp(x: np.ndarray, gate: np.ndarray, up: np.ndarray, down: np.ndarray):
    g, u = gate @ x, up @ x
    return down @ (4 * np.tanh(g / 4) * sigmoid(g) * 25 * np.tanh(u / 25))


def layer_by_hand(x: np.ndarray, w: MoeWeights) -> np.ndarray:
    scores = sigmoid(w.router.numpy() @ x)
    biased = scores + w.bias.numpy()
    chosen = sorted(range(EXPERTS), key=lambda e: (-biased[e], e))[:TOP_K]
    total = sum(scores[e] for e in chosen)
    banks = [dequantise(bank).numpy() for bank in (w.w1, w.w3, w.w2)]
    latent = w.latent_down.numpy() @ x
    y = sum(
        scores[e] / total * SCALE * mlp(latent, *(b[e] for b in banks)) for e in chosen
    )
    y = y / np.sqrt(np.mean(y**2) + NORM_EPS) * w.latent_norm.numpy()
    shared = (w.shared.gate.numpy(), w.shared.up.numpy(), w.shared.down.numpy())
    return w.latent_up.numpy() @ y + mlp(x, *shared)


def test_layer_is_the_equations() -> None:
    w, x = layer(), normal(16, HIDDEN, seed=100)
    hand = np.stack([layer_by_hand(row, w) for row in x.numpy()])
    # Chains of three sums of at most 64 products of size 1 to 10 in fp64: 64 x 10 x
    # 1.1e-16 = 7e-14 each, and a norm that can enlarge it by 1 / sqrt(eps) = 4.5.
    np.testing.assert_allclose(moe(x, w).numpy(), hand, rtol=0, atol=1e-12)


@settings(max_examples=150, deadline=None)
@given(
    logits=st.lists(st.integers(-3, 3), min_size=12, max_size=12),
    bias=st.lists(st.sampled_from([-0.5, 0.0, 0.5]), min_size=12, max_size=12),
    top_k=st.integers(1, 12),
)
def test_routing_with_ties(logits: list[int], bias: list[float], top_k: int) -> None:
    """Most scores are tied: lowest id first; and the bias does not weigh."""
    x = torch.tensor([logits], dtype=torch.float64)
    ids, weights = route(x, torch.tensor(bias).double(), top_k, 2.5)
    scores = torch.sigmoid(x[0]).tolist()
    chosen = sorted(range(12), key=lambda e: (-(scores[e] + bias[e]), e))[:top_k]
    assert ids[0].tolist() == chosen
    total = sum(scores[e] for e in chosen)
    assert weights[0].tolist() == pytest.approx(
        [2.5 * scores[e] / total for e in chosen], rel=1e-14
    )


def test_equal_logits_choose_the_first_experts() -> None:
    """Field case F11: zero weights tie every expert; the tie rule alone decides."""
    ids, weights = route(torch.zeros(2, 896), torch.zeros(896), 16)
    assert ids.tolist() == [list(range(16))] * 2
    assert weights.flatten().tolist() == [1 / 16] * 32


def test_nan_is_the_largest_score() -> None:
    """Ids stay distinct, and no weight of the row looks sane."""
    x = torch.randn(2, 12, generator=torch.Generator().manual_seed(0))
    x[0, 7] = x[0, 3] = torch.nan
    x[1] = torch.nan
    ids, weights = route(x, torch.zeros(12), 4)
    assert ids[0, :2].tolist() == [3, 7] and ids[1].tolist() == [0, 1, 2, 3]
    assert len(set(ids[0].tolist())) == 4 and weights.isnan().all()


def test_plan_by_hand() -> None:
    """Three rows, five experts, room for four rows."""
    ids = torch.tensor([[4, 1], [1, 2], [4, 1]])
    plan = expert_plan(ids, 5, 4)
    assert [words.tolist() for words in plan] == [
        [1, 2, 4, -1, -1],
        [0, 3, 4, 6, 6, 6],
        [1, 2, 5, 3, 0, 4, -1, -1],
        [3, 6],
    ]
    assert {words.dtype for words in plan} == {torch.int32}
    nothing = expert_plan(ids[:0], 5, 4)
    assert [words.tolist() for words in nothing] == [
        *([-1] * 5, [0] * 6, [-1] * 8, [0, 0])
    ]


def test_kimi_k3_routing_is_the_engines() -> None:
    """896 experts, 16 a token, fp32: experts and weights of vLLM's torch path."""
    router = pytest.importorskip(
        "vllm.model_executor.layers.fused_moe.router.grouped_topk_router"
    )
    logits = 2 * normal(8, 896, seed=3).float()
    bias = 0.1 * normal(896, seed=4).float()
    eager = getattr(router.grouped_topk, "__wrapped__", router.grouped_topk)
    theirs = eager(
        logits, logits, 16, True, 1, 1, "sigmoid", 1.0, e_score_correction_bias=bias
    )
    ids, weights = route(logits, bias, 16, compute=torch.float32)
    order = theirs[1].long().argsort(dim=1)
    mine = ids.argsort(dim=1)
    assert torch.equal(theirs[1].long().gather(1, order), ids.gather(1, mine))
    # fp32: a sum of 16 terms, at most 16 x 6e-8 of it, and the last bit of sigmoid.
    torch.testing.assert_close(
        weights.gather(1, mine), theirs[0].gather(1, order), rtol=2e-6, atol=0
    )


@pytest.mark.parametrize("compute", [torch.float32, torch.float64])
def test_rows_do_not_depend_on_batch_mates(compute: torch.dtype) -> None:
    """Field case F40: whichever experts the other rows load, bit for bit."""
    w, x = layer(), normal(9, HIDDEN, seed=5)
    together = moe(x, w, compute=compute)
    everyone = dense_experts(w.w1, w.w3, w.w2, range(EXPERTS), compute=compute)
    assert together.dtype == compute
    assert torch.equal(moe(x, w, compute=compute, bank=everyone), together)
    for m in range(9):
        assert torch.equal(moe(x[m : m + 1], w, compute=compute)[0], together[m])


def test_the_order_the_router_lists_experts_in_changes_nothing() -> None:
    """The sum runs in ascending expert id: a permuted list gives the same bits."""
    w, latent = layer(), normal(1, LATENT, seed=6)
    ids = torch.tensor([[7, 2, 5, 0]])
    shares = torch.tensor([[0.1, 0.4, 0.2, 0.3]], dtype=torch.float64)
    bank = dense_experts(w.w1, w.w3, w.w2, [0, 2, 5, 7])
    first = experts(latent, ids, shares, bank)
    for order in ([3, 1, 2, 0], [0, 3, 1, 2], [2, 0, 3, 1]):
        assert torch.equal(
            experts(latent, ids[:, order], shares[:, order], bank), first
        )


def test_experts_that_are_not_routed_to_are_not_read() -> None:
    w, x = layer(), normal(1, HIDDEN, seed=7)
    clean = moe(x, w)
    ids, _ = route(x @ w.router.T, w.bias, TOP_K)
    unused = [e for e in range(EXPERTS) if e not in ids[0].tolist()]
    poisoned = {}
    for name in ("w1", "w3", "w2"):
        bank = getattr(w, name)
        scales = bank.scales.clone()
        scales[unused] = 255  # NaN
        poisoned[name] = Mxfp4(bank.packed, scales)
    assert torch.equal(moe(x, MoeWeights(**(vars(w) | poisoned))), clean)


def test_bad_input_is_refused() -> None:
    with pytest.raises(ValueError, match="top_k is 5; it must be 1 to 4"):
        route(torch.zeros(1, 4), torch.zeros(4), 5)
    with pytest.raises(ValueError, match=r"bias \(3,\)"):
        route(torch.zeros(1, 4), torch.zeros(3), 2)
    with pytest.raises(ValueError, match=r"x is \(1, 3\)"):
        moe(torch.zeros(1, 3), layer())
