# SPDX-License-Identifier: Apache-2.0
"""Instructions that lanes of a warp run together: shuffles, votes, matrix products."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from tests.verify_kernels.machine.arithmetic import put
from tests.verify_kernels.machine.memory import Array, Fault
from tests.verify_kernels.machine.ptx import Build, Decoded, Decoder, Lanes
from verify_kernels.audit.ptx import Instruction

if TYPE_CHECKING:
    from tests.verify_kernels.machine.warp import Warp

_LANE = np.arange(32)


def _check_members(decoder: Decoder, text: str) -> None:
    if text not in ("-1", "0xffffffff"):
        raise decoder.refuse("the machine takes the whole warp only: lane mask -1")


def _shuffle(decoder: Decoder, ins: Instruction) -> Decoded:
    """d, a, b, c, mask: lane i takes a of the lane that the form makes of i and b, if
    that is within the segment that c sets, else its own."""
    _, sync, how, _ = ins.opcode.split(".")
    if sync != "sync" or how not in ("idx", "bfly", "up", "down"):
        raise decoder.refuse("the machine does not know this shuffle")
    if "|" in ins.operands[0]:
        raise decoder.refuse("the machine gives no predicate of a shuffle")
    out, value, by, clamp = (decoder.row(o, "u32") for o in ins.operands[:4])
    _check_members(decoder, ins.operands[4])

    def run(warp: Warp, lanes: Lanes) -> None:
        warp.require_all()
        rows = warp.rows["u32"]
        b, c = rows[by].astype(np.int64) & 31, rows[clamp].astype(np.int64)
        segment = c >> 8 & 31
        first = _LANE & segment
        last = first | c & 31 & ~segment
        if how == "idx":
            source = first | b & ~segment
        else:
            source = {"bfly": _LANE ^ b, "up": _LANE - b, "down": _LANE + b}[how]
        # For .up the clamp is the segment's first lane.
        inside = source >= last if how == "up" else source <= last
        put(rows[out], rows[value][np.where(inside, source, _LANE)], lanes)
        warp.data_met()

    return Decoded(run, together=True)


def _elect(decoder: Decoder, ins: Instruction) -> Decoded:
    """One lane of the warp, any but always the same: the launch's seed names it."""
    chosen, _, leader = ins.operands[0].partition("|")
    lane_row = -1 if chosen == "_" else decoder.row(chosen, "u32")
    leader_row = decoder.row(leader, "pred")
    _check_members(decoder, ins.operands[1])

    def run(warp: Warp, lanes: Lanes) -> None:
        warp.require_all()
        lane = warp.cta.cluster.schedule.leader
        if lanes is not None and not lanes[lane]:
            lane = int(lanes.argmax())
        if lane_row >= 0:
            put(warp.rows["u32"][lane_row], lane, lanes)
        put(warp.rows["pred"][leader_row], lane == _LANE, lanes)

    return Decoded(run, together=True)


def _vote(decoder: Decoder, ins: Instruction) -> Decoded:
    _, sync, how, kind = ins.opcode.split(".")
    found: dict[str, Callable[[Array], int]] = {
        "any": lambda votes: bool(votes.any()),
        "all": lambda votes: bool(votes.all()),
        "ballot": lambda votes: sum(1 << int(i) for i in np.flatnonzero(votes)),
    }
    if sync != "sync" or how not in found or "!" in ins.operands[1]:
        raise decoder.refuse("the machine does not know this vote")
    out, vote = decoder.row(ins.operands[0], kind), decoder.row(ins.operands[1], "pred")
    _check_members(decoder, ins.operands[2])

    def run(warp: Warp, lanes: Lanes) -> None:
        warp.require_all()
        votes = warp.rows["pred"][vote]
        result = found[how](votes if lanes is None else votes[lanes])
        put(warp.rows[kind][out], result, lanes)
        warp.data_met()

    return Decoded(run, together=True)


def _reduce(decoder: Decoder, ins: Instruction) -> Decoded:
    _, sync, how, kind = ins.opcode.split(".")
    if sync != "sync" or how not in ("min", "max") or kind not in ("s32", "u32"):
        raise decoder.refuse("the machine does not know this reduction")
    out, value = (decoder.row(o, kind) for o in ins.operands[:2])
    # The compiler puts this mask into a register.
    members = decoder.row(ins.operands[2], "u32")

    def run(warp: Warp, lanes: Lanes) -> None:
        warp.require_all()
        if (warp.rows["u32"][members] != 2**32 - 1).any():
            raise Fault("the machine takes the whole warp only: lane mask -1")
        values = warp.rows[kind][value]
        put(warp.rows[kind][out], values.max() if how == "max" else values.min(), lanes)
        warp.data_met()

    return Decoded(run, together=True)


def _bf16_pairs(rows: list[Array], which: list[int]) -> Array:
    """[registers, 8, 4, 2] in fp64: lane 4 g + q, low half first."""
    words = np.stack([rows[r] for r in which])
    wide = words.view(np.uint16).astype(np.uint32) << 16
    return wide.view(np.float32).astype(np.float64).reshape(len(which), 8, 4, 2)


def row_factor(words: list[Array], which: list[int]) -> Array:
    """A [16, 16] in fp64, from its four registers."""
    pairs = _bf16_pairs(words, which).reshape(2, 2, 8, 4, 2)
    return pairs.transpose(1, 2, 0, 3, 4).reshape(16, 16)


def add_product(
    d: Sequence[Array], c: Sequence[Array], left: Array, right: Array
) -> None:
    """D = A B + C, A [16, 16] and B's columns [8, 16] in fp64, summed in fp64, rounded
    once; C and D as in registers. Every element in the same order, as a product of BLAS
    may not be: no column depends on another."""
    total = np.einsum("ik,jk->ij", left, right).reshape(2, 8, 4, 2)
    for r, (out, start) in enumerate(zip(d, c, strict=True)):
        out[:] = total[r // 2, :, :, r % 2].reshape(32) + start


def _matrix_product(decoder: Decoder, ins: Instruction) -> Decoded:
    """D = A B + C with A [16, 16] and B [16, 8] in bf16.

    Lane 4 g + q holds A rows g and g + 8, columns 2 q + 8 h, + 1, in register
    2 h + (row >= 8); B column g likewise; C rows g and g + 8, columns 2 q, + 1.
    """
    if ins.opcode != "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32":
        raise decoder.refuse("the machine does not know this matrix product")
    d, c = (decoder.rows(ins.operands[i], "f32") for i in (0, 3))
    a, b = (decoder.rows(ins.operands[i], "b32") for i in (1, 2))

    def run(warp: Warp, lanes: Lanes) -> None:
        warp.require_all()
        words, floats = warp.rows["b32"], warp.rows["f32"]
        right = _bf16_pairs(words, b).transpose(1, 0, 2, 3).reshape(8, 16)
        out, start = [floats[r] for r in d], [floats[r] for r in c]
        add_product(out, start, row_factor(words, a), right)
        warp.data_met()

    return Decoded(run, together=True, pure=True)


BUILDERS: dict[str, Build] = {
    "shfl": _shuffle,
    "elect": _elect,
    "redux": _reduce,
    "vote": _vote,
    "mma": _matrix_product,
}
