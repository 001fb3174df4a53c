# SPDX-License-Identifier: Apache-2.0
"""The machine's wgmma: the bits of its mma.sync, and a fault for what a GPU would
punish with wrong sums or a hang. A from shared memory and swizzles:
`test_machine_wgmma_shared`."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.verify_kernels.machine import Deadlock, Fault
from tests.verify_kernels.machine.small import run, wait

SEEDS = range(12)
K = 32
#: A store to shared memory, seen by the asynchronous proxy after this.
PROXY = "fence.proxy.async.shared::cta;"
FENCE = "wgmma.fence.sync.aligned;"
#: What takes the rank of a cluster's CTA from the address that a descriptor holds.
MASK = "and.b32 t, t, 262143;"
COMMIT = "wgmma.commit_group.sync.aligned;"
WAIT = "wgmma.wait_group.sync.aligned 0;"
MEET = "bar.sync 0;"
#: Where tests put something: before and after the products, before the wait, the end.
BEFORE, ISSUED, WAITED, LEFT = "// before", "// issued", "// waited", "// left"
#: No swizzle, 128 bytes from one half of k to the other, K / 8 core matrices to the
#: next 8 tokens.
DESCRIPTOR = (128 >> 4) << 16 | (K // 8 * 128 >> 4) << 32
Edit = Callable[[str], str]
USED = "used before wgmma.wait_group has waited for it"


def registers(names: str, count: int) -> str:
    return "{" + ",".join(f"{names}{i}" for i in range(count)) + "}"


def product(n: int, step: int, where: str = "desc", scale: str = "") -> str:
    return (
        f"wgmma.mma_async.sync.aligned.m64n{n}k16.f32.bf16.bf16 "
        f"{registers('d', n // 2)}, {registers(f'a{step}', 4)}, {where}, "
        f"{scale or ('yes' if step else 'no')}, 1, 1, 0;"
    )


def stage(n: int) -> str:
    """X to shared memory, a core matrix (8 tokens x 16 bytes) after the other."""
    pieces = n * K // 8
    lines = []
    for first in range(0, pieces, 128):
        lines.append(
            f"add.u32 t, %r0, {first}; setp.lt.u32 some, t, {pieces};"
            "mul.wide.u32 at, t, 16; add.s64 at, at, %d0;"
            "@some ld.global.v4.b32 {b0,b1,b2,b3}, [at];"
            f"shr.u32 u, t, {3 + (K // 8).bit_length() - 1}; shl.b32 u, u, 9;"
            f"and.b32 v, t, {K // 8 - 1}; shl.b32 v, v, 7; add.u32 u, u, v;"
            f"shr.u32 v, t, {(K // 8).bit_length() - 1}; and.b32 v, v, 7;"
            "shl.b32 v, v, 4; add.u32 u, u, v; add.u32 u, u, smem;"
            "@some st.shared.v4.b32 [u], {b0,b1,b2,b3};"
        )
    return "\n".join(lines)


def kernel(n: int) -> str:
    """%d0: X [n, K], %d1: W [64, K]; %d2 and %d3: Y [n, 64], by wgmma and mma.sync."""
    lines = [
        "{.reg .pred yes, no, some; .reg .b32 t, u, v, g, q, row, b<4>, z;",
        f".reg .b32 d<{n // 2}>, e<4>, a0<4>, a1<4>; .reg .b64 at, desc, other;",
        stage(n),
        f"{PROXY}\n{MEET}",
        "shr.u32 g, %r0, 2; and.b32 g, g, 7; and.b32 q, %r0, 3;",
        "shr.u32 row, %r0, 5; shl.b32 row, row, 4; add.u32 row, row, g;"
        "and.b32 row, row, 63;",
        f"mul.wide.u32 at, row, {2 * K}; mul.wide.u32 other, q, 4;"
        "add.s64 at, at, other; add.s64 at, at, %d1;",
    ]
    for step in range(K // 16):
        for i in range(4):
            offset = 2 * (16 * step + 8 * (i // 2) + 8 * (i % 2) * K)
            lines.append(f"ld.global.b32 a{step}{i}, [at+{offset}];")
    lines += [
        "setp.ne.b32 no, 0, 0; setp.eq.b32 yes, 0, 0; mov.b32 z, 0;",
        f"mov.u32 t, smem; {MASK} shr.u32 t, t, 4; cvt.u64.u32 other, t;",
        f"or.b64 other, other, {DESCRIPTOR};",
        FENCE,
        "mov.b64 desc, other;",
        BEFORE,
    ]
    for step in range(K // 16):
        lines += [f"add.s64 desc, other, {16 * step};", product(n, step)]
    lines += [ISSUED, COMMIT, WAIT, WAITED]
    lines += [
        "mul.wide.u32 at, q, 512; mul.wide.u32 other, row, 4; add.s64 other, at, other;"
    ]
    for tile in range(n // 8):
        lines.append(
            f"mul.wide.u32 at, g, {2 * K}; mul.wide.u32 desc, q, 4;"
            "add.s64 at, at, desc; add.s64 at, at, %d0;"
        )
        previous = "{z,z,z,z}"
        for step in range(K // 16):
            for h in range(2):
                offset = 2 * (8 * tile * K + 16 * step + 8 * h)
                lines.append(f"ld.global.b32 b{h}, [at+{offset}];")
            lines.append(
                "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {e0,e1,e2,e3}, "
                f"{registers(f'a{step}', 4)}, {{b0,b1}}, {previous};"
            )
            previous = "{e0,e1,e2,e3}"
        for i in range(4):
            offset = 4 * (64 * (8 * tile + i % 2) + 8 * (i // 2))
            for y, value in ((2, f"d{4 * tile + i}"), (3, f"e{i}")):
                lines.append(f"add.s64 desc, %d{y}, other;")
                lines.append(f"st.global.b32 [desc+{offset}], {value};")
    return "\n".join([*lines, LEFT, "}"])


def tensors(n: int, seed: int = 0) -> list[torch.Tensor]:
    torch.manual_seed(seed)
    x, w = torch.randn(n, K).bfloat16(), torch.randn(64, K).bfloat16()
    return [x, w, *(torch.full((n, 64), torch.nan) for _ in range(2))]


def launch(
    body: str, n: int, seed: int, races: bool = True, threads: int = 128
) -> list[torch.Tensor]:
    data = tensors(n, seed)
    run(
        body, data, threads=threads, seed=seed, races=races, shared_bytes=2 * n * K + 64
    )
    return data


def replaced(old: str, new: str) -> Edit:
    """The one place of ``old``."""

    def edit(body: str) -> str:
        assert body.count(old) == 1
        return body.replace(old, new)

    return edit


@pytest.mark.parametrize("n", [8, 16, 64])
def test_wgmma_gives_the_bits_of_mma_sync(n: int) -> None:
    body = kernel(n)
    for seed in SEEDS:
        x, w, y, same = launch(body, n, seed)
        torch.testing.assert_close(y, x.float() @ w.float().T)
        assert torch.equal(y.view(torch.int32), same.view(torch.int32))


@pytest.mark.parametrize(
    "fence", ["fence.proxy.async;", "fence.proxy.async.shared::cluster;"]
)
def test_other_forms_of_the_proxy_fence_and_register_budgets_change_nothing(
    fence: str,
) -> None:
    body = replaced(PROXY, "setmaxnreg.inc.sync.aligned.u32 240;" + fence)(kernel(8))
    for seed in SEEDS:
        _, _, y, same = launch(body, 8, seed)
        assert torch.equal(y, same)


@pytest.mark.parametrize(
    ("left", "used", "fault"),
    [(0, "b0", False), (1, "d0", False), (1, "b0", True), (2, "d0", True)],
)
def test_a_group_stays_under_way_while_later_ones_are_not_waited_for(
    left: int, used: str, fault: bool
) -> None:
    """wait_group 1 waits for all but the last group, which has b as its sums."""
    other = product(8, 0, "other", "no").replace("{d0,d1,d2,d3}", "{b0,b1,b2,b3}")
    wait_some = f"wgmma.wait_group.sync.aligned {left};"
    lines = [COMMIT, FENCE, other, COMMIT, wait_some, f"mov.b32 z, {used};", WAIT]
    body = replaced(f"{COMMIT}\n{WAIT}", "".join(lines) + "mov.b32 z, 0;")(kernel(8))
    for seed in SEEDS:
        if fault:
            with pytest.raises(Fault, match=USED):
                launch(body, 8, seed)
        else:
            _, _, y, same = launch(body, 8, seed)
            assert torch.equal(y, same)


UNFENCED = "no wgmma.fence between"
SHARED = "shares registers with a wgmma that is under way"
DIFFERENT = "step .* of a warpgroup: this warp does .*, another did"
UNWAITED = "the warp ends while a wgmma has not been waited for"
#: Warp 2, or lane 37.
WARP, LANE = "shr.u32 u, %r0, 5; setp.eq.u32 some, u, 2;", "setp.eq.u32 some, %r0, 37;"
#: A product at the end, and a whole second chain with no fence.
ONCE_MORE = f"mov.b64 desc, {DESCRIPTOR + 64}; {FENCE} {product(8, 0)}"
AGAIN = product(8, 0, "desc", "no") + COMMIT + WAIT


@pytest.mark.parametrize(
    ("edit", "fault"),
    [
        (replaced(WAIT, ""), USED),
        (replaced(COMMIT, ""), USED),
        (replaced(ISSUED, "mov.b32 d3, 0;"), USED),
        (replaced(ISSUED, "mov.b32 z, d0;"), USED),
        (replaced(ISSUED, "mov.b32 a02, 0;"), USED),
        (replaced(ISSUED, "ld.global.b32 a02, [%d1];"), USED),
        (replaced(COMMIT, f"{COMMIT} @yes add.f32 a02, a02, a02;"), USED),
        (replaced(FENCE, ""), UNFENCED),
        (replaced(BEFORE, "mov.b32 a13, 0;"), UNFENCED),
        (replaced(BEFORE, "@yes mov.b32 d2, 0;"), UNFENCED),
        (replaced(BEFORE, "ld.global.b32 a00, [%d1];"), UNFENCED),
        (replaced(WAITED, f"add.f32 d0, d0, d0; {AGAIN}"), UNFENCED),
        (replaced(WAITED, AGAIN), None),
        (replaced(WAITED, f"add.f32 d0, d0, d0; {FENCE} {AGAIN}"), None),
        (
            replaced(ISSUED, product(8, 0).replace("d0,d1", "d1,d0")),
            SHARED,
        ),
        (replaced(ISSUED, product(8, 0).replace("a00", "d0", 1)), "stands there twice"),
        (
            replaced(ISSUED, product(8, 0).replace("{d0,d1,d2,d3}", "{a10,b1,b2,b3}")),
            SHARED,
        ),
        (replaced(LEFT, f"{ONCE_MORE} {COMMIT}"), UNWAITED),
        (replaced(LEFT, f"{ONCE_MORE} {WAIT}"), UNWAITED),
        # The warps of a warpgroup.
        (replaced(BEFORE, f"{WARP} @some bra OVER;"), DIFFERENT),
        (replaced(WAITED, f"{WARP} @some {FENCE}"), DIFFERENT),
        (replaced(WAITED, f"{WARP} @some bra LAST; {COMMIT} LAST:"), DIFFERENT),
        (replaced(BEFORE, f"{WARP} @some add.s64 other, other, 1;"), DIFFERENT),
        (replaced(BEFORE, f"{WARP} @some setp.eq.b32 no, 0, 0;"), DIFFERENT),
        (replaced(PROXY, f"{WARP} @some setmaxnreg.dec.sync.aligned.u32 40; {PROXY}"),
         DIFFERENT),
        # The lanes of a warp.
        (replaced(WAITED, f"{LANE} @some {FENCE}"), "some lanes of the warp do not"),
        (replaced(WAITED, f"{LANE} @some ret; {FENCE}"), "lanes .* have ended"),
        (replaced(BEFORE, f"{LANE} @some add.s64 other, other, 1;"), "disagree"),
        (replaced(BEFORE, f"or.b64 other, other, {2 << 62};"), "no such swizzle or"),
        (replaced(BEFORE, f"or.b64 other, other, {1 << 49};"), "no such swizzle or"),
        (replaced(BEFORE, "add.s64 other, other, 64;"), "which has 576 bytes"),
    ],
)  # fmt: skip
def test_what_is_undefined_or_hangs_is_a_fault(edit: Edit, fault: str | None) -> None:
    body = edit(kernel(8)).replace(LEFT, "OVER:")
    for seed in SEEDS:
        if fault is None:
            launch(body, 8, seed)
        else:
            with pytest.raises((Fault, ValueError), match=fault):
                launch(body, 8, seed)


#: Each CTA of a cluster its own X and results, one after the other.
APART = (
    "mov.u32 %r1, %cluster_ctarank;"
    f"mul.wide.u32 %d4, %r1, {8 * K * 2}; add.s64 %d0, %d0, %d4;"
    f"mul.wide.u32 %d4, %r1, {8 * 64 * 4}; add.s64 %d2, %d2, %d4;"
    "add.s64 %d3, %d3, %d4;"
)


def cluster_launch(
    edit: Edit, seed: int, shared_bytes: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Results of two CTAs, [2, 8, 64], by wgmma and mma.sync."""
    data = tensors(16, seed)
    body, size = APART + edit(kernel(8)), {"cluster": 2, "shared_bytes": shared_bytes}
    run(body, data, threads=128, seed=seed, races=True, **size)
    x, w, y, same = data
    torch.testing.assert_close(same, x.float() @ w.float().T)
    return y.reshape(2, 8, 64), same.reshape(2, 8, 64)


