# SPDX-License-Identifier: Apache-2.0
"""The machine that runs PTX: who waits for whom, and what comes too late or too early.

Each fault is shown beside the cure, which every seed passes.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from tests.verify_kernels.machine import Deadlock, Fault
from tests.verify_kernels.machine.small import run, wait, words

SEEDS = range(24)
LANE = torch.arange(32)

#: One thread makes a barrier at 0 for one arrival.
INIT = """
setp.eq.b32 %p1, %r0, 0;
@%p1 mbarrier.init.shared.b64 [smem], 1;
bar.sync 0;
"""
COPY = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
SEND = "st.async.shared::cluster.mbarrier::complete_tx::bytes.b32"
#: Every thread's word at smem + 128.
READ = "shl.b32 %r1, %r0, 2; add.s32 %r2, %r1, smem; ld.shared.b32 %r3, [%r2+128];"
STORE = "st.global.b32 [%d11], %r3;"
CLUSTER = "barrier.cluster.arrive; barrier.cluster.wait;"


def found(body: str, inputs: Sequence[Tensor], **sizes: int) -> set[tuple[int, ...]]:
    """The different results, first words of the last tensor, over all seeds."""
    results = set()
    for seed in SEEDS:
        out = words(sizes.get("threads", 32) * sizes.get("cluster", 1))
        run(body, [*inputs, out], seed=seed, **sizes)
        results.add(tuple(out.view(torch.int32)[::2].tolist()))
    return results


def numbers(count: int = 32, first: int = 0) -> Tensor:
    return torch.arange(first, first + count, dtype=torch.int32)


EXPECT = "@%p1 mbarrier.arrive.expect_tx.shared.b64 _, [smem], 128;"
ISSUE = f"@%p1 {COPY} [smem+128], [%d0], 128, [smem];"
RIGHT = {tuple(range(32))}


@pytest.mark.parametrize("parts", [EXPECT + ISSUE, ISSUE + EXPECT])
def test_a_copy_is_there_when_its_bytes_have_been_counted(parts: str) -> None:
    """Bytes may come before they are announced."""
    body = INIT + parts + wait("smem", 0) + READ + STORE
    assert found(body, [numbers()]) == RIGHT


def test_without_the_wait_a_copy_is_there_wholly_in_part_or_not() -> None:
    results = found(INIT + EXPECT + ISSUE + READ + STORE + wait("smem", 0), [numbers()])
    assert {(-1,) * 32, *RIGHT} < results
    assert any(len(set(r)) not in (1, 32) for r in results)


def test_a_wait_must_be_repeated() -> None:
    """try_wait may give up; without a loop what follows can be too early."""
    once = "mbarrier.try_wait.parity.shared.b64 %p7, [smem], 0;"
    body = INIT + EXPECT + ISSUE
    results = found(body + once + READ + STORE + wait("smem", 0), [numbers()])
    assert len(results) > 1


def test_phases_alternate_and_the_one_before_the_first_has_passed() -> None:
    """Warp 0 leaves 1, 2, 3, 4 in one word, each when warp 1 has taken the last."""
    two = INIT.replace(
        "[smem], 1;", "[smem], 1; @%p1 mbarrier.init.shared.b64 [smem+8], 1;"
    )
    body = two + "mov.b32 %r3, 0; setp.ge.u32 %p3, %r0, 32; @%p3 bra TAKE;"
    for turn in range(4):
        body += (
            wait("smem+8", (turn + 1) % 2)
            + f"@%p1 st.shared.b32 [smem+128], {turn + 1};"
        )
        body += "@%p1 mbarrier.arrive.shared.b64 _, [smem];"
    body += "bra OUT; TAKE: setp.eq.b32 %p4, %r0, 32;"
    for turn in range(4):
        body += wait("smem", turn % 2) + "ld.shared.b32 %r4, [smem+128];"
        body += "mad.lo.s32 %r3, %r3, 10, %r4; and.b32 %r9, %r4, 0;"
        body += "add.s32 %r10, %r9, smem; @%p4 mbarrier.arrive.shared.b64 _, [%r10+8];"
    right = {(0,) * 32 + (1234,) * 32}
    assert found(body + "OUT:" + STORE, [words(64)], threads=64) == right


def test_a_phase_is_missed_if_the_next_one_passes_before_anybody_looks() -> None:
    twice = "@%p1 mbarrier.arrive.shared.b64 _, [smem];" * 2
    body = (
        INIT + "@%p1 bra FIRST;" + wait("smem", 0) + "bra END; FIRST:" + twice + "END:"
    )
    outcomes = set()
    for seed in SEEDS:
        try:
            run(body.replace("@%p1 bra", "setp.lt.u32 %p2, %r0, 32; @%p2 bra"), [],
                threads=64, seed=seed)  # fmt: skip
            outcomes.add("seen")
        except Deadlock:
            outcomes.add("missed")
    assert outcomes == {"seen", "missed"}


def test_a_deadlock_names_every_warp_and_what_it_waits_for() -> None:
    body = INIT + "setp.lt.u32 %p2, %r0, 32; @%p2 bra LAST;" + wait("smem", 0)
    for seed in SEEDS:
        with pytest.raises(Deadlock) as caught:
            run(body + "LAST: bar.sync 1;", [], threads=64, seed=seed)
        lines = str(caught.value).splitlines()[1:]
        assert len(lines) == 2
        assert re.search(r"warp 0, .*`bar.sync 1` waits for bar.sync 1, to", lines[0])
        assert re.search(
            r"warp 1, .*`mbarrier.try_wait.* waits for parity 0 of barrier at 0 of "
            r"shared memory of CTA \(0, 0, 0\): phase 0, 1 of 1 arrivals and 0 bytes",
            lines[1],
        )


def test_too_few_bytes_are_a_deadlock_and_lanes_that_part_before_a_meeting_too() -> (
    None
):
    wrong = EXPECT.replace("128;", "144;")
    with pytest.raises(Deadlock, match="0 of 1 arrivals and 16 bytes to come"):
        run(INIT + wrong + ISSUE + wait("smem", 0), [numbers()])
    parted = "setp.lt.u32 %p2, %r0, 7; @%p2 bra HERE; bar.warp.sync -1; ret;"
    with pytest.raises(Deadlock, match="waits for the other lanes of its warp"):
        run(parted + "HERE: bar.warp.sync -1;", [])


def test_bar_sync_orders_the_warps_of_a_cta() -> None:
    """Each thread reads what a thread of another warp stored; then 96 of 128 threads
    meet at a barrier of their own."""
    store = "shl.b32 %r4, %r0, 2; add.s32 %r5, %r4, smem; st.shared.b32 [%r5], %r0;"
    read = "xor.b32 %r6, %r5, 128; ld.shared.b32 %r3, [%r6];"
    right = {tuple(t ^ 32 for t in range(128))}
    threads = {"threads": 128}
    assert found(store + "bar.sync 0;" + read + STORE, [words(128)], **threads) == right
    assert found(store + read + STORE, [words(128)], **threads) != right
    some = "setp.ge.u32 %p2, %r0, 96; @%p2 ret; bar.sync 3, 96;"
    body = store + "bar.sync 0;" + read + STORE + some
    assert found(body, [words(128)], **threads) == right


RING = (
    INIT.replace(
        "bar.sync 0;", "@%p1 mbarrier.init.shared.b64 [smem+8], 1; bar.sync 0;"
    )
    + "setp.ge.u32 %p3, %r0, 32; @%p3 bra CONSUME;"
    + EXPECT
    + ISSUE
    + wait("smem+8", 0)
    + EXPECT
    + ISSUE.replace("%d0", "%d0+128")
    + "ret; CONSUME: and.b32 %r0, %r0, 31;"
    + wait("smem", 0)
    + READ
    + "RELEASE"
    + wait("smem", 1)
    + "add.s32 %r4, %r3, 1; sub.s32 %r3, %r4, 1; st.global.b32 [%d11+-256], %r3;"
)
#: The consumer's lane 0 gives the slot back; the rest is what it waits for.
GIVE = "setp.eq.b32 %p4, %r0, 0; @%p4 mbarrier.arrive.shared.b64 _, [{at}];"
DEPENDENT = "and.b32 %r9, %r3, 0; add.s32 %r10, %r9, smem;"


def test_a_slot_given_back_before_its_data_reached_registers_is_overwritten() -> None:
    """Loads finish at their first use: an arrival, and ``bar.warp.sync``, may pass
    them. The cure is an arrival whose address is computed from the data."""
    both = torch.cat([numbers(), numbers(first=100)])

    def results(release: str) -> set[tuple[int, ...]]:
        found_here = found(RING.replace("RELEASE", release), [both], threads=64)
        return {r[:32] for r in found_here}

    late = results("bar.warp.sync -1;" + GIVE.format(at="smem+8"))
    assert late > RIGHT
    assert results(DEPENDENT + GIVE.format(at="%r10+8")) == RIGHT


def test_arithmetic_on_late_data_is_late_too() -> None:
    """A sum is no use of the data: an arrival in no relation to it passes both."""
    release = "add.s32 %r3, %r3, 0; add.s32 %r3, %r3, 0;" + GIVE.format(at="smem+8")
    both = torch.cat([numbers(), numbers(first=100)])
    results = found(RING.replace("RELEASE", release), [both], threads=64)
    assert {r[:32] for r in results} > RIGHT


REMOTE = (
    "mov.u32 %r20, %cluster_ctarank; xor.b32 %r21, %r20, 1;"
    "mad.lo.s32 %r22, %r20, 256, 0; cvt.u64.u32 %d20, %r22; add.s64 %d11, %d11, %d20;"
    "shl.b32 %r1, %r0, 2; add.s32 %r2, %r1, smem; add.s32 %r2, %r2, 128;"
    "mapa.shared::cluster.u32 %r23, %r2, %r21; mov.b32 %r24, smem;"
    "mapa.shared::cluster.u32 %r25, %r24, %r21; mad.lo.s32 %r26, %r20, 100, %r0;"
    + INIT
    + EXPECT
)
TELL = f"{SEND} [%r23], {{%r26}}, [%r25];"
TOLD = {(*range(100, 132), *range(32))}


def test_remote_stores_come_before_the_wait_that_counts_them() -> None:
    body = REMOTE + CLUSTER + TELL + wait("smem", 0) + READ + STORE
    assert found(body, [words(64)], cluster=2) == TOLD


def test_the_sender_may_tell_how_much_comes() -> None:
    """In place of the receiver, with its own arrival."""
    told = (
        "@%p1 mbarrier.arrive.expect_tx.relaxed.cluster.shared::cluster.b64 "
        "_, [%r25], 128;"
    )
    quiet = REMOTE.replace(EXPECT, "") + CLUSTER + TELL
    body = wait("smem", 0) + READ + STORE
    assert found(quiet + told + body, [words(64)], cluster=2) == TOLD
    with pytest.raises(Deadlock, match="4 bytes to come"):
        more = told.replace("128", "132")
        found(quiet + more + body, [words(64)], cluster=2)


def test_a_remote_store_needs_the_barrier_there() -> None:
    """Without the cluster's barrier the other CTA may not have made it yet."""
    with pytest.raises(Fault, match=r"under way to CTA .* no barrier at 0"):
        found(REMOTE + TELL + wait("smem", 0) + READ + STORE, [words(64)], cluster=2)


