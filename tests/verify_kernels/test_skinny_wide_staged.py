# SPDX-License-Identifier: Apache-2.0
"""The wide skinny GEMM with asynchronous copies on the CPU: numbers, the bits of the
ring's, and what is noticed when a wait is missing."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.verify_kernels.machine import Fault
from tests.verify_kernels.machine.kernels import BF16, Edit, Outputs, gemm, gemm_ptx
from tests.verify_kernels.test_skinny_gemm import inputs
from tests.verify_kernels.test_skinny_wide import (
    WAIT,
    check_audit,
    check_matrices_of_one_launch,
    check_right_and_the_bits_of_the_ring,
    check_that_nan_stays_alone,
    machine_code,
    name_of,
    noticed,
    replaced,
)
from verify_kernels.common.variant import ARCHITECTURES
from verify_kernels.skinny_gemm.tiling import SUM_ORDER
from verify_kernels.skinny_gemm.wide_tiling import LAG, WideTiling

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")


def staged(k: int, tiles: int, cluster: int, along: int, groups: int, depth: int,
           loads: int = 8, stages: int = 0) -> WideTiling:  # fmt: skip
    return WideTiling(
        k, tiles, cluster, along, groups, depth, loads, staged=1, stages=stages
    )


#: Tilings, N and clusters. X whole and through stages; parts that are segments, more
#: and less; queues that end within a slice, with one step more than a product takes and
#: with a whole slice; products of several pieces; one turn and several; clusters
#: without rows.
CASES = [
    (staged(128, 1, 1, 2, 1, 4), 77, 2),
    (staged(128, 8, 1, 1, 1, 3, 2), 3, 4),
    (staged(384, 4, 1, 1, 1, 5, 5), 70, 2),
    (staged(768, 8, 1, 1, 1, 24, 8), 70, 1),
    (staged(768, 8, 1, 1, 1, 12, 8, 4), 70, 1),
    (staged(768, 4, 1, 3, 1, 8, 4, 3), 3, 1),
    (staged(1536, 2, 1, 1, 2, 9), 33, 1),
    (staged(1536, 4, 2, 1, 1, 4, 4, 3), 67, 1),
    (staged(1536, 2, 2, 1, 1, 24), 3, 1),
    (staged(2112, 8, 2, 1, 1, 5, 6), 17, 1),
    (staged(3584, 1, 1, 1, 4, 6, 2), 17, 1),
    (staged(4224, 4, 4, 1, 1, 3, 3, 5), 1, 1),
    (staged(7168, 8, 8, 1, 1, 10), 1, 1),
    (staged(12288, 1, 8, 1, 1, 7, 1, 3), 1, 1),
    (staged(33792, 1, 8, 1, 1, 9, 1, 4), 1, 1),
]
#: wgmma everywhere, mma.sync in some.
ON = [(*case, "sm_90a") for case in CASES]
ON += [(*CASES[i], "sm_100a") for i in (1, 5, 7)]


@pytest.mark.parametrize(("t", "n", "clusters", "arch"), ON, ids=name_of)
def test_right_and_the_bits_of_the_ring(
    t: WideTiling, n: int, clusters: int, arch: str
) -> None:
    check_right_and_the_bits_of_the_ring(t, n, clusters, arch)


@pytest.mark.parametrize(
    ("t", "outputs"),
    [
        (staged(1536, 2, 2, 1, 1, 4, 2, 3), ("fp32", "bf16", "bf16")),
        (staged(384, 2, 1, 1, 1, 6), ("fp32",) * 3),
    ],
    ids=name_of,
)
def test_matrices_of_one_launch_get_the_bits_of_their_own(
    t: WideTiling, outputs: Outputs
) -> None:
    check_matrices_of_one_launch(t, outputs)


@pytest.mark.parametrize(
    "t", [staged(384, 1, 1, 1, 1, 4), staged(1536, 2, 2, 1, 1, 4, 2, 3)], ids=name_of
)
def test_a_row_and_a_token_of_nan_stay_alone(t: WideTiling) -> None:
    check_that_nan_stays_alone(t)


#: X through stages, in a part a segment; two turns.
STREAMED = (staged(1536, 1, 2, 1, 1, 6, 1, 3), 66, 3)
#: X whole, one turn and two.
WHOLE = [
    (staged(384, 2, 1, 1, 1, 4), 20, 9),
    (staged(1536, 2, 1, 1, 2, 5, 2), 66, 11),
]


def test_every_wait_of_a_barrier_is_needed() -> None:
    """One a part for X, one for a part's place, one for sums that have come at each of
    the two places where they are finished, one for such that have been read."""
    t, n, rows = STREAMED
    found = len(re.findall(WAIT, gemm_ptx(t, BF16), re.S))
    assert found == t.slice_chunks // t.part_chunks + 4
    assert all(noticed(t, n, rows, replaced(WAIT, i), 8) for i in range(found))


@pytest.mark.parametrize(("t", "n", "rows"), [STREAMED, *WHOLE], ids=name_of)
def test_every_wait_for_copies_is_needed(t: WideTiling, n: int, rows: int) -> None:
    """One a piece for weights, one for X; neither may leave one group more."""
    pattern = r"cp\.async\.wait_group (\d+);"
    found = re.findall(pattern, gemm_ptx(t, BF16))
    assert len(found) == len(list(t.pieces())) + 1
    for i, left in enumerate(found):
        edit = replaced(pattern, i, f"cp.async.wait_group {int(left) + 1};")
        assert noticed(t, n, rows, edit, 8), i


@pytest.mark.parametrize(("t", "n", "rows"), [STREAMED, WHOLE[1]], ids=name_of)
def test_a_place_is_copied_to_when_its_words_have_come(
    t: WideTiling, n: int, rows: int
) -> None:
    """Each copy's place needs a sum that needs the words; without that, loads that are
    under way would be overwritten."""
    ptx = gemm_ptx(t, BF16)
    begin = ptx.index("cp.async.wait_group")

    def edit(ptx: str) -> str:
        """The first copies after the first wait stand before its loads' use."""
        copies = list(re.finditer(r"@p cp\.async\.cg[^;]*;", ptx[begin:]))
        loads = re.search(r"ld\.shared\.v4\.b32 \{[^;]*;", ptx[begin:])
        assert copies and loads
        place = re.search(r"\[(%r\d+)\+\d+\]|\[(%r\d+)\]", loads.group())
        assert place is not None
        at = place[1] or place[2]
        source = re.search(r"\[(%rd\d+)\+?\d*\], 16", copies[0].group())
        assert source is not None
        end = begin + loads.end()
        stray = f" cp.async.cg.shared.global [{at}], [{source[1]}], 16;"
        return ptx[:end] + stray + ptx[end:]

    assert noticed(t, n, rows, edit, 8)


