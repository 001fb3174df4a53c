# SPDX-License-Identifier: Apache-2.0
"""The machine that runs PTX: small kernels whose results are known."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import pytest
import torch

from experiments.bench.neighbours import STALE
from tests.verify_kernels.machine import Fault, GlobalMemory, launch, tensor_argument
from tests.verify_kernels.machine.small import HEAD, run, words

SEEDS = range(16)
LANE = torch.arange(32)

A = torch.tensor(
    [0, 1, 2, -1, -7, 7, 2**31 - 1, -(2**31), 12345, -98765, 40, 33, 32, 31] * 3
)[:32]
B = torch.tensor(
    [1, 2, 5, 3, 2, -2, -1, 7, 31, 32, 33, 4, 100, 9, 6, -40, 2**31 - 1] * 2
)[:32]
LOW = 2**32 - 1


def signed(value: int) -> int:
    return (value + 2**31) % 2**32 - 2**31


def truncated(a: int, b: int) -> int:
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


INTEGER = {
    "add.s32 %r3, %r1, %r2;": lambda a, b: a + b,
    "sub.s32 %r3, %r1, %r2;": lambda a, b: a - b,
    "mul.lo.s32 %r3, %r1, %r2;": lambda a, b: a * b,
    "mul.hi.s32 %r3, %r1, %r2;": lambda a, b: a * b >> 32,
    "mad.lo.s32 %r3, %r1, %r2, -5;": lambda a, b: a * b - 5,
    "div.s32 %r3, %r1, %r2;": truncated,
    "min.s32 %r3, %r1, %r2;": min,
    "max.s32 %r3, %r1, %r2;": max,
    "min.u32 %r3, %r1, %r2;": lambda a, b: min(a & LOW, b & LOW),
    "and.b32 %r3, %r1, %r2;": lambda a, b: a & b,
    "or.b32 %r3, %r1, %r2;": lambda a, b: a | b,
    "xor.b32 %r3, %r1, 255;": lambda a, b: a ^ 255,
    "neg.s32 %r3, %r1;": lambda a, b: -a,
    "abs.s32 %r3, %r1;": lambda a, b: abs(a),
    "popc.b32 %r3, %r1;": lambda a, b: (a & LOW).bit_count(),
    "redux.sync.max.s32 %r3, %r1, -1;": lambda a, b: max(A.tolist()),
    "redux.sync.min.u32 %r3, %r1, -1;": lambda a, b: min(x & LOW for x in A.tolist()),
    "prmt.b32 %r3, %r1, %r2, 0x7340;": lambda a, b: (
        (a & 0xFF) | (b & 0xFF) << 8 | (a >> 24 & 0xFF) << 16 | b & 0xFF000000
    ),
    "prmt.b32 %r3, %r1, %r2, 0x4488;": lambda a, b: (
        (0xFFFF if a & 0x80 else 0) | (b & 0xFF) * 0x01010000
    ),
    "shl.b32 %r3, %r1, %r2;": lambda a, b: a << b if 0 <= b < 32 else 0,
    "shr.u32 %r3, %r1, %r2;": lambda a, b: (a & LOW) >> min(b & LOW, 32),
    "shr.s32 %r3, %r1, %r2;": lambda a, b: a >> min(b & LOW, 31),
    "setp.lt.u32 %p1, %r1, %r2; selp.b32 %r3, 3, %r1, %p1;": lambda a, b: (
        3 if a & LOW < b & LOW else a
    ),
    "setp.ge.s32 %p1, %r1, %r2; not.pred %p2, %p1; selp.b32 %r3, 3, 4, %p2;": (
        lambda a, b: 3 if a < b else 4
    ),
    "mul.wide.s32 %d21, %r1, %r2; shr.s64 %d22, %d21, 3; cvt.u32.u64 %r3, %d22;": (
        lambda a, b: a * b >> 3
    ),
    "cvt.s64.s32 %d21, %r1; mad.lo.s64 %d22, %d21, 3, -1; shr.s64 %d23, %d22, 8;"
    "cvt.u32.u64 %r3, %d23;": lambda a, b: a * 3 - 1 >> 8,
    "mov.b64 %d21, {%r1, %r2}; add.s64 %d22, %d21, 1; mov.b64 {%r4, %r3}, %d22;": (
        lambda a, b: b + (a == -1)
    ),
    # A register that is wider than what is loaded or stored.
    "ld.global.b32 %d21, [%d10]; shr.u64 %d22, %d21, 4; cvt.u32.u64 %r3, %d22;": (
        lambda a, b: (a & LOW) >> 4
    ),
    "ld.global.s32 %d21, [%d10]; shr.s64 %d22, %d21, 33; cvt.u32.u64 %r3, %d22;": (
        lambda a, b: a >> 33
    ),
    "mov.b64 %d21, {%r1, %r2}; st.global.b32 [%d12], %d21;"
    "ld.global.b32 %r3, [%d12];": lambda a, b: a,
}


@pytest.mark.parametrize("code", INTEGER)
def test_integers(code: str) -> None:
    a, b, out = A.long(), B.long(), words()
    body = f"ld.global.b32 %r1, [%d10]; ld.global.b32 %r2, [%d11]; {code}"
    run(body + "st.global.b32 [%d12], %r3;", [a, b, out])
    expected = [
        signed(INTEGER[code](x, y)) for x, y in zip(A.tolist(), B.tolist(), strict=True)
    ]
    assert out.view(torch.int32)[::2].tolist() == expected


FLOATS = torch.tensor(
    [1.0, -2.5, 3e38, 1e-40, float("inf"), float("nan"), 1 + 2**-8, 1 + 3 * 2**-8] * 4
)
OTHERS = torch.randn(32, generator=torch.Generator().manual_seed(0))
FLOAT = {
    "add.f32 %r3, %r1, %r2;": lambda a, b: a + b,
    "sub.f32 %r3, %r1, %r2;": lambda a, b: a - b,
    "mul.f32 %r3, %r1, %r2;": lambda a, b: a * b,
    "fma.rn.f32 %r3, %r1, %r2, 0f3F800000;": lambda a, b: (
        a.double() * b.double() + 1
    ).float(),
    "max.f32 %r3, %r1, %r2;": torch.fmax,
    "div.rn.f32 %r3, %r1, %r2;": lambda a, b: a / b,
    "ex2.approx.ftz.f32 %r3, %r2;": lambda a, b: torch.exp2(b.double()).float(),
    "rcp.approx.ftz.f32 %r3, %r2;": lambda a, b: (1 / b.double()).float(),
    "ex2.approx.ftz.f32 %r3, 0fC3010000;": lambda a, b: 0 * b.abs(),  # 2^-129
    "cvt.rn.bf16.f32 %h1, %r1; cvt.f32.bf16 %r3, %h1;": lambda a, b: (
        a.bfloat16().float()
    ),
    "cvt.rn.bf16x2.f32 %r4, %r1, %r2; and.b32 %r3, %r4, -65536;": (
        lambda a, b: a.bfloat16().float()
    ),
    "cvt.rn.bf16x2.f32 %r4, %r1, %r2; shl.b32 %r3, %r4, 16;": (
        lambda a, b: b.bfloat16().float()
    ),
    "setp.ne.f32 %p1, %r1, %r1; selp.f32 %r3, %r1, %r2, %p1;": lambda a, b: b,
}


@pytest.mark.parametrize("code", FLOAT)
def test_floats(code: str) -> None:
    """Against torch, NaN, overflow, subnormals and ties of the rounding included."""
    a, b, out = (torch.zeros(32, 2) for _ in range(3))
    a[:, 0], b[:, 0] = FLOATS, OTHERS
    body = f"ld.global.b32 %r1, [%d10]; ld.global.b32 %r2, [%d11]; {code}"
    run(body + "st.global.b32 [%d12], %r3;", [a, b, out])
    torch.testing.assert_close(
        out[:, 0], FLOAT[code](FLOATS, OTHERS), rtol=0, atol=0, equal_nan=True
    )


@pytest.mark.parametrize("seed", SEEDS)
def test_lanes_part_in_loops_and_branches_and_meet_again(seed: int) -> None:
    """Each lane counts its own Collatz steps; then the whole warp shuffles."""
    out = words()
    run(
        """
        add.s32 %r1, %r0, 1; mov.b32 %r2, 0;
        LOOP: setp.eq.b32 %p1, %r1, 1; @%p1 bra END;
        and.b32 %r3, %r1, 1; setp.eq.b32 %p2, %r3, 0; @!%p2 bra ODD;
        shr.u32 %r1, %r1, 1; bra NEXT;
        ODD: mad.lo.s32 %r1, %r1, 3, 1;
        NEXT: add.s32 %r2, %r2, 1; bra LOOP;
        END: shfl.sync.bfly.b32 %r4, %r2, 1, 31, -1;
        st.global.b32 [%d10], %r2; st.global.b32 [%d10+4], %r4;
        """,
        [out],
        seed=seed,
    )

    def steps(n: int) -> int:
        return 0 if n == 1 else 1 + steps(n // 2 if n % 2 == 0 else 3 * n + 1)

    counted, partner = out.view(torch.int32).reshape(32, 2).T.tolist()
    assert counted == [steps(n + 1) for n in range(32)]
    assert partner == [counted[lane ^ 1] for lane in range(32)]


def test_lanes_that_leave_do_not_run_on() -> None:
    out = words()
    run(
        """
        setp.lt.u32 %p1, %r0, 20; @%p1 st.global.b32 [%d10], %r0;
        @!%p1 ret; st.global.b32 [%d10+4], 5;
        """,
        [out],
    )
    expected = torch.full((32, 2), -1, dtype=torch.int32)
    expected[:20, 0], expected[:20, 1] = LANE[:20], 5
    assert torch.equal(out.view(torch.int32).reshape(32, 2), expected)
    with pytest.raises(Fault, match="have ended"):
        run("setp.eq.b32 %p1, %r0, 3; @%p1 ret; bar.warp.sync -1;", [])


@pytest.mark.parametrize(
    ("how", "by", "clamp", "source"),
    [
        ("idx", 5, 31, lambda lane: 5),
        ("idx", 3, 0x181F, lambda lane: lane // 8 * 8 + 3),
        ("bfly", 16, 31, lambda lane: lane ^ 16),
        ("down", 3, 31, lambda lane: lane + 3 if lane + 3 < 32 else lane),
        ("up", 3, 0, lambda lane: lane - 3 if lane >= 3 else lane),
        ("down", 1, 0x181F, lambda lane: lane + (lane % 8 != 7)),
    ],
)
def test_shuffles(how: str, by: int, clamp: int, source: Callable[[int], int]) -> None:
    """Segments of 8 lanes too (clamp 0x18xx)."""
    out = words()
    run(
        f"mul.lo.s32 %r1, %r0, 7; shfl.sync.{how}.b32 %r2, %r1, {by}, {clamp}, -1;"
        "st.global.b32 [%d10], %r2;",
        [out],
    )
    expected = [7 * source(lane) for lane in range(32)]
    assert out.view(torch.int32)[::2].tolist() == expected


def test_votes_and_one_elected_lane_that_every_seed_names_anew() -> None:
    leaders = set()
    for seed in SEEDS:
        out = words()
        run(
            """
            setp.gt.u32 %p1, %r0, 28; vote.sync.ballot.b32 %r1, %p1, -1;
            elect.sync %r2|%p2, -1; elect.sync _|%p3, -1;
            vote.sync.any.pred %p4, %p2, -1; vote.sync.all.pred %p5, %p2, -1;
            @%p3 st.global.b32 [%d10], %r1; @%p2 st.global.b32 [%d10+4], %r2;
            @%p5 st.global.b32 [%d10], 0; @!%p4 st.global.b32 [%d10], 0;
            """,
            [out],
            seed=seed,
        )
        written = (out != -1).nonzero().flatten().tolist()
        assert len(written) == 1
        assert out.view(torch.int32)[2 * written[0] :][:2].tolist() == [
            signed(0xE0000000),
            written[0],
        ]
        leaders.update(written)
    assert len(leaders) > 4


def test_matrix_product_against_numpy() -> None:
    """Layouts of PTX's tables; a NaN row of A stays in its row, a NaN column of B in
    its column."""
    generator = np.random.default_rng(0)
    a, b, c = (
        torch.from_numpy(generator.standard_normal(s)).bfloat16()
        for s in ((16, 16), (16, 8), (16, 8))
    )
    a[3], b[:, 6] = torch.nan, torch.nan
    registers = torch.zeros(32, 16, dtype=torch.float32)
    halves = registers.view(torch.bfloat16).reshape(32, 16, 2)
    for lane in range(32):
        g, q = divmod(lane, 4)
        for i in range(4):
            row, column = g + 8 * (i % 2), 2 * q + 8 * (i // 2)
            halves[lane, i] = a[row, column : column + 2]
            registers[lane, 8 + i] = c[g + 8 * (i // 2), 2 * q + i % 2].float()
        for i in range(2):
            halves[lane, 4 + i] = b[2 * q + 8 * i : 2 * q + 8 * i + 2, g]
    out = torch.zeros(32, 4)
    run(
        """
        mad.lo.s32 %r39, %r0, 64, 0; cvt.u64.u32 %d20, %r39; add.s64 %d21, %d0, %d20;
        ld.global.v4.b32 {%r1,%r2,%r3,%r4}, [%d21];
        ld.global.v2.b32 {%r5,%r6}, [%d21+16];
        ld.global.v4.b32 {%r9,%r10,%r11,%r12}, [%d21+32];
        mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%r13,%r14,%r15,%r16},
            {%r1,%r2,%r3,%r4}, {%r5,%r6}, {%r9,%r10,%r11,%r12};
        add.s64 %d22, %d11, %d8; st.global.v4.b32 [%d22], {%r13,%r14,%r15,%r16};
        """,
        [registers, out],
    )
    exact = a.double() @ b.double() + c.double()
    found = out.reshape(8, 4, 2, 2).permute(2, 0, 1, 3).reshape(16, 8)
    assert torch.equal(torch.isnan(found), torch.isnan(exact))
    # One rounding of a sum that fp64 holds to 2^-48.
    torch.testing.assert_close(
        found.double(), exact, rtol=2.0**-24, atol=2.0**-48, equal_nan=True
    )


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("ld.global.b32 %r1, [%d0+64];", r"4 bytes at 64 of t0"),
        ("ld.global.b32 %r1, [%d0+16];", r"4 bytes at 16 of t0"),
        ("ld.global.v2.b32 {%r1, %r2}, [%d0+4];", "not a multiple of 8"),
        ("st.global.b32 [%d0+20], %r0;", r"4 bytes at 20 of t0"),
        ("mov.b64 %d1, 64; ld.global.b32 %r1, [%d1];", "in no tensor"),
        ("ld.shared.b32 %r1, [smem+1024];", "which has 1024 bytes"),
        ("st.shared.b32 [smem+-4], %r0;", "which has 1024 bytes"),
        ("mbarrier.arrive.shared.b64 _, [smem];", "no barrier at 0"),
        (
            "mbarrier.init.shared.b64 [smem], 32; st.shared.b32 [smem+4], 1;",
            "made a second time",
        ),
        (
            "setp.eq.b32 %p1, %r0, 0; @%p1 mbarrier.init.shared.b64 [smem], 1;"
            "st.shared.b32 [smem+4], 1;",
            "a store over barrier at 0",
        ),
        (
            "setp.eq.b32 %p1, %r0, 0; @%p1 mbarrier.init.shared.b64 [smem], 3;"
            "mbarrier.arrive.expect_tx.shared.b64 _, [smem], 16;",
            "more than the 3 of a phase",
        ),
        ("mapa.shared::cluster.u32 %r1, %r0, 1;"
         "mbarrier.arrive.relaxed.cluster.shared::cluster.b64 _, [%r1];",
         "in no CTA of a cluster of 1"),
    ],
)  # fmt: skip
def test_faults_name_the_place(body: str, message: str) -> None:
    """Bytes between the rows of a tensor are no one's."""
    rows = torch.zeros(2, 8, dtype=torch.int32)[:, :4]
    with pytest.raises(Fault, match=rf"(?s)CTA \(0, 0, 0\), .* line \d+ .*{message}"):
        run(body, [rows])


