# SPDX-License-Identifier: Apache-2.0
"""Which tilings of skinny_gemm a search tries."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator, Mapping

from experiments.bench.shapes import integers
from verify_kernels.batch import MAX_ROWS
from verify_kernels.skinny_gemm.host import TILINGS
from verify_kernels.skinny_gemm.tiling import ROW_TILE, SUM_ORDER, TOKEN_TILE, Tiling

#: What a search may vary; "stages" is the deepest that fits unless it is given.
FIELDS = (
    "cluster",
    "span",
    "row_tiles",
    "stage_rows",
    "held_tiles",
    "reducers",
    "partial_buffers",
    "exchange_buffers",
    "ctas_per_sm",
    "stages",
)
#: A ring of more stages than this was never faster (H200).
MAX_STAGES = 12
_DEFAULTS: dict[str, int] = {name: getattr(Tiling, name) for name in FIELDS}

Space = Mapping[str, tuple[int, ...]]


def in_use(k: int, rows: int) -> Tiling | None:
    """The tiling that serves M = rows in one launch; None where M is cut into several.

    Raises:
        ValueError: for a K without a fixed order of sums, or M outside 1..64.
    """
    if k not in SUM_ORDER:
        raise ValueError(
            f"k={k}: no order of sums is fixed for it; K is one of "
            f"{', '.join(map(str, SUM_ORDER))}"
        )
    if not 1 <= rows <= MAX_ROWS:
        raise ValueError(f"rows={rows}: a step has 1 to {MAX_ROWS} rows")
    return next((t for most, t in TILINGS[k].items() if rows <= most), None)


def _values(k: int, rows: int, space: Space) -> Iterator[dict[str, int]]:
    """Every combination; a field that is not given keeps the value in use."""
    base = dict(_DEFAULTS)
    used = in_use(k, rows)
    if used is not None:
        base.update({name: getattr(used, name) for name in FIELDS})
        base["held_tiles"] = min(base["held_tiles"], -(-rows // TOKEN_TILE))
    lists = [space.get(name, (base[name],)) for name in FIELDS]
    for values in itertools.product(*lists):
        found = dict(zip(FIELDS, values, strict=True))
        if "row_tiles" in space and "stage_rows" not in space:
            found["stage_rows"] = found["row_tiles"] * ROW_TILE
        yield found


def _useful(values: Mapping[str, int]) -> bool:
    """False where fewer row tiles would do the same work."""
    return values["stage_rows"] > (values["row_tiles"] - 1) * ROW_TILE


def _tiling(k: int, rows: int, values: Mapping[str, int]) -> Tiling | None:
    try:
        return Tiling(k, token_tiles=-(-rows // TOKEN_TILE), **values)
    except ValueError:
        return None


def _deepest(k: int, rows: int, values: Mapping[str, int]) -> Tiling | None:
    for stages in range(MAX_STAGES, 0, -1):
        found = _tiling(k, rows, {**values, "stages": stages})
        if found is not None:
            return found
    return None


def candidates(k: int, rows: int, space: Space) -> list[Tiling]:
    """The valid tilings of ``space`` for M = rows, each once.

    A field that is not in ``space`` keeps its value in the tiling in use (stage_rows
    follows row_tiles if that is given). Without a cluster there is nothing to exchange,
    so exchange_buffers is not varied there.

    Raises:
        ValueError: as :func:`in_use`, and for a field that a search cannot vary.
    """
    for name in space:
        if name not in FIELDS:
            raise ValueError(f"field={name!r}: a search varies {', '.join(FIELDS)}")
    make = _tiling if "stages" in space else _deepest
    found: dict[Tiling, None] = {}
    for values in _values(k, rows, space):
        if values["cluster"] == 1:
            values["exchange_buffers"] = _DEFAULTS["exchange_buffers"]
        if _useful(values) and (tiling := make(k, rows, values)) is not None:
            found[tiling] = None
    return list(found)


def spell(tiling: Tiling) -> dict[str, int]:
    """What differs from Tiling's defaults but K and token tiles, as `host.CHOICES`."""
    values = {name: getattr(tiling, name) for name in FIELDS}
    return {name: v for name, v in values.items() if v != _DEFAULTS[name]}


def add_options(parser: argparse.ArgumentParser) -> None:
    """One option a field, a list of values."""
    for name in FIELDS:
        parser.add_argument(f"--{name.replace('_', '-')}", type=integers, metavar="N,N")


def of_options(options: argparse.Namespace) -> dict[str, tuple[int, ...]]:
    """The fields that were given."""
    given = {name: getattr(options, name) for name in FIELDS}
    return {name: values for name, values in given.items() if values is not None}
