# SPDX-License-Identifier: Apache-2.0
"""What PTX instructions do to memory (PTX ISA 9.x, chapter 9.7).

An opcode in neither list is unknown, which the checks report: a new instruction is
looked up and entered here, never waved through.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from verify_kernels.audit.ptx import Instruction, parse_fragment

_REGISTER = (
    "abs activemask add addc and bfe bfi bfind bmsk bra brev brkpt brx clz cnot "
    "copysign cos createpolicy cvt cvta div dp2a dp4a elect ex2 exit fma fns "
    "getctarank isspacep lg2 lop3 mad mad24 madc mapa match max min mma mov movmatrix "
    "mul mul24 nanosleep neg not or pmevent popc prmt rcp redux rem ret rsqrt sad "
    "selp set setmaxnreg setp shf shfl shl shr sin slct sqrt sub subc szext tanh testp "
    "trap vote xor"
)
_MEMORY = (
    "applypriority atom bar barrier clusterlaunchcontrol cp discard fence "
    "griddepcontrol ld ldmatrix ldu mbarrier membar multimem prefetch prefetchu red st "
    "stmatrix suld sured sust tcgen05 tensormap tex tld4 wgmma"
)
#: Registers and control only.
REGISTER_OPCODES = frozenset(_REGISTER.split())
#: Read, write or order memory.
MEMORY_OPCODES = frozenset(_MEMORY.split())
_SPACES = frozenset(["global", "shared", "local", "const", "param"])
#: Parts of cp.async that only wait or count.
_NO_COPY = frozenset(("commit_group", "wait_group", "wait_all", "mbarrier"))

Kind = Literal["load", "prefetch", "store"]


@dataclass(frozen=True)
class Access:
    """One access to global memory, or to memory whose space the opcode leaves open.

    Attributes:
        kind: load, prefetch or store; an atomic counts as a store.
        address: the operand with the address; "" where the form is not understood.
        generic: the opcode names no state space.
    """

    kind: Kind
    address: str
    generic: bool = False


def known(instruction: Instruction) -> bool:
    """Whether the opcode is in one of the two lists."""
    return instruction.head in REGISTER_OPCODES | MEMORY_OPCODES


def touches_memory(code: str) -> bool:
    """Whether an inline asm string has an instruction that is not register-only.

    A call or an opcode in neither list counts as touching memory.
    """
    return any(
        instruction.head not in REGISTER_OPCODES for instruction in parse_fragment(code)
    )


def access(instruction: Instruction) -> Access | None:
    """The access of one instruction that may be to global memory, or None."""
    head, *parts = instruction.opcode.split(".")
    # Windows of a space count as the space: shared::cta, param::entry.
    spaces = [space for p in parts if (space := p.partition("::")[0]) in _SPACES]
    brackets = [o for o in instruction.operands if o.startswith("[")]
    if head == "cp":
        return _copy(parts, spaces, brackets)
    kind: Kind
    if head in ("ld", "ldu"):
        kind = "load"
    elif head in ("tex", "tld4", "suld"):
        return Access("load", "")
    elif head in ("sust", "sured"):
        return Access("store", "")
    elif head in ("st", "atom", "red", "discard", "tensormap"):
        kind = "store"
    elif head in ("prefetch", "prefetchu", "applypriority"):
        if "tensormap" in parts:
            return None
        kind = "prefetch"
    elif head == "multimem":
        return Access("load" if parts[0] == "ld_reduce" else "store", brackets[0])
    else:
        return None
    if not brackets:
        return Access(kind, "")
    if not spaces:
        return Access(kind, brackets[0], generic=True)
    return Access(kind, brackets[0]) if spaces[0] == "global" else None


def _copy(parts: list[str], spaces: list[str], brackets: list[str]) -> Access | None:
    if _NO_COPY.intersection(parts):
        # "mbarrier::complete_tx::bytes" is another part than "mbarrier".
        return None
    if "prefetch" in parts and brackets:
        return Access("prefetch", brackets[0])
    if len(spaces) < 2 or len(brackets) < 2:
        return Access("store", "")
    if spaces[0] == "global":
        return Access("store", brackets[0])
    return Access("load", brackets[1]) if spaces[1] == "global" else None
