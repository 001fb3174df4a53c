# SPDX-License-Identifier: Apache-2.0
"""Registers, stack and static shared memory of compiled kernels, read from the cubin.

A cubin is an ELF64 file. ``.nv.info`` holds attributes, each a format byte, an
attribute byte and, for format 4, a 16-bit size and that many bytes. The attributes read
here have (symbol index, value) as two 32-bit words; their numbers are those that
``cuobjdump --dump-elf`` prints as EIATTR_REGCOUNT, EIATTR_FRAME_SIZE and
EIATTR_MIN_STACK_SIZE.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

_REGISTERS, _FRAME, _STACK = 0x2F, 0x11, 0x12
_SIZED = 4
#: Shared memory that the driver keeps for itself in every CTA from sm_90 on; a kernel's
#: section counts it.
_RESERVED = 1024


@dataclass(frozen=True)
class Resources:
    """What one kernel takes.

    Attributes:
        registers: per thread.
        frame_bytes: local memory of a thread's frame; spilled registers and arrays with
            a run-time index live there.
        stack_bytes: least stack of a thread, calls included.
        static_shared_bytes: shared memory of a CTA that is declared in the code, the
            driver's own 1 KB not counted.
    """

    registers: int
    frame_bytes: int
    stack_bytes: int
    static_shared_bytes: int


@dataclass(frozen=True)
class _Section:
    name: str
    size: int
    data: bytes


def resources(cubin: bytes) -> dict[str, Resources]:
    """Resources of each kernel of a cubin, by its symbol.

    Raises:
        ValueError: not a cubin, or one without register counts.
    """
    found = {section.name: section for section in sections(cubin)}
    if not {".nv.info", ".symtab", ".strtab"} <= found.keys():
        raise ValueError("the file has no .nv.info section: not a linked cubin")
    symbols = _symbols(found[".symtab"].data, found[".strtab"].data)
    values: dict[int, dict[int, int]] = {_REGISTERS: {}, _FRAME: {}, _STACK: {}}
    for attribute, payload in _attributes(found[".nv.info"].data):
        if attribute in values and len(payload) == 8:
            symbol, value = struct.unpack("<II", payload)
            values[attribute][symbol] = value
    if not values[_REGISTERS]:
        raise ValueError("the cubin's .nv.info gives no register count")
    result = {}
    for symbol, registers in values[_REGISTERS].items():
        name = symbols[symbol]
        shared = found.get(f".nv.shared.{name}")
        result[name] = Resources(
            registers,
            values[_FRAME][symbol],
            values[_STACK][symbol],
            max(0, shared.size - _RESERVED) if shared else 0,
        )
    return result


def sections(cubin: bytes) -> list[_Section]:
    if cubin[:6] != b"\x7fELF\x02\x01":
        raise ValueError("not a 64-bit little-endian ELF file")
    (table,) = struct.unpack_from("<Q", cubin, 40)
    size, count, names_at = struct.unpack_from("<HHH", cubin, 58)
    raw = []
    for i in range(count):
        name, kind, _, _, offset, length = struct.unpack_from(
            "<IIQQQQ", cubin, table + i * size
        )
        # Type 8 (NOBITS) takes no room in the file.
        data = b"" if kind == 8 else cubin[offset : offset + length]
        raw.append((name, length, data))
    names = raw[names_at][2]
    return [_Section(_text(names, name), length, data) for name, length, data in raw]


def _text(table: bytes, offset: int) -> str:
    return table[offset : table.index(b"\0", offset)].decode()


def _symbols(table: bytes, strings: bytes) -> list[str]:
    return [
        _text(strings, struct.unpack_from("<I", table, at)[0])
        for at in range(0, len(table), 24)
    ]


def _attributes(data: bytes) -> list[tuple[int, bytes]]:
    found, at = [], 0
    while at + 4 <= len(data):
        kind, attribute, size = struct.unpack_from("<BBH", data, at)
        at += 4
        if kind == _SIZED:
            found.append((attribute, data[at : at + size]))
            at += size
    return found
