# SPDX-License-Identifier: Apache-2.0
"""The KDA verify kernel's PTX on the CPU, under many schedules: numbers, bits, and no
two accesses to shared memory that nothing orders (`tests.verify_kernels.machine`)."""

from __future__ import annotations

import itertools
from dataclasses import fields

import numpy as np
import pytest
from torch import Tensor

from tests.verify_kernels import test_kda_kernel as tests
from tests.verify_kernels.machine import GlobalMemory, launch, tensor_argument
from tests.verify_kernels.machine.kernels import compiled
from verify_kernels import VerifyBatch
from verify_kernels.kda import KdaFoldState, KdaVerifyWeights
from verify_kernels.kda.host import CLUSTERS, variant_name

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")


#: Extents and strides that are open, of each tensor; else one extent.
OPENED = {
    "packed": (2, 1),
    "norm": (0, 0),
    "state": (2, 1),
    "u": (2, 1),
    "key": (2, 1),
    "decay": (2, 1),
    "counts": (2, 1),
    "out": (2, 1),
}
WRITTEN = ("state", "window", "u", "key", "decay", "counts", "out")


def run_on_machine(
    layout: str,
    ctas: int,
    w: KdaVerifyWeights,
    batch: VerifyBatch,
    tensors: dict[str, Tensor],
    seed: int,
    races: bool,
) -> None:
    """One launch; ``tensors`` by the names of the kernel's parameters."""
    variant, ptx = compiled("kda", variant_name(ctas, layout))
    memory = GlobalMemory()
    parameters = []
    for name in variant.kernel.parameters:
        tensor = tensors.get(name)
        for holder in (w, batch):
            if tensor is None:
                tensor = getattr(holder, name, None)
        assert isinstance(tensor, Tensor)
        early = name in variant.kernel.early_loads
        at = memory.add(tensor, name, dynamic=not early, writable=name in WRITTEN)
        extents, strides = OPENED.get(name, (1, 0))
        shape, steps = tensor.shape[:extents], tensor.stride()[:strides]
        if name == "window":
            shape, steps = tensor.shape, tensor.stride()[:2]
        elif tensor.dim() == 2 and name == "state_slots":
            shape, steps = tensor.shape, tensor.stride()[:1]
        parameters.append(tensor_argument(at, shape, steps))
    for number in (w.lower_bound, w.norm_eps):
        parameters.append(np.float32(number).tobytes())
    columns = tensors["state_slots"].shape[1] if layout == "snapshot" else 1
    parameters.append(np.int32(columns).tobytes())
    launch(
        ptx,
        memory,
        parameters,
        grid=(ctas, tensors["state"].shape[1], batch.size),
        block=(variant.kernel.threads, 1, 1),
        cluster=(ctas, 1, 1),
        shared_bytes=variant.kernel.shared_bytes,
        seed=seed,
        races=races,
    )


def on_machine(ctas: int, seed: int = 0, races: bool = False) -> tests.Step:
    """Seeds count up from step to step."""
    seeds = itertools.count(seed)

    def step(
        packed: Tensor,
        w: KdaVerifyWeights,
        cache: KdaFoldState,
        batch: VerifyBatch,
        out: Tensor,
    ) -> None:
        tensors = {f.name: getattr(cache, f.name) for f in fields(cache)}
        tensors |= {"packed": packed, "out": out}
        run_on_machine("fold", ctas, w, batch, tensors, next(seeds), races)

    return step


def snapshots_on_machine(
    ctas: int, seed: int = 0, races: bool = False
) -> tests.SnapshotStep:
    seeds = itertools.count(seed)

    def step(
        packed: Tensor,
        w: KdaVerifyWeights,
        state: Tensor,
        window: Tensor,
        slots: Tensor,
        batch: VerifyBatch,
        out: Tensor,
    ) -> None:
        tensors = {"packed": packed, "state": state, "window": window}
        tensors |= {"state_slots": slots, "out": out}
        run_on_machine("snapshot", ctas, w, batch, tensors, next(seeds), races)

    return step


def test_ragged_steps_are_right() -> None:
    """Two heads, four requests, four steps."""
    tests.check_ragged_steps(on_machine(8))


def test_widths_and_folds_have_the_same_bits() -> None:
    tests.check_widths_and_folds(on_machine(8, 50))


def test_random_accepts_are_plain_decoding() -> None:
    tests.check_random_accepts(on_machine(8, 80), 2)


def test_schedules_clusters_and_batches_have_the_same_bits() -> None:
    """And no race: four schedules over all cluster sizes."""
    steps = [on_machine(c, s, races=True) for s, c in enumerate((*CLUSTERS, 8))]
    tests.check_equal_over(steps)
