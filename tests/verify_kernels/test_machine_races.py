# SPDX-License-Identifier: Apache-2.0
"""The machine that runs PTX: accesses to shared memory that nothing orders.

Each fault is shown beside the cure, which every seed passes. A fault is one under every
seed that comes to it, whether or not the values suffer.
"""

from __future__ import annotations

import pytest
import torch

from tests.verify_kernels.machine import Fault
from tests.verify_kernels.machine.small import run, wait

SEEDS = range(12)
#: 32-bit numbers that a kernel may copy.
NUMBERS = torch.arange(256, dtype=torch.int32)
INIT = """
setp.eq.b32 %p1, %r0, 0;
@%p1 mbarrier.init.shared.b64 [smem], {count};
@%p1 mbarrier.init.shared.b64 [smem+8], {count};
bar.sync 0;
mov.u32 %r30, %laneid; setp.eq.b32 %p5, %r30, 0;
shl.b32 %r1, %r0, 2; and.b32 %r2, %r1, 127; add.s32 %r4, %r2, smem;
xor.b32 %r5, %r2, 4; add.s32 %r5, %r5, smem;
setp.ge.u32 %p3, %r0, 32;
"""
#: Each lane's word, and that of the lane next to it.
STORE, READ = "st.shared.b32 [%r4+128], %r0;", "ld.shared.b32 %r3, [%r5+128];"
EVERY = "mbarrier.arrive.shared.b64 _, [smem];"
ONE = "bar.warp.sync -1; @%p5 mbarrier.arrive.shared.b64 _, [smem];"
#: Arrivals that need the lane's data, or those of the warp.
NEEDS = "and.b32 %r9, {of}, 0; add.s32 %r10, %r9, smem;"
AFTER = NEEDS.format(of="%r3") + "{who} mbarrier.arrive.shared.b64 _, [%r10];"
VOTE = (
    "setp.gt.u32 %p6, %r3, 1000; vote.sync.ballot.b32 %r11, %p6, -1;"
    + NEEDS.format(of="%r11")
    + "@%p5 mbarrier.arrive.shared.b64 _, [%r10];"
)
STORED = r"a read at \d+ .* not ordered with the store there by lane \d+ of warp 0"
READ_BY = r"a store at \d+ .* not ordered with the read there by lane \d+ of warp 0"


def two(first: str, second: str, count: int = 32) -> str:
    """Warp 0 does one thing, warp 1 another."""
    return (
        INIT.format(count=count)
        + f"@%p3 bra SECOND; {first} bra END; SECOND: {second} END:"
    )


def check(body: str, fault: str | None, threads: int = 64, cluster: int = 1) -> None:
    """Every seed passes, or every seed meets the fault."""
    for seed in SEEDS:
        tensors = [NUMBERS.clone(), torch.zeros(threads * cluster, dtype=torch.int64)]
        sizes = {"threads": threads, "cluster": cluster, "seed": seed}
        if fault is None:
            run(body, tensors, races=True, **sizes)
            continue
        with pytest.raises(Fault, match=fault):
            run(body, tensors, races=True, **sizes)


@pytest.mark.parametrize(
    ("arrive", "count", "fault"),
    [(EVERY, 32, None), (ONE, 1, STORED), ("", 0, STORED)],
    ids=["every-lane", "one-lane", "none"],
)
def test_a_lane_that_arrives_passes_on_its_own_stores_only(
    arrive: str, count: int, fault: str | None
) -> None:
    """A lane of warp 1 reads what two lanes of warp 0 may have stored."""
    body = two(STORE + arrive, (wait("smem", 0) if arrive else "") + READ, count or 1)
    if arrive:
        check(body, fault)
        return
    # Without a barrier it depends on who comes first.
    both = f"{STORED}|{READ_BY.replace('warp 0', 'warp 1')}"
    check(body, both)


@pytest.mark.parametrize(
    ("arrive", "count", "fault"),
    [
        (AFTER.format(who=""), 32, None),
        (AFTER.format(who="@%p5"), 1, READ_BY),
        ("bar.warp.sync -1;" + AFTER.format(who="@%p5"), 1, READ_BY),
        (VOTE, 1, None),
    ],
    ids=["every-lane", "one-lane", "one-lane-after-meeting", "one-lane-after-vote"],
)
def test_a_lane_that_arrives_passes_on_its_own_reads_or_those_a_result_needs(
    arrive: str, count: int, fault: str | None
) -> None:
    check(two(READ + arrive, wait("smem", 0) + STORE, count), fault)


@pytest.mark.parametrize(
    ("meet", "fault"), [("bar.warp.sync -1;", None), ("", STORED)], ids=["met", "not"]
)
def test_lanes_of_a_warp_that_has_met_know_of_each_other(
    meet: str, fault: str | None
) -> None:
    check(INIT.format(count=1) + STORE + meet + READ, fault, threads=32)


def test_a_lane_waits_for_its_warp() -> None:
    """What it has learnt so, the others know when they have met."""
    one = "@!%p5 bra MEET;" + wait("smem", 0) + "MEET: bar.warp.sync -1;"
    check(two(STORE + EVERY, one + READ, 32), None)


