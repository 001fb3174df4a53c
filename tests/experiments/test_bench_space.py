# SPDX-License-Identifier: Apache-2.0
"""Which kernels of skinny_gemm a search tries."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from experiments.bench import space
from verify_kernels.skinny_gemm.choice import DESIGNS, Choice, design_of, most_rows
from verify_kernels.skinny_gemm.direct_tiling import DirectTiling
from verify_kernels.skinny_gemm.tiling import SUM_ORDER, Tiling
from verify_kernels.skinny_gemm.wide_tiling import MOST_TOGETHER, WideTiling

SIZES = [
    (n, k, rows)
    for k in SUM_ORDER
    for n in (1, 56, 768, 7168, 20480, 163840)
    for rows in (1, 2, 4, 8, 9, 16, 32, 64)
]


def test_every_candidate_serves_its_rows_and_its_m() -> None:
    for n, k, rows in SIZES:
        found = space.candidates(n, k, rows)
        assert len({choice.name for choice in found}) == len(found)
        for choice in found:
            cut = choice.cut
            assert cut.k == k and most_rows(cut) >= rows, choice.name
            # No more token tiles than M needs, but for a power of two.
            assert cut.tokens < 2 * max(rows, 8)
            clusters = -(-n // choice.run) if choice.run else 1
            assert clusters * cut.cluster < 2**31
            if isinstance(cut, DirectTiling):
                assert rows <= 16 or k <= 128
                assert not cut.staged or cut.staged == rows <= 8
            if isinstance(cut, WideTiling):
                assert rows >= 8


def test_direct_ctas_end_together() -> None:
    """With one row less a CTA one more wave would be needed."""
    seen = 0
    for n, k, rows in SIZES:
        for choice in space.candidates(n, k, rows, designs=["direct"]):
            slots = 132 * choice.cut.ctas_per_sm
            ctas = -(-n // choice.run)
            waves = -(-ctas // slots)
            assert waves <= space.MAX_WAVES
            # What the same kernel with fewer rows, or alone on its SM, would do.
            assert isinstance(choice.cut, DirectTiling)
            assert choice.cut.halves == 1 or choice.run > 8
            assert choice.cut.ctas_per_sm == 1 or ctas > 132
            if choice.run > 1 and choice.run not in space.MORE_RUNS:
                assert -(-n // (choice.run - 1)) > slots * waves
                seen += 1
    assert seen > 100


def test_stages_of_small_rings_hold_all_rows_of_a_cluster() -> None:
    """So that everything is requested at once, by as many CTAs an SM as fit."""
    used, *small = space.candidates(768, 7168, 8, designs=["ring"])
    assert used == Choice(space.RING[7168][8])
    small = [choice for choice in small if choice.run]
    assert len(small) > 5
    for choice in small:
        cut = choice.cut
        assert isinstance(cut, Tiling)
        rows = cut.stages * cut.stage_rows // cut.stages_per_tile
        assert choice.run <= rows < choice.run + cut.stages
        if cut.ctas_per_sm < 3:
            with pytest.raises(ValueError):
                dataclasses.replace(cut, ctas_per_sm=cut.ctas_per_sm + 1)
    assert {choice.cut.cluster for choice in small} == {2, 4, 8}
    many = space.candidates(6288, 7168, 8, designs=["ring"])
    assert not any(choice.run for choice in many)


@pytest.mark.parametrize(
    ("n", "k", "rows", "name"),
    [
        (768, 128, 1, "direct_k128_m8_r8_w4_d1_t1_g0_o1@6"),
        (1152, 1536, 8, "direct_k1536_m8_r16_w12_d1_t4_g0_o1@9"),
        (3648, 7168, 1, "direct_k7168_m8_r16_w7_d2_t4_g1_o1@14"),
        (8448, 7168, 2, "direct_k7168_m8_r16_w7_d2_t8_g2_o2@16"),
        (7168, 768, 1, "k768_m8_c1_r16_h14_p1_s4_b4_x4_d1_t1_o2@0"),
        (6288, 7168, 1, "k7168_m8_c2_r16_h16_p2_s3_b2_x4_d1_t1_o1@0"),
        (6288, 7168, 16, "k7168_m16_c8_r16_h16_p1_s6_b2_x4_d2_t2_o1@0"),
    ],
)
def test_what_was_fastest_is_tried(n: int, k: int, rows: int, name: str) -> None:
    """Winners of a first search on an H200."""
    assert name in {choice.name for choice in space.candidates(n, k, rows)}


def test_wide_kernels_have_no_idle_warpgroup() -> None:
    found = space.candidates(20480, 7168, 16, designs=["wide"])
    assert {choice.cut.warpgroups for choice in found} == {1, 2, 3}  # type: ignore[union-attr]
    for n in (56, 7168):
        for choice in space.candidates(n, 7168, 32, designs=["wide"]):
            assert isinstance(choice.cut, WideTiling)
            assert choice.run > 64 * (choice.cut.warpgroups - 1)


def test_staged_kernels_are_tried_wherever_tokens_are_many() -> None:
    """X goes through stages where it fits in no other way, and where two CTAs then fit
    an SM. One launch serves 64 rows at every K."""
    for n, k, rows in SIZES:
        every = space.candidates(n, k, rows, designs=["wide"])
        found = [c.cut for c in every if isinstance(c.cut, WideTiling) and c.cut.staged]
        assert bool(found) == (rows > 8), (k, rows)
        for cut in found:
            if cut.stages and cut.ctas_per_sm == 1:
                others = (c for c in found if c.ctas_per_sm == 1)
                whole = [c.depth for c in others if not c.stages]
                assert max(whole, default=0) <= MOST_TOGETHER
    cuts = [c.cut for c in space.candidates(7168, 33792, 64)]
    assert cuts and all(isinstance(c, WideTiling) and c.stages for c in cuts)
    small = [c.cut for c in space.candidates(7168, 768, 64, designs=["wide"])]
    assert any(isinstance(c, WideTiling) and c.stages for c in small)


def test_designs_can_be_left_out() -> None:
    every = space.candidates(1536, 7168, 8)
    by_design = [
        space.candidates(1536, 7168, 8, designs=[design]) for design in DESIGNS
    ]
    assert all(by_design) and [*itertools.chain(*by_design)] == every
    for design, found in zip(DESIGNS, by_design, strict=True):
        assert {design_of(choice.cut) for choice in found} == {design}


def test_bad_spaces_are_refused() -> None:
    with pytest.raises(ValueError, match="k=700: no order of sums"):
        space.candidates(8, 700, 1)
    with pytest.raises(ValueError, match="rows=65"):
        space.candidates(8, 768, 65)
    with pytest.raises(ValueError, match="n=0"):
        space.candidates(0, 768, 1)
    with pytest.raises(ValueError, match="design='narrow'"):
        space.candidates(8, 768, 1, designs=["narrow"])
