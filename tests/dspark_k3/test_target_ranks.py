# SPDX-License-Identifier: Apache-2.0
"""Sublayers on two ranks: each has its shard of the weights, sums give the whole.

Ranks are threads that meet in the all-reduce; kernels are those of
`test_target_executor`.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("vllm.models.kimi_k3")

from dspark_k3.target import scope, sublayers
from experiments import k3_shapes
from tests.dspark_k3.test_target_executor import (
    HIDDEN,
    FakeGemm,
    product,
    weight,
)
from tests.dspark_k3.test_target_moe import halves, latent_moe
from tests.dspark_k3.test_target_scope import at_degree
from verify_kernels.layer import products

TINY = Path(__file__).resolve().parents[2] / "experiments" / "tiny" / "k3-target"
ROWS = 5


class Ranks:
    """Threads whose all-reduce sums in rank order; ``sent`` lists what rank 0 sent."""

    def __init__(self, world: int) -> None:
        self.world = world
        self.sent: list[tuple[int, ...]] = []
        self._meet = threading.Barrier(world, timeout=30)
        self._rows: list[Tensor | None] = [None] * world
        self._own = threading.local()

    def all_reduce(self, rows: Tensor) -> Tensor:
        assert rows.is_contiguous()
        rank = self._own.rank
        if rank == 0:
            self.sent.append(tuple(rows.shape))
        self._rows[rank] = rows
        self._meet.wait()
        total = torch.stack([r.float() for r in self._rows if r is not None]).sum(0)
        self._meet.wait()
        return total.to(rows.dtype)

    def run(self, action: Callable[[int], Tensor]) -> list[Tensor]:
        found: list[Any] = [None] * self.world

        def one(rank: int) -> None:
            self._own.rank = rank
            found[rank] = action(rank)

        threads = [
            threading.Thread(target=one, args=(rank,)) for rank in range(self.world)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        return found


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Ranks:
    made = Ranks(2)
    monkeypatch.setattr(products, "SkinnyGemm", FakeGemm)
    monkeypatch.setattr(sublayers, "get_tensor_model_parallel_world_size", lambda: 2)
    monkeypatch.setattr(sublayers, "tensor_model_parallel_all_reduce", made.all_reduce)
    monkeypatch.setattr(sublayers.torch.cuda, "Event", lambda: None)
    torch.manual_seed(0)
    return made


def held(data: Tensor) -> SimpleNamespace:
    return SimpleNamespace(weight=nn.Parameter(data.contiguous(), requires_grad=False))


def mlp_shard(module: Any, rank: int) -> SimpleNamespace:
    """Gate and up rows of this rank's half of the width, down's columns."""
    gate, up = module.gate_up_proj.weight.chunk(2)
    return SimpleNamespace(
        gate_up_proj=held(torch.cat([gate.chunk(2)[rank], up.chunk(2)[rank]])),
        down_proj=held(module.down_proj.weight.chunk(2, dim=1)[rank]),
        act_fn=halves,
    )


def close(found: Tensor, wanted: Tensor) -> None:
    """A partial sum and the sum of two are rounded to bf16: two steps of 2^-8."""
    atol = float(wanted.abs().max()) * 2**-7
    torch.testing.assert_close(found.float(), wanted.float(), atol=atol, rtol=2**-7)


def test_a_dense_layers_shards_sum_to_the_whole(ranks: Ranks) -> None:
    whole = SimpleNamespace(
        gate_up_proj=weight(16, HIDDEN), down_proj=weight(HIDDEN, 8), act_fn=halves
    )
    hidden = torch.randn(ROWS, HIDDEN).bfloat16()
    made = [
        sublayers.Dense(mlp_shard(whole, rank), pdl=True)  # type: ignore[arg-type]
        for rank in range(2)
    ]
    found = ranks.run(lambda rank: made[rank](hidden, torch.arange(ROWS)))
    assert torch.equal(found[0], found[1])
    wanted = halves(product(hidden, whole.gate_up_proj.weight).bfloat16())
    close(found[0], product(wanted, whole.down_proj.weight))
    assert ranks.sent == [(ROWS, HIDDEN)]


def test_a_moe_layers_shards_sum_before_the_norm(ranks: Ranks) -> None:
    """The router and the latent projections are whole on every rank; each rank has half
    of every expert's width, here half of its rows' values, and half of the shared."""
    whole = latent_moe()
    hidden = torch.randn(ROWS, HIDDEN).bfloat16()
    logits = product(hidden, whole.gate.weight)
    top, ids = torch.topk(logits.sigmoid(), 2)
    latent = product(hidden, whole.routed_expert_down_proj.weight).bfloat16()
    routed = latent.float() * (top * ids).sum(-1, keepdim=True)
    up = product((2 * routed).bfloat16(), whole.routed_expert_up_proj.weight)
    shared = whole.shared_experts
    inner = halves(product(hidden, shared.gate_up_proj.weight).bfloat16())
    wanted = up + product(inner, shared.down_proj.weight)

    def of_rank(rank: int) -> sublayers.Moe:
        module = SimpleNamespace(**vars(whole))
        module.shared_experts = mlp_shard(shared, rank)
        experts = whole.experts.routed_experts
        part = SimpleNamespace(**vars(experts))

        def forward_modular(**given: Tensor) -> Tensor:
            out = experts.forward_modular(**given)
            return out * (0.25 if rank == 0 else 0.75)

        part.forward_modular = forward_modular
        runner = SimpleNamespace(**vars(whole.experts))
        runner.routed_experts = part
        module.experts = runner
        return sublayers.Moe(module, pdl=True, route=False)  # type: ignore[arg-type]

    made = [of_rank(rank) for rank in range(2)]
    found = ranks.run(
        lambda rank: sublayers.whole(made[rank](hidden, torch.arange(ROWS)))
    )
    assert torch.equal(found[0], found[1])
    close(found[0], wanted)
    assert ranks.sent == [(ROWS, 12), (ROWS, HIDDEN)]


def of_degree(config: dict[str, Any], tp: int, **ops: str) -> list[str]:
    """What is refused of it."""
    return scope.failures(at_degree(config, tp, **ops))


def left_at(config: dict[str, Any], tp: int) -> list[str]:
    """What is left to vLLM if nothing is named."""
    return list(scope.left(at_degree(config, tp)))


@pytest.mark.parametrize("tp", [1, 2, 4, 8, 16, 32])
def test_every_degree_that_divides_k3s_heads_is_served(tp: int) -> None:
    config = k3_shapes.target_config(k3_shapes.K3_LAYERS)
    assert of_degree(config, tp) == []
    assert left_at(config, tp) == (["moe_experts"] if tp == 32 else [])
    assert bool(of_degree(config, tp, moe_experts="ours")) is (tp == 32)


@pytest.mark.parametrize("tp", [5, 7, 10, 64])
def test_degrees_that_do_not_are_refused(tp: int) -> None:
    (found,) = of_degree(k3_shapes.target_config(k3_shapes.K3_LAYERS), tp)
    assert "whole heads on every rank" in found and f"TP {tp}" in found


def test_degrees_without_kernels_name_what_lacks_one() -> None:
    config = k3_shapes.target_config(k3_shapes.K3_LAYERS)
    (found,) = of_degree(config, 3)
    assert "a kernel for every projection" in found and "K =" in found


@pytest.mark.parametrize("tp", [1, 2, 3, 4, 8])
def test_tiny_k3_has_two_heads(tp: int) -> None:
    config = json.loads((TINY / "config.json").read_text())
    assert bool(of_degree(config, tp, moe_experts="ours")) is (tp > 2)
    assert bool(of_degree(config, tp)) is (tp > 2)
    if tp <= 2:
        assert left_at(config, tp) == []


def test_a_ranks_share_as_a_model_is_served_as_the_rank_is() -> None:
    """The profiles of one rank's share run the kernels that the rank runs."""
    whole = k3_shapes.target_config(k3_shapes.K3_LAYERS)
    for tp in k3_shapes.SHARES:
        config = k3_shapes.target_config(k3_shapes.K3_LAYERS, tp)
        assert of_degree(config, 1) == []
        assert left_at(config, 1) == left_at(whole, tp)
