# SPDX-License-Identifier: Apache-2.0
"""The executor's MLPs over modules as vLLM makes them: what they add up, and
who waits for whom."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from verify_kernels.layer import FRONT_ROWS
from verify_kernels.layer import moe as moe_layer

pytest.importorskip("vllm.models.kimi_k3")

from dspark_k3.target import sublayers
from tests.dspark_k3.test_target_executor import HIDDEN, kernels, product, weight

#: Every test here runs with it.
kernels = kernels


def halves(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    return torch.tanh(gate) * up


def latent_moe() -> SimpleNamespace:
    def select_experts(
        hidden_states: Tensor, router_logits: Tensor, topk_indices_dtype: Any
    ) -> tuple[Tensor, Tensor]:
        assert router_logits.dtype == torch.float32
        return torch.topk(router_logits.sigmoid(), 2)

    def forward_modular(x: Tensor, topk_weights: Tensor, topk_ids: Tensor) -> Tensor:
        return (x.float() * (topk_weights * topk_ids).sum(-1, keepdim=True)).bfloat16()

    experts = SimpleNamespace(
        routed_experts=SimpleNamespace(
            quant_method=SimpleNamespace(is_monolithic=False, topk_indices_dtype=None),
            _ensure_moe_quant_config_init=lambda: None,
            forward_modular=forward_modular,
        ),
        router=SimpleNamespace(select_experts=select_experts),
        # vLLM pads a latent that its kernel cannot take as it is.
        _maybe_pad_hidden_states=lambda _, x: (F.pad(x, (0, 4)), None, None),
        do_naive_dispatch_combine=False,
        _fused_output_is_reduced=False,
        routed_scaling_factor=1.0,
        _quant_method=None,
    )
    return SimpleNamespace(
        experts=experts,
        gate=weight(6, HIDDEN),
        routed_expert_down_proj=weight(12, HIDDEN),
        routed_expert_norm=lambda x: 2 * x,
        routed_expert_up_proj=weight(HIDDEN, 12),
        shared_experts=SimpleNamespace(
            gate_up_proj=weight(16, HIDDEN),
            down_proj=weight(HIDDEN, 8),
            act_fn=halves,
        ),
        _down_proj_stream=None,
    )


def routed_and_shared(module: Any, hidden: Tensor) -> tuple[Tensor, Tensor]:
    logits = product(hidden, module.gate.weight)
    top, ids = torch.topk(logits.sigmoid(), 2)
    latent = product(hidden, module.routed_expert_down_proj.weight).bfloat16()
    routed = (latent.float() * (top * ids).sum(-1, keepdim=True)).bfloat16()
    shared = module.shared_experts
    gate_up = product(hidden, shared.gate_up_proj.weight).bfloat16()
    return routed, product(halves(gate_up), shared.down_proj.weight).bfloat16()


def test_moe_adds_routed_and_shared() -> None:
    module, hidden = latent_moe(), torch.randn(3, HIDDEN).bfloat16()
    routed, shared = routed_and_shared(module, hidden)
    up = product(2 * routed, module.routed_expert_up_proj.weight).bfloat16()
    ours = sublayers.Moe(module, pdl=True, route=False)(hidden, torch.arange(3))
    assert torch.equal(sublayers.whole(ours), up + shared)


def test_few_rows_take_one_launch_where_there_is_a_kernel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And give what the launches apart give."""
    module = latent_moe()
    hidden = torch.randn(FRONT_ROWS, HIDDEN).bfloat16()
    apart = sublayers.Moe(module, pdl=True, route=False)(hidden, torch.arange(2))
    asked: list[Any] = []

    def serves(k: int, dtypes: Any) -> bool:
        asked.append((k, dtypes))
        return True

    monkeypatch.setattr(moe_layer, "serves", serves)
    moe = sublayers.Moe(module, pdl=True, route=False)
    assert asked == [(HIDDEN, (torch.float32, torch.bfloat16, torch.bfloat16))]

    def gone(x: Tensor) -> Tensor:
        raise AssertionError("a launch of its own")

    inner = moe._layer
    inner._router = inner._down = inner._gate_up = gone  # type: ignore[assignment]
    for found, wanted in zip(moe(hidden, torch.arange(2)), apart, strict=True):
        assert torch.equal(found, wanted)


