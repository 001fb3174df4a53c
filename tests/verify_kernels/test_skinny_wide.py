# SPDX-License-Identifier: Apache-2.0
"""The wide skinny GEMM's PTX on the CPU: numbers, and the bits of the ring's."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.verify_kernels.machine import Fault
from tests.verify_kernels.machine.kernels import BF16, Edit, Outputs, gemm, gemm_ptx
from tests.verify_kernels.test_skinny_gemm import bits, check_accuracy, inputs
from verify_kernels.audit import audit
from verify_kernels.audit.sass import Instruction, NoDisassembler, disassemble
from verify_kernels.common.variant import ARCHITECTURES
from verify_kernels.skinny_gemm.host import variant
from verify_kernels.skinny_gemm.tiling import SUM_ORDER, Tiling
from verify_kernels.skinny_gemm.wide_tiling import WideTiling

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")


def ring_of(x: Tensor, w: Tensor, output: str = "bf16") -> Tensor:
    """SkinnyGemmKernel's result, 8 tokens a launch."""
    k = w.shape[1]
    t = Tiling(k, cluster=8 if k > 7168 else 1, stages=1, partial_buffers=1)
    return torch.cat([gemm(t, part, [w], 1, (output,))[0] for part in x.split(8)])


def wide(k: int, tiles: int, cluster: int, along: int, groups: int, depth: int,
         loads: int = 8) -> WideTiling:  # fmt: skip
    return WideTiling(k, tiles, cluster, along, groups, depth, loads)


#: Tilings, N and clusters. One CTA and clusters of 2 to 8, fewer tiles than CTAs; one
#: warpgroup with all of K and several; parts of X, all of it at once, the last part not
#: whole; blocks of unequal height, one and several turns, blocks and clusters without
#: rows.
CASES = [
    (wide(128, 1, 1, 2, 1, 4), 77, 2),
    (wide(128, 8, 1, 1, 1, 2, 2), 3, 4),
    (wide(384, 4, 1, 1, 1, 4, 5), 70, 2),
    (wide(768, 2, 1, 2, 1, 12), 62, 1),
    (wide(768, 8, 1, 1, 1, 4, 4), 3, 1),
    (wide(1536, 2, 1, 1, 2, 8), 33, 1),
    (wide(1536, 4, 2, 1, 1, 4, 3), 35, 1),
    (wide(1536, 2, 2, 2, 1, 12), 3, 1),
    (wide(2112, 2, 2, 1, 1, 11), 17, 1),
    (wide(3584, 1, 1, 1, 4, 4, 2), 17, 1),
    (wide(3584, 4, 2, 1, 2, 4, 2), 2, 1),
    (wide(3584, 1, 1, 1, 1, 14), 5, 1),
    (wide(4224, 4, 4, 1, 1, 3), 1, 1),
    (wide(6144, 1, 4, 1, 1, 8), 9, 1),
    (wide(7168, 8, 8, 1, 1, 7), 1, 1),
    (wide(12288, 2, 2, 1, 2, 8), 1, 1),
    (wide(33792, 1, 8, 1, 1, 11), 1, 1),
]


def name_of(value: object) -> str:
    return value.name if isinstance(value, WideTiling) else str(value)


def check_right_and_the_bits_of_the_ring(
    t: WideTiling, n: int, clusters: int, arch: str
) -> None:
    """Field case F40: at every M too; "noise" shows any other order of the sums."""
    m = t.tokens - 3
    x, w = inputs(n, t.k, "noise", m, device="cpu")
    (y,) = gemm(t, x, [w], clusters, seed=n, races=t.k < 7168, arch=arch)
    check_accuracy(y, x, w)
    some = sorted({*range(4), *range(m - 4, m)})
    assert torch.equal(bits(y[some]), bits(ring_of(x[some], w)))
    if t.k < 4000:
        (alone,) = gemm(t, x[:1], [w], clusters, seed=n + 1, races=True, arch=arch)
        assert torch.equal(bits(alone), bits(y[:1]))