def test_a_cta_that_leaves_while_a_peer_sends_is_a_fault() -> None:
    """Field case F36: the cure is a barrier of the cluster at the end."""
    body = REMOTE + CLUSTER + TELL + "mov.b32 %r3, 0;" + STORE
    with pytest.raises(Fault, match="all threads of the CTA had ended"):
        found(body, [words(64)], cluster=2)
    zeros = {(0,) * 64}
    assert found(body + wait("smem", 0) + CLUSTER, [words(64)], cluster=2) == zeros


#: This CTA's address of smem, smem of ranks 0 and 1 by mapa, and the other's.
WINDOWS = (
    "mov.u32 %r20, %cluster_ctarank; xor.b32 %r21, %r20, 1; mov.b32 %r24, smem;"
    "mapa.shared::cluster.u32 %r22, %r24, 0; mapa.shared::cluster.u32 %r23, %r24, 1;"
    "mapa.shared::cluster.u32 %r25, %r24, %r21;"
    "mad.lo.s32 %r26, %r20, 256, 0; cvt.u64.u32 %d20, %r26; add.s64 %d11, %d11, %d20;"
)


def test_a_shared_address_has_the_rank_of_its_cta_from_bit_24_on() -> None:
    first, second = 1024, (1 << 24) + 1024
    for register, right in (
        ("%r24", (first, second)),
        ("%r22", (first, first)),
        ("%r23", (second, second)),
        ("%r25", (second, first)),
    ):
        body = f"{WINDOWS} mov.b32 %r3, {register}; {STORE}"
        wanted = {(right[0],) * 32 + (right[1],) * 32}
        assert found(body, [words()], cluster=2) == wanted
    # Of an address in another window too, mapa makes one of the rank it is given.
    body = f"{WINDOWS} mapa.shared::cluster.u32 %r3, %r25, %r20; {STORE}"
    assert found(body, [words()], cluster=2) == {(first,) * 32 + (second,) * 32}


