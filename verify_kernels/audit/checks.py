# SPDX-License-Identifier: Apache-2.0
"""Proofs over the PTX of one kernel: what runs before the wait, what after the release.

An instruction may run before ``griddepcontrol.wait`` exactly when some path leads to it
from the entry past no wait; so the branch of every warp role is covered, and a wait
under a predicate does not count. Paths are those of the control-flow graph: no branch
is taken to be impossible.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from verify_kernels.audit import opcodes
from verify_kernels.audit.ptx import Entry, Instruction, names_in, reach

#: Their result comes from memory or another thread's count: no address flows through.
_OPAQUE = frozenset(
    ("ld", "ldu", "atom", "tex", "tld4", "suld", "mbarrier", "ldmatrix", "multimem")
) | {"wgmma"}


@dataclass(frozen=True)
class Promise:
    """What a kernel states about itself; see `verify_kernels.common.variant.Kernel`."""

    parameters: tuple[str, ...]
    early_loads: tuple[str, ...]
    early_release: str
    pdl: bool


@dataclass(frozen=True)
class Origins:
    """Where an address comes from.

    Attributes:
        parameters: indices among the parameters that hold an address.
        spaces: state spaces of variables whose address flows in.
        loaded: whether a value read from memory flows in.
    """

    parameters: frozenset[int]
    spaces: frozenset[str]
    loaded: bool


class AddressSlice:
    """Backward slices over register definitions, blind to the order of instructions."""

    def __init__(self, entry: Entry) -> None:
        self._entry = entry
        self._definitions: dict[str, list[Instruction]] = {}
        for instruction in entry.instructions:
            result = instruction.operands[0] if instruction.operands else "["
            # The first operand of a store, a copy or a prefetch is an address.
            if not result.startswith("["):
                for name in names_in(result):
                    self._definitions.setdefault(name, []).append(instruction)
        self._index = {
            parameter.name: index
            for index, parameter in enumerate(
                p for p in entry.parameters if p.passed_by_address
            )
        }
        self._symbols = {p.name for p in entry.parameters}

    def origins(self, operand: str) -> Origins:
        """Everything that the address in ``operand`` may derive from."""
        # Coordinates of a TMA operand are no addresses: [map, {x, y}].
        todo = list(names_in(operand.partition("{")[0]))
        seen = set(todo)
        parameters, spaces, loaded = set(), set(), False
        while todo:
            name = todo.pop()
            if name in self._entry.variables:
                spaces.add(self._entry.variables[name])
            elif name in self._index:
                # The address of the parameter itself: a TMA descriptor, or a choice
                # between tensors.
                parameters.add(self._index[name])
            for definition in self._definitions.get(name, ()):
                sources: Sequence[str] = ()
                if self._reads_parameter(definition):
                    parameters |= self._pointer_word(definition)
                elif definition.head in _OPAQUE and (
                    not definition.opcode.startswith("ld.param")
                ):
                    loaded = True
                else:
                    sources = definition.operands[1:]
                for source in (n for text in sources for n in names_in(text)):
                    is_predicate = self._entry.registers.get(source) == ".pred"
                    if source not in seen and not is_predicate:
                        seen.add(source)
                        todo.append(source)
        return Origins(frozenset(parameters), frozenset(spaces), loaded)

    def _reads_parameter(self, instruction: Instruction) -> bool:
        if not instruction.opcode.startswith("ld.param"):
            return False
        return next(names_in(instruction.operands[1])) in self._symbols

    def _pointer_word(self, load: Instruction) -> set[int]:
        symbol, _, offset = load.operands[1].strip("[]").partition("+")
        index = self._index.get(symbol)
        return {index} if index is not None and int(offset or 0) == 0 else set()


def check(entry: Entry, promise: Promise) -> tuple[list[str], list[str]]:
    """Findings, and the names of parameters that are read before the wait."""
    findings = [
        f"line {ins.line}: opcode {ins.opcode} is in no list of "
        "verify_kernels/audit/opcodes.py; look up what it does to memory and add it"
        for ins in entry.instructions
        if not opcodes.known(ins)
    ]
    findings += _check_names(entry, promise)
    if findings:
        return findings, []
    slices = AddressSlice(entry)
    early: list[str] = []
    if promise.pdl:
        early_findings, early = _check_wait(entry, promise, slices)
        findings += early_findings
    return findings + list(_check_release(entry, promise, slices)), early


def _check_names(entry: Entry, promise: Promise) -> Iterator[str]:
    count = sum(p.passed_by_address for p in entry.parameters)
    if count != len(promise.parameters):
        yield (
            f"the kernel takes {count} tensors and its `parameters` names "
            f"{len(promise.parameters)}: {', '.join(promise.parameters) or 'none'}"
        )
    if unknown := set(promise.early_loads) - set(promise.parameters):
        yield f"`early_loads` names {sorted(unknown)}, which are not in `parameters`"


def _check_wait(
    entry: Entry, promise: Promise, slices: AddressSlice
) -> tuple[list[str], list[str]]:
    waits = frozenset(
        index
        for index, ins in enumerate(entry.instructions)
        if ins.opcode == "griddepcontrol.wait" and not ins.guard
    )
    reached = reach(entry, [0], waits)
    findings: list[str] = []
    early: set[str] = set()
    for index in sorted(reached):
        if index == len(entry.instructions):
            findings.append(
                "launched with the programmatic attribute, but a path ends without "
                f"griddepcontrol.wait ({_path(entry, reached, index)}): every thread "
                "waits, or pdl is False"
            )
            continue
        access = opcodes.access(entry.instructions[index])
        if access is None:
            continue
        names, problem = _where(access, promise, slices)
        if names is None:
            continue
        ins = entry.instructions[index]
        if access.kind == "store":
            problem = "a store"
        else:
            early |= names
            if not problem and names <= set(promise.early_loads):
                continue
        told = problem or (
            f"a {access.kind} of {', '.join(sorted(names))}, which `early_loads` "
            "does not list"
        )
        findings.append(
            f"line {ins.line}: {told}, may run before griddepcontrol.wait "
            f"({_path(entry, reached, index)}): {ins.text}"
        )
    return findings, sorted(early)


def _check_release(
    entry: Entry, promise: Promise, slices: AddressSlice
) -> Iterator[str]:
    if promise.early_release.strip():
        return
    releases = [
        index
        for index, ins in enumerate(entry.instructions)
        if ins.opcode == "griddepcontrol.launch_dependents"
    ]
    after = {n for index in releases for n in entry.successors[index]}
    for index in sorted(reach(entry, sorted(after))):
        if index == len(entry.instructions):
            continue
        ins = entry.instructions[index]
        access = opcodes.access(ins)
        if access is None or access.kind != "store":
            continue
        if _where(access, promise, slices)[0] is None:
            continue
        yield (
            f"line {ins.line}: a global store may follow "
            f"griddepcontrol.launch_dependents: {ins.text}; store first, or write the "
            "reason in `early_release`"
        )


def _where(
    access: opcodes.Access, promise: Promise, slices: AddressSlice
) -> tuple[set[str] | None, str]:
    """Parameters that an access may touch, None if it is not to global memory.

    The second value is the problem where the address cannot be told.
    """
    if not access.address:
        return set(), f"a {access.kind} in a form whose address is not understood"
    origins = slices.origins(access.address)
    if access.generic and not origins.parameters and not origins.loaded:
        inner = origins.spaces
        if inner and inner <= {"shared", "local", "const"}:
            return None, ""
    names = {promise.parameters[index] for index in origins.parameters}
    if not names:
        source = "a value read from memory" if origins.loaded else "no tensor"
        return names, f"a {access.kind} whose address derives from {source}"
    return names, ""


def _path(entry: Entry, before: dict[int, int], index: int) -> str:
    """The branches on a path, as lines: which warp role it is."""
    lines = []
    while index >= 0:
        earlier = before[index]
        if earlier >= 0 and index != earlier + 1:
            lines.append(entry.instructions[earlier].line)
        index = earlier
    jumps = ", ".join(str(line) for line in reversed(lines))
    return f"jumps taken at lines {jumps}" if jumps else "no jump taken"