@pytest.mark.parametrize(("t", "n", "rows"), [STREAMED, WHOLE[1]], ids=name_of)
def test_lanes_data_is_waited_for_where_lanes_pass_it_on(
    t: WideTiling, n: int, rows: int
) -> None:
    """Before a part is written in another order, given back, or its sums are."""
    vote = r"vote\.sync\.any\.pred\s+(%p\d+),[^;]*;"
    found = len(re.findall(vote, gemm_ptx(t, BF16)))
    assert found >= 2

    def edit(number: int) -> Edit:
        def without(ptx: str) -> str:
            match = list(re.finditer(vote, ptx))[number]
            fixed = f"setp.ne.b32 {match[1]}, 0, 0;"
            return ptx[: match.start()] + fixed + ptx[match.end() :]

        return without

    missed = [i for i in range(found) if not noticed(t, n, rows, edit(i), 8)]
    assert not missed


@pytest.mark.parametrize("line", ["fence.proxy.async.shared::cta;", "wgmma.fence"])
def test_the_fences_of_asynchronous_products_are_needed(line: str) -> None:
    t, n, rows = WHOLE[0]
    edit = replaced(rf"{re.escape(line)}[\w.]*;?", 0)
    assert noticed(t, n, rows, edit, 8)


def test_a_kernel_without_its_wait_for_earlier_kernels_is_noticed() -> None:
    t = staged(384, 1, 1, 1, 1, 4)
    x, w = inputs(20, 384, rows=1, device="cpu")
    with pytest.raises(Fault, match=r"a store to y0 before griddepcontrol\.wait"):
        gemm(t, x, [w], edit=replaced(r"griddepcontrol\.wait;", 0))