def test_a_vote_passes_on_no_stores() -> None:
    arrive = VOTE.replace("%r3", "%r0")
    check(two(STORE + arrive, wait("smem", 0) + READ, 1), STORED)


def test_a_read_counts_from_when_its_data_come() -> None:
    """An arrival that does not need the data passes on nothing of a load under way:
    some schedules let it pass, others show it."""
    body = two(READ + EVERY, wait("smem", 0) + STORE)
    outcomes = set()
    for seed in range(40):
        try:
            run(body, [NUMBERS, NUMBERS], threads=64, seed=seed, races=True)
            outcomes.add("passed")
        except Fault as fault:
            assert "was under way when a store came" in str(
                fault
            ) or "not ordered with the read" in str(fault)
            outcomes.add("fault")
    assert outcomes == {"passed", "fault"}


def test_bar_sync_orders_and_a_cluster_barrier_if_it_is_not_relaxed() -> None:
    other = READ.replace("%r5", "%r6")
    body = INIT.format(count=1) + (
        "add.s32 %r7, %r1, smem; st.shared.b32 [%r7+128], %r0;"
        "xor.b32 %r6, %r1, 128; add.s32 %r6, %r6, smem; BETWEEN"
    )
    fault = r"a (read|store) at \d+ .* not ordered with the (store|read) there by lane"
    check(body.replace("BETWEEN", "bar.sync 0;") + other, None)
    check(body.replace("BETWEEN", "") + other, fault)
    cluster = "barrier.cluster.arrive{}; barrier.cluster.wait;"
    check(body.replace("BETWEEN", cluster.format("")) + other, None, cluster=2)
    relaxed = cluster.format(".relaxed")
    check(body.replace("BETWEEN", relaxed) + other, fault, cluster=2)


COPY = (
    "@%p1 mbarrier.arrive.expect_tx.shared.b64 _, [smem], 128;"
    "@%p1 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
    "[smem+128], [%d0], 128, [smem];"
)


def test_a_copy_is_ordered_by_the_barrier_that_counts_it() -> None:
    """Its reader waits for that, the next copy for the readers."""
    ready, free = wait("smem", 0), wait("smem+8", 0)
    give = AFTER.format(who="").replace("[%r10]", "[%r10+8]")
    init = INIT.replace("[smem], {count}", "[smem], 1")
    body = init.format(count=32) + (
        "@%p3 bra SECOND;" + COPY + "FREE" + COPY + "bra END; SECOND:"
        "READY" + READ + "GIVE END:"
    )
    right = {"FREE": free, "READY": ready, "GIVE": give + wait("smem", 1)}

    def made(**other: str) -> str:
        found = body
        for name, text in {**right, **other}.items():
            found = found.replace(name, text)
        return found

    check(made(), None)
    counted = r"not ordered with the store there by a copy or remote store counted by"
    late = r"was under way when a store came|is not ordered with the read there by lane"
    once = two(COPY, READ + ready, 1)
    check(once, f"{counted}|{late}")
    check(two(COPY, ready + READ, 1), None)
    one = give.replace("mbarrier", "@%p5 mbarrier") + wait("smem", 1)
    check(
        made(GIVE=one).replace("[smem+8], 32", "[smem+8], 1"),
        r"what was counted by barrier at 0 .* not ordered with the read there by lane",
    )


REMOTE = INIT.format(count=1) + (
    "mov.u32 %r20, %cluster_ctarank; xor.b32 %r21, %r20, 1;"
    "mapa.shared::cluster.u32 %r23, %r4, %r21; mov.b32 %r24, smem;"
    "mapa.shared::cluster.u32 %r25, %r24, %r21;"
    "@%p1 mbarrier.arrive.expect_tx.shared.b64 _, [smem], 128;"
    "barrier.cluster.arrive; barrier.cluster.wait;"
)
SEND = (
    "st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 "
    "[%r23+128], {%r0}, [%r25];"
)
TELL = "mbarrier.arrive.relaxed.cluster.shared::cluster.b64 _, [{at}+8];"


def test_remote_stores_are_ordered_by_arrivals_that_need_what_was_read() -> None:
    """CTAs send each other a row, read theirs, and send again when the other has."""
    again = "@%p1 mbarrier.arrive.expect_tx.shared.b64 _, [smem], 128;"
    vote = VOTE.rpartition(";")[0].rpartition(";")[0] + ";"
    vote = vote.replace("smem", "%r25") + "@%p5 " + TELL.format(at="%r10")
    last = "barrier.cluster.arrive; barrier.cluster.wait;"
    right = (
        REMOTE + SEND + wait("smem", 0) + READ + again + vote + wait("smem+8", 0)
        + SEND + wait("smem", 1) + last
    )  # fmt: skip
    check(right, None, threads=32, cluster=2)
    alone = right.replace("vote.sync.ballot.b32 %r11, %p6, -1;", "mov.b32 %r11, %r3;")
    fault = r"what was counted by .* is not ordered with the read there by lane"
    check(alone, fault, threads=32, cluster=2)
