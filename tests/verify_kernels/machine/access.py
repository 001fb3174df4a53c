# SPDX-License-Identifier: Apache-2.0
"""Instructions on memory: loads, stores, asynchronous copies, barriers."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import numpy as np

from tests.verify_kernels.machine.arithmetic import put
from tests.verify_kernels.machine.memory import (
    WINDOW_BITS,
    Array,
    Barrier,
    Fault,
    Fetch,
)
from tests.verify_kernels.machine.ptx import (
    BITS,
    Build,
    Decoded,
    Decoder,
    Execute,
    Lanes,
)
from tests.verify_kernels.machine.warp import Group, Warp
from verify_kernels.audit.ptx import Instruction

_BYTES = {"b8": "u1", "u8": "u1", "s8": "i1", "b16": "u2", "u16": "u2", "s16": "i2"}


def _each(lanes: Lanes) -> Array:
    return np.arange(32) if lanes is None else np.flatnonzero(lanes)


def _number(warp: Warp, row: int, lane: int) -> int:
    return int(warp.rows["u32"][row][lane])


def _form(decoder: Decoder, ins: Instruction) -> tuple[str, int, str, int]:
    """State space, numbers a lane, type and bytes of a load or store."""
    _, *parts = ins.opcode.split(".")
    space = next((p for p in parts if p in ("global", "param")), "")
    if {"shared", "shared::cta"} & set(parts):
        space = "shared"
    if not space:
        raise decoder.refuse("the machine does not know this state space")
    count = next((int(p[1:]) for p in parts if p in ("v2", "v4")), 1)
    kind = parts[-1]
    size = np.dtype(_BYTES[kind]).itemsize if kind in _BYTES else BITS[kind] // 8
    return space, count, kind, size


def _places(warp: Warp, bits: int, address: tuple[int, int], lanes: Lanes) -> Array:
    """Addresses of the lanes that run."""
    row, displacement = address
    found = warp.rows[f"u{bits}"][row]
    if lanes is not None:
        found = found[lanes]
    return found + found.dtype.type(displacement % 2**bits)


def _register_kind(decoder: Decoder, text: str, kind: str) -> str:
    """As what a register is seen that holds numbers narrower than itself; a load
    extends them."""
    if text in decoder.registers:
        bits = decoder.registers[text][0]
        return f"u{bits}" if kind in _BYTES or bits > BITS[kind] else kind
    return "u32" if kind in _BYTES else kind


def _load(decoder: Decoder, ins: Instruction) -> Decoded:
    space, count, kind, size = _form(decoder, ins)
    if space == "param":
        return Decoded(_load_parameter(decoder, ins, kind, size))
    text = ins.operands[0]
    names = text.strip("{}").replace(" ", "").split(",")
    kinds = [_register_kind(decoder, name, kind) for name in names]
    targets = [(k, decoder.row(n, k)) for k, n in zip(kinds, names, strict=True)]
    signed = np.dtype(f"i{size}") if kind in ("s8", "s16", "s32") else None
    bits = 32 if space == "shared" else 64
    address = decoder.address(ins.operands[1], bits)
    registers = decoder.named(names)

    def land(warp: Warp, values: Array, lanes: Lanes) -> None:
        values = values if signed is None else values.view(signed)
        for (kind, row), column in zip(targets, values.T, strict=True):
            target = warp.rows[kind][row]
            if column.dtype.itemsize == target.dtype.itemsize:
                column = np.ascontiguousarray(column).view(target.dtype)
            target[() if lanes is None else lanes] = column

    def run(warp: Warp, lanes: Lanes) -> None:
        places = _places(warp, bits, address, lanes)
        order = warp.cta.cluster.order
        if space != "shared":
            waited = warp.waited if lanes is None else warp.waited[lanes]
            fetch = warp.cta.cluster.memory.reader(places, size, count, waited)
        else:
            fetch = warp.cta.shared.reader(places, size, count)
            if order is not None:
                read = order.read(warp, lanes, places, size * count)

        def come() -> None:
            if space == "shared" and order is not None:
                order.came(warp, read)
            land(warp, fetch(), lanes)

        warp.issue(space, registers, come)

    return Decoded(run)


_MATRICES = re.compile(
    r"ldmatrix\.sync\.aligned\.m8n8\.x([124])(\.trans)?\.shared(?:::cta)?\.b16"
)


def _load_matrices(decoder: Decoder, ins: Instruction) -> Decoded:
    """Matrices of 8 rows, 16 bytes each: lane 8 i + r reads row r of matrix i, whose
    words come to lanes 4 r .. 4 r + 3, in register i; with .trans those lanes get
    column r, two rows a word."""
    found = _MATRICES.fullmatch(ins.opcode)
    if found is None:
        raise decoder.refuse("the machine does not know this form of ldmatrix")
    count, across = int(found[1]), bool(found[2])
    targets = decoder.rows(ins.operands[0], "b32")
    if len(set(targets)) != count or len(targets) != count:
        raise decoder.refuse(f"it takes {count} registers")
    address = decoder.address(ins.operands[1], 32)
    registers = decoder.named(ins.operands[:1])
    readers = np.arange(32) < 8 * count

    def run(warp: Warp, lanes: Lanes) -> None:
        warp.require_all()
        if lanes is not None:
            raise Fault("some lanes of the warp do not run it")
        places = _places(warp, 32, address, readers)
        fetch, order = warp.cta.shared.reader(places, 4, 4), warp.cta.cluster.order
        read = None if order is None else order.read(warp, readers, places, 16)

        def come() -> None:
            if order is not None and read is not None:
                order.came(warp, read)
            words = fetch()
            if across:
                halves = words.view(np.uint16).reshape(count, 8, 8)
                words = halves.transpose(0, 2, 1).copy().view(np.uint32)
            words = words.reshape(count, 32)
            for row, values in zip(targets, words, strict=True):
                warp.rows["b32"][row][:] = values

        warp.issue("shared", registers, come)

    return Decoded(run, together=True)


def _load_parameter(
    decoder: Decoder, ins: Instruction, kind: str, size: int
) -> Execute:
    name, _, displacement = ins.operands[1].strip("[]").partition("+")
    start = int(displacement or 0)
    if name not in decoder.parameters:
        raise decoder.refuse(f"{name} is no parameter")
    names = ins.operands[0].strip("{}").replace(" ", "").split(",")
    if start + size * len(names) > decoder.parameters[name]:
        raise decoder.refuse("the read leaves the parameter")
    rows = [decoder.row(target, kind) for target in names]

    def run(warp: Warp, lanes: Lanes) -> None:
        for i, row in enumerate(rows):
            at = start + size * i
            data = warp.cta.cluster.parameters[name][at : at + size]
            target = warp.rows[kind][row]
            where = () if lanes is None else lanes
            target[where] = np.frombuffer(data, target.dtype)[0]

    return run


def _store(decoder: Decoder, ins: Instruction) -> Decoded:
    if ".async." in ins.opcode:
        return Decoded(_store_remote(decoder, ins))
    space, count, kind, size = _form(decoder, ins)
    names = ins.operands[1].strip("{}").replace(" ", "").split(",")
    kinds = [_register_kind(decoder, name, kind) for name in names]
    sources = [(k, decoder.row(n, k)) for k, n in zip(kinds, names, strict=True)]
    assert len(sources) == count
    bits = 32 if space == "shared" else 64
    address = decoder.address(ins.operands[0], bits)
    dtype = np.dtype(f"u{size}")

    def run(warp: Warp, lanes: Lanes) -> None:
        # A lane's own loads and stores of one place keep their order.
        warp.land(space=space)
        places = _places(warp, bits, address, lanes)
        values = np.stack([warp.rows[k][r] for k, r in sources], 1)
        same = values.dtype.itemsize == size
        values = values.view(dtype) if same else values.astype(dtype)
        if lanes is not None:
            values = values[lanes]
        if space == "shared":
            warp.cta.shared.write(places, values)
            if warp.cta.cluster.order is not None:
                warp.cta.cluster.order.write(warp, lanes, places, size * count)
        else:
            waited = warp.waited if lanes is None else warp.waited[lanes]
            warp.cta.cluster.memory.write(places, values, waited)

    return Decoded(run)


def _store_remote(decoder: Decoder, ins: Instruction) -> Execute:
    """st.async: under way for a while, then counted by a barrier of the same CTA."""
    kind = ins.opcode.rpartition(".")[2]
    sources = decoder.rows(ins.operands[1], kind)
    place, at = decoder.address(ins.operands[0], 32)
    barrier, barrier_at = decoder.address(ins.operands[2], 32)

    def run(warp: Warp, lanes: Lanes) -> None:
        for lane in _each(lanes):
            values = np.stack([warp.rows[kind][r][lane] for r in sources])
            data = values.view(np.uint8)
            cta, address = _locate(warp, _number(warp, place, lane) + at)
            other, counter = _locate(warp, _number(warp, barrier, lane) + barrier_at)
            if cta is not other:
                raise Fault("data and barrier of a remote store are in different CTAs")
            if address % len(data):
                raise Fault(f"{address:#x} is not a multiple of {len(data)}")
            land = _landing(warp, int(lane), cta, counter)
            come = functools.partial(land, address, lambda data=data: data)
            warp.cta.cluster.send(cta, come, ins.text)

    return run


def _landing(
    warp: Warp, lane: int, cta: Any, counter: int
) -> Callable[[int, Fetch], None]:
    """What happens when bytes come that ``lane`` sends now and a barrier counts."""
    order = warp.cta.cluster.order
    knowledge = None if order is None else order.knowledge(warp, lane)

    def land(address: int, fetch: Fetch) -> None:
        data, barrier = fetch(), cta.shared.barrier(counter)
        if order is not None:
            order.land(knowledge, cta, address, len(data), barrier)
        cta.shared.write_bytes(address, data)
        barrier.complete(len(data))

    return land


def _locate(warp: Warp, address: int) -> tuple[Any, int]:
    """The CTA that has a shared::cluster address, and the address."""
    ctas, rank = warp.cta.cluster.ctas, address >> WINDOW_BITS
    if not 0 <= rank < len(ctas):
        raise Fault(f"{address:#x} is in no CTA of a cluster of {len(ctas)}")
    return ctas[rank], address


def _copy(decoder: Decoder, ins: Instruction) -> Decoded:
    if ins.opcode == "cp.async.bulk.prefetch.L2.global":
        source, at = decoder.address(ins.operands[0], 64)
        length = decoder.row(ins.operands[1], "u32")

        def prefetch(warp: Warp, lanes: Lanes) -> None:
            for lane in _each(lanes):
                address = int(warp.rows["u64"][source][lane]) + at
                size = _number(warp, length, lane)
                warp.cta.cluster.memory.prefetch(address, size)

        return Decoded(prefetch)
    if ins.opcode in _COPIES or ins.opcode.startswith("cp.async.wait_group"):
        return Decoded(_copy_by_lane(decoder, ins))
    if ins.opcode == "cp.async.commit_group":
        return Decoded(lambda warp, lanes: warp.commit_copies(lanes))
    if ins.opcode != (
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
    ):
        raise decoder.refuse("the machine does not know this copy")
    place, place_at = decoder.address(ins.operands[0], 32)
    source, source_at = decoder.address(ins.operands[1], 64)
    length = decoder.row(ins.operands[2], "u32")
    barrier, barrier_at = decoder.address(ins.operands[3], 32)

    def run(warp: Warp, lanes: Lanes) -> None:
        for lane in _each(lanes):
            cta, address = _locate(warp, _number(warp, place, lane) + place_at)
            other, counter = _locate(warp, _number(warp, barrier, lane) + barrier_at)
            if cta is not other:
                raise Fault("data and barrier of a bulk copy are in different CTAs")
            size = _number(warp, length, lane)
            cta.shared.check_copy(address, size)
            fetch = warp.cta.cluster.memory.bytes_at(
                int(warp.rows["u64"][source][lane]) + source_at,
                size,
                bool(warp.waited[lane]),
            )
            land = _landing(warp, int(lane), cta, counter)
            for first, last in warp.cta.cluster.schedule.pieces(size):
                part = functools.partial(_part, fetch, first, last)
                come = functools.partial(land, address + first, part)
                warp.cta.cluster.send(cta, come, ins.text)

    return Decoded(run)


#: Copies by a lane, waited for by the same lane.
_COPIES = frozenset(
    f"cp.async.cg.shared.global{hint}"
    for hint in ("", ".L2::64B", ".L2::128B", ".L2::256B")
)


def _copy_by_lane(decoder: Decoder, ins: Instruction) -> Execute:
    """cp.async of 16 bytes, zero past as many as the last operand says, and the wait
    for it. Nobody may touch the place in between."""
    if ins.opcode == "cp.async.wait_group":
        left = int(ins.operands[0])
        return lambda warp, lanes: warp.wait_copies(left, lanes)
    place = decoder.address(ins.operands[0], 32)
    source = decoder.address(ins.operands[1], 64)
    if ins.operands[2] != "16":
        raise decoder.refuse("the machine copies 16 bytes at a time")
    some = decoder.row(ins.operands[3], "u32") if len(ins.operands) > 3 else -1

    def run(warp: Warp, lanes: Lanes) -> None:
        # Loads of the place that are under way stay so: nothing waits for them.
        places = _places(warp, 32, place, lanes)
        waited = warp.waited if lanes is None else warp.waited[lanes]
        fetch = warp.cta.cluster.memory.reader(
            _places(warp, 64, source, lanes), 4, 4, waited
        )
        shared, order = warp.cta.shared, warp.cta.cluster.order
        shared.reader(places, 4, 4)
        live = np.full((len(places), 1), True)
        if some >= 0:
            sizes = warp.rows["u32"][some][_each(lanes)]
            if not np.isin(sizes, (0, 16)).all():
                raise Fault("the machine copies all 16 bytes or none")
            live = sizes[:, None] == 16
        started = None
        if order is not None:
            started = order.start_copy(warp, lanes, places, 16)

        def come() -> None:
            shared.write(places, np.where(live, fetch(), np.uint32(0)))

        def waited_for() -> None:
            if order is not None and started is not None:
                order.end_copy(started)

        warp.start_copy(come, waited_for)

    return run


def _part(fetch: Fetch, first: int, last: int) -> Array:
    return fetch()[first:last]


def _map(decoder: Decoder, ins: Instruction) -> Decoded:
    if ins.opcode != "mapa.shared::cluster.u32":
        raise decoder.refuse("the machine does not know this form of mapa")
    out, address, rank = (decoder.row(o, "u32") for o in ins.operands)

    def run(warp: Warp, lanes: Lanes) -> None:
        rows = warp.rows["u32"]
        within = rows[address] & np.uint32((1 << WINDOW_BITS) - 1)
        where = within | rows[rank] << np.uint32(WINDOW_BITS)
        np.copyto(rows[out], where, where=True if lanes is None else lanes)

    return Decoded(run)


def _mbarrier(decoder: Decoder, ins: Instruction) -> Decoded:
    _, what, *parts = ins.opcode.split(".")
    if what == "init":
        place, at = decoder.address(ins.operands[0], 32)
        count = decoder.row(ins.operands[1], "u32")

        def init(warp: Warp, lanes: Lanes) -> None:
            for lane in _each(lanes):
                address = _number(warp, place, lane) + at
                warp.cta.shared.init_barrier(address, _number(warp, count, lane))

        return Decoded(init)
    if what == "arrive":
        return Decoded(_arrive(decoder, ins, parts))
    if what == "try_wait" and "parity" in parts:
        return Decoded(control=_try_wait(decoder, ins))
    raise decoder.refuse("the machine does not know this barrier instruction")


def _arrive(decoder: Decoder, ins: Instruction, parts: list[str]) -> Execute:
    """Local arrivals count at once, remote ones are under way for a while. Neither
    waits for the data of loads: compiled code does not."""
    address = decoder.address(ins.operands[1], 32)
    extra = decoder.row(ins.operands[2], "u32") if len(ins.operands) > 2 else -1
    expect = "expect_tx" in parts

    def local(warp: Warp, lanes: Lanes) -> None:
        for lane in _each(lanes):
            place = _number(warp, address[0], lane) + address[1]
            barrier = warp.cta.shared.barrier(place)
            if warp.cta.cluster.order is not None:
                warp.cta.cluster.order.arrive(warp, int(lane), barrier)
            if expect:
                barrier.arrive(announced=_number(warp, extra, lane))
            else:
                barrier.arrive(1 if extra < 0 else _number(warp, extra, lane))

    def remote(warp: Warp, lanes: Lanes) -> None:
        for lane in _each(lanes):
            cta, place = _locate(warp, _number(warp, address[0], lane) + address[1])
            order = warp.cta.cluster.order
            carried = None if order is None else order.leave_relaxed(warp, int(lane))
            announced = _number(warp, extra, lane) if expect else 0

            def land(
                cta: Any = cta,
                place: int = place,
                carried: Array | None = carried,
                announced: int = announced,
            ) -> None:
                barrier = cta.shared.barrier(place)
                if carried is not None:
                    warp.cta.cluster.order.arrive_with(carried, barrier)
                barrier.arrive(announced=announced)

            warp.cta.cluster.send(cta, land, ins.text)

    if "shared::cluster" not in parts:
        return local
    if (extra >= 0 and not expect) or "relaxed" not in parts:
        raise decoder.refuse("the machine does not know this remote arrival")
    return remote


def _try_wait(decoder: Decoder, ins: Instruction) -> Any:
    """Tries again whenever the phase has changed; now and then it gives up and says
    so, as the time limit allows it to."""
    out = decoder.row(ins.operands[0], "pred")
    address = decoder.address(ins.operands[1], 32)
    parity = decoder.row(ins.operands[2], "u32")

    def run(warp: Warp, group: Group, lanes: Lanes) -> bool:
        rows = warp.rows["u32"]
        places, wanted = rows[address[0]] + np.uint32(address[1] % 2**32), rows[parity]
        passed = np.zeros(32, np.bool_)
        which = _each(lanes)
        closed: tuple[Barrier, int] | None = None
        named = zip(places[which].tolist(), wanted[which].tolist(), strict=True)
        for place, phase in set(named):
            if phase > 1:
                raise Fault(f"parity {phase}; it is 0 or 1")
            barrier = warp.cta.shared.barrier(place)
            if barrier.passed(phase):
                here = (places == place) & (wanted == phase)
                passed |= here
                if warp.cta.cluster.order is not None:
                    here &= True if lanes is None else lanes
                    warp.cta.cluster.order.wait(warp, here, barrier)
            else:
                closed = barrier, phase
        if closed is None or warp.cta.cluster.schedule.gives_up():
            put(warp.rows["pred"][out], passed, lanes)
            group.pc += 1
            return closed is None
        barrier, phase = closed
        wake = group.block(lambda: f"parity {phase} of {barrier}")
        barrier.waiters.append(wake)
        return False

    return run


#: Fences between ordinary stores to shared memory and what reads it asynchronously.
_PROXY_FENCES = ("", ".shared::cta", ".shared::cluster")


def _fence(decoder: Decoder, ins: Instruction) -> Decoded:
    if ins.opcode in [f"fence.proxy.async{space}" for space in _PROXY_FENCES]:

        def run(warp: Warp, lanes: Lanes) -> None:
            if warp.cta.cluster.order is not None:
                warp.cta.cluster.order.fence_proxy(warp, lanes)

        return Decoded(run)
    return Decoded(lambda warp, lanes: None)


BUILDERS: dict[str, Build] = {
    "ld": _load,
    "ldmatrix": _load_matrices,
    "st": _store,
    "cp": _copy,
    "mapa": _map,
    "mbarrier": _mbarrier,
    "fence": _fence,
}
