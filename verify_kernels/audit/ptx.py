# SPDX-License-Identifier: Apache-2.0
"""Reader of compiled PTX: instructions, their registers, and the control-flow graph."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.S)
_ENTRY = re.compile(r"\.entry\s+([\w$]+)\s*(?:\((.*?)\))?[^{;]*\{", re.S)
_PARAMETER = re.compile(r"\.param\s+([^,]*?)([\w$]+)\s*(?:\[(\d+)\])?\s*$", re.S)
_VARIABLE = re.compile(
    r"^\s*(?:\.(?:extern|visible|weak|common)\s+)*"
    r"\.(shared|local|global|const)\s[^;=(]*?([\w$]+)\s*(?:\[\d*\])?\s*[=;]",
    re.M,
)
_LABEL = re.compile(r"([A-Za-z_$%][\w$]*)\s*:(?!:)")
_LINE_DIRECTIVE = re.compile(r"\.(?:loc|file)\b[^\n]*")
_GUARD = re.compile(r"@(!?)\s*([\w$%]+)\s*")
_NAME = re.compile(r"[%A-Za-z_$][\w$]*")


@dataclass(frozen=True)
class Parameter:
    """One ``.param`` of an entry.

    Attributes:
        name: its symbol.
        passed_by_address: an array of bytes: a tensor (address first, then extents and
            strides) or a TMA descriptor. Else a plain number.
    """

    name: str
    passed_by_address: bool


@dataclass(frozen=True)
class Instruction:
    """One instruction.

    Attributes:
        line: line in the PTX file, from 1.
        guard: predicate register it runs under, "" if it always runs.
        opcode: with all its suffixes.
        operands: split at the outer commas. A register of an inner scope carries the
            scope's number (``p@3``), so equal names of two asm blocks differ.
        text: as written, on one line.
    """

    line: int
    guard: str
    opcode: str
    operands: tuple[str, ...]
    text: str

    @property
    def head(self) -> str:
        return self.opcode.partition(".")[0]


@dataclass(frozen=True)
class Entry:
    """One kernel.

    Attributes:
        name: its symbol.
        parameters: in order.
        variables: state space of every module or function variable, by symbol.
        registers: state of every declared register: its type, by name.
        instructions: in the order of the file.
        successors: for each instruction, the instructions that may run next;
            ``len(instructions)`` stands for the end of the kernel.
    """

    name: str
    parameters: tuple[Parameter, ...]
    variables: dict[str, str]
    registers: dict[str, str]
    instructions: tuple[Instruction, ...]
    successors: tuple[tuple[int, ...], ...]


@dataclass
class _Scope:
    number: int
    parent: _Scope | None
    labels: dict[str, int] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)

    def chain(self) -> Iterator[_Scope]:
        scope: _Scope | None = self
        while scope is not None:
            yield scope
            scope = scope.parent


def split_operands(text: str) -> tuple[str, ...]:
    """Operands of one instruction, split at commas outside brackets."""
    parts, depth, start = [], 0, 0
    for at, char in enumerate(text):
        if char in "[{(":
            depth += 1
        elif char in "]})":
            depth -= 1
        elif char == "," and depth == 0:
            parts.append(text[start:at])
            start = at + 1
    parts.append(text[start:])
    return tuple(part.strip() for part in parts if part.strip())


def names_in(text: str) -> Iterator[str]:
    """Symbols and registers in an operand."""
    for match in re.finditer(r"[%A-Za-z_$][\w$]*(?:@\d+)?", text):
        yield match.group()


def statements(text: str) -> Iterator[tuple[str, str, int]]:
    """``(kind, text, offset)`` of a body; kind is open, close, label or statement."""
    at = 0
    while at < len(text):
        char = text[at]
        if char.isspace() or char == ";":
            at += 1
        elif char in "{}":
            yield ("open" if char == "{" else "close"), char, at
            at += 1
        elif label := _LABEL.match(text, at):
            yield "label", label.group(1), at
            at = label.end()
        elif directive := _LINE_DIRECTIVE.match(text, at):
            at = directive.end()
        else:
            end = text.find(";", at)
            end = len(text) if end < 0 else end
            yield "statement", " ".join(text[at:end].split()), at
            at = end


def parse(text: str) -> tuple[Entry, ...]:
    """Every kernel of a PTX module.

    Raises:
        ValueError: text that this reader does not understand.
    """
    text = _COMMENT.sub(lambda m: re.sub(r"[^\n]", " ", m.group()), text)
    variables = {name: space for space, name in _VARIABLE.findall(text)}
    entries = []
    for match in _ENTRY.finditer(text):
        end = _closing_brace(text, match.end() - 1)
        line = text.count("\n", 0, match.end()) + 1
        body = _Body(text[match.end() : end], line)
        entries.append(
            Entry(
                match.group(1),
                tuple(_parameter(p) for p in split_operands(match.group(2) or "")),
                variables,
                body.registers,
                tuple(body.instructions),
                body.successors(),
            )
        )
    return tuple(entries)


def parse_fragment(code: str) -> tuple[Instruction, ...]:
    """Instructions of an inline asm string, its ``$0`` and ``${:uid}`` included."""
    return tuple(_Body(code.replace("${:uid}", "0").replace("$$", "$"), 1).instructions)


def _closing_brace(text: str, start: int) -> int:
    depth = 0
    for at in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[at], 0)
        if depth == 0:
            return at
    raise ValueError("the PTX ends inside a kernel: the file is not complete")


def _parameter(text: str) -> Parameter:
    match = _PARAMETER.search(text)
    if match is None:
        raise ValueError(f"unknown form of kernel parameter: {text!r}")
    kind, name, size = match.groups()
    return Parameter(name, size is not None or ".ptr" in kind)


class _Body:
    """Instructions of one body, with scopes resolved."""

    def __init__(self, text: str, first_line: int) -> None:
        self.instructions: list[Instruction] = []
        self.registers: dict[str, str] = {}
        self._scopes: list[_Scope] = []
        self._tables: dict[str, tuple[str, ...]] = {}
        scope = _Scope(0, None)
        count, table = 0, ""
        for kind, statement, offset in statements(text):
            if kind == "open":
                count += 1
                scope = _Scope(count, scope)
            elif kind == "close":
                if scope.parent is None:
                    raise ValueError("a brace closes that was never opened")
                scope = scope.parent
            elif kind == "label":
                scope.labels[statement] = len(self.instructions)
                table = statement
            elif statement.startswith(".reg"):
                self._declare(scope, statement)
            elif statement.startswith(".branchtargets"):
                targets = statement.removeprefix(".branchtargets")
                self._tables[table] = split_operands(targets)
            elif not statement.startswith("."):
                line = first_line + text.count("\n", 0, offset)
                self.instructions.append(self._instruction(scope, statement, line))
                self._scopes.append(scope)

    def _declare(self, scope: _Scope, statement: str) -> None:
        kind, _, names = statement.removeprefix(".reg").strip().partition(" ")
        for name in split_operands(names):
            many = re.fullmatch(r"([\w$%]+)<(\d+)>", name)
            each = (
                [f"{many.group(1)}{i}" for i in range(int(many.group(2)))]
                if many
                else [name]
            )
            for one in each:
                scope.names[one] = f"{one}@{scope.number}" if scope.number else one
                self.registers[scope.names[one]] = kind

    def _instruction(self, scope: _Scope, statement: str, line: int) -> Instruction:
        def renamed(match: re.Match[str]) -> str:
            name = match.group()
            return next((s.names[name] for s in scope.chain() if name in s.names), name)

        guard, rest = "", statement
        if found := _GUARD.match(statement):
            guard = _NAME.sub(renamed, found.group(2))
            rest = statement[found.end() :]
        opcode, _, operands = rest.partition(" ")
        return Instruction(
            line,
            guard,
            opcode,
            split_operands(_NAME.sub(renamed, operands)),
            statement,
        )

    def successors(self) -> tuple[tuple[int, ...], ...]:
        """Edges of the control-flow graph."""
        return tuple(
            self._next(index, instruction, self._scopes[index])
            for index, instruction in enumerate(self.instructions)
        )

    def _next(self, index: int, ins: Instruction, scope: _Scope) -> tuple[int, ...]:
        onward = (index + 1,) if ins.guard else ()
        if ins.head == "bra":
            return (self._label(scope, ins.operands[0]), *onward)
        if ins.head == "brx":
            table = self._tables.get(ins.operands[1])
            if table is None:
                raise ValueError(f"line {ins.line}: no targets known for {ins.text!r}")
            return (*(self._label(scope, name) for name in table), *onward)
        if ins.head in ("ret", "exit"):
            return (len(self.instructions), *onward)
        if ins.head == "trap":
            return onward
        return (index + 1,)

    def _label(self, scope: _Scope, name: str) -> int:
        for s in scope.chain():
            if name in s.labels:
                return s.labels[name]
        raise ValueError(f"branch to {name!r}, which is no label in reach")


def reach(
    entry: Entry, starts: Sequence[int], blocked: frozenset[int] = frozenset()
) -> dict[int, int]:
    """Instructions that may run from ``starts`` on without passing ``blocked`` ones.

    A blocked instruction is reached itself, but nothing after it through it.

    Returns:
        For each instruction reached, the one before it on a shortest path (-1 at a
        start). ``len(entry.instructions)`` is the end of the kernel.
    """
    before = dict.fromkeys(starts, -1)
    front = list(before)
    while front:
        later = []
        for index in front:
            if index in blocked or index == len(entry.instructions):
                continue
            for following in entry.successors[index]:
                if following not in before:
                    before[following] = index
                    later.append(following)
        front = later
    return before
