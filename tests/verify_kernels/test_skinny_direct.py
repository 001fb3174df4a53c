# SPDX-License-Identifier: Apache-2.0
"""The direct skinny GEMM's PTX on the CPU: numbers, and the bits of the ring's."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.verify_kernels.machine import Fault
from tests.verify_kernels.machine.kernels import BF16, Outputs, gemm
from tests.verify_kernels.test_skinny_gemm import bits, check_accuracy, inputs
from verify_kernels.audit import audit
from verify_kernels.audit.sass import NoDisassembler, disassemble
from verify_kernels.common.variant import ARCHITECTURES
from verify_kernels.skinny_gemm.direct_tiling import DirectTiling
from verify_kernels.skinny_gemm.host import variant
from verify_kernels.skinny_gemm.tiling import SUM_ORDER, Tiling

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")


def ring_tiling(k: int, token_tiles: int) -> Tiling:
    return Tiling(k, token_tiles, held_tiles=token_tiles, stages=2, partial_buffers=1)


@functools.cache
def ring(k: int, n: int, kind: str, rows: int, output: str) -> Tensor:
    """SkinnyGemmKernel's result, of one CTA, for `inputs`."""
    x, w = inputs(n, k, kind, rows, device="cpu")
    return gemm(ring_tiling(k, -(-rows // 8)), x, [w], 1, (output,))[0]


#: Tilings, N and CTAs: one shot and rolling, 8 and 16 rows, tokens staged and not,
#: warps with parts of slices, with whole ones, with several and with all of K. Runs
#: differ in length; the last but one N leaves CTAs of one row, the last one CTAs
#: without any.
CASES = [
    (DirectTiling(128, 1, 1, 4, 1, 1), 101, 13),
    (DirectTiling(128, 8, 2, 4, 1, 1), 37, 3),
    (DirectTiling(128, 2, 2, 1, 2, 2), 33, 3),
    (DirectTiling(384, 2, 2, 6, 1, 2), 130, 9),
    (DirectTiling(768, 1, 2, 6, 1, 4), 75, 5),
    (DirectTiling(768, 4, 2, 3, 1, 2), 21, 2),
    (DirectTiling(1536, 1, 1, 12, 1, 4), 50, 7),
    (DirectTiling(1536, 2, 2, 2, 2, 4), 30, 2),
    (DirectTiling(2112, 2, 1, 11, 1, 3, staged=12), 21, 3),
    (DirectTiling(3584, 1, 1, 2, 3, 8, staged=5), 15, 2),
    (DirectTiling(4224, 1, 1, 22, 2, 4), 15, 2),
    (DirectTiling(7168, 1, 1, 14, 4, 8, staged=8), 15, 2),
    (DirectTiling(7168, 2, 2, 8, 2, 2), 19, 2),
    (DirectTiling(384, 1, 1, 6, 1, 2), 5, 5),
    (DirectTiling(7168, 1, 1, 4, 2, 4), 2, 3),
]


def name_of(value: object) -> str:
    return value.name if isinstance(value, DirectTiling) else str(value)


@pytest.mark.parametrize(("t", "n", "ctas"), CASES, ids=name_of)
def test_right_and_the_bits_of_the_ring_under_every_schedule(
    t: DirectTiling, n: int, ctas: int
) -> None:
    """Field case F40: at every M too; "noise" shows any other order of the sums."""
    most = t.max_tokens
    x, w = inputs(n, t.k, "noise", most, device="cpu")
    wanted = ring(t.k, n, "noise", most, "bf16")
    check_accuracy(wanted, x, w)
    for rows in sorted({1, most // 2 + 1, most}):
        for seed in range(2):
            (y,) = gemm(t, x[:rows], [w], ctas, seed=100 * rows + seed)
            assert torch.equal(bits(y), bits(wanted[:rows])), (rows, seed)


@pytest.mark.parametrize(
    ("t", "ctas", "outputs"),
    [
        (DirectTiling(7168, 1, 1, 14, 4, 4), 4, ("fp32", "bf16", "bf16")),
        (DirectTiling(7168, 1, 2, 8, 1, 1, staged=3), 2, ("fp32",) * 3),
        (DirectTiling(384, 2, 2, 1, 2, 2), 2, ("bf16", "fp32", "bf16")),
        (DirectTiling(384, 1, 1, 6, 1, 2), 5, ("bf16",) * 3),
    ],
    ids=name_of,
)
def test_matrices_of_one_launch_get_the_bits_of_their_own(
    t: DirectTiling, ctas: int, outputs: Outputs
) -> None:
    """Rows of all three meet in one CTA."""
    rows = t.max_tokens - 1
    x, w = inputs(22, t.k, "outliers", rows, device="cpu")
    ws = list(w.split([9, 1, 12]))
    other = ring_tiling(t.k, t.token_tiles)
    alone = [
        gemm(other, x, [part], 1, (o,))[0] for part, o in zip(ws, outputs, strict=True)
    ]
    for y, right in zip(gemm(t, x, ws, ctas, outputs), alone, strict=True):
        assert torch.equal(bits(y), bits(right))


@pytest.mark.parametrize(
    "t",
    [
        DirectTiling(384, 1, 2, 6, 1, 2),
        DirectTiling(1536, 1, 1, 6, 1, 4, staged=5),
        DirectTiling(128, 1, 2, 1, 4, 4),
    ],
    ids=name_of,
)
def test_a_row_and_a_token_of_nan_stay_alone(t: DirectTiling) -> None:
    """What a lane holds of other rows and tokens reaches no result but theirs."""
    x, w = inputs(21, t.k, rows=5, device="cpu")
    (right,) = gemm(t, x, [w], 3)
    x[3], w[8] = torch.nan, torch.nan
    (found,) = gemm(t, x, [w], 3, finite=False)
    assert found[3].isnan().all() and found[:, 8].isnan().all()
    found[3], found[:, 8] = right[3], right[:, 8]
    assert torch.equal(bits(found), bits(right))


def without(pattern: str, ptx: str) -> str:
    found, count = re.subn(pattern, "", ptx)
    assert count == 1
    return found


@pytest.mark.parametrize("staged", [0, 4])
def test_a_kernel_without_its_wait_for_earlier_kernels_is_noticed(staged: int) -> None:
    t = DirectTiling(384, 1, 2, 6, 1, 1, staged)
    x, w = inputs(20, 384, rows=1, device="cpu")
    with pytest.raises(Fault, match=r"a store to y0 before griddepcontrol\.wait"):
        gemm(t, x, [w], 2, edit=functools.partial(without, r"griddepcontrol\.wait;"))


def test_a_kernel_without_its_barrier_is_noticed() -> None:
    t = DirectTiling(384, 1, 2, 6, 1, 2)
    x, w = inputs(20, 384, rows=3, device="cpu")
    (right,) = gemm(t, x, [w], 2)
    edit = functools.partial(without, r"bar\.sync\s+0;")
    found = [
        gemm(t, x, [w], 2, seed=seed, edit=edit, finite=False)[0] for seed in range(10)
    ]
    assert any(not torch.equal(bits(y), bits(right)) for y in found)


AUDITED = [
    (DirectTiling(128, 1, 2, 4, 1, 1), BF16),
    (DirectTiling(768, 1, 2, 6, 1, 4, ctas_per_sm=5), BF16),
    (DirectTiling(7168, 1, 1, 14, 4, 4), ("fp32", "bf16", "bf16")),
    (DirectTiling(7168, 1, 1, 28, 2, 4, staged=4), BF16),
    (DirectTiling(7168, 1, 1, 14, 2, 4, staged=4, ctas_per_sm=2), BF16),
]


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize(("t", "outputs"), AUDITED, ids=name_of)
def test_it_compiles_within_its_registers_and_passes_the_audit(
    t: DirectTiling, outputs: Outputs, arch: str
) -> None:
    """No spill, and of all tensors only the weights are read before the wait."""
    report = audit(variant(t, outputs), arch)
    assert report.findings == ()
    assert report.early == tuple(f"w{g}" for g in range(len(outputs)))


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_weights_in_flight_stand_before_the_wait_in_machine_code(
    arch: str, tmp_path: Path
) -> None:
    """All of them, and no load of a token: ptxas moves some kinds of load."""
    t = DirectTiling(7168, 1, 1, 14, 2, 4)
    cubin = variant(t, BF16).compile(arch, tmp_path).artifacts.CUBIN
    try:
        code = disassemble(cubin).instructions
    except NoDisassembler as error:
        pytest.skip(str(error))
    (wait,) = (i for i, ins in enumerate(code) if ins.head == "ACQBULK")
    loads = [i for i, ins in enumerate(code) if ins.head == "LDG"]
    assert sum(i < wait for i in loads) == t.depth * t.chunks
    assert len(loads) == 2 * t.steps


def tilings() -> Iterator[DirectTiling]:
    """Every K with every number of warps that fits."""
    for k, tiles, halves in itertools.product(SUM_ORDER, (1, 2, 4, 8), (1, 2)):
        for warps in range(1, 33):
            for staged in (0, 8 * tiles - 3):
                with contextlib.suppress(ValueError):
                    yield DirectTiling(k, tiles, halves, warps, 1, 1, staged)


def test_partial_sums_meet_every_bank_once() -> None:
    """A warp's stores of its accumulators; its reads of the leaves of a few rows."""
    lane = np.arange(32)
    count = 0
    for t in tilings():
        stored = 2 * (lane % 4) * t.token_pitch + lane // 4
        assert len(set(stored % 32)) == 32, t
        if t.leaves > 1:
            count += 1
            row = lane // t.leaves % t.rows
            token = lane // t.leaves // t.rows
            part = lane % t.leaves * t.leaf_parts
            read = part * t.part_pitch + token * t.token_pitch + row
            # Two leaves of 8 rows are of two tokens, and meet some banks twice.
            assert len(set(read % 32)) == 32 or (t.leaves, t.rows) == (2, 8), t
    assert count > 100


def test_staged_tokens_are_read_without_conflicts() -> None:
    """16 bytes a lane: eight lanes, of two tokens, meet all 32 banks once."""
    for t in tilings():
        if t.staged:
            word = np.arange(8) // 4 * (t.staged_pitch // 4) + np.arange(8) % 4 * 4
            banks = {int(w + i) % 32 for w in word for i in range(4)}
            assert len(banks) == 32, t
            assert t.staged_pitch >= 64 * t.steps


def test_parts_fill_shared_memory_and_no_more() -> None:
    """Every partial sum has its place, and the last one ends where memory does."""
    for t in tilings():
        assert t.warps * t.warp_parts == t.leaves * t.leaf_parts
        assert t.leaves in (1, 2, 4, 8)
        assert t.part_pitch >= t.tokens * t.token_pitch
        parts = 0 if t.in_registers else t.warps * t.warp_parts
        assert t.shared_bytes == t.staged_bytes + 4 * parts * t.part_pitch


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"k": 1024}, "k=1024: no order of sums is fixed for it; K is one of 64, 128,"),
        ({"k": 768, "token_tiles": 3}, "token_tiles=3 must be 1, 2, 4 or 8"),
        ({"k": 768, "halves": 3}, "halves=3 must be 1 or 2: 8 or 16 rows a CTA"),
        ({"k": 768, "warps": 4}, "warps=4 must divide the 6 segments of K 768"),
        ({"k": 33792, "warps": 48}, "warps=48 must divide .* and be at most 32"),
        ({"k": 768, "warps": 3, "depth": 3}, "depth=3 must lie in 1..2, the segments"),
        ({"k": 768, "warps": 6, "depth": 0}, "depth=0 must lie in 1..1"),
        ({"k": 768, "warps": 6, "token_chunks": 5}, "token_chunks=5 must lie in 1..4"),
        ({"k": 768, "warps": 6, "staged": 9}, "staged=9 tokens are not 1 token_tiles"),
        (
            {"k": 768, "warps": 6, "staged": 3, "token_chunks": 4},
            "token_chunks=4 must lie in 1..3, all that a warp reads",
        ),
        ({"k": 7168, "warps": 28, "ctas_per_sm": 3}, "ctas_per_sm=3 must lie in 1..2:"),
        (
            {"k": 7168, "warps": 14, "depth": 4},
            "hold 148 registers of weights, tokens and sums and has 128 in all; lower",
        ),
        (
            {"k": 7168, "warps": 14, "staged": 8, "ctas_per_sm": 2, "halves": 1},
            "needs 144256 bytes of shared memory; lower staged, token_tiles",
        ),
    ],
)
def test_tilings_that_cannot_be_are_refused(
    arguments: dict[str, int], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        DirectTiling(**arguments)


def test_names_say_everything_that_a_kernel_is_made_with() -> None:
    """Field case F15: the cache tells kernels apart by name."""
    base = DirectTiling(3584, 1, 1, 7, 1, 4)
    changes: dict[str, int] = {
        "k": 7168, "token_tiles": 2, "halves": 2, "warps": 14, "depth": 2,
        "token_chunks": 3, "staged": 8, "ctas_per_sm": 2,
    }  # fmt: skip
    assert changes.keys() == {f.name for f in dataclasses.fields(base)}
    names = {dataclasses.replace(base, **{n: v}).name for n, v in changes.items()}
    assert len(names | {base.name}) == 1 + len(changes)
