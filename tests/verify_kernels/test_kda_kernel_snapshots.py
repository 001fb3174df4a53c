# SPDX-License-Identifier: Apache-2.0
"""The KDA verify kernel in vLLM's slots: the bits of the fold layout, which is held
against the reference in `test_kda_kernel`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.verify_kernels.test_kda_kernel import (
    SnapshotStep,
    Step,
    batch_of,
    bits,
    cache_of,
    projections,
    run,
    run_on_gpu,
    weights,
)
from verify_kernels import VerifyBatch
from verify_kernels.kda import (
    BoundSnapshots,
    KdaVerifyWeights,
    bind_snapshots,
    kda_verify_snapshots,
)
from verify_kernels.kda.host import CLUSTERS, DIM

#: Slots of three requests; the first has no place for its last row's state, the third
#: is padding. 12 and 16 belong to nobody.
TABLE = [[3, 9, 1, 2, 14, 6, 5, -1], [4, 7, 8, 10, 11, 13, 15, 17], [0] * 8]
#: Widths, and rows accepted of the first two.
PLAN = [
    ((8, 3, 1), (6, 3)),
    ((2, 0, 1), (1, 3)),
    ((5, 8, 1), (5, 1)),
    ((1, 2, 0), (1, 2)),
]


def on_gpu(ctas: int, pdl: bool = True) -> SnapshotStep:
    def step(
        packed: Tensor,
        w: KdaVerifyWeights,
        state: Tensor,
        window: Tensor,
        slots: Tensor,
        batch: VerifyBatch,
        out: Tensor,
    ) -> None:
        kda_verify_snapshots(
            packed, w, state, window, slots, batch, out, ctas=ctas, pdl=pdl
        )

    return step


def check_same_as_fold(
    fold: Step, steps: Sequence[SnapshotStep], device: str = "cpu", heads: int = 1
) -> None:
    """Field cases F02, F13: ragged steps with rejected rows, a request that waits and
    a slot that is not there; results, every snapshot and the windows bit for bit."""
    w = weights(heads, 6, device)
    cache = cache_of(5, heads, [1, 2], 6, device)
    slots = torch.tensor(TABLE, dtype=torch.int32, device=device)
    firsts = [line[0] for line in TABLE]
    state = torch.full((18, heads + 1, DIM, DIM), torch.nan, device=device)[:, :heads]
    window = torch.full((18, 11, 3 * heads * DIM), torch.nan, device=device)
    window = window.bfloat16()[:, :10]
    for own, line in ((1, TABLE[0]), (2, TABLE[1])):
        state[line[0]] = cache.state[own]
        window[line[0], :3] = cache.window[own, :3]
    caches = [(state.clone(), window.clone()) for _ in steps]
    told, waiting, written = [1, 1], [0, 0], set(firsts[:2])
    for number, (widths, accepted) in enumerate(PLAN):
        total = sum(widths)
        packed = projections(total, heads, 70 + number, device)
        batch = batch_of(widths, [1, 2, 0], [*waiting, 0], device)
        right = run(fold, packed, w, cache, batch)
        batch = batch_of(widths, firsts, [*told, 1], device)
        taken = [line[a - 1] for line, a in zip(TABLE, told, strict=False)]
        for step, (own_state, own_window) in zip(steps, caches, strict=True):
            # What the fold commits is what the step starts from.
            for own, slot, width in zip((1, 2), taken, widths, strict=False):
                if width:
                    found, kept = own_state[slot], cache.state[own]
                    assert torch.equal(bits(found), bits(kept)), (number, own)
            out = torch.full_like(right, torch.nan)
            step(packed, w, own_state, own_window, slots, batch, out)
            assert torch.equal(bits(out), bits(right)), number
            for own, line, width in zip((1, 2), TABLE, widths, strict=False):
                if width:
                    found = own_window[line[0], : 2 + width]
                    assert torch.equal(found, cache.window[own, 1 : 3 + width])
        for b in range(2):
            if widths[b]:
                told[b] = waiting[b] = accepted[b]
                written |= set(TABLE[b][: widths[b]])
    for own_state, own_window in caches:
        assert torch.equal(bits(own_state), bits(caches[0][0]))
        for slot in range(18):
            assert torch.isfinite(own_state[slot]).all() == (slot in written), slot
            assert torch.isnan(own_state[slot]).all() == (slot not in written), slot
            assert torch.isnan(own_window[slot]).all() == (slot not in firsts[:2])


def test_snapshots_on_the_machine() -> None:
    """Under two schedules, with no race."""
    pytest.importorskip("cutlass", reason="CuTe DSL is not installed")
    from tests.verify_kernels.test_kda_kernel_machine import (
        on_machine,
        snapshots_on_machine,
    )

    steps = [snapshots_on_machine(c, 40 + c, True) for c in (8, 2)]
    check_same_as_fold(on_machine(4, 20), steps)


def bound_on_gpu() -> SnapshotStep:
    def step(
        packed: Tensor,
        w: KdaVerifyWeights,
        state: Tensor,
        window: Tensor,
        slots: Tensor,
        batch: VerifyBatch,
        out: Tensor,
    ) -> None:
        launch = bind_snapshots(w, state, window)
        launch(packed, state, window, slots, batch.row_start, batch.accepted, out)

    return step


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [1, 6, 48])
def test_snapshots_have_the_bits_of_the_fold(heads: int) -> None:
    steps = [on_gpu(c, pdl) for c in CLUSTERS for pdl in (False, True)]
    steps.append(bound_on_gpu())
    check_same_as_fold(run_on_gpu(), steps, "cuda", heads)


def call() -> dict[str, Tensor]:
    return {
        "state": torch.zeros(18, 1, DIM, DIM),
        "window": torch.zeros(18, 10, 3 * DIM, dtype=torch.bfloat16),
        "slots": torch.tensor(TABLE, dtype=torch.int32),
    }


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({}, "packed is on cpu; the kernel needs a CUDA"),
        ({"slots": torch.zeros(3).int()}, r"slots is \(3,\); it must be \[B, S\]"),
        ({"slots": torch.zeros(3, 9).int()}, r"slots is \(3, 9\).* S 1 to 8"),
        ({"slots": torch.zeros(2, 8).int()}, r"slots is .*\(2, 8\).*\(3, 8\)"),
        ({"slots": torch.zeros(3, 8)}, "slots is torch.float32"),
        ({"window": call()["window"][:, :9]}, r"window is \(18, 9, 384\).*least 10"),
        ({"window": call()["window"][:9]}, r"window is .*\(9, 10, 384\); it must be"),
        ({"state": call()["state"].bfloat16()}, "state is torch.bfloat16"),
    ],
)
def test_bad_input_is_refused(change: dict[str, Tensor], words: str) -> None:
    arguments = call() | change
    batch = batch_of([1, 1, 1], [3, 4, 0], [1, 1, 1])
    with pytest.raises(ValueError, match=words):
        kda_verify_snapshots(projections(3, 1, 0), weights(1), batch=batch, **arguments)


def bound(columns: int, kernels: list[Any]) -> tuple[BoundSnapshots, dict[str, Any]]:
    """And what it holds, by the names of the kernel's parameters."""
    w = weights(1)
    held: dict[str, Any] = {f.name: getattr(w, f.name) for f in fields(w)}
    return BoundSnapshots(kernels, w, columns, True), held