def check_matrices_of_one_launch(t: WideTiling, outputs: Outputs) -> None:
    """Rows of all three meet in one block."""
    x, w = inputs(22, t.k, "outliers", t.tokens - 1, device="cpu")
    ws = list(w.split([9, 1, 12]))
    alone = [ring_of(x, part, o) for part, o in zip(ws, outputs, strict=True)]
    for y, right in zip(gemm(t, x, ws, 1, outputs), alone, strict=True):
        assert torch.equal(bits(y), bits(right))


def check_that_nan_stays_alone(t: WideTiling) -> None:
    """What a lane holds of other rows and tokens reaches no result but theirs."""
    x, w = inputs(21, t.k, rows=5, device="cpu")
    (right,) = gemm(t, x, [w])
    x[3], w[8] = torch.nan, torch.nan
    (found,) = gemm(t, x, [w], finite=False)
    assert found[3].isnan().all() and found[:, 8].isnan().all()
    found[3], found[:, 8] = right[3], right[:, 8]
    assert torch.equal(bits(found), bits(right))


def check_audit(t: WideTiling, outputs: Outputs, arch: str) -> None:
    """No spill, and of all tensors only the weights are read before the wait."""
    report = audit(variant(t, outputs), arch)
    assert report.findings == ()
    assert report.early == tuple(f"w{g}" for g in range(len(outputs)))


#: wgmma everywhere, mma.sync in some.
ON = [(*case, "sm_90a") for case in CASES]
ON += [(*case, "sm_100a") for case in CASES[1:6:2]]


@pytest.mark.parametrize(("t", "n", "clusters", "arch"), ON, ids=name_of)
def test_right_and_the_bits_of_the_ring(
    t: WideTiling, n: int, clusters: int, arch: str
) -> None:
    check_right_and_the_bits_of_the_ring(t, n, clusters, arch)


@pytest.mark.parametrize(
    ("t", "outputs"),
    [
        (wide(7168, 2, 2, 1, 2, 4), ("fp32", "bf16", "bf16")),
        (wide(384, 2, 1, 1, 1, 6), ("fp32",) * 3),
    ],
    ids=name_of,
)
def test_matrices_of_one_launch_get_the_bits_of_their_own(
    t: WideTiling, outputs: Outputs
) -> None:
    check_matrices_of_one_launch(t, outputs)


@pytest.mark.parametrize(
    "t",
    [wide(384, 1, 1, 1, 1, 4), wide(1536, 2, 2, 1, 1, 4), wide(1536, 2, 1, 1, 2, 4)],
    ids=name_of,
)
def test_a_row_and_a_token_of_nan_stay_alone(t: WideTiling) -> None:
    check_that_nan_stays_alone(t)


