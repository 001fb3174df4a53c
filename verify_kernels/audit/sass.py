# SPDX-License-Identifier: Apache-2.0
"""Reader of machine code: instructions, their scoreboards, and the control-flow graph.

nvdisasm turns a cubin into text; its ``-hex`` form adds the 128 bits of each
instruction. The upper bits say what an instruction waits for and what it signals; their
places are those that ptxas uses from sm_70 on (read off compiled code; the layout is
published nowhere by NVIDIA): from bit 105 on, 4 bits of stall, 1 of yield, 3 of the
scoreboard released when the result is written, 3 of the one released when the operands
are read (7: none), 6 of scoreboards that must be clear before issue.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from verify_kernels.audit.ptx import split_operands

_INSTRUCTION = re.compile(
    r"\s*/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;\s*/\* 0x([0-9a-f]{16}) \*/"
)
_UPPER = re.compile(r"\s*/\* 0x([0-9a-f]{16}) \*/")
_LABEL = re.compile(r"\s*([.$\w]+):\s*$")
_TARGET = re.compile(r"`\((.+?)\)")
_GUARD = re.compile(r"@(!?U?P[0-9T])\s+")
_NO_SCOREBOARD = 7
_INDIRECT = frozenset(("BRX", "BRXU", "JMX", "JMXU"))
_JUMPS = frozenset(("BRA", "JMP"))


class NoDisassembler(RuntimeError):
    """There is no nvdisasm, or it does not know the cubin's architecture."""


@dataclass(frozen=True)
class Instruction:
    """One machine instruction.

    Attributes:
        address: offset in its section, in bytes.
        guard: predicate it runs under (``P0``, ``!UP1``), "" if it always runs.
        opcode: with all its suffixes.
        operands: split at the outer commas, ``.reuse`` marks dropped.
        waits: scoreboards that must be clear before it issues.
        scoreboard: the one that clears when its result has been written; None if none.
        text: as nvdisasm writes it.
    """

    address: int
    guard: str
    opcode: str
    operands: tuple[str, ...]
    waits: frozenset[int]
    scoreboard: int | None
    text: str

    @property
    def head(self) -> str:
        return self.opcode.partition(".")[0]


@dataclass(frozen=True)
class Code:
    """The machine code of one kernel.

    Attributes:
        instructions: in the order of the section.
        taken: for each instruction, where it may jump to.
        falls: for each instruction, whether the next one may follow it.
    """

    instructions: tuple[Instruction, ...]
    taken: tuple[tuple[int, ...], ...]
    falls: tuple[bool, ...]

    def successors(self, index: int) -> tuple[int, ...]:
        onward = self.falls[index] and index + 1 < len(self.instructions)
        return (*self.taken[index], *((index + 1,) if onward else ()))


def find_nvdisasm() -> Path:
    """nvdisasm on the path, in the CUDA toolkit, or in the Triton package.

    Raises:
        NoDisassembler: it is in none of them.
    """
    if found := shutil.which("nvdisasm"):
        return Path(found)
    toolkits = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH")]
    places = [Path(t) / "bin" for t in (*toolkits, "/usr/local/cuda") if t]
    # find_spec does not import Triton.
    triton = importlib.util.find_spec("triton")
    for package in (triton and triton.submodule_search_locations) or ():
        places.append(Path(package) / "backends" / "nvidia" / "bin")
    for place in places:
        if (place / "nvdisasm").is_file():
            return place / "nvdisasm"
    raise NoDisassembler(
        "no nvdisasm on PATH, in CUDA_HOME, in /usr/local/cuda or in a Triton package: "
        "install the CUDA toolkit, or `pip install triton`"
    )


def disassemble(cubin: bytes) -> Code:
    """The one kernel of a cubin.

    Raises:
        NoDisassembler: no nvdisasm, or one too old for the architecture.
        ValueError: machine code that this reader does not understand.
    """
    tool = find_nvdisasm()
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        # -ndf leaves out an analysis that changes nothing printed: a third less time.
        command = [str(tool), "-c", "-hex", "-ndf", file.name]
        ran = subprocess.run(command, capture_output=True, text=True, check=False)
    if ran.returncode:
        raise NoDisassembler(f"{tool} refuses the cubin: {ran.stderr.strip()}")
    return parse(ran.stdout)


def parse(text: str) -> Code:
    """Code from what ``nvdisasm -c -hex`` prints of a cubin with one kernel.

    Raises:
        ValueError: several code sections, or control flow that cannot be followed.
    """
    if text.count("\t.section\t.text.") > 1:
        raise ValueError("the cubin has more than one kernel; check each by itself")
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    lines = iter(text.splitlines())
    for line in lines:
        if label := _LABEL.match(line):
            labels[label.group(1)] = len(instructions)
        elif match := _INSTRUCTION.match(line):
            upper = _UPPER.match(next(lines, ""))
            if upper is None:
                raise ValueError(f"nvdisasm gave half an instruction: {line.strip()}")
            instructions.append(
                _instruction(int(match[1], 16), match[2], int(upper[1], 16))
            )
    if not instructions:
        raise ValueError("nvdisasm printed no instructions")
    taken, falls = _edges(instructions, labels)
    return Code(tuple(instructions), taken, falls)


def _instruction(address: int, text: str, upper: int) -> Instruction:
    control = upper >> (105 - 64)
    guard = _GUARD.match(text)
    opcode, _, rest = text[guard.end() if guard else 0 :].strip().partition(" ")
    scoreboard = control >> 5 & 7
    name = guard.group(1) if guard else ""
    return Instruction(
        address,
        "" if name in ("PT", "UPT") else name,
        opcode,
        split_operands(rest.replace(".reuse", "")),
        frozenset(i for i in range(6) if control >> (11 + i) & 1),
        None if scoreboard == _NO_SCOREBOARD else scoreboard,
        text,
    )


def _edges(
    instructions: list[Instruction], labels: dict[str, int]
) -> tuple[tuple[tuple[int, ...], ...], tuple[bool, ...]]:
    def target(ins: Instruction) -> Iterator[int]:
        for name in _TARGET.findall(ins.text):
            if name not in labels:
                raise ValueError(f"{ins.text!r} jumps to a label that is not there")
            yield labels[name]

    joins: dict[str, set[int]] = {}
    for ins in instructions:
        if ins.head == "BSSY":
            joins.setdefault(ins.operands[0], set()).update(target(ins))
    returns = tuple(i + 1 for i, ins in enumerate(instructions) if ins.head == "CALL")
    taken: list[tuple[int, ...]] = []
    falls = []
    for index, ins in enumerate(instructions):
        to: tuple[int, ...] = ()
        falling = True
        if ins.head == "BSYNC":
            # Threads meet here and go on where their BSSY says: as a rule right below.
            # Elsewhere any BSSY of the same register may have been theirs.
            meet = joins.get(ins.operands[0], set())
            to = () if index + 1 in meet else tuple(sorted(meet))
        elif ins.head == "RET":
            to, falling = returns, bool(ins.guard)
        elif ins.head == "EXIT":
            falling = bool(ins.guard)
        elif ins.head != "BSSY":
            to = tuple(target(ins))
            if ins.head in _INDIRECT or (ins.head in {*_JUMPS, "CALL"} and not to):
                raise ValueError(f"it is not known where {ins.text!r} goes")
            # A predicate may stand among the operands, too: BRA.U UP0, `(label).
            sure = not ins.guard and len(ins.operands) == 1
            falling = not (ins.head in _JUMPS and sure)
        taken.append(to)
        falls.append(falling)
    return tuple(taken), tuple(falls)
