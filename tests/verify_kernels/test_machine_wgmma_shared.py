# SPDX-License-Identifier: Apache-2.0
"""The machine's wgmma with A in shared memory, with swizzles and with B's tokens
fastest: right sums, and a fault for data that may not be there or still in use."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.verify_kernels.machine import Fault
from tests.verify_kernels.machine.memory import Array
from tests.verify_kernels.machine.small import run

SEEDS = range(12)
K = 64
PROXY = "fence.proxy.async.shared::cta;"
FENCE = "wgmma.fence.sync.aligned;"
COMMIT = "wgmma.commit_group.sync.aligned;"
WAIT = "wgmma.wait_group.sync.aligned 0;"
COPIED = "cp.async.commit_group; cp.async.wait_group 0;"
MEET = "bar.sync 0;"
#: Where tests put something: before the products, after them.
BEFORE, AFTER = "// before", "// after"
SWIZZLE = 1 << 62
Edit = Callable[[str], str]


@dataclass(frozen=True)
class Layout:
    """A factor in shared memory.

    Attributes:
        places: byte of every element, [rows, K].
        descriptor: with the start at 0.
        step: bytes from 16 columns to the next.
        across: rows are fastest.
    """

    places: Array
    descriptor: int
    step: int
    across: bool = False

    @property
    def size(self) -> int:
        return -(-int(self.places.max() + 2) // 1024) * 1024


def fields(leading: int, stride: int) -> int:
    return leading >> 4 << 16 | stride >> 4 << 32


def plain(rows: int) -> Layout:
    """Core matrices of 8 rows by 16 bytes, K / 8 a row of them."""
    r, k = np.ogrid[:rows, :K]
    places = r // 8 * 1024 + k // 8 * 128 + r % 8 * 16 + k % 8 * 2
    return Layout(places, fields(128, 1024), 256)


def swizzled(rows: int, stride: int = 1024) -> Layout:
    """Rows of 128 bytes, K of them; row r has its 16 bytes i at i ^ r mod 8."""
    r, k = np.ogrid[:rows, :K]
    chunk = k // 8 ^ r % 8
    places = r // 8 * stride + r % 8 * 128 + chunk * 16 + k % 8 * 2
    # A leading offset that nothing needs.
    return Layout(places, SWIZZLE | fields(16, stride), 32)


def crosswise(rows: int, leading: int, stride: int) -> Layout:
    """Columns of 128 bytes, 64 rows of them; column k has its 16 bytes i at
    i ^ k mod 8."""
    r, k = np.ogrid[:rows, :K]
    chunk = r % 64 // 8 ^ k % 8
    places = r // 64 * leading + k // 8 * stride + k % 8 * 128 + chunk * 16 + r % 8 * 2
    return Layout(places, SWIZZLE | fields(leading, stride), 2 * stride, across=True)


def registers(name: str, count: int, first: int = 0) -> str:
    return "{" + ",".join(f"{name}{first + i}" for i in range(count)) + "}"


def load_a() -> str:
    """A from its rows in global memory, %d1."""
    lines = [
        f"mul.wide.u32 at, row, {2 * K}; mul.wide.u32 other, q, 4;"
        "add.s64 at, at, other; add.s64 at, at, %d1;"
    ]
    for step in range(K // 16):
        for i in range(4):
            offset = 2 * (16 * step + 8 * (i // 2) + 8 * (i % 2) * K)
            lines.append(f"ld.global.b32 a{4 * step + i}, [at+{offset}];")
    return "\n".join(lines)


def kernel(n: int, a: Layout | None, b: Layout, copies: bool = False) -> str:
    """%d0: A and B as in shared memory, B behind A; %d1: A [64, K]; %d2: Y [64, n].

    ``copies``: cp.async, not loads and stores.
    """
    behind = a.size if a else 0
    lines = [
        "{.reg .pred yes, no, some; .reg .b32 t, u, g, q, row, w<4>, a<16>;",
        f".reg .b32 d<{n // 2}>; .reg .b64 at, other, start, adesc, bdesc;",
        "shl.b32 t, %r0, 4; mov.u32 u, smem; add.u32 u, t, u;",
        "cvt.u64.u32 at, t; add.s64 at, at, %d0;",
    ]
    for first in range(0, behind + b.size, 128 * 16):
        lines.append(f"setp.lt.u32 some, t, {behind + b.size - first};")
        if copies:
            lines.append(
                f"@some cp.async.cg.shared.global [u+{first}], [at+{first}], 16;"
            )
        else:
            lines.append(
                f"@some ld.global.v4.b32 {registers('w', 4)}, [at+{first}];"
                f"@some st.shared.v4.b32 [u+{first}], {registers('w', 4)};"
            )
    lines += [
        COPIED if copies else "",
        PROXY,
        MEET,
        "shr.u32 g, %r0, 2; and.b32 g, g, 7; and.b32 q, %r0, 3;",
        "shr.u32 row, %r0, 5; shl.b32 row, row, 4; add.u32 row, row, g;",
        "" if a else load_a(),
        "setp.ne.b32 no, 0, 0; setp.eq.b32 yes, 0, 0;",
        "mov.u32 t, smem; and.b32 t, t, 262143; shr.u32 t, t, 4;",
        "cvt.u64.u32 start, t;",
        FENCE,
        BEFORE,
    ]
    for step in range(K // 16):
        here = b.descriptor + (behind + step * b.step >> 4)
        lines.append(f"add.s64 bdesc, start, {here};")
        if a:
            lines.append(
                f"add.s64 adesc, start, {a.descriptor + (step * a.step >> 4)};"
            )
        left = "adesc" if a else registers("a", 4, 4 * step)
        lines.append(
            f"wgmma.mma_async.sync.aligned.m64n{n}k16.f32.bf16.bf16 "
            f"{registers('d', n // 2)}, {left}, bdesc, {'yes' if step else 'no'}, "
            f"1, 1, {'0, ' if a else ''}{int(b.across)};"
        )
    lines += [
        COMMIT,
        WAIT,
        AFTER,
        f"mul.wide.u32 at, row, {4 * n}; mul.wide.u32 other, q, 8;"
        "add.s64 at, at, other; add.s64 at, at, %d2;",
    ]
    for i in range(n // 2):
        offset = 4 * (i % 4 // 2 * 8 * n + i // 4 * 8 + i % 2)
        lines.append(f"st.global.b32 [at+{offset}], d{i};")
    return "\n".join([*lines, "}"])


def factors(n: int, seed: int) -> tuple[Tensor, Tensor]:
    """Whole numbers, whose sums are exact."""
    generator = torch.Generator().manual_seed(seed)

    def whole(rows: int) -> Tensor:
        return torch.randint(-99, 99, (rows, K), generator=generator).bfloat16()

    return whole(64), whole(n)


def image(layout: Layout, factor: Tensor) -> Array:
    """The bytes of a factor; NaN where it has none."""
    halves = np.full(layout.size // 2, 0xFFFF, np.uint16)
    halves[layout.places // 2] = factor.view(torch.int16).numpy().view(np.uint16)
    return halves


def inputs(
    rows: int, a: Layout | None, b: Layout, seed: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Shared memory's bytes, A, and the product with all ``rows`` of B."""
    left, right = factors(rows, seed)
    parts = ([image(a, left)] if a else []) + [image(b, right)]
    bits = torch.from_numpy(np.concatenate(parts).view(np.int16))
    return bits, left, left.float() @ right.float().T