def test_a_descriptor_holds_an_address_without_the_rank() -> None:
    """With it CTA 0 is right and CTA 1 has another leading offset: wrong sums where the
    memory is large enough for them (measured on an H200)."""
    for seed in SEEDS:
        y, same = cluster_launch(str, seed, 4096)
        assert torch.equal(y, same)
        y, same = cluster_launch(replaced(MASK, ""), seed, 4096)
        assert torch.equal(y[0], same[0])
        assert (y[1] != same[1]).all()
        with pytest.raises(Fault, match=r"of CTA \(1, 0, 0\), which has 576 bytes"):
            cluster_launch(replaced(MASK, ""), seed, 576)


@pytest.mark.parametrize("threads", [96, 224])
def test_a_warpgroup_that_is_not_whole_is_a_fault(threads: int) -> None:
    with pytest.raises(Fault, match=r"warps \d to \d are not all there"):
        launch(kernel(8), 8, 0, races=False, threads=threads)


@pytest.mark.parametrize(
    "edit",
    [
        replaced(PROXY, ""),
        # Too late: the barrier has told of the stores. And too early.
        replaced(f"{PROXY}\n{MEET}", f"{MEET} {PROXY}"),
        lambda body: PROXY + body.replace(PROXY, ""),
        # By one lane for others that have stored.
        replaced(PROXY, f"bar.warp.sync -1; setp.eq.b32 some, %r0, 0; @some {PROXY}"),
        replaced(PROXY, "fence.proxy.async.global;"),
    ],
    ids=["none", "after", "before", "one-lane", "global"],
)
def test_stores_need_a_proxy_fence_by_who_stored(edit: Edit) -> None:
    body = edit(kernel(8))
    for seed in SEEDS:
        with pytest.raises(Fault, match=r"no fence\.proxy\.async after it"):
            launch(body, 8, seed)


