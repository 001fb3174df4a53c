# SPDX-License-Identifier: Apache-2.0
"""Which kernel serves a shape: read from a measured table and one that is not.

Three designs compute the same sums in the same order (`tiling.SUM_ORDER`), so every
choice gives the same bits; it is about speed, and about few kernels to compile:

    ring    weights through shared memory by bulk copies, K shared by a cluster: the
            most bytes under way, a long way from launch to first result
    direct  weights straight into registers, a CTA a few rows: the shortest launch
    wide    warpgroups own rows and X stays in shared memory: many tokens

``choices.json`` was measured and is written by ``python -m experiments.bench.tune
--write``. ``choices_unmeasured.json`` was written by hand for widths of K that no GPU
has timed yet, each like a measured K that it names: right, but not the fastest that
could be. Its entries for a K, outputs and launch mode end where ``choices.json`` has
any.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any

from verify_kernels.skinny_gemm.direct_tiling import DirectTiling
from verify_kernels.skinny_gemm.tiling import Tiling
from verify_kernels.skinny_gemm.wide_tiling import WideTiling

Cut = Tiling | DirectTiling | WideTiling
Outputs = tuple[str, ...]
DESIGNS: dict[str, type[Cut]] = {
    "ring": Tiling,
    "direct": DirectTiling,
    "wide": WideTiling,
}


def most_rows(cut: Cut) -> int:
    """M that one launch of ``cut`` serves at most."""
    return cut.max_tokens if isinstance(cut, DirectTiling) else cut.tokens


@dataclass(frozen=True)
class Choice:
    """A kernel and its grid.

    Attributes:
        cut: the kernel's constants.
        run: rows of W a cluster takes at most, so the grid follows from N; 0: as many
            clusters as the device holds at once share them.

    Raises:
        ValueError: a negative run; a direct kernel is not told its run, or cannot hold
            it.
    """

    cut: Cut
    run: int = 0

    def __post_init__(self) -> None:
        if self.run < 0:
            raise ValueError(
                f"run={self.run} must be a number of rows, or 0 to share them among "
                "the clusters that the device holds"
            )
        if isinstance(self.cut, DirectTiling) and not 0 < self.run <= self.cut.rows:
            raise ValueError(
                f"run={self.run}: a CTA of {self.cut.name} has 1 to {self.cut.rows} "
                "rows"
            )

    @property
    def name(self) -> str:
        """The cut's name and the run."""
        return f"{self.cut.name}@{self.run}"


@dataclass(frozen=True)
class Entry:
    """What serves one shape.

    Attributes:
        k, n: columns and rows of W, all matrices of a launch together.
        outputs: "bf16" or "fp32" for each matrix.
        pdl: in a chain of programmatic launches, or of plain ones.
        rows: measured at this M; serves every M down to the next smaller entry's.
        choice: the fastest, or of an unmeasured entry one that is likely to be fast.

    Raises:
        ValueError: no rows, or more than the choice serves in one launch.
    """

    k: int
    n: int
    outputs: Outputs
    pdl: bool
    rows: int
    choice: Choice

    def __post_init__(self) -> None:
        if not 0 < self.rows <= most_rows(self.choice.cut):
            raise ValueError(
                f"rows={self.rows}: {self.choice.cut.name} serves 1 to "
                f"{most_rows(self.choice.cut)} in one launch"
            )


def design_of(cut: Cut) -> str:
    """The design's name: a key of `DESIGNS`."""
    (design,) = (name for name, kind in DESIGNS.items() if isinstance(cut, kind))
    return design


def spell(cut: Cut) -> dict[str, Any]:
    """A cut as the tables have it."""
    return {"design": design_of(cut), **vars(cut)}


def cut_of(spelled: Mapping[str, Any]) -> Cut:
    """The cut of which ``spelled`` is the spelling.

    Raises:
        ValueError: no design has it as the designs are now, or its values do not fit.
    """
    fields = {name: value for name, value in spelled.items() if name != "design"}
    try:
        return DESIGNS[spelled["design"]](**fields)
    except (KeyError, TypeError) as error:
        raise ValueError(
            f"cut={dict(spelled)} is none of these designs, {', '.join(DESIGNS)}, with "
            "the fields they have now: measure it again"
        ) from error


def entries_of(text: str) -> tuple[Entry, ...]:
    """Every entry of a table's text.

    Raises:
        ValueError: an entry cannot be served as it says.
    """
    content = json.loads(text)
    cuts = [cut_of(cut) for cut in content["cuts"]]
    return tuple(
        Entry(k, n, tuple(outputs.split("+")), bool(pdl), rows, Choice(cuts[cut], run))
        for k, n, outputs, pdl, rows, cut, run in content["choices"]
    )


def _shipped(name: str) -> tuple[Entry, ...]:
    return entries_of(resources.files(__package__).joinpath(name).read_text())


@functools.cache
def measured() -> tuple[Entry, ...]:
    """Every entry of ``choices.json``."""
    return _shipped("choices.json")


@functools.cache
def unmeasured() -> tuple[Entry, ...]:
    """The entries of ``choices_unmeasured.json`` that no measured one replaces."""
    known = {(e.k, e.outputs, e.pdl) for e in measured()}
    return tuple(
        e
        for e in _shipped("choices_unmeasured.json")
        if (e.k, e.outputs, e.pdl) not in known
    )


@functools.cache
def table() -> tuple[Entry, ...]:
    """Every entry that may serve a shape."""
    return measured() + unmeasured()


def kernels() -> list[tuple[Cut, Outputs]]:
    """Every kernel that some shape is served by, once."""
    return list(dict.fromkeys((e.choice.cut, e.outputs) for e in table()))


@functools.cache
def outputs_of(k: int) -> tuple[Outputs, ...]:
    """The outputs that kernels of this K have."""
    return tuple(sorted({e.outputs for e in table() if e.k == k}))


def choices(k: int, n: int, outputs: Outputs, pdl: bool) -> dict[int, Choice]:
    """The choices for one weight, by the M they serve at most, ascending.

    Those of the N in the table nearest to n, by ratio. A larger M than the last is cut
    into launches.

    Raises:
        KeyError: there is no kernel for this k and these outputs.
    """
    found = [e for e in table() if (e.k, e.outputs, e.pdl) == (k, outputs, pdl)]
    if not found:
        mode = "programmatic" if pdl else "plain"
        raise KeyError(f"no kernel for k={k}, outputs={outputs}, {mode}")
    nearest = min({e.n for e in found}, key=lambda m: (abs(math.log(m / max(n, 1))), m))
    same = sorted((e for e in found if e.n == nearest), key=lambda e: e.rows)
    return {e.rows: e.choice for e in same}