def launch(
    body: str,
    n: int,
    a: Layout | None,
    b: Layout,
    seed: int,
    races: bool = True,
    rows: int = 0,
) -> tuple[Tensor, Tensor]:
    """Y, and the product with all of B, which has n rows or ``rows``."""
    bits, left, right = inputs(rows or n, a, b, seed)
    y, size = torch.full((64, n), torch.nan), 2 * len(bits)
    run(body, [bits, left, y], threads=128, seed=seed, races=races, shared_bytes=size)
    return y, right


def replaced(old: str, new: str) -> Edit:
    """The one place of ``old``."""

    def edit(body: str) -> str:
        assert body.count(old) == 1
        return body.replace(old, new)

    return edit


PATTERN = "swizzled rows begin and end in the first 128 of 1024 bytes"
A, WIDE_A = swizzled(64), swizzled(64, 2048)


@pytest.mark.parametrize(
    ("n", "a", "b"),
    [
        (8, A, swizzled(8)),
        (64, A, swizzled(64)),
        (32, WIDE_A, swizzled(32, 3072)),
        (24, plain(64), plain(24)),
        (16, plain(64), swizzled(16)),
        (16, A, plain(16)),
        (32, None, swizzled(32)),
        (32, A, crosswise(32, 0, 1024)),
        (64, A, crosswise(64, 16, 2048)),
        (96, A, crosswise(96, 8192, 1024)),
        (128, plain(64), crosswise(128, 1024, 2048)),
        (256, A, crosswise(256, 8192, 1024)),
        (256, None, crosswise(256, 1024, 4096)),
        (64, None, crosswise(64, 0, 1024)),
    ],
)
def test_sums_are_right_wherever_the_factors_lie(
    n: int, a: Layout | None, b: Layout
) -> None:
    """A of None: in registers."""
    for copies in (False, True):
        body = kernel(n, a, b, copies)
        for seed in SEEDS if n <= 64 else range(3):
            y, right = launch(body, n, a, b, seed)
            assert torch.equal(y, right)