#: Beside those of the table, which `test_compile` audits.
AUDITED = [
    (staged(768, 8, 1, 1, 1, 24, 8), BF16),
    (staged(768, 8, 1, 1, 1, 12, 8, 4), BF16),
    (staged(7168, 4, 8, 3, 1, 10, 4), BF16),
]


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize(("t", "outputs"), AUDITED, ids=name_of)
def test_it_compiles_within_its_registers_and_passes_the_audit(
    t: WideTiling, outputs: Outputs, arch: str
) -> None:
    check_audit(t, outputs, arch)


def test_weights_are_asked_for_before_the_wait_and_counted_in_order(
    tmp_path: Path,
) -> None:
    """A group of copies a step of 32 columns; a product waits for all but those that
    are to come later."""
    t = staged(7168, 8, 8, 2, 1, 10)
    code = machine_code(t, "sm_90a", tmp_path)
    names = [ins.head for ins in code]
    wait = names.index("ACQBULK")
    assert names[:wait].count("LDGSTS") == 2 * t.depth
    assert names[:wait].count("LDGDEPBAR") == t.depth
    left = [ins.operands[1] for ins in code if ins.opcode == "DEPBAR.LE"]
    assert left.count(hex(t.depth - t.chunks)) == t.slice_segments
    assert "LDG" not in names


def tilings() -> Iterator[WideTiling]:
    """Every K with every share of it that fits."""
    for k, tiles, cluster in itertools.product(SUM_ORDER, (1, 2, 4, 8), (1, 2, 4, 8)):
        for along, depth, loads, stages in itertools.product(
            (1, 2, 3), (2, 4, 11), (2, 6, 8), (0, 4)
        ):
            with contextlib.suppress(ValueError):
                yield staged(k, tiles, cluster, along, 1, depth, loads, stages)


def test_pieces_make_up_segments_and_parts() -> None:
    seen = set()
    for t in tilings():
        seen.add((t.k, t.stages > 0))
        pieces = list(t.pieces())
        assert pieces[0][0] == 0 and pieces[-1][1] == t.slice_chunks
        assert all(a[1] == b[0] for a, b in itertools.pairwise(pieces))
        for first, last in pieces:
            assert 0 < last - first <= t.piece <= t.depth
            assert first // t.chunks == (last - 1) // t.chunks
            if t.stages:
                assert first // t.part_chunks == (last - 1) // t.part_chunks
        assert t.tile_pitch >> 4 < 1 << 14, "the descriptor has 14 bits for it"
        assert t.token_bytes % 128 == 0 and t.barrier_bytes % 128 == 0
        if t.moves_registers:
            shares = t.multipliers * t.registers + t.copy_registers
            assert shares <= (t.multipliers + 1) * t.register_limit
    assert seen >= {(k, True) for k in SUM_ORDER if k > 64}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"staged": 2}, "staged=2 must be 0 or 1"),
        ({"staged": 0, "stages": 3}, "staged=0 must be 0 or 1, and 1 for stages=3"),
        ({"depth": 3}, "depth=3: a staged tiling of K 768 has 4 to 24 steps"),
        ({"depth": 25}, "depth=25: a staged tiling"),
        ({"stages": LAG}, r"stages=2, k_groups=1: X goes through at least 3 stages"),
        ({"stages": 3, "token_loads": 5}, "token_loads=5: 10 steps of 32 columns"),
        ({"token_tiles": 8, "warpgroups": 2, "depth": 24}, "needs 2.* shared memory"),
    ],
)
def test_what_does_not_fit_is_refused(changes: dict[str, int], words: str) -> None:
    base = staged(768, 2, 1, 1, 1, 12)
    with pytest.raises(ValueError, match=words):
        dataclasses.replace(base, **changes)
