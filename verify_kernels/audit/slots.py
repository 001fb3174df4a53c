# SPDX-License-Identifier: Apache-2.0
"""Proof over machine code: no slot is handed back while loads of it are under way.

A warp that has read a slot of shared memory arrives on a barrier, and an asynchronous
copy or another CTA may then overwrite the slot. ptxas keeps loads and the arrival in
order, but a load has only been *issued* then; its data has reached a register when its
scoreboard is clear. So at every ``SYNCS.ARRIVE`` all loads from shared memory that may
have been issued before, on any path, must have been waited for, by the arrival itself
or by an instruction before it. And after an arrival no path may load again before it
has tried a barrier.

The proof is stricter than the rule. It asks neither which barrier an arrival is on nor
which slot a load is from: every arrival counts against every load. Only loads whose
address is proved to lie in memory that the kernel states is never handed back
(``kept_shared``; `verify_kernels.audit.address`) are let off. Nor is any branch taken
to be impossible. So it may refuse a kernel that is right, for instance one that reads
the next slot before it hands this one back.

It rests on this:

- LDS and LDSM (ldmatrix) of a warp, unless under a guard, return in the order of
  issue. ptxas counts on it: of a run of loads, of both kinds too, it often gives only
  the last a scoreboard (12.9 and 13.0, sm_90a and sm_100a);
- a scoreboard is clear when everything issued with it has returned, so waiting for it
  covers the loads issued with it earlier;
- a wgmma reads shared memory until its group has been waited for: by a ``DEPBAR`` for
  all groups, after one with ``gsb0`` (PTX's commit_group) has closed its group;
- a lane arrives for itself, or the lanes of its warp have come together before it
  arrives for all. That is the source's business: mma.sync, a shuffle, a vote or
  ``sync_warp`` stands between;
- what the kernel states in ``kept_shared`` is true.

It does not see slots handed over by ``bar.sync`` or a cluster barrier. A wgmma is never
let off for where it reads. Shared memory that tcgen05 or bulk copies read has no
scoreboard; a kernel with such readers is refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from verify_kernels.audit.address import Region, shared_addresses
from verify_kernels.audit.sass import Code, Instruction

_PRODUCT = re.compile(r"[HQIB]GMMA")
_LOAD = re.compile(rf"LDS|LDSM|ATOMS|LD|ATOM|{_PRODUCT.pattern}")
#: Loads that return in the order of issue, whichever of them.
_IN_ORDER = frozenset(("LDS", "LDSM"))
#: Read shared memory behind the scoreboards' back: tcgen05, bulk stores.
_ASYNCHRONOUS = re.compile(r"DGMMA|UTC\w+|UTMAST\w*|UTMARED\w*|UBLKRED")
#: Stands for the closed groups of wgmma where the six scoreboards do.
_GROUPS = 6

#: Each load that may be under way, and the scoreboards any of which shows that it has
#: returned.
Pending = dict[int, frozenset[int]]


def check_slots(code: Code, kept: Sequence[Region] = ()) -> list[str]:
    """Findings, one sentence each.

    Args:
        code: the kernel.
        kept: ranges of bytes of dynamic shared memory, from its start, that nothing
            writes again once the kernel reads them.
    """
    findings = [
        f"{_place(ins)} reads shared memory asynchronously; audit/slots.py does not "
        "follow it"
        for ins in code.instructions
        if _ASYNCHRONOUS.fullmatch(ins.head)
        or (ins.head == "UBLKCP" and not ins.opcode.startswith("UBLKCP.S.G"))
    ]
    early = [
        (index, load)
        for index, pending in sorted(_under_way(code).items())
        if _arrives(code.instructions[index])
        for load in sorted(_waited(code.instructions[index], pending))
    ]
    late = sorted(_after_arrival(code))
    # Where a load reads is asked only if it matters: it takes ten times as long.
    exempt = _proved_inside(code, kept) if kept and (early or late) else frozenset()
    for index, load in early:
        if load not in exempt:
            findings.append(
                f"{_place(code.instructions[index])} may hand a slot back while "
                f"{_place(code.instructions[load])} is under way: let the barrier's "
                "address depend on a value that needs every word read "
                "(common.ptx.arrive_after)"
            )
    for load in late:
        if load not in exempt:
            findings.append(
                f"{_place(code.instructions[load])} may follow an arrival with no wait "
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
    # ptxas puts loads that never run (@!PT) beside asynchronous copies.
    return bool(_LOAD.fullmatch(ins.head)) and ins.guard != "!PT"


def _closes(ins: Instruction) -> bool:
    """Whether it is a wgmma that closes its group."""
    return bool(_PRODUCT.fullmatch(ins.head)) and ins.operands[-1] == "gsb0"


def _waited(ins: Instruction, pending: Pending) -> Pending:
    waits = ins.waits
    for_all = ins.opcode == "WARPGROUP.DEPBAR.LE" and ins.operands == ("gsb0", "0x0")
    if for_all and not ins.guard:
        waits |= {_GROUPS}
    return {i: shown for i, shown in pending.items() if not shown & waits}


def _issue(code: Code, index: int, pending: Pending) -> Pending:
    """What is under way after an instruction."""
    ins = code.instructions[index]
    pending = _waited(ins, pending)
    if not _loads(ins):
        return pending
    if _PRODUCT.fullmatch(ins.head):
        pending = pending | {index: frozenset()}
        if not _closes(ins) or ins.guard:
            return pending
        return {
            i: shown | {_GROUPS}
            if _PRODUCT.fullmatch(code.instructions[i].head)
            else shown
            for i, shown in pending.items()
        }
    own = frozenset(() if ins.scoreboard is None else (ins.scoreboard,))
    if ins.head in _IN_ORDER and not ins.guard:
        pending = {
            i: shown | own if code.instructions[i].head in _IN_ORDER else shown
            for i, shown in pending.items()
        }
    return pending | {index: own}


def _either(one: Pending, other: Pending) -> Pending:
    """Under way on one of two paths; shown only by what shows it on both."""
    both = {i: one[i] & other[i] for i in one.keys() & other.keys()}
    return one | other | both


def _under_way(code: Code) -> dict[int, Pending]:
    """What may be under way before each instruction, over all paths from the start."""
    before: dict[int, Pending] = {0: {}}
    todo = [0]
    while todo:
        index = todo.pop()
        after = _issue(code, index, before[index])
        for following in code.successors(index):
            known = before.get(following)
            new = after if known is None else _either(known, after)
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
        ins = code.instructions[index]
        if ins.opcode.startswith("SYNCS.PHASECHK") and not ins.guard:
            continue
        for following in code.successors(index):
            if following not in seen:
                seen.add(following)
                todo.append(following)
    return frozenset(i for i in seen if _loads(code.instructions[i]))


def _proved_inside(code: Code, kept: Sequence[Region]) -> frozenset[int]:
    def inside() -> Iterator[int]:
        for index, (low, high) in shared_addresses(code).items():
            if any(start <= low and high <= end for start, end in kept):
                yield index

    return frozenset(inside())