@pytest.mark.parametrize("fenced", [True, False])
def test_an_mbarrier_passes_the_proxy_fence_on(fenced: bool) -> None:
    init = (
        "setp.eq.u32 %p1, %r0, 0; @%p1 mbarrier.init.shared.b64 [smem+512], 128;"
        f"{MEET}\n"
    )
    arrive = "mbarrier.arrive.shared.b64 _, [smem+512];" + wait("smem+512", 0)
    body = init + replaced(MEET, arrive)(kernel(8))
    if not fenced:
        # By then it is too late.
        body = replaced(PROXY, "")(body).replace(FENCE, f"{PROXY} {FENCE}")
    for seed in SEEDS:
        if fenced:
            _, _, y, same = launch(body, 8, seed)
            assert torch.equal(y, same)
        else:
            with pytest.raises(Fault, match=r"no fence\.proxy\.async after it"):
                launch(body, 8, seed)


def test_stores_need_a_barrier_too() -> None:
    body = replaced(MEET, "")(kernel(16))
    for seed in SEEDS:
        with pytest.raises(Fault, match="not ordered with the"):
            launch(body, 16, seed)


#: Thread 0 stores where a core matrix was, in its own warp's order or in no other's.
STORE = "setp.eq.u32 some, %r0, 0; @some st.shared.b32 [smem], %r0;"


