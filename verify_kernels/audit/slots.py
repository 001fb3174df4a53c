# SPDX-License-Identifier: Apache-2.0
"""Proof over machine code: no slot is handed back while loads of it are under way.

A warp that has read a slot of shared memory arrives on a barrier, and an asynchronous
copy or another CTA may then overwrite the slot. ptxas keeps loads and the arrival in
order, but a load has only been *issued* then; its data has reached a register when its
scoreboard is clear. So at every ``SYNCS.ARRIVE`` all loads from shared memory that may
have been issued before, on any path, must have been waited for, by the arrival itself
or by an instruction before it. And after an arrival no path may load again before it
has tried a barrier.

The proof is stricter than the rule in two ways. It asks nothing of which barrier an
arrival is on, nor which slot a load is from: every arrival counts against every load,
but loads whose address is proved to lie in memory that the kernel states is never
handed back (`verify_kernels.audit.address`). And no branch is taken to be impossible.

It rests on this:

- plain LDS of one warp return in the order of issue, whatever their predicate-free
  scoreboards are; ptxas counts on it itself, and gives only the last of a run one;
- a scoreboard is clear when all that was issued with it has returned, so waiting for it
  covers loads issued with it earlier;
- the lanes of a warp have come together when one of them arrives for all (the sources
  see to that: mma.sync, shuffles or ``sync_warp`` stand between).

It does not cover slots handed over by ``bar.sync`` or a cluster barrier, nor shared
memory read by wgmma, tcgen05 or bulk copies; a kernel with such readers is refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence

from verify_kernels.audit.address import Region, shared_addresses
from verify_kernels.audit.sass import Code, Instruction

_LOAD = re.compile(r"LDS|LDSM|ATOMS|LD|ATOM")
#: Read shared memory behind the scoreboards' back: wgmma, tcgen05, bulk stores.
_ASYNCHRONOUS = re.compile(r"[HQIBD]GMMA|WARPGROUP|UTC\w+|UTMAST\w*|UTMARED\w*|UBLKRED")

#: Each load that may be under way, and the scoreboards any of which shows that it has
#: returned.
Pending = dict[int, frozenset[int]]


def check_slots(code: Code, threads: int, kept: Sequence[Region] = ()) -> list[str]:
    """Findings, one sentence each.

    Args:
        code: the kernel.
        threads: threads of a CTA.
        kept: ranges of bytes of dynamic shared memory, from its start, that nothing
            writes again once the kernel reads them.
    """
    findings = [
        f"{_place(ins)} reads shared memory asynchronously; audit/slots.py does not "
        "follow it"
        for ins in code.instructions
        if _ASYNCHRONOUS.fullmatch(ins.head)
        or (ins.head == "UBLKCP" and not ins.opcode.startswith("UBLKCP.S"))
    ]
    arrivals = [i for i, ins in enumerate(code.instructions) if _arrives(ins)]
    exempt = _proved_inside(code, threads, kept) if kept else frozenset()
    before = _forward(code, {}, _issue, _either)
    for index in arrivals:
        arrival = code.instructions[index]
        pending = _waited(arrival, before.get(index, {}))
        for load in sorted(pending.keys() - exempt):
            findings.append(
                f"{_place(arrival)} may hand a slot back while "
                f"{_place(code.instructions[load])} is under way: let the barrier's "
                "address depend on a value that needs every word read "
                "(common.ptx.arrive_after)"
            )
    for index in sorted(_after_arrival(code) - exempt):
        findings.append(
            f"{_place(code.instructions[index])} may follow an arrival with no wait "
            "between: the slot it reads may have been handed back"
        )
    return findings


def count_arrivals(code: Code) -> int:
    """Arrivals that `check_slots` looks at."""
    return sum(map(_arrives, code.instructions))


def _place(ins: Instruction) -> str:
    return f"{ins.text} at {ins.address:#x}"


def _arrives(ins: Instruction) -> bool:
    return ins.opcode.startswith("SYNCS.ARRIVE")


def _hands_over(ins: Instruction) -> bool:
    """Whether it arrives without announcing bytes, as only a reader does."""
    return _arrives(ins) and bool(re.search(r"\.A[1R]T0", ins.opcode))


def _loads(ins: Instruction) -> bool:
    return bool(_LOAD.fullmatch(ins.head))


def _waited(ins: Instruction, pending: Pending) -> Pending:
    return {i: shown for i, shown in pending.items() if not shown & ins.waits}


def _issue(code: Code, index: int, pending: Pending) -> Pending:
    """What is under way after an instruction."""
    ins = code.instructions[index]
    pending = _waited(ins, pending)
    if not _loads(ins):
        return pending
    own = frozenset(() if ins.scoreboard is None else (ins.scoreboard,))
    if ins.head == "LDS" and not ins.guard:
        pending = {
            i: shown | own if code.instructions[i].head == "LDS" else shown
            for i, shown in pending.items()
        }
    return pending | {index: own}


def _either(one: Pending, other: Pending) -> Pending:
    """Under way on one of two paths; shown only by what shows it on both."""
    both = {i: one[i] & other[i] for i in one.keys() & other.keys()}
    return one | other | both


def _forward(
    code: Code,
    start: Pending,
    step: Callable[[Code, int, Pending], Pending],
    join: Callable[[Pending, Pending], Pending],
) -> dict[int, Pending]:
    """What holds before each instruction, over all paths from the kernel's start."""
    before, todo = {0: start}, [0]
    while todo:
        index = todo.pop()
        after = step(code, index, before[index])
        for following in code.successors(index):
            known = before.get(following)
            new = after if known is None else join(known, after)
            if new != known:
                before[following] = new
                todo.append(following)
    return before


def _after_arrival(code: Code) -> frozenset[int]:
    """Loads that some path leads to from an arrival past no wait on a barrier."""
    hands = (i for i, ins in enumerate(code.instructions) if _hands_over(ins))
    todo = [n for i in hands for n in code.successors(i)]
    seen = set(todo)
    while todo:
        index = todo.pop()
        if code.instructions[index].opcode.startswith("SYNCS.PHASECHK"):
            continue
        for following in code.successors(index):
            if following not in seen:
                seen.add(following)
                todo.append(following)
    return frozenset(i for i in seen if _loads(code.instructions[i]))


def _proved_inside(code: Code, threads: int, kept: Sequence[Region]) -> frozenset[int]:
    def inside() -> Iterator[int]:
        for index, (low, high) in shared_addresses(code, threads).items():
            if any(start <= low and high <= end for start, end in kept):
                yield index

    return frozenset(inside())