def test_a_tensor_that_is_only_read_is_not_written() -> None:
    memory = GlobalMemory()
    address = tensor_argument(memory.add(words(), "w"))
    text = HEAD.format(parameters=".param .b64 p0") + (
        "ld.param.b64 %d0, [p0]; st.global.b32 [%d0], %r0; ret; }"
    )
    sizes = {"grid": (1, 1, 1), "block": (32, 1, 1)}
    with pytest.raises(Fault, match="a store to w, which the kernel only reads"):
        launch(text, memory, [address], **sizes, pdl=False)
    with pytest.raises(ValueError, match=r"\[16\] bytes; the kernel declares \[8\]"):
        launch(text, memory, [address + bytes(8)], **sizes)


def test_unknown_instructions_are_refused() -> None:
    for code in ("atom.global.add.u32 %r1, [%d0], 1;", "add.rz.f32 %r1, %r1, %r1;"):
        with pytest.raises(ValueError, match=f"`{re.escape(code[:-1])}`: the machine"):
            run(code, [])


def test_shared_memory_is_full_of_what_others_left() -> None:
    """Another word with another seed, so that whoever reads it has other results."""
    for seed, word in enumerate(STALE):
        out = words()
        run(
            "ld.shared.u32 %d20, [smem+512]; st.global.b64 [%d10], %d20;",
            [out],
            seed=seed,
        )
        assert (out == word).all()
