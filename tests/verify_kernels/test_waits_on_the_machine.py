# SPDX-License-Identifier: Apache-2.0
"""The kernels' waits and arrivals, each left out or weakened in the PTX once: some
schedule must go wrong.

It shows that the machine would notice a kernel without it, and that the kernel has no
wait to spare.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from tests.verify_kernels import test_attn_res as attn_res_tests
from tests.verify_kernels import test_skinny_gemm as skinny_tests
from tests.verify_kernels.machine import Fault
from tests.verify_kernels.machine.kernels import (
    Edit,
    attn_res,
    compiled,
    ring_gemm,
    skinny_gemm,
    tiling_for,
)
from verify_kernels.attn_res.host import variant_name

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

#: Schedules of which at least one must show a fault; each run stops at the first.
SEEDS = range(40)
#: A wait for a barrier, as the DSL writes it.
WAIT = re.compile(r"\{\s*\.reg \.pred\s+P1;.*?DONE:\s*\}", re.S)
#: Faults where it runs.
NOWHERE = "{.reg .b32 v; .reg .b64 a; mov.b64 a, 0; ld.global.b32 v, [a];}"


def replaced(pattern: re.Pattern[str], number: int, by: str) -> Edit:
    """The number-th match of a pattern replaced."""

    def edit(ptx: str) -> str:
        match = list(pattern.finditer(ptx))[number]
        return ptx[: match.start()] + by + ptx[match.end() :]

    return edit


def noticed(run: Callable[[int], Sequence[Tensor]], right: Sequence[Tensor]) -> bool:
    """Whether some schedule faults, hangs or gives other bits."""
    for seed in SEEDS:
        try:
            found = run(seed)
        except Fault:
            return True
        if any(
            not torch.equal(skinny_tests.bits(a), skinny_tests.bits(b))
            for a, b in zip(found, right, strict=True)
        ):
            return True
    return False


@pytest.mark.parametrize(("k", "n", "rows"), [(384, 150, 3), (1536, 110, 9)])
def test_every_wait_of_skinny_gemm_is_needed(k: int, n: int, rows: int) -> None:
    """Without any one of the waits that run at this M some schedule goes wrong. (Others
    are code for an M of 0.)"""
    x, w = skinny_tests.inputs(n, k, rows=rows, device="cpu")
    right = skinny_gemm(x, [w])
    ptx = ring_gemm(k, rows)
    count = 0
    for number in range(len(WAIT.findall(ptx))):
        try:
            skinny_gemm(x, [w], edit=replaced(WAIT, number, NOWHERE))
        except Fault:
            count += 1
            edit = replaced(WAIT, number, "")
            run = functools.partial(_with_seed, x, [w], edit)
            assert noticed(run, right), f"wait {number} of {k}"
    # full, empty, part_full, part_free; with a cluster sums_full and sums_free too.
    assert count >= (4 if tiling_for(k, rows).cluster == 1 else 6)


def _with_seed(x: Tensor, ws: Sequence[Tensor], edit: Edit, seed: int) -> list[Tensor]:
    return skinny_gemm(x, ws, edit=edit, seed=seed)


@pytest.mark.parametrize(
    "by", [r"mov.b32 t, \1;", "and.b32 t, {loaded}, 0; add.s32 t, t, \\1;"]
)
def test_a_slot_is_given_back_when_all_of_its_words_have_come(by: str) -> None:
    """The release must depend on the data, on one of the words loaded not enough:
    loads finish in any order."""
    k, rows = 768, 3
    x, w = skinny_tests.inputs(85, k, rows=rows, device="cpu")
    right = skinny_gemm(x, [w])

    def edit(ptx: str) -> str:
        loaded = re.search(r"ld\.shared\.v4\.b32 \{(%r\d+),", ptx)
        assert loaded is not None
        found, count = re.subn(
            r"and\.b32 t, %r\d+, %r\d+; add\.s32 t, t, (%r\d+);",
            by.replace("{loaded}", loaded[1]),
            ptx,
            count=1,
        )
        assert count
        return found

    assert noticed(functools.partial(_with_seed, x, [w], edit), right)


def found_race(x: Tensor, w: Tensor, edit: Edit) -> str:
    """The fault of the first schedule that has one, "" if none has: a few would show
    it, since unordered accesses need not come in the wrong order."""
    for seed in SEEDS[:4]:
        try:
            skinny_gemm(x, [w], edit=edit, seed=seed, races=True)
        except Fault as fault:
            return str(fault)
    return ""


def changed(pattern: str, by: str, most: int = 0) -> Edit:
    """All matches of a pattern replaced, of which there must be some."""

    def edit(ptx: str) -> str:
        found, count = re.subn(pattern, by, ptx, count=most)
        assert count
        return found

    return edit


#: One lane arrives for its warp.
BY_ONE_LANE = (
    "{{.reg .pred q; .reg .b32 l; mov.u32 l, %laneid; setp.eq.b32 q, l, 7; "
    "@q mbarrier.arrive.shared.b64 _, {}, 32;}}"
)
#: How far row g is from the last of a slot, for lanes past it.
LARGER = r"max\.u32\s+(%r\d+), %r\d+, {};"
NEIGHBOUR = "a read .* not ordered with the store there by a copy"
STORED = "a read .* not ordered with the store there by lane"


@pytest.mark.parametrize(
    ("k", "n", "rows", "edit", "words"),
    [
        # Rows past a slot's 14 of 16 or 28 of 32 are read from the next one.
        (768, 75, 2, changed(LARGER.format(5), r"mov.u32 \1, 5;"), NEIGHBOUR),
        (384, 80, 1, changed(LARGER.format(3), r"mov.u32 \1, 3;"), NEIGHBOUR),
        # A lane arrives for its warp's partial sums,
        (
            3584,
            20,
            3,
            changed(
                r"mbarrier\.arrive\.shared\.b64\s+%rd\d+, (\[[^\]]+\]), %r\d+;",
                "bar.warp.sync -1; " + BY_ONE_LANE.format(r"\1"),
            ),
            STORED,
        ),
        # and, where every CTA has received, for its reads of what was sent.
        (
            3584,
            110,
            3,
            changed(
                r"vote\.sync\.ballot\.b32\s+(%r\d+), (%p\d+), -1;",
                r"bar.warp.sync -1; selp.b32 \1, 1, 0, \2;",
            ),
            "what was counted by .* not ordered with the read there by lane",
        ),
    ],
    ids=["idle-rows-14", "idle-rows-28", "partials", "sums"],
)
def test_accesses_that_one_lane_vouches_for_are_noticed(
    k: int, n: int, rows: int, edit: Edit, words: str
) -> None:
    """compute-sanitizer's racecheck reported these, but for the sums of a cluster, of
    an earlier form of the kernel (H200, 2026-11-29)."""
    x, w = skinny_tests.inputs(n, k, rows=rows, device="cpu")
    found = found_race(x, w, edit)
    assert re.search(words, found), found


@pytest.mark.parametrize(("k", "n", "rows"), [(768, 85, 3), (3584, 110, 3)])
def test_every_lane_arrives_for_its_own_reads_of_partial_sums(
    k: int, n: int, rows: int
) -> None:
    """Unlike those of the ring, where a product stands between."""
    x, w = skinny_tests.inputs(n, k, rows=rows, device="cpu")
    ptx = ring_gemm(k, rows)
    arrival = re.compile(r"mbarrier\.arrive\.shared::cta\.b64 _, \[t\];")
    by_one = BY_ONE_LANE.format("[t]")
    assert any(
        re.search(
            "a store .* not ordered with the read there by lane",
            found_race(x, w, replaced(arrival, number, by_one)),
        )
        for number in range(len(arrival.findall(ptx)))
    )


def test_a_kernel_without_its_wait_for_earlier_kernels_is_noticed() -> None:
    x, w = skinny_tests.inputs(20, 384, rows=1, device="cpu")
    with pytest.raises(Fault, match=r"a store to y0 before griddepcontrol\.wait"):
        skinny_gemm(x, [w], edit=lambda p: p.replace("griddepcontrol.wait;", ""))


@pytest.mark.parametrize(
    "wait",
    [r"bar\.sync\s+0;", r"barrier\.cluster\.wait;", r"\{\.reg \.pred p; WAIT.*?\}"],
)
def test_every_wait_of_attn_res_is_needed(wait: str) -> None:
    """Field case F36 among them: without the last wait a CTA leaves while its peers
    still send."""
    form = (2, "add", True, True)
    arguments = attn_res_tests.inputs(form, 1, device="cpu")
    right = attn_res(form, arguments)
    pattern = re.compile(wait, re.S)
    ptx = compiled("attn_res", variant_name(7168, *form))[1]
    assert pattern.search(ptx)
    for number in range(len(pattern.findall(ptx))):
        edit = replaced(pattern, number, "")

        def run(seed: int, edit: Edit = edit) -> list[Tensor]:
            return attn_res(form, arguments, seed=seed, edit=edit)

        assert noticed(run, right), f"{wait} {number}"