@pytest.mark.parametrize(
    ("edit", "fault"),
    [
        (replaced(COMMIT, COMMIT + STORE), "not ordered|was under way when"),
        (replaced(WAITED, STORE), "a store .* not ordered with the read there|a read"),
        (replaced(WAITED, MEET + STORE), None),
    ],
)
def test_a_store_over_b_waits_for_the_products_of_all_warps(
    edit: Edit, fault: str | None
) -> None:
    body = edit(kernel(8))
    for seed in SEEDS:
        if fault is None:
            launch(body, 8, seed)
        else:
            with pytest.raises(Fault, match=fault):
                launch(body, 8, seed)


def test_products_read_b_at_any_time_up_to_the_wait() -> None:
    """Without the checks of ``races``: some seeds see the store, others do not."""
    body = replaced(COMMIT, COMMIT + STORE)(kernel(8))
    found = set()
    for seed in SEEDS:
        _, _, y, same = launch(body, 8, seed, races=False)
        found.add(torch.equal(y[:, :16], same[:, :16]))
    assert found == {False, True}


def test_a_warp_that_waits_for_a_later_one_of_its_warpgroup_may_hang() -> None:
    """Warp 0 waits, before the fence, for warp 1, which has it behind its products."""
    first = "setp.eq.u32 some, %r0, 0;"
    init = f"{first} @some mbarrier.init.shared.b64 [smem+512], 1; {MEET}"
    late = wait("smem+512", 0)
    body = kernel(8).replace(MEET, MEET + init)
    body = body.replace(
        FENCE, f"setp.ge.u32 some, %r0, 32; @some bra GO; {late} GO: {FENCE}"
    )
    body = body.replace(
        WAITED,
        "setp.eq.u32 some, %r0, 32; @some mbarrier.arrive.shared.b64 _, [smem+512];",
    )
    hung = 0
    for seed in SEEDS:
        try:
            launch(body, 8, seed)
        except Deadlock as fault:
            assert "its warpgroup, of which 3 warps have come" in str(fault)
            hung += 1
    assert 0 < hung < len(SEEDS)


@pytest.mark.parametrize(
    "instruction",
    [
        product(8, 0).replace("1, 1, 0;", "1, -1, 0;"),
        product(8, 0).replace("1, 1, 0;", "1, 1, 2;"),
        product(8, 0).replace("1, 1, 0;", "1, 1, 0, 0;"),
        product(8, 0).replace("{a00,a01,a02,a03}", "other"),
        product(8, 0).replace("m64n8k16", "m64n16k16"),
        product(8, 0).replace("m64n8k16", "m64n12k16"),
        product(8, 0).replace("bf16.bf16", "f16.f16"),
        "wgmma.wait_group.sync.aligned z;",
        "setmaxnreg.inc.sync.aligned.u32 20;",
        "setmaxnreg.inc.sync.aligned.u32 100;",
    ],
)
def test_other_forms_are_refused(instruction: str) -> None:
    with pytest.raises(ValueError, match=r"line \d+: `(wgmma|setmaxnreg)"):
        launch(replaced(BEFORE, instruction)(kernel(8)), 8, 0)