def test_a_start_may_lie_within_a_row() -> None:
    """Tokens 32 to 63 of 64."""
    b = crosswise(64, 0, 1024)
    part = replace(b, descriptor=b.descriptor + (64 >> 4))
    body = kernel(32, A, part)
    for seed in SEEDS:
        y, right = launch(body, 32, A, part, seed, rows=64)
        assert torch.equal(y, right[:, 32:])


def test_the_swizzle_and_the_offsets_matter() -> None:
    """Each of them wrong gives wrong sums: what is right above is so for a reason."""
    b = crosswise(128, 8192, 1024)
    other = [
        (A, replace(b, descriptor=SWIZZLE | fields(1024, 8192))),
        (A, replace(b, step=1024)),
        (replace(A, descriptor=fields(16, 1024)), b),
        (replace(A, descriptor=SWIZZLE | fields(16, 0)), b),
        (replace(A, step=64), b),
    ]
    for left, right in other:
        try:
            y, exact = launch(kernel(128, left, right), 128, left, right, 0)
        except Fault as fault:
            assert re.search(f"which has|{PATTERN}", str(fault))
        else:
            assert not torch.equal(y, exact)


#: A small product of everything that is new.
N, B = 32, crosswise(32, 0, 1024)
#: Thread 0 stores over A: its own warp's rows, the next warp's; over B.
OVER_OWN, OVER_NEXT, OVER_B = 0, 16 * 128, A.size


def over(place: int, copy: bool = False) -> str:
    store = (
        f"@some cp.async.cg.shared.global [smem+{place}], [%d0], 16; {COPIED}"
        if copy
        else f"@some st.shared.b32 [smem+{place}], %r0;"
    )
    return f"setp.eq.u32 some, %r0, 0; {store}"


def check(body: str, fault: str | None) -> None:
    """Every seed gives the right sums, or meets the fault."""
    for seed in SEEDS:
        if fault is None:
            y, right = launch(body, N, A, B, seed)
            assert torch.equal(y, right)
        else:
            with pytest.raises(Fault, match=fault):
                launch(body, N, A, B, seed)


UNFENCED = r"no fence\.proxy\.async after it"
MOVED = f"{PROXY}\n{MEET}"


@pytest.mark.parametrize("copies", [False, True])
@pytest.mark.parametrize(
    ("edit", "fault"),
    [
        (replaced(PROXY, ""), UNFENCED),
        # Too late: the barrier has told of the stores.
        (replaced(MOVED, f"{MEET} {PROXY}"), UNFENCED),
        # By one lane for others that have stored.
        (replaced(PROXY, f"bar.warp.sync -1; setp.eq.b32 some, %r0, 0; @some {PROXY}"),
         UNFENCED),
        (replaced(PROXY, "fence.proxy.async.global;"), UNFENCED),
        (replaced(MEET, ""), "not ordered with the"),
        (replaced(MEET, "bar.warp.sync -1;"), "not ordered with the"),
    ],
)  # fmt: skip
def test_stores_and_copies_need_the_fence_of_who_made_them_and_a_barrier(
    edit: Edit, fault: str, copies: bool
) -> None:
    check(edit(kernel(N, A, B, copies)), fault)


@pytest.mark.parametrize(
    ("edit", "fault"),
    [
        # Fenced before they have come.
        (replaced(f"{COPIED}\n{PROXY}", PROXY + COPIED), UNFENCED),
        # The wait is somebody else's: after the barrier, or for an older group.
        (replaced(COPIED, "cp.async.commit_group; cp.async.wait_group 1;"),
         "not ordered with the store"),
        (lambda body: replaced(COPIED, "cp.async.commit_group;")(body).replace(
            FENCE, COPIED + FENCE), "not ordered with the store|" + UNFENCED),
    ],
)  # fmt: skip
def test_a_copy_is_waited_for_before_the_fence_and_the_barrier(
    edit: Edit, fault: str
) -> None:
    check(edit(kernel(N, A, B, copies=True)), fault)


#: Whichever of the two comes first.
IN_USE = (
    "a store .* not ordered with the read there|was under way when a store came|"
    "a read .* not ordered with the store there"
)


@pytest.mark.parametrize("copy", [False, True])
@pytest.mark.parametrize("place", [OVER_OWN, OVER_NEXT, OVER_B])
def test_a_factor_is_in_use_until_all_warps_that_read_it_have_waited(
    place: int, copy: bool
) -> None:
    """The rows of A until their own warp has: nothing else reads them."""
    body, store = kernel(N, A, B), over(place, copy)
    check(replaced(COMMIT, COMMIT + store)(body), IN_USE)
    check(replaced(AFTER, store)(body), None if place == OVER_OWN else IN_USE)
    check(replaced(AFTER, MEET + store)(body), None)
    # A barrier does not end what has not been waited for.
    check(replaced(COMMIT, COMMIT + MEET + store)(body), IN_USE)


