# SPDX-License-Identifier: Apache-2.0
"""What a kernel is launched with, from the IR of its host part."""

from __future__ import annotations

import re
from dataclasses import dataclass

_PROGRAMMATIC = re.compile(
    r"programmatic_stream_serialization_allowed\[[^\]]*\]\s*(%[\w$.#]+)"
)
_SHARED = re.compile(r"dynamicSmemBytes = (%[\w$.#]+)")
_LAUNCH = re.compile(r"\bcuda\.launch_ex\b")


@dataclass(frozen=True)
class Launch:
    """One launch.

    Attributes:
        count: launches in the host part.
        programmatic: whether the programmatic attribute is set; a value known only at
            run time counts as set.
        shared_bytes: dynamic shared memory of a CTA; None if not a constant.
    """

    count: int
    programmatic: bool
    shared_bytes: int | None


def read_launch(ir: str) -> Launch:
    """The launch in the MLIR of a kernel's host part."""
    # Device code comes first, in a module of its own with names of its own.
    host = ir[ir.rindex("func.func ") :]
    attribute = _PROGRAMMATIC.search(host)
    shared = _SHARED.search(host)
    return Launch(
        len(_LAUNCH.findall(host)),
        attribute is not None and _constant(host, attribute.group(1)) != 0,
        _constant(host, shared.group(1)) if shared else 0,
    )


def _constant(host: str, name: str) -> int | None:
    """The integer that an SSA value of the host function is, if it is a constant."""
    for _ in range(8):
        found = re.search(rf"{re.escape(name)} = arith\.(\w+) (%?[\w$.#-]+)", host)
        if found is None:
            return None
        kind, value = found.groups()
        if kind == "constant":
            return {"true": 1, "false": 0}[value] if value.isalpha() else int(value)
        if kind not in ("extsi", "extui", "index_cast", "trunci"):
            return None
        name = value
    return None