def test_a_rank_reduces_the_latent_before_its_norm_and_the_shared_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sublayers, "get_tensor_model_parallel_world_size", lambda: 2)
    reduced: list[tuple[int, ...]] = []

    def all_reduce(rows: Tensor) -> Tensor:
        assert rows.is_contiguous()
        reduced.append(tuple(rows.shape))
        return rows + rows

    monkeypatch.setattr(sublayers, "tensor_model_parallel_all_reduce", all_reduce)
    module, hidden = latent_moe(), torch.randn(3, HIDDEN).bfloat16()
    routed, shared = routed_and_shared(module, hidden)
    up = product(4 * routed, module.routed_expert_up_proj.weight).bfloat16()
    ours = sublayers.Moe(module, pdl=True, route=False)(hidden, torch.arange(3))
    assert torch.equal(sublayers.whole(ours), up + 2 * shared)
    assert reduced == [(3, 12), (3, HIDDEN)]


@pytest.mark.parametrize("few", [True, False])
def test_the_side_stream_is_waited_for_before_its_rows_are_read(
    monkeypatch: pytest.MonkeyPatch, few: bool
) -> None:
    log: list[str] = []
    where = ["main"]
    names = iter(["begun", "marked", "ended"])

    class Event:
        def __init__(self) -> None:
            self.name = next(names)

        def record(self) -> None:
            log.append(f"{where[-1]} records {self.name}")

        def wait(self) -> None:
            log.append(f"{where[-1]} waits for {self.name}")

    @contextlib.contextmanager
    def on(stream: object) -> Iterator[None]:
        where.append("side")
        yield
        where.pop()

    def logged(name: str, function: Any) -> Any:
        def call(*arguments: Any, **keywords: Any) -> Any:
            log.append(f"{where[-1]}: {name}")
            return function(*arguments, **keywords)

        return call

    monkeypatch.setattr(sublayers.torch.cuda, "Event", Event)
    monkeypatch.setattr(sublayers.torch.cuda, "stream", on)
    monkeypatch.setattr(moe_layer, "serves", lambda k, dtypes: True)
    rows = FRONT_ROWS + (not few)
    module, hidden = latent_moe(), torch.randn(rows, HIDDEN).bfloat16()
    module._down_proj_stream = object()
    runner = module.experts
    runner.router.select_experts = logged("routing", runner.router.select_experts)
    runner._maybe_pad_hidden_states = logged("pad", runner._maybe_pad_hidden_states)
    experts = runner.routed_experts
    experts.forward_modular = logged("experts", experts.forward_modular)
    module.routed_expert_norm = logged("norm", module.routed_expert_norm)
    shared = module.shared_experts
    shared.act_fn = logged("activation", shared.act_fn)
    moe = sublayers.Moe(module, pdl=True, route=False)
    for gemm in ("router", "down", "shared_down", "up"):
        own = logged(gemm, getattr(moe._layer, f"_{gemm}"))
        setattr(moe._layer, f"_{gemm}", own)
    routed, shared_rows = routed_and_shared(module, hidden)
    log.clear()
    ours = moe(hidden, torch.arange(3))
    front = [
        "main records begun",
        "side waits for begun",
        "side: activation",
        "side: shared_down",
        "side records ended",
        "main: routing",
    ]
    apart = [
        "main records begun",
        "main: router",
        "side waits for begun",
        "side: down",
        "side records marked",
        "side: activation",
        "side: shared_down",
        "side records ended",
        "main: routing",
        "main waits for marked",
    ]
    after = [
        "main: pad",
        "main: experts",
        "main waits for ended",
        "main: norm",
        "main: up",
    ]
    assert log == [*(front if few else apart), *after]
    up = product(2 * routed, module.routed_expert_up_proj.weight).bfloat16()
    assert torch.equal(sublayers.whole(ours), up + shared_rows)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("do_naive_dispatch_combine", True),
        ("_fused_output_is_reduced", True),
        ("routed_scaling_factor", 2.5),
    ],
)
def test_experts_with_their_own_reduction_are_refused(name: str, value: Any) -> None:
    module = latent_moe()
    setattr(module.experts, name, value)
    with pytest.raises(ValueError, match=r'"ops": \{"moe": "stock"\}'):
        sublayers.Moe(module, pdl=True, route=False)


def test_dense_is_gate_up_activation_down() -> None:
    module = latent_moe().shared_experts
    hidden = torch.randn(3, HIDDEN).bfloat16()
    gate_up = product(hidden, module.gate_up_proj.weight).bfloat16()
    wanted = product(halves(gate_up), module.down_proj.weight).bfloat16()
    ours = sublayers.Dense(module, pdl=True)(hidden, torch.arange(3))
    assert torch.equal(ours, wanted)
