# SPDX-License-Identifier: Apache-2.0
"""The executor's loop and sublayers on the CPU, with the kernels' references.

vLLM's modules are stood in for by small ones with the attributes that the executor
reads; what it computes is compared with the equations written out once more here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dspark_k3 import settings
from verify_kernels.attn_res import reference
from verify_kernels.layer import products

pytest.importorskip("vllm.models.kimi_k3")

from vllm.config import CUDAGraphMode

from dspark_k3.target import executor, graphs, sublayers

HIDDEN = 32
LAYERS = 5
BLOCK = 2
ALL_STOCK = dict.fromkeys(settings.OPS, "stock")


class FakeGemm:
    """SkinnyGemm with fp32 sums by torch."""

    def __init__(self, k: int, *, out_dtype: Any, pdl: bool) -> None:
        self._k = k
        single = isinstance(out_dtype, torch.dtype)
        self._dtypes = [out_dtype] if single else list(out_dtype)

    def bind(self, w: Any) -> Callable[[Tensor, Any], None]:
        weights = [w] if isinstance(w, Tensor) else w
        assert all(each.shape[1] == self._k for each in weights)

        def launch(x: Tensor, out: Any) -> None:
            outs = [out] if isinstance(out, Tensor) else out
            assert [each.dtype for each in outs] == self._dtypes
            for each, weight in zip(outs, weights, strict=True):
                each.copy_(product(x, weight))

        return launch


def product(x: Tensor, w: Tensor) -> Tensor:
    return x.float() @ w.float().T


def mix_by_reference(
    prefix: Tensor, delta: Tensor | None, blocks: Tensor, *weights: Any, **keywords: Any
) -> Tensor:
    """The reference, updating its arguments in place as the kernel does."""
    keywords.pop("pdl")
    saved = blocks.clone()
    hidden, new = reference.attn_res(
        prefix, delta, saved, *weights, compute=torch.float32, **keywords
    )
    prefix.copy_(new)
    blocks.copy_(saved)
    return hidden.to(prefix.dtype)


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sublayers, "attn_res", mix_by_reference)
    monkeypatch.setattr(products, "SkinnyGemm", FakeGemm)
    monkeypatch.setattr(sublayers, "get_tensor_model_parallel_world_size", lambda: 1)
    monkeypatch.setattr(sublayers.torch.cuda, "Event", lambda: None)
    torch.manual_seed(0)
    yield


def weight(n: int, k: int) -> SimpleNamespace:
    data = (torch.randn(n, k) / k**0.5).to(torch.bfloat16)
    return SimpleNamespace(weight=nn.Parameter(data, requires_grad=False))


def norm() -> SimpleNamespace:
    data = (1 + 0.1 * torch.randn(HIDDEN)).to(torch.bfloat16)
    return SimpleNamespace(weight=nn.Parameter(data), variance_epsilon=1e-5)


def rms(x: Tensor, module: Any) -> Tensor:
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + module.variance_epsilon)
    return wide * scale * module.weight.float()


class Attention(nn.Module):
    """KDA's marker attribute and a product instead of attention."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.prefix = f"layers.{index}.self_attn"
        self.own = weight(HIDDEN, HIDDEN).weight
        if index % 2:
            self.in_proj_qkvgfab = nn.Identity()

    def forward(self, hidden_states: Tensor, positions: Tensor) -> Tensor:
        return product(hidden_states, self.own).to(torch.bfloat16)


class Mlp(nn.Module):
    """Of the layers behind the first its rows come in two, as those of `Moe` do."""

    def __init__(self, parts: int) -> None:
        super().__init__()
        self.own = [weight(HIDDEN, HIDDEN).weight for _ in range(parts)]

    def forward(self, x: Tensor) -> sublayers.Delta:
        rows = [torch.tanh(product(x, own)).to(torch.bfloat16) for own in self.own]
        return (rows[0], rows[1]) if len(rows) == 2 else rows[0]


