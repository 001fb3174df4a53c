# SPDX-License-Identifier: Apache-2.0
"""Text that every machine has: Python's own library, and generated code-like text.

Bytes are tokens: ids 0..255 are byte values, 256 ends a text, 257 is the drafter's mask
token. Held-out text is chosen by a hash of its name, so it does not depend on the order
of a directory listing.
"""

from __future__ import annotations

import hashlib
import random
import sysconfig
from pathlib import Path
from typing import Literal, get_args

Kind = Literal["stdlib", "generated"]
KINDS: tuple[Kind, ...] = get_args(Kind)

EOS, MASK, VOCAB_SIZE = 256, 257, 260
#: Folders of the standard library that are test data or vendored bundles.
_SKIPPED = {"test", "tests", "site-packages", "__pycache__", "idlelib", "lib2to3"}

_NOUNS = ("row", "cell", "node", "item", "user", "page", "file", "task", "line", "word")
_VERBS = (
    "load",
    "save",
    "parse",
    "merge",
    "count",
    "find",
    "sort",
    "send",
    "read",
    "build",
)
_TYPES = ["int", "str", "float", "list", "dict"]


def encode(text: str) -> list[int]:
    """UTF-8 bytes as token ids."""
    return list(text.encode())


def decode(tokens: list[int]) -> str:
    """Text of token ids; special tokens are dropped."""
    return bytes(t for t in tokens if t < 256).decode(errors="replace")


def _held_out(name: str) -> bool:
    return hashlib.sha256(name.encode()).digest()[0] < 13  # about 5 %


def stdlib_files(held_out: bool) -> list[Path]:
    """Python sources of the running interpreter's library, sorted by name."""
    root = Path(sysconfig.get_paths()["stdlib"])
    return [
        path
        for path in sorted(root.rglob("*.py"))
        if not _SKIPPED.intersection(path.relative_to(root).parts)
        and _held_out(path.relative_to(root).as_posix()) == held_out
    ]


def generated_text(seed: int, functions: int) -> str:
    """Code-like text from a few templates: predictable, but not a fixed string."""
    rng = random.Random(seed)
    parts = []
    for _ in range(functions):
        verb, noun, kind = (rng.choice(w) for w in (_VERBS, _NOUNS, _TYPES))
        name = f"{verb}_{noun}"
        limit = rng.randrange(2, 10)
        body = rng.choice(
            (
                f"    result = []\n    for {noun} in {noun}s:\n"
                f"        if {noun} is not None:\n"
                f"            result.append({noun})\n    return result\n",
                f"    total = 0\n    for index in range({limit}):\n"
                f"        total += {noun}s[index]\n    return total\n",
                f"    if len({noun}s) > {limit}:\n"
                f'        raise ValueError("too many {noun}s")\n'
                f"    return {kind}({noun}s)\n",
            )
        )
        parts.append(
            f"def {name}({noun}s: {kind}) -> {kind}:\n"
            f'    """{verb.capitalize()} every {noun}."""\n{body}\n\n'
        )
    return "".join(parts)


def training_bytes(kind: Kind) -> bytes:
    """All text of a kind except what is held out."""
    if kind == "generated":
        return generated_text(seed=1, functions=20_000).encode()
    return b"".join(path.read_bytes() for path in stdlib_files(held_out=False))


def held_out_bytes(kind: Kind) -> bytes:
    """Text of a kind that training never saw."""
    if kind == "generated":
        return generated_text(seed=2, functions=1_000).encode()
    # Files of the encodings package repeat each other's tables: text held out there
    # would be known from a sibling.
    files = [p for p in stdlib_files(held_out=True) if p.parent.name != "encodings"]
    return b"".join(path.read_bytes() for path in files)


def held_out_prompts(kind: Kind, n: int, length: int = 96) -> list[list[int]]:
    """``n`` prompts of ``length`` tokens, evenly spread over the held-out text.

    Raises ValueError for an unknown kind or a length the text cannot give.
    """
    if kind not in KINDS:
        raise ValueError(f"kind={kind!r}: must be one of {', '.join(KINDS)}")
    text = held_out_bytes(kind)
    if not 1 <= length <= len(text) // max(n, 1):
        raise ValueError(
            f"length={length} with n={n}: the held-out text has {len(text)} bytes"
        )
    step = (len(text) - length) // max(n, 1)
    return [list(text[i * step : i * step + length]) for i in range(n)]