@pytest.mark.parametrize(
    "access",
    [
        "ld.shared.b32 %r3, [{at}+128];",
        "ld.shared::cta.v4.b32 {{%r3,%r4,%r5,%r6}}, [{at}+128];",
        "st.shared.b32 [{at}+128], %r0;",
        "@%p1 mbarrier.init.shared.b64 [{at}+8], 1;",
        "@%p1 mbarrier.arrive.shared.b64 _, [{at}];",
        "@%p1 mbarrier.arrive.expect_tx.shared.b64 _, [{at}], 128;",
        "mbarrier.try_wait.parity.shared.b64 %p7, [{at}], 1;",
    ],
)
def test_without_shared_cluster_a_cta_accesses_its_own_window_only(access: str) -> None:
    body = WINDOWS + INIT + CLUSTER + access
    run(body.format(at="%r24"), [words(64)], cluster=2)
    other = r"CTA \(([01]), 0, 0\), .* is in the window of rank (?!\1)[01]; "
    with pytest.raises(Fault, match=other + ".* others take shared::cluster"):
        run(body.format(at="%r25"), [words(64)], cluster=2)
    # Without the rank it is an address of rank 0, which alone may use it.
    within = body.format(at="%r27").replace(INIT, INIT + "and.b32 %r27, %r24, 262143;")
    with pytest.raises(Fault, match=r"CTA \(1, .* is in the window of rank 0; "):
        run(within, [words(64)], cluster=2)
    run(within, [words()], cluster=1)


