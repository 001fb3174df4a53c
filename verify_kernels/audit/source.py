# SPDX-License-Identifier: Apache-2.0
"""Whether inline asm that touches memory could be moved, from the sources and the IR.

LLVM may merge and move asm that does not declare side effects. Two checks see it: one
over the Python sources (so that asm is written in one place only), one over the IR of
each kernel as the compiler first builds it (so that nothing else slips past).
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from verify_kernels.audit.opcodes import touches_memory

#: The one function that may write inline asm: `verify_kernels.common.ptx.asm`.
_WRAPPER_FILE, _WRAPPER = "ptx.py", "asm"
_RAW = frozenset(("inline_asm", "InlineAsmOp", "inline_ptx"))
_IR_ASM = re.compile(r'llvm\.inline_asm (?P<flags>[^"]*)"(?P<code>(?:[^"\\]|\\.)*)"')
_HOLE = "$0"


def check_sources(directory: Path, common: Path | None = None) -> list[str]:
    """Findings over every Python file below ``directory``.

    Args:
        directory: where to look.
        common: directory whose ``ptx.py`` may call ``llvm.inline_asm``, inside its
            function ``asm``; default ``directory / "common"``.
    """
    wrapper = (common or directory / "common") / _WRAPPER_FILE
    findings = []
    for path in sorted(directory.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        name = path.relative_to(directory).as_posix()
        allowed = set(_inside_wrapper(tree)) if path == wrapper else set()
        findings += [
            f"{name}:{node.lineno}: {problem}"
            for node in ast.walk(tree)
            if isinstance(node, ast.Call) and node not in allowed
            for problem in _problems(node)
        ]
    return findings


def check_ir(text: str) -> list[str]:
    """Findings over the MLIR of a kernel, as built, before any pass."""
    findings = []
    for match in _IR_ASM.finditer(text):
        code = re.sub(r"\\([0-9A-F]{2})", _unescape, match["code"])
        if "has_side_effects" not in match["flags"] and touches_memory(code):
            findings.append(
                f"asm that touches memory is declared pure and may be merged or moved "
                f"across griddepcontrol.wait: {' '.join(code.split())}"
            )
    return findings


def _unescape(match: re.Match[str]) -> str:
    return chr(int(match.group(1), 16))


def _inside_wrapper(tree: ast.Module) -> Iterator[ast.AST]:
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name == _WRAPPER:
            yield from ast.walk(node)


def _problems(call: ast.Call) -> Iterator[str]:
    name = _called(call.func)
    if name in _RAW:
        yield (
            f"{name} is called here; inline asm is written with "
            "verify_kernels.common.ptx.asm, which refuses a load declared pure"
        )
    if name != _WRAPPER:
        return
    keywords = {k.arg: k.value for k in call.keywords}
    code = call.args[2] if len(call.args) > 2 else keywords.get("code")
    text = _text(code) if code is not None else None
    effects = keywords.get("effects")
    if isinstance(effects, ast.Constant) and effects.value is True:
        return
    if text is None:
        yield "asm whose code is not a literal must pass effects=True"
    elif touches_memory(text):
        yield f"asm touches memory without effects=True: {text}"


def _called(function: ast.expr) -> str:
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def _text(node: ast.expr) -> str | None:
    """A string literal's text, its formatted values as operands; None if it is none."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        parts = [
            part.value if isinstance(part, ast.Constant) else _HOLE
            for part in node.values
        ]
        return "".join(str(part) for part in parts)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = _text(node.left), _text(node.right)
        return None if left is None or right is None else left + right
    return None