def backbone() -> SimpleNamespace:
    layers = [
        SimpleNamespace(
            self_attn=Attention(i),
            mlp=Mlp(2 if i else 1),
            layer_idx=i,
            is_moe_layer=i > 0,
            prev_valid_blocks=-(-i // BLOCK),
            is_block_write_layer=i % BLOCK == 0,
            self_attention_res_norm=norm(),
            self_attention_res_proj=weight(1, HIDDEN),
            input_layernorm=norm(),
            mlp_res_norm=norm(),
            mlp_res_proj=weight(1, HIDDEN),
            post_attention_layernorm=norm(),
        )
        for i in range(LAYERS)
    ]
    table = torch.randn(11, HIDDEN).to(torch.bfloat16)
    return SimpleNamespace(
        layers=layers,
        num_attn_res_blocks=-(-LAYERS // BLOCK),
        output_attn_res_norm=norm(),
        output_attn_res_proj=weight(1, HIDDEN),
        aux_hidden_state_layers=(0, 2, 3, LAYERS),
        embed_input_ids=lambda ids: F.embedding(ids, table),
    )


def mixed(sources: Sequence[Tensor], mix: Any, query: Any) -> Tensor:
    """softmax over sources of <norm weight * query, v> / rms(v), times v."""
    stack = torch.stack([each.float() for each in sources])
    w = mix.weight.float() * query.weight.float()[0]
    scale = torch.rsqrt(stack.square().mean(-1) + mix.variance_epsilon)
    share = torch.softmax((stack @ w) * scale, 0)
    return (share[..., None] * stack).sum(0)


def expected(model: Any, ids: Tensor) -> tuple[Tensor, list[Tensor]]:
    """The layer loop as section A.5 of the model's description puts it."""
    prefix = model.embed_input_ids(ids)
    blocks: list[Tensor] = []
    taps = [prefix]
    pending: Tensor | None = None
    for layer in model.layers:
        if pending is not None:
            prefix = (prefix.float() + pending.float()).to(torch.bfloat16)
        start = layer.layer_idx % BLOCK == 0
        sources = [*blocks, prefix]
        if start:
            blocks.append(prefix)
        own = layer.self_attention_res_norm, layer.self_attention_res_proj
        hidden = rms(mixed(sources, *own), layer.input_layernorm).to(torch.bfloat16)
        out = layer.self_attn(hidden, None)
        prefix = out if start else (prefix.float() + out.float()).to(torch.bfloat16)
        own = layer.mlp_res_norm, layer.mlp_res_proj
        hidden = mixed([*blocks, prefix], *own)
        out = layer.mlp(rms(hidden, layer.post_attention_layernorm).bfloat16())
        pending = out if isinstance(out, Tensor) else torch.add(*out)
        if layer.layer_idx + 1 in model.aux_hidden_state_layers:
            taps.append((prefix.float() + pending.float()).to(torch.bfloat16))
    assert pending is not None
    prefix = (prefix.float() + pending.float()).to(torch.bfloat16)
    last = model.output_attn_res_norm, model.output_attn_res_proj
    return mixed([*blocks, prefix], *last), taps


def make(model: Any, **ops: str) -> executor.Executor:
    asked = {"target": True, "ops": ALL_STOCK | ops}
    holder = SimpleNamespace(model=model, lm_head=None)
    return executor.Executor(holder, settings.read({"dspark_k3": asked}))


def test_the_loop_is_the_models() -> None:
    model = backbone()
    ids = torch.tensor([1, 5, 7])
    hidden, taps = make(model, attn_res="ours").run(torch.arange(3), ids, None)
    wanted, wanted_taps = expected(model, ids)
    # One bf16 rounding apart: 2^-8 of the largest values.
    torch.testing.assert_close(hidden.float(), wanted, atol=2**-7, rtol=2**-7)
    assert len(taps) == len(wanted_taps) == 4
    for tap, want in zip(taps, wanted_taps, strict=True):
        torch.testing.assert_close(tap.float(), want.float(), atol=2**-6, rtol=2**-6)


def test_vllms_mix_in_the_loop_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kernel, with vLLM's arguments, stood in for by the reference."""
    from vllm.models.kimi_k3.nvidia import ops

    def stock(*tensors: Any, block_write_idx: int, **keywords: Any) -> Tensor:
        write = None if block_write_idx < 0 else block_write_idx
        return mix_by_reference(*tensors, write_block=write, pdl=False, **keywords)

    monkeypatch.setattr(ops, "attn_res", stock)
    model = backbone()
    ids = torch.tensor([1, 5, 7])
    ours, our_taps = make(model, attn_res="ours").run(torch.arange(3), ids, None)
    theirs, their_taps = make(model, attn_res="stock").run(torch.arange(3), ids, None)
    assert torch.equal(ours, theirs)
    assert all(map(torch.equal, our_taps, their_taps))


def test_given_embeddings_are_not_written_to() -> None:
    model = backbone()
    ids = torch.tensor([1, 5, 7])
    given = model.embed_input_ids(ids)
    before = given.clone()
    run = make(model, attn_res="ours")
    by_rows, _ = run.run(torch.arange(3), None, given)
    by_ids, _ = run.run(torch.arange(3), ids, None)
    assert torch.equal(given, before)
    assert torch.equal(by_rows, by_ids)


def metadata(prefills: int = 0, without: int | None = None) -> dict[str, Any]:
    return {
        f"layers.{i}.self_attn": SimpleNamespace(num_prefills=prefills)
        for i in range(LAYERS)
        if i != without
    }


@pytest.mark.parametrize(
    ("rows", "given", "mode", "reason"),
    [
        (1, metadata(), CUDAGraphMode.NONE, "ours"),
        (64, metadata(), CUDAGraphMode.FULL, "ours"),
        (65, metadata(), CUDAGraphMode.FULL, "stock_rows"),
        (8, metadata(prefills=1), CUDAGraphMode.NONE, "stock_prefill"),
        (8, metadata(), CUDAGraphMode.PIECEWISE, "stock_piecewise"),
        (8, metadata(without=3), CUDAGraphMode.NONE, "stock_other"),
        (8, None, CUDAGraphMode.NONE, "stock_other"),
    ],
)
def test_who_runs_a_step(
    rows: int, given: Any, mode: CUDAGraphMode, reason: str
) -> None:
    run = make(backbone(), attn_res="ours")
    assert run.judge(rows, given, mode) == reason
    run.counters.count(run.judge(rows, given, mode))
    counted = run.counters.read()
    assert counted.pop(reason) == 1
    assert not any(counted.values())


@pytest.mark.parametrize(
    ("warming_up", "capturing", "planned", "runs"),
    [(False, False, True, 0), (True, False, False, 1), (True, True, True, 0)],
)
def test_the_run_before_a_capture_warms_ours_and_vllms(
    monkeypatch: pytest.MonkeyPatch,
    warming_up: bool,
    capturing: bool,
    planned: bool,
    runs: int,
) -> None:
    """vLLM runs a step eagerly before it captures it, whole or in pieces. Seen on an
    H200: with ours alone run there, vLLM's kernels compiled inside the capture of the
    pieces, which CUDA refuses."""
    context = SimpleNamespace(
        attn_metadata=metadata(), cudagraph_runtime_mode=CUDAGraphMode.NONE
    )
    monkeypatch.setattr(executor, "is_forward_context_available", lambda: True)
    monkeypatch.setattr(executor, "get_forward_context", lambda: context)
    monkeypatch.setattr(
        executor.torch.cuda, "is_current_stream_capturing", lambda: capturing
    )
    model = backbone()
    model.config = SimpleNamespace(hidden_size=HIDDEN)
    ours = make(model, attn_res="ours")
    ran: list[tuple[int, ...]] = []
    monkeypatch.setattr(ours, "run", lambda step, ids, rows: ran.append(rows.shape))
    monkeypatch.setattr(graphs, "capture_under_way", lambda: warming_up)
    positions = torch.arange(3)
    step = ours.plan(positions, None)
    assert step is (positions if planned else None)
    assert ran == [(3, HIDDEN)] * runs


class Recurrence(nn.Module):
    """A KDA module whose `_forward` is a known function of what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.prefix = "kda"
        self.local_num_heads, self.head_dim = 2, 16
        self.local_projection_size = 32
        self.in_proj_padding = 6
        self.in_proj_qkvgfab = weight(4 * 32 + 16 + 2 + 6, HIDDEN)
        self.f_b_proj = weight(32, 16)
        self.o_proj = weight(HIDDEN, 32)

    def _forward(
        self, mixed_qkv: Tensor, g1: Tensor, g2: Tensor, beta: Tensor, **out: Tensor
    ) -> None:
        q, k, v = mixed_qkv.unflatten(-1, (3, 2, 16)).unbind(1)
        core = out["core_attn_out"]
        core[0] = q + 2 * k + 3 * v + g1[0] * g2 + beta[0][..., None]
        # As vLLM does after its norm, whose result is the same memory (seen on an
        # H200: refused when the buffer was a slice along the second dimension).
        core.copy_(core.view(-1, 16).view(core.shape))


def test_kda_wires_its_projections_as_vllm_packs_them() -> None:
    module, hidden = Recurrence(), torch.randn(3, HIDDEN).bfloat16()
    packed = product(hidden, module.in_proj_qkvgfab.weight).bfloat16()
    q, k, v, gate = packed[:, :128].unflatten(-1, (4, 2, 16)).unbind(1)
    decay, beta = packed[:, 128:144], packed[:, 144:146]
    raw = product(decay, module.f_b_proj.weight).bfloat16().unflatten(-1, (2, 16))
    core = (q + 2 * k + 3 * v + raw * gate + beta[..., None]).flatten(1)
    wanted = product(core, module.o_proj.weight).bfloat16()
    kda = sublayers.Kda(module, pdl=True)
    assert torch.equal(kda(hidden, torch.arange(3)), wanted)


def test_rows_that_attention_does_not_write_are_finite() -> None:
    """A graph's padding rows: vLLM's own are whatever memory held."""
    module = Recurrence()
    module._forward = lambda **_: None  # type: ignore[method-assign]
    nan = torch.full((64, HIDDEN), torch.nan).bfloat16()
    out = sublayers.Kda(module, pdl=True)(nan, torch.arange(64))
    assert torch.equal(out, torch.zeros_like(out))


class Latent(nn.Module):
    """An MLA module whose `_attention` is a known function of what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.layer_name = "mla"
        self.num_local_heads, self.v_head_dim, self.qk_head_dim = 2, 16, 24
        self.q_lora_rank, self.kv_lora_rank, self.qk_rope_head_dim = 16, 32, 8
        self.rms_norm_eps = 1e-5
        self.fused_qkv_a_g_proj = weight(16 + 32 + 8 + 32, HIDDEN)
        self.q_b_proj = weight(48, 16)
        self.o_proj = weight(HIDDEN, 32)
        self.q_a_layernorm = self.kv_a_layernorm = SimpleNamespace(
            weight=nn.Parameter(torch.ones(1))
        )

    def _attention(
        self, positions: Tensor, q: Tensor, kv: Tensor, k_pe: Tensor, out: Tensor
    ) -> None:
        out.copy_(
            q[..., :16].flatten(1) + kv + F.pad(k_pe[:, 0], (0, 24)) + positions[0]
        )


def test_mla_wires_its_projections_as_vllm_packs_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def norms(q: Tensor, kv: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
        return 2 * q, 3 * kv

    monkeypatch.setattr(sublayers, "fused_q_kv_rmsnorm", norms)
    monkeypatch.setattr(sublayers, "_gate_sigmoid_mul", lambda x, g: x * g.sigmoid())
    module, hidden = Latent(), torch.randn(3, HIDDEN).bfloat16()
    packed = product(hidden, module.fused_qkv_a_g_proj.weight).bfloat16()
    q_latent, kv, k_pe, gate = packed.split([16, 32, 8, 32], -1)
    q = product(2 * q_latent, module.q_b_proj.weight).bfloat16().unflatten(-1, (2, 24))
    out = torch.empty(3, 32, dtype=torch.bfloat16)
    module._attention(torch.tensor([4]), q, 3 * kv, k_pe.unsqueeze(1), out)
    wanted = product(out * gate.sigmoid(), module.o_proj.weight).bfloat16()
    ours = sublayers.Mla(module, pdl=True)(hidden, torch.tensor([4]))
    assert torch.equal(ours, wanted)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_product_has_the_dtype_asked_for(dtype: torch.dtype) -> None:
    layer, x = weight(6, HIDDEN), torch.randn(3, HIDDEN).bfloat16()
    out = sublayers.Gemm(layer, dtype, pdl=True)(x)
    assert out.dtype == dtype
    assert torch.equal(out, product(x, layer.weight).to(dtype))
    plain = sublayers.Gemm(layer, pdl=True)(x)
    assert torch.equal(plain, product(x, layer.weight).bfloat16())


@pytest.mark.parametrize("rows", [1, 64, 65])
def test_the_head_leaves_more_than_64_rows_to_vllm(rows: int) -> None:
    head = weight(48, HIDDEN)
    head.quant_method = SimpleNamespace(apply=lambda layer, x, bias: "vllm")
    ours = sublayers.Head(head, pdl=True)
    x = torch.randn(rows, HIDDEN).bfloat16()
    out = ours.apply(head, x)
    if rows > 64:
        assert out == "vllm"
    else:
        assert torch.equal(out, product(x, head.weight).bfloat16())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight": None}, "no plain weight matrix"),
        ({"weight": torch.zeros(4, 8)}, "torch.float32 weight"),
        ({"bias": torch.zeros(4)}, "has a bias"),
    ],
)
def test_a_layer_that_cannot_be_bound_is_named(
    change: dict[str, Any], message: str
) -> None:
    layer = weight(4, HIDDEN)
    layer.prefix = "model.layers.3.mlp.gate_up_proj"
    for name, value in change.items():
        setattr(layer, name, value)
    with pytest.raises(ValueError, match=message) as error:
        sublayers.Gemm(layer, pdl=True)
    assert "model.layers.3.mlp.gate_up_proj" in str(error.value)
