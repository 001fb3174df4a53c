# SPDX-License-Identifier: Apache-2.0
"""The machine that runs PTX: matrices from shared memory (ldmatrix)."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.verify_kernels.machine import Deadlock, Fault
from tests.verify_kernels.machine.small import run, wait

SEEDS = range(24)
LANE = torch.arange(32)
PITCH = 80
#: Warp 0's lane i stores its 16 bytes of tensor 0 as row i, 64 bytes into shared
#: memory; every lane l has the address of row 5 l mod 32, less the 64, in %r5.
ROWS = f"""
setp.ge.u32 %p3, %r0, 32; and.b32 %r31, %r0, 31;
mul.wide.u32 %d9, %r31, 16; add.s64 %d7, %d0, %d9; add.s64 %d6, %d1, %d9;
ld.global.v4.b32 {{%r10,%r11,%r12,%r13}}, [%d7];
mad.lo.s32 %r4, %r31, {PITCH}, 0; add.s32 %r4, %r4, smem;
mul.lo.s32 %r6, %r31, 5; and.b32 %r6, %r6, 31;
mad.lo.s32 %r5, %r6, {PITCH}, 0; add.s32 %r5, %r5, smem;
"""
STORE = "st.shared.v4.b32 [%r4+64], {%r10,%r11,%r12,%r13};"
FOUR = "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r20,%r21,%r22,%r23}, [%r5+64];"
TWO = "ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%r20,%r21}, [%r5+64];"
ONE = "ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r20}, [%r5+64];"
FORMS = {1: ONE, 2: TWO, 4: FOUR}
OUT = "st.global.v4.b32 [%d6], {%r20,%r21,%r22,%r23};"
SHARED_BYTES = 64 + 32 * PITCH


def rows() -> Tensor:
    """A word of every lane."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(-(2**31), 2**31 - 1, (32, 4), generator=generator).int()


def check(body: str, right: Tensor | None, fault: str = "", **sizes: int) -> None:
    """Every seed gives these words, or meets the fault."""
    for seed in SEEDS:
        out = torch.full((32, 4), -1, dtype=torch.int32)
        options = {"shared_bytes": SHARED_BYTES, "seed": seed, "races": True, **sizes}
        if fault:
            with pytest.raises(Fault, match=fault):
                run(ROWS + body, [rows(), out], **options)
            continue
        run(ROWS + body, [rows(), out], **options)
        if right is not None:
            assert torch.equal(out, right)