@pytest.mark.parametrize(("requests", "which"), [(1, 1), (2, 2), (5, 2)])
def test_a_bound_launch_passes_what_the_kernel_takes(requests: int, which: int) -> None:
    """In its order; the kernel is that of the number of requests."""
    pytest.importorskip("cutlass", reason="CuTe DSL is not installed")
    from verify_kernels.kda.kernel import KdaKernel

    calls: list[tuple[int, tuple[Any, ...]]] = []
    kernels: list[Any] = [
        lambda *given, own=own: calls.append((own, given)) for own in range(3)
    ]
    launch, held = bound(8, kernels)
    given = {
        "packed": projections(3, 1, 0),
        "state": call()["state"],
        "window": call()["window"],
        "state_slots": torch.zeros(requests, 8).int(),
        "row_start": torch.zeros(requests + 1).int(),
        "accepted": torch.ones(requests).int(),
        "out": torch.zeros(3, 1, DIM).bfloat16(),
    }
    launch(*given.values())
    ((own, passed),) = calls
    assert own == which
    wanted = [(given | held)[name] for name in KdaKernel(2, False, True).parameters]
    # The fold layout's four are left out before the last.
    wanted[-1:-1] = [None] * 4
    assert len(passed) == len(wanted) + 4
    assert all(a is b for a, b in zip(passed, wanted, strict=False))
    assert passed[len(wanted) :] == (held["lower_bound"], held["norm_eps"], 8, 1)


@pytest.mark.parametrize(
    ("rows", "columns"),
    [(65, 8), (3, 5)],
)
def test_a_bound_launch_refuses_what_does_not_fit(rows: int, columns: int) -> None:
    launch, _ = bound(4, [])
    packed, caches = torch.zeros(rows, 768).bfloat16(), call()
    slots, ints = torch.zeros(1, columns).int(), torch.zeros(2).int()
    with pytest.raises(ValueError, match=r"at most 64 rows and 4 columns"):
        launch(packed, caches["state"], caches["window"], slots, ints, ints[:1], packed)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({}, "state is on cpu; the kernel needs a CUDA"),
        ({"ctas": 3}, r"ctas is 3; it must be one of \(1, 2, 4, 8\)"),
        ({"state": torch.zeros(18, 1, DIM)}, r"state is \(18, 1, 128\) and window"),
        ({"state": call()["state"].bfloat16()}, "state is torch.bfloat16"),
        ({"window": call()["window"][:9]}, r"window is .*\(9, 10, 384\); it must be"),
        ({"window": call()["window"][:, :2]}, r"at least 3 entries"),
        ({"weights": weights(2)}, r"w_fb is .*\(256, 128\); it must be .*\(128, 128\)"),
    ],
)
def test_bad_input_is_not_bound(change: dict[str, Any], words: str) -> None:
    held = {name: call()[name] for name in ("state", "window")}
    with pytest.raises(ValueError, match=words):
        bind_snapshots(**{"weights": weights(1), **held, **change})