@functools.cache
def unchanged(t: WideTiling, n: int, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """X, W and the kernel's result."""
    x, w = inputs(n, t.k, rows=rows, device="cpu")
    return x, w, gemm(t, x, [w])[0]


def noticed(
    t: WideTiling, n: int, rows: int, edit: Edit, seeds: int, races: bool = True
) -> bool:
    """Whether some schedule of the changed kernel faults, hangs or gives other bits."""
    x, w, right = unchanged(t, n, rows)
    for seed in range(seeds):
        try:
            (found,) = gemm(t, x, [w], seed=seed, edit=edit, finite=False, races=races)
        except Fault:
            return True
        if not torch.equal(bits(found), bits(right)):
            return True
    return False


def replaced(pattern: str, number: int, by: str = "") -> Edit:
    """The number-th match of a pattern replaced."""

    def edit(ptx: str) -> str:
        match = list(re.finditer(pattern, ptx, re.S))[number]
        return ptx[: match.start()] + by + ptx[match.end() :]

    return edit


def test_a_kernel_without_its_wait_for_earlier_kernels_is_noticed() -> None:
    t = wide(384, 1, 1, 1, 1, 4)
    x, w = inputs(20, 384, rows=1, device="cpu")
    with pytest.raises(Fault, match=r"a store to y0 before griddepcontrol\.wait"):
        gemm(t, x, [w], edit=replaced(r"griddepcontrol\.wait;", 0))


#: A wait for a barrier, as the DSL writes it.
WAIT = r"\{\s*\.reg \.pred\s+P1;.*?DONE:\s*\}"
#: X in a part a segment; two turns.
HANDSHAKES = [
    (wide(1536, 1, 2, 1, 1, 4, 1), 66, 3),
    (wide(1536, 2, 1, 1, 2, 4, 2), 66, 11),
]


@pytest.mark.parametrize(("t", "n", "rows"), HANDSHAKES, ids=name_of)
def test_every_wait_is_needed(t: WideTiling, n: int, rows: int) -> None:
    """One a segment for X, one for sums that have come, one for such that have been
    read."""
    found = len(re.findall(WAIT, gemm_ptx(t, BF16), re.S))
    assert found == t.slice_segments + 2
    assert all(noticed(t, n, rows, replaced(WAIT, i), 8) for i in range(found))


@pytest.mark.parametrize(("t", "n", "rows"), HANDSHAKES, ids=name_of)
def test_a_buffer_is_given_back_when_all_of_its_words_have_come(
    t: WideTiling, n: int, rows: int
) -> None:
    """The vote brings every lane's data into the arrival."""

    def edit(ptx: str) -> str:
        found, count = re.subn(
            r"vote\.sync\.any\.pred\s+(%p\d+),[^;]*;", r"setp.ne.b32 \1, 0, 0;", ptx
        )
        assert count
        return found

    assert noticed(t, n, rows, edit, 8)


@pytest.mark.parametrize("line", ["fence.proxy.async.shared::cta;", "wgmma.fence"])
def test_the_fences_of_asynchronous_products_are_needed(line: str) -> None:
    t = wide(384, 2, 1, 1, 1, 4)
    edit = replaced(rf"{re.escape(line)}[\w.]*;?", 0)
    assert noticed(t, 9, 3, edit, 8)


def test_a_cta_is_written_to_when_its_barriers_are_made() -> None:
    t = wide(1536, 1, 2, 1, 1, 4)
    edit = replaced(r"barrier\.cluster\.wait[\w.]*;", 0)
    assert noticed(t, 9, 1, edit, 60, races=False)


AUDITED = [
    (wide(768, 4, 1, 1, 1, 12, 4), BF16),
    (wide(7168, 2, 2, 1, 2, 7), ("fp32", "bf16", "bf16")),
]


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize(("t", "outputs"), AUDITED, ids=name_of)
def test_it_compiles_within_its_registers_and_passes_the_audit(
    t: WideTiling, outputs: Outputs, arch: str
) -> None:
    check_audit(t, outputs, arch)


def machine_code(t: WideTiling, arch: str, directory: Path) -> tuple[Instruction, ...]:
    cubin = variant(t, BF16).compile(arch, directory).artifacts.CUBIN
    try:
        return disassemble(cubin).instructions
    except NoDisassembler as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_weights_in_flight_stand_before_the_wait_in_machine_code(
    arch: str, tmp_path: Path
) -> None:
    """All of them: ptxas moves some kinds of load. And none is waited for: it puts
    moves behind loads whose words are to go elsewhere."""
    t = wide(7168, 2, 2, 1, 2, 14)
    code = machine_code(t, arch, tmp_path)
    (wait,) = (i for i, ins in enumerate(code) if ins.head == "ACQBULK")
    loads = [i for i, ins in enumerate(code[:wait]) if ins.head == "LDG"]
    assert len(loads) == 2 * t.depth
    words = {
        f"R{int(code[i].operands[0][1:]) + word}" for i in loads for word in range(4)
    }
    end = next(i for i in range(loads[-1], wait) if code[i].head == "BRA")
    others = (ins for ins in code[loads[0] : end] if ins.head != "LDG")
    used = re.findall(r"\bR\d+\b", " ".join(ins.text for ins in others))
    assert words.isdisjoint(used)


def test_products_of_a_segment_are_under_way_together(tmp_path: Path) -> None:
    """ptxas serialises wgmma whose registers it cannot keep in place."""
    t = wide(7168, 8, 8, 1, 1, 14, 14)
    names = [ins.opcode for ins in machine_code(t, "sm_90a", tmp_path)]
    products = [n for n in names if "GMMA" in n or n.startswith("WARPGROUP")]
    segment = ["WARPGROUP.ARRIVE", *["HGMMA.64x64x16.F32.BF16"] * (2 * t.chunks)]
    segment.append("WARPGROUP.DEPBAR.LE")
    assert products == segment * t.slice_segments


def tilings() -> Iterator[WideTiling]:
    """Every K with every share of it that fits."""
    for k, tiles in itertools.product(SUM_ORDER, (1, 2, 4, 8)):
        for cluster, groups in itertools.product((1, 2, 4, 8), (1, 2, 4)):
            for loads in (2, 6):
                with contextlib.suppress(ValueError):
                    yield wide(k, tiles, cluster, 1, groups, SEGMENT[k], loads)


SEGMENT = {k: k // slices // warps // 32 for k, (slices, warps) in SUM_ORDER.items()}


def test_parts_and_shares_are_all_of_k_and_all_tiles() -> None:
    seen = set()
    for t in tilings():
        seen.add(t.k)
        assert (t.parts - 1) * t.part_chunks < t.local_chunks <= t.parts * t.part_chunks
        assert t.cluster * t.k_groups * t.unit_k == t.k
        assert t.unit_k == 32 * t.unit_slices * t.slice_chunks
        assert t.cluster * t.own_tiles >= t.token_tiles
        # A power of two: a subtree of the sum.
        assert t.unit_slices == 1 << t.levels
        assert t.tile_pitch >> 4 < 1 << 14, "the descriptor has 14 bits for it"
        if t.moves_registers:
            shares = t.multipliers * t.registers + t.copy_registers
            assert shares <= (t.multipliers + 1) * t.register_limit
    assert seen == set(SUM_ORDER)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"k": 1024}, "k=1024: no order of sums is fixed for it; K is one of 64, 128,"),
        ({"k": 768, "token_tiles": 3}, "token_tiles=3 must be 1, 2, 4 or 8"),
        (
            {"k": 1536, "cluster": 2, "k_groups": 2},
            "cluster=2, k_groups=2: their product must divide the 2 slices of K 1536",
        ),
        ({"k": 1536, "k_groups": 0}, "cluster=1, k_groups=0: both must be at least 1"),
        (
            {"k": 768, "warpgroups": 0},
            "warpgroups=0, k_groups=1: .* 128 threads; a CTA",
        ),
        ({"k": 768, "warpgroups": 8}, "1152 threads; a CTA has 256 to 1024"),
        (
            {"k": 768, "warpgroups": 3, "ctas_per_sm": 5},
            "ctas_per_sm=5 must lie in 1..4: an SM holds 2048 threads, a CTA has 512",
        ),
        (
            {"k": 768, "depth": 9},
            "depth=9 must divide 24, the steps of 32 columns in a slice of K 768, and "
            "be at least 4, those in a segment",
        ),
        ({"k": 768, "depth": 3}, "depth=3 must divide 24, .* at least 4"),
        ({"k": 768, "token_loads": 0}, "token_loads=0 must be positive"),
        (
            {"k": 768, "token_tiles": 8, "token_loads": 3},
            "token_loads=3 must be positive, with 8 token tiles also even",
        ),
        (
            {"k": 7168, "token_tiles": 8, "cluster": 4},
            r"needs 2\d\d\d\d\d bytes of shared memory; raise cluster",
        ),
        (
            {"k": 7168, "token_tiles": 8, "cluster": 8, "warpgroups": 2, "depth": 14},
            "a thread would need 252 registers and has 2..; lower depth",
        ),
    ],
)
def test_what_does_not_fit_is_refused(arguments: dict[str, int], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        WideTiling(**arguments)


def test_names_say_everything_that_a_kernel_is_made_with() -> None:
    """Field case F15: the cache tells kernels apart by name."""
    base = WideTiling(3584, 1, 1, 1, 1, 4, 2)
    changes: dict[str, int] = {
        "k": 6144, "token_tiles": 2, "cluster": 2, "warpgroups": 2, "k_groups": 2,
        "depth": 7, "token_loads": 4, "ctas_per_sm": 2, "staged": 1,
    }  # fmt: skip
    fields = {f.name for f in dataclasses.fields(base)}
    assert fields == {*changes, "stages"}
    names = {dataclasses.replace(base, **{n: v}).name for n, v in changes.items()}
    whole = dataclasses.replace(base, staged=1, token_loads=1)
    names |= {dataclasses.replace(whole, stages=n).name for n in (3, 4)}
    assert len(names | {base.name}) == 3 + len(changes)