def test_a_barrier_before_the_wait_is_none() -> None:
    """Thread 0 has waited when it stores, and met the others when they had not."""
    check(
        replaced(f"{COMMIT}\n{WAIT}", COMMIT + MEET + WAIT + over(OVER_NEXT))(
            kernel(N, A, B)
        ),
        IN_USE,
    )


def test_a_warp_may_store_its_own_rows_of_a_and_meet_alone() -> None:
    """The second time: the barrier is that of the warp."""
    zeros = (
        "and.b32 t, %r0, 31; shl.b32 t, t, 4; shr.u32 u, %r0, 5; shl.b32 u, u, 11;"
        "add.u32 u, u, t; mov.u32 t, smem; add.u32 u, u, t; mov.b32 w0, 0;"
        + "".join(
            f"st.shared.v4.b32 [u+{i}], {{w0,w0,w0,w0}};" for i in range(0, 2048, 512)
        )
    )
    body = kernel(N, A, B)
    products = body.split(BEFORE)[1].split(AFTER)[0]
    again = f"{zeros} {PROXY} bar.warp.sync -1; {FENCE} {products}"
    second = replaced(AFTER, again)(body)
    for seed in SEEDS:
        y, _ = launch(second, N, A, B, seed)
        assert (y == 0).all()
    check(replaced(AFTER, again.replace(PROXY, ""))(body), UNFENCED)
    check(replaced(AFTER, again.replace("bar.warp.sync -1;", ""))(body), "not ordered")


def test_a_is_read_at_any_time_up_to_the_wait() -> None:
    """Without the checks of ``races``: some seeds see the store, others do not."""
    body = replaced(COMMIT, COMMIT + over(OVER_OWN) + "bar.warp.sync -1;")(
        kernel(N, A, B)
    )
    found = set()
    for seed in SEEDS:
        y, right = launch(body, N, A, B, seed, races=False)
        assert torch.equal(y[1:], right[1:])
        found.add(torch.equal(y[0], right[0]))
    assert found == {False, True}


def changed(a: Layout, bits: int) -> Layout:
    return replace(a, descriptor=a.descriptor ^ bits)


NO_SUCH = "no such swizzle or base"


@pytest.mark.parametrize(
    ("a", "b", "fault"),
    [
        (changed(A, 3 << 62), B, NO_SUCH),
        (changed(A, 2 << 62), B, NO_SUCH),
        (A, changed(B, 3 << 62), NO_SUCH),
        (changed(A, 1 << 49), B, NO_SUCH),
        (A, changed(B, 4 << 49), NO_SUCH),
        (changed(A, 1 << 52), B, NO_SUCH),
        (A, changed(B, SWIZZLE), "rows that are fastest with a swizzle only"),
        # From the second row of the pattern on; past the end of a row.
        (changed(A, 128 >> 4), B, PATTERN),
        (A, changed(B, 512 >> 4), PATTERN),
        (changed(A, 112 >> 4), B, PATTERN),
        (A, changed(B, 80 >> 4), PATTERN),
        # Half a pattern to the next.
        (changed(A, 512 >> 4 << 32), B, PATTERN),
        (A, changed(B, 512 >> 4 << 32), PATTERN),
        (A, replace(B, step=1 << 17), r"which has \d+ bytes"),
    ],
)
def test_descriptors_that_are_not_known_are_faults(
    a: Layout, b: Layout, fault: str
) -> None:
    with pytest.raises(Fault, match=fault):
        launch(kernel(N, a, b), N, A, B, 0)


def test_all_warps_have_the_same_descriptor_of_a() -> None:
    """Those of some warps or lanes have other leading offsets, which nothing needs."""
    more = f"@some add.s64 start, start, {1 << 16};"
    for some, fault in (
        (
            "shr.u32 u, %r0, 5; setp.eq.u32 some, u, 2;",
            "of a warpgroup: this warp does",
        ),
        ("setp.eq.u32 some, %r0, 37;", "lanes of the warp disagree"),
    ):
        check(replaced(BEFORE, some + more)(kernel(N, A, B)), fault)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("1, 1, 0, 1;", "1, 1, 1, 1;"),
        ("1, 1, 0, 1;", "1, 1, 0, 2;"),
        ("1, 1, 0, 1;", "1, -1, 0, 1;"),
        ("1, 1, 0, 1;", "1, 1, 1;"),
        ("1, 1, 0, 1;", "1, 1, 0, 1, 0;"),
        ("adesc, bdesc, no", "{a0,a1,a2,a3}, bdesc, no"),
        ("adesc, bdesc, no", "t, bdesc, no"),
    ],
)
def test_other_forms_are_refused(old: str, new: str) -> None:
    with pytest.raises(ValueError, match=r"line \d+: `wgmma"):
        launch(kernel(N, A, B).replace(old, new), N, A, B, 0)