def expected(count: int, across: bool = False) -> Tensor:
    """Register i has of matrix i row lane / 4, of that word lane mod 4; across, column
    lane / 4, of that rows 2 (lane mod 4), + 1."""
    right = torch.full((32, 4), 7, dtype=torch.int32)
    halves = rows().view(torch.int16)
    for i in range(count):
        if across:
            pair = 8 * i + 2 * (LANE[:, None] % 4) + torch.arange(2)
            words = halves[pair * 5 % 32, LANE[:, None] // 4].contiguous()
            right[:, i] = words.view(torch.int32)[:, 0]
        else:
            right[:, i] = rows()[(8 * i + LANE // 4) * 5 % 32, LANE % 4]
    return right


@pytest.mark.parametrize("across", [False, True])
@pytest.mark.parametrize("count", FORMS)
@pytest.mark.parametrize("space", ["shared", "shared::cta"])
def test_every_lane_gives_a_row_and_gets_a_word_of_each_matrix(
    space: str, count: int, across: bool
) -> None:
    """Of fewer than four matrices the addresses of the first lanes count, the others
    may be odd."""
    start = "".join(f"mov.b32 %r{i}, 7;" for i in range(21, 24))
    wild = f"setp.ge.u32 %p1, %r0, {8 * count}; @%p1 mov.b32 %r5, -3;"
    load = FORMS[count].replace("shared", "trans." * across + space)
    met = STORE + "bar.warp.sync -1;"
    check(met + start + wild + load + OUT, expected(count, across))


def test_the_b_operand_of_a_matrix_product() -> None:
    """Columns of B as rows of shared memory: matrices 2 t and 2 t + 1 are the halves
    along k of columns 8 t .. 8 t + 7; A is the identity."""
    address = (
        "and.b32 %r6, %r0, 7; shr.u32 %r7, %r0, 4; mad.lo.s32 %r6, %r7, 8, %r6;"
        "shr.u32 %r7, %r0, 3; and.b32 %r7, %r7, 1; shl.b32 %r7, %r7, 4;"
        f"mad.lo.s32 %r5, %r6, {PITCH}, %r7; add.s32 %r5, %r5, smem;"
    )
    # 16 columns of 32 bytes, two lanes a column.
    store = (
        "shr.u32 %r6, %r0, 1; and.b32 %r7, %r0, 1; shl.b32 %r7, %r7, 4;"
        f"mad.lo.s32 %r4, %r6, {PITCH}, %r7; add.s32 %r4, %r4, smem;"
    )
    # Lane 4 g + q has a one in row g if 2 q is g (low half) or 2 q + 1 is (high).
    identity = (
        "shr.u32 %r6, %r0, 2; and.b32 %r7, %r0, 3; shl.b32 %r7, %r7, 1;"
        "sub.s32 %r8, %r6, %r7; setp.eq.s32 %p1, %r8, 0; setp.eq.s32 %p2, %r8, 1;"
        "selp.b32 %r9, 16256, 0, %p1; selp.b32 %r8, 1065353216, 0, %p2;"
        "or.b32 %r9, %r9, %r8; mov.b32 %r8, 0; mov.b32 %r14, 0;"
    )
    product = (
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%r24,%r25,%r26,%r27}, "
        "{%r9,%r8,%r8,%r9}, {%r22,%r23}, {%r14,%r14,%r14,%r14};"
    )
    b = torch.randn(16, 16, generator=torch.Generator().manual_seed(1)).bfloat16()
    for seed in SEEDS:
        out = torch.zeros(32, 4)
        run(
            ROWS + store + STORE + "bar.warp.sync -1;" + address + FOUR + identity
            + product + "st.global.v4.b32 [%d6], {%r24,%r25,%r26,%r27};",
            [b.view(torch.int32).reshape(32, 4), out],
            shared_bytes=SHARED_BYTES, seed=seed, races=True,
        )  # fmt: skip
        found = out.reshape(8, 4, 2, 2).permute(2, 0, 1, 3).reshape(16, 8)
        assert torch.equal(found, b[8:].T.float())


def test_a_row_that_another_warp_stores_needs_a_barrier() -> None:
    start, read = "@!%p3 bra READ;" + STORE + "READ:", "@%p3 ret;" + FOUR
    check(start + "bar.sync 0;" + read + OUT, expected(4), threads=64)
    both = (
        r"a read at \d+ .* not ordered with the store there by lane \d+ of warp 1"
        r"|a store at \d+ .* not ordered with the read there by lane \d+ of warp 0"
        r"|was under way when a store came"
    )
    check(start + read + OUT, None, both, threads=64)
    # A lane speaks for its own store, not for those of its warp.
    alone = STORE + FOUR + OUT
    check(alone, None, r"a read at \d+ .* with the store there by lane \d+ of warp 0")


#: Warp 0 stores, reads and gives back, then warp 1 stores in the same places.
HAND_OVER = """
setp.eq.b32 %p1, %r0, 0; @%p1 mbarrier.init.shared.b64 [smem], {count};
@!%p3 {store} bar.sync 0; @%p3 bra SECOND;
{read} {give} mbarrier.arrive.shared.b64 _, [%r9]; {out} bra END;
SECOND: {wait} mov.b32 %r10, 3; {store} END:
"""
GIVE = "and.b32 %r9, {of}, 0; add.s32 %r9, %r9, smem; {who}"


def handed_over(give: str, count: int) -> str:
    waiting = wait("smem", 0)
    return HAND_OVER.format(
        count=count, store=STORE, read=FOUR, give=give, out=OUT, wait=waiting
    )


def test_rows_are_handed_over_when_the_data_have_come() -> None:
    sizes = {"threads": 64}
    every = GIVE.format(of="%r23", who="")
    check(handed_over(every, 32), expected(4), **sizes)
    vote = "setp.gt.u32 %p6, %r20, 1000; vote.sync.ballot.b32 %r8, %p6, -1;"
    one = GIVE.format(of="%r8", who="@%p1 ")
    check(handed_over(vote + one, 1), expected(4), **sizes)
    # One lane's data are enough for the rows it has given, not for those of others.
    single = GIVE.format(of="%r23", who="@%p1 ")
    fault = r"a store at \d+ .* not ordered with the read there by lane \d+ of warp 0"
    check(handed_over(single, 1), None, fault, **sizes)


def test_data_come_late_like_those_of_another_load() -> None:
    """An arrival that does not need them passes them: some schedules show it."""
    body = ROWS + handed_over(GIVE.format(of="%r31", who=""), 32)
    outcomes, values = set(), set()
    for seed in range(40):
        for races in (True, False):
            out = torch.full((32, 4), -1, dtype=torch.int32)
            options = {"shared_bytes": SHARED_BYTES, "threads": 64, "seed": seed}
            try:
                run(body, [rows(), out], races=races, **options)
            except Fault as fault:
                assert races
                late = "was under way when a store came"
                assert late in str(fault) or "with the read there" in str(fault)
                outcomes.add("fault")
            else:
                outcomes.add("passed" if races else "without races")
                values.add(torch.equal(out, expected(4)))
    assert outcomes == {"fault", "passed", "without races"}
    assert values == {True, False}


@pytest.mark.parametrize(
    ("body", "fault"),
    [
        ("setp.eq.b32 %p1, %r0, 9; @%p1 add.s32 %r5, %r5, 8;" + FOUR,
         r"is not a multiple of 16"),
        ("setp.eq.b32 %p1, %r0, 9; @%p1 add.s32 %r5, %r5, 8;" + TWO,
         r"is not a multiple of 16"),
        ("setp.eq.b32 %p1, %r0, 9; @%p1 add.s32 %r5, %r5, 4096;" + FOUR,
         r"which has \d+ bytes"),
        ("setp.eq.b32 %p1, %r0, 9; @%p1 ret;" + FOUR, "have ended"),
        ("setp.ne.b32 %p1, %r0, 9; @%p1 " + FOUR, "some lanes of the warp"),
    ],
)  # fmt: skip
def test_every_lane_takes_part_with_an_aligned_row(body: str, fault: str) -> None:
    check(body, None, fault)


def test_a_lane_that_goes_elsewhere_is_waited_for() -> None:
    parted = "setp.eq.b32 %p1, %r0, 9; @%p1 bra AWAY;" + FOUR + "ret; AWAY: "
    with pytest.raises(Deadlock, match="waits for the other lanes of its warp"):
        run(ROWS + parted + "bar.warp.sync -1;", [rows(), rows()])
    # A warp of fewer threads is none.
    with pytest.raises(Fault, match="some lanes of the warp"):
        run(ROWS + FOUR, [rows(), rows()], threads=16, shared_bytes=SHARED_BYTES)


@pytest.mark.parametrize(
    "form",
    [FOUR.replace(".x4", ".trans.x4"), FOUR.replace(".shared", ""),
     FOUR.replace(".x4", ".x3").replace(",%r23", ""), FOUR.replace("b16", "b8"),
     TWO.replace("x2", "x4"), TWO.replace("x2", "x1"), TWO.replace("%r21", "%r20")],
)  # fmt: skip
def test_other_forms_are_refused(form: str) -> None:
    message = "the machine does not know this form of ldmatrix|it takes . registers"
    with pytest.raises(ValueError, match=message):
        run(ROWS + form, [rows(), rows()])
