# SPDX-License-Identifier: Apache-2.0
"""The KDA verify kernel over thousands of steps and launches, and over slots that lie
gigabytes apart, in both layouts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Protocol

import pytest
import torch
from torch import Tensor

from experiments.bench.neighbours import neighbours
from tests.verify_kernels.test_kda_kernel import (
    SnapshotStep,
    Step,
    batch_of,
    bits,
    cache_of,
    generator,
    projections,
    ragged_call,
    run,
    run_on_gpu,
    same,
    weights,
)
from tests.verify_kernels.test_kda_kernel_snapshots import TABLE, on_gpu
from verify_kernels import VerifyBatch
from verify_kernels.kda import (
    KdaFoldState,
    KdaVerifyWeights,
    kda_verify_snapshots,
    reference,
)
from verify_kernels.kda.host import CLUSTERS, DIM, MAX_WIDTH, TAPS
from verify_kernels.kda.reference import KdaRows, KdaWeights

PAST = TAPS - 1
#: A gate that never takes much: sums of thousands of rows stay in the state.
SLOW = (-12.0, -2.0)


def slow_weights(heads: int, device: str) -> KdaVerifyWeights:
    """Of 128 key channels the slowest loses 3e-5 of its content a row, the fastest
    half."""
    bias = torch.linspace(*SLOW, DIM, device=device).expand(heads, DIM)
    w = weights(heads, 7, device)
    return replace(w, dt_bias=bias.contiguous(), a_log=torch.zeros_like(w.a_log))


class Layout(Protocol):
    """One request in a layout, from its start on."""

    fewest: int

    def launch(self, packed: Tensor, told: int) -> Tensor:
        """The state [H, V, K] that is committed when this step begins, ``told`` rows of
        the step before accepted."""


@dataclass
class Folded:
    """In slot 1 of a cache."""

    step: Step
    w: KdaVerifyWeights
    cache: KdaFoldState
    fewest = 0

    def launch(self, packed: Tensor, told: int) -> Tensor:
        batch = batch_of([packed.shape[0]], [1], [told], packed.device.type)
        run(self.step, packed, self.w, self.cache, batch)
        return self.cache.state[1]


@dataclass
class Snapped:
    """In the slots of one line; ``told`` before the first step is read as 1."""

    step: SnapshotStep
    w: KdaVerifyWeights
    state: Tensor
    window: Tensor
    slots: Tensor
    fewest = 1

    @classmethod
    def at(
        cls, step: SnapshotStep, w: KdaVerifyWeights, cache: KdaFoldState, count: int
    ) -> Snapped:
        """With ``count`` slots, from where slot 1 of ``cache`` is."""
        heads, device = cache.state.shape[1], cache.state.device
        state = torch.full((count + 1, heads, DIM, DIM), torch.nan, device=device)
        window = torch.full((count + 1, count + 2, 3 * heads * DIM), torch.nan)
        window = window.bfloat16().to(device)
        state[1] = cache.state[1]
        window[1, :PAST] = cache.window[1, :PAST]
        slots = torch.arange(1, count + 1, dtype=torch.int32, device=device)
        return cls(step, w, state, window, slots[None])

    def launch(self, packed: Tensor, told: int) -> Tensor:
        width, heads = packed.shape[0], self.state.shape[1]
        begins = self.state[max(told, 1)].clone()
        batch = batch_of([width], [1], [max(told, 1)], packed.device.type)
        shape = (width, heads, DIM)
        out = torch.full(shape, torch.nan, dtype=torch.bfloat16, device=packed.device)
        args = (self.state, self.window, self.slots, batch, out)
        self.step(packed, self.w, *args)
        assert torch.isfinite(out).all()
        return begins


@dataclass
class Decoding:
    """Row by row in plain torch."""

    weights: KdaWeights
    w_fb: Tensor
    state: Tensor
    past: Tensor
    dtype: torch.dtype

    @classmethod
    def of(
        cls, w: KdaVerifyWeights, cache: KdaFoldState, dtype: torch.dtype
    ) -> Decoding:
        heads = cache.state.shape[1]
        taps = w.conv.to(dtype).view(3, heads, DIM, TAPS).permute(0, 3, 1, 2)
        static = (x.to(dtype) for x in (w.a_log, w.dt_bias, w.norm))
        found = KdaWeights(*taps, *static, w.lower_bound, w.norm_eps)
        past = cache.window[1, :PAST].to(dtype).unflatten(1, (3, heads, DIM))
        return cls(found, w.w_fb.to(dtype), cache.state[1].to(dtype), past, dtype)

    def accept(self, packed: Tensor) -> None:
        if not packed.shape[0]:
            return
        heads = self.state.shape[0]
        wide = packed.to(self.dtype)
        rows = KdaRows.unpack(wide, self.w_fb, heads, DIM, bf16_decay=True)
        own = torch.stack((rows.q, rows.k, rows.v), 1)
        line = torch.cat((self.past, own))
        for t in range(packed.shape[0]):
            q, k, v = line[t : t + TAPS].unbind(1)
            found = reference.step(self.state, (q, k, v), rows, t, self.weights)
            self.state = found.state
        self.past = line[-PAST:]


def check_drift(
    make: Callable[[KdaVerifyWeights, KdaFoldState], Layout],
    single: SnapshotStep,
    steps: int,
    every: int,
    device: str = "cpu",
    heads: int = 1,
) -> None:
    """Field cases F02, F13: after thousands of verify steps with random accepts the
    state is as near to fp64 as that of single-step decoding with the kernel. That has
    twice the error of decoding in fp32 torch at most, and an fp32 ulp a row for the
    approximate exponential. Compared each ``every`` steps."""
    w = slow_weights(heads, device)
    cache = cache_of(2, heads, [1], 8, device)
    layout = make(w, cache)
    alone = Snapped.at(single, w, cache, 1)
    exact, plain = (
        Decoding.of(w, cache, kind) for kind in (torch.float64, w.conv.dtype)
    )
    g = generator(9)
    told, accepted = 0, 0
    for number in range(1, steps + 1):
        width = int(torch.randint(1, MAX_WIDTH + 1, (1,), generator=g))
        packed = projections(width, heads, 1000 + number, device)
        verified = layout.launch(packed, told)
        if number % every == 0:
            errors = [
                (state.double() - exact.state).norm(dim=(1, 2))
                for state in (verified, alone.state[1], plain.state)
            ]
            size = exact.state.norm(dim=(1, 2))
            assert (errors[0] <= errors[1]).all(), (number, errors)
            allowed = 2 * errors[2] + max(accepted, 1) * 2.0**-23 * size
            assert (errors[1] <= allowed).all(), (number, errors)
        told = int(torch.randint(layout.fewest, width + 1, (1,), generator=g))
        accepted += told
        for t in range(told):
            alone.launch(packed[t : t + 1], 1)
        exact.accept(packed[:told])
        plain.accept(packed[:told])
    assert accepted >= 2 * steps
    assert not torch.equal(exact.state, plain.state.double())


@pytest.mark.parametrize("layout", ["fold", "snapshot"])
def test_drift_on_the_machine(layout: str) -> None:
    """Four steps: that the comparison is right."""
    pytest.importorskip("cutlass", reason="CuTe DSL is not installed")
    from tests.verify_kernels.test_kda_kernel_machine import (
        on_machine,
        snapshots_on_machine,
    )

    def make(w: KdaVerifyWeights, cache: KdaFoldState) -> Layout:
        if layout == "fold":
            return Folded(on_machine(4, 90), w, cache)
        return Snapped.at(snapshots_on_machine(2, 90), w, cache, MAX_WIDTH)

    check_drift(make, snapshots_on_machine(8, 95), 4, 2)


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["fold", "snapshot"])
def test_drift_of_4096_steps(layout: str) -> None:
    def make(w: KdaVerifyWeights, cache: KdaFoldState) -> Layout:
        if layout == "fold":
            return Folded(run_on_gpu(), w, cache)
        return Snapped.at(on_gpu(4), w, cache, MAX_WIDTH)

    check_drift(make, on_gpu(8), 4096, 256, "cuda", 2)


@dataclass
class SnapshotCall:
    """A step of widths 3, 8 and 1 in the slots of `TABLE`; the third is padding."""

    packed: Tensor
    w: KdaVerifyWeights
    state: Tensor
    window: Tensor
    slots: Tensor
    batch: VerifyBatch

    @classmethod
    def on(cls, device: str, heads: int) -> SnapshotCall:
        g = generator(21)
        state = torch.randn(18, heads, DIM, DIM, generator=g).to(device)
        window = torch.randn(18, 10, 3 * heads * DIM, generator=g)
        table = torch.tensor(TABLE, dtype=torch.int32, device=device)
        firsts = [line[0] for line in TABLE]
        return cls(
            projections(12, heads, 22, device),
            weights(heads, 6, device),
            state,
            window.bfloat16().to(device),
            table,
            batch_of([3, 8, 1], firsts, [2, 5, 1], device),
        )

    def launch(
        self, state: Tensor, window: Tensor, out: Tensor, ctas: int, pdl: bool
    ) -> None:
        args = (self.w, state, window, self.slots, self.batch, out)
        kda_verify_snapshots(self.packed, *args, ctas=ctas, pdl=pdl)

    def new_out(self) -> Tensor:
        shape = (self.packed.shape[0], self.state.shape[1], DIM)
        device = self.packed.device
        return torch.full(shape, torch.nan, dtype=torch.bfloat16, device=device)


@pytest.mark.gpu
@pytest.mark.parametrize("pdl", [False, True])
def test_a_thousand_snapshot_launches_with_another_stream_busy(pdl: bool) -> None:
    """Field case F40: the same bits each time, cluster sizes cycling."""
    call = SnapshotCall.on("cuda", 24)
    right, right_window = call.state.clone(), call.window.clone()
    expected, out = call.new_out(), call.new_out()
    call.launch(right, right_window, expected, 8, False)
    assert torch.isfinite(expected).all() and not torch.equal(right, call.state)
    state, window = call.state.clone(), call.window.clone()
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    with neighbours() as disturb:
        for i in range(1000):
            disturb()
            state.copy_(call.state)
            window.copy_(call.window)
            out.fill_(torch.nan)
            call.launch(state, window, out, CLUSTERS[i % 3], pdl)
            for found, wanted in (
                (out, expected),
                (state, right),
                (window, right_window),
            ):
                wrong += (bits(found) != bits(wanted)).sum()
    assert int(wrong) == 0


@pytest.mark.gpu
def test_a_graph_of_snapshot_steps_reads_what_is_new() -> None:
    """Field case F06: one captured step, replayed with other rows, widths, tables and
    counts, chained programmatically with a second layer, equals eager launches."""
    calls = [SnapshotCall.on("cuda", 2) for _ in range(2)]
    calls[1] = replace(
        calls[1],
        packed=calls[0].packed,
        slots=calls[0].slots,
        batch=calls[0].batch,
        w=weights(2, 5, "cuda"),
    )
    call = calls[0]
    eager = [(c.state.clone(), c.window.clone()) for c in calls]
    outs = [c.new_out() for c in calls]

    def layers(
        caches: list[tuple[Tensor, Tensor]], to: list[Tensor], pdl: bool
    ) -> None:
        for one, (state, window), out in zip(calls, caches, to, strict=True):
            one.launch(state, window, out, 4, pdl)

    own = [(c.state, c.window) for c in calls]
    layers(own, outs, True)
    layers(eager, [torch.empty_like(out) for out in outs], False)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layers(own, outs, True)
    g, last = generator(23), [3, 8]
    for number in range(40):
        widths = torch.randint(0, 6, (2,), generator=g).tolist()
        told = [int(torch.randint(1, n + 1, (1,), generator=g)) for n in last]
        order = [0, 1] if number % 3 else [1, 0]
        total = sum(widths)
        rows = projections(total, 2, 80 + number, "cuda")
        call.packed[:total] = rows[:, : call.packed.shape[1]]
        call.slots.copy_(torch.tensor([TABLE[i] for i in (*order, 2)]))
        new = batch_of(
            [*(widths[i] for i in order), 1],
            [0, 0, 0],
            [*(told[i] for i in order), 1],
            "cuda",
        )
        for name in ("row_start", "accepted"):
            getattr(call.batch, name).copy_(getattr(new, name))
        right = [torch.full_like(out, torch.nan) for out in outs]
        layers(eager, right, False)
        for out in outs:
            out.fill_(torch.nan)
        graph.replay()
        for found, wanted in zip(outs, right, strict=True):
            assert torch.isfinite(found[: total + 1]).all()
            assert torch.equal(bits(found), bits(wanted)), number
        for one, other in zip(own, eager, strict=True):
            for found, wanted in zip(one, other, strict=True):
                assert torch.equal(bits(found), bits(wanted)), number
        last = [w or n for w, n in zip(widths, last, strict=True)]


def pages(slots: int, like: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same contents, all of a slot in one page as vLLM's hybrid cache has it, pages
    2^31 bytes apart."""
    pool = torch.empty(slots * 2**31 - 2**31 + 2**24, dtype=torch.uint8, device="cuda")
    found, offset = {}, 0
    for name, tensor in like.items():
        size = tensor.element_size()
        view = pool.view(tensor.dtype).as_strided(
            tensor.shape,
            (2**31 // size, *tensor[0].contiguous().stride()),
            offset // size,
        )
        found[name] = view.copy_(tensor)
        offset += -(-tensor[0].numel() * size // 256) * 256
    assert offset <= 2**24
    return found


@pytest.mark.gpu
def test_all_of_a_fold_slot_far_away() -> None:
    """Field case F37: window, records and counts need 64-bit offsets too."""
    packed, w, near, batch = ragged_call("cuda", 2)
    far = KdaFoldState(
        **pages(5, {f.name: getattr(near, f.name) for f in fields(near)})
    )
    expected = run(run_on_gpu(), packed, w, near, batch)
    assert torch.isfinite(expected).all()
    assert torch.equal(bits(run(run_on_gpu(), packed, w, far, batch)), bits(expected))
    same(far, near, [4, 1, 2])


@pytest.mark.gpu
def test_snapshots_far_away() -> None:
    """Field case F37: both tables' slots are 2^31 bytes apart, 38 GB in all."""
    call = SnapshotCall.on("cuda", 2)
    far = pages(18, {"state": call.state, "window": call.window})
    expected, out = call.new_out(), call.new_out()
    call.launch(call.state, call.window, expected, 4, True)
    call.launch(far["state"], far["window"], out, 4, True)
    assert torch.isfinite(expected).all()
    assert torch.equal(bits(out), bits(expected))
    assert torch.equal(bits(far["state"]), bits(call.state))
    assert torch.equal(bits(far["window"]), bits(call.window))