def test_a_copy_goes_to_the_window_of_its_address() -> None:
    """Each CTA copies to the other; data and barrier are of one window."""
    start, ending = WINDOWS + INIT + EXPECT + CLUSTER, READ + STORE + CLUSTER
    copy = f"@%p1 {COPY} [%r25+128], [%d20], 128, [%r25];" + wait("smem", 0)
    # From its half of the numbers.
    start += "mul.wide.u32 %d20, %r20, 128; add.s64 %d20, %d0, %d20;"
    right = {(*range(32, 64), *range(32))}
    assert found(start + copy + ending, [numbers(64)], cluster=2) == right
    with pytest.raises(Fault, match="barrier of a bulk copy are in different CTAs"):
        found(start + copy.replace("[%r25]", "[smem]"), [numbers(64)], cluster=2)


def test_the_cluster_barrier_wants_an_arrival_for_each_wait() -> None:
    with pytest.raises(Fault, match="a wait without an arrival"):
        run("barrier.cluster.wait;", [], cluster=2)
    with pytest.raises(Fault, match="a second arrival without a wait"):
        run("barrier.cluster.arrive; barrier.cluster.arrive;", [], cluster=2)
    some = "setp.eq.b32 %p2, %r0, 9; @%p2 bra OUT;" + CLUSTER + "OUT:"
    run(some, [], cluster=2)  # threads that have ended are not waited for
    with pytest.raises(Deadlock, match="the cluster, of which 2 threads have not come"):
        run(some + "bar.warp.sync -1;", [], cluster=2)


def test_what_earlier_kernels_write_is_seen_after_the_wait_only() -> None:
    """Field case F08, at run time: with programmatic launch an early read is NaN and
    an early store is refused."""
    load = "ld.global.b32 %r3, [%d10];"
    out, source = words(), words().fill_(7)
    run(load + "griddepcontrol.wait;" + STORE, [source, out], pdl=True)
    assert out.view(torch.int32)[::2].eq(-1).all()
    run("griddepcontrol.wait;" + load + STORE, [source, out], pdl=True)
    assert out.view(torch.int32)[::2].eq(7).all()
    run(load + STORE, [source, out], pdl=False)
    with pytest.raises(Fault, match=r"a store to t1 before griddepcontrol\.wait"):
        run(load + STORE + "griddepcontrol.wait;", [source, out], pdl=True)
    early = INIT + EXPECT + ISSUE + "griddepcontrol.wait;" + wait("smem", 0)
    run(early + READ + STORE, [numbers(), out], pdl=True)
    assert out.view(torch.int32)[::2].eq(-1).all()


def test_each_warp_waits_for_itself() -> None:
    """The wait of warp 0 does not let warp 1 read."""
    out = words(64)
    run(
        "setp.lt.u32 %p2, %r0, 32; @%p2 griddepcontrol.wait; ld.global.b32 %r3, [%d10];"
        "bar.sync 0; griddepcontrol.wait;" + STORE,
        [words(64).fill_(7), out],
        threads=64,
        pdl=True,
    )
    assert out.view(torch.int32)[::2].tolist() == [7] * 32 + [-1] * 32
