# SPDX-License-Identifier: Apache-2.0
"""Which kernels of skinny_gemm a search tries for a weight at one M."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from verify_kernels.batch import MAX_ROWS
from verify_kernels.skinny_gemm.choice import DESIGNS, Choice
from verify_kernels.skinny_gemm.direct_tiling import DirectTiling
from verify_kernels.skinny_gemm.tiling import (
    CHUNK,
    ROW_TILE,
    SUM_ORDER,
    TOKEN_TILE,
    Tiling,
    check_k,
)
from verify_kernels.skinny_gemm.wide_tiling import (
    CHUNK_BYTES,
    GROUP_ROWS,
    MOST_GROUPS,
    MOST_TOGETHER,
    WARPS,
    WideTiling,
)

#: Clusters that a device holds at once, one CTA an SM, by their size; of 1 the SMs.
Held = Mapping[int, int]
CLUSTER_SIZES = (1, 2, 4, 8)
H200: Held = {1: 132, 2: 66, 4: 30, 8: 15}

_PAIR = {"ctas_per_sm": 2}
_DEEP = {"cluster": 8, "exchange_buffers": 2, "reducers": 3}
#: K for which no ring and no split of direct warps was ever timed.
UNSEARCHED = frozenset({64, 192, 256, 512, 1056, 3072, 8448, 16896})
_RING: dict[int, dict[int, dict[str, int]]] = {
    64: {
        8: {"row_tiles": 4, "stage_rows": 64, "stages": 2} | _PAIR,
        16: {"row_tiles": 4, "stage_rows": 64, "stages": 2, "held_tiles": 2} | _PAIR,
        32: {"row_tiles": 2, "stage_rows": 32, "held_tiles": 4},
        64: {"held_tiles": 8, "reducers": 2},
    },
    128: {
        8: {"row_tiles": 4, "stage_rows": 64, "stages": 2} | _PAIR,
        16: {"row_tiles": 4, "stage_rows": 64, "stages": 2, "held_tiles": 2} | _PAIR,
        32: {"row_tiles": 2, "stage_rows": 32, "held_tiles": 4},
        64: {"held_tiles": 8, "reducers": 2},
    },
    192: {
        8: {"row_tiles": 2, "stage_rows": 28, "stages": 3} | _PAIR,
        16: {"row_tiles": 2, "stage_rows": 28, "stages": 3, "held_tiles": 2} | _PAIR,
        32: {"held_tiles": 4, "stages": 6, "reducers": 2},
        64: {"held_tiles": 8, "stages": 4, "reducers": 3},
    },
    256: {
        8: {"row_tiles": 2, "stage_rows": 28, "stages": 3} | _PAIR,
        16: {"row_tiles": 2, "stage_rows": 28, "stages": 3, "held_tiles": 2} | _PAIR,
        32: {"held_tiles": 4, "stages": 6, "reducers": 2},
        64: {"held_tiles": 8, "stages": 4, "reducers": 3},
    },
    384: {
        8: {"row_tiles": 2, "stage_rows": 28, "stages": 3} | _PAIR,
        16: {"row_tiles": 2, "stage_rows": 28, "stages": 3, "held_tiles": 2} | _PAIR,
        32: {"held_tiles": 4, "stages": 6, "reducers": 2},
        64: {"held_tiles": 8, "stages": 4, "reducers": 3},
    },
    512: {
        8: {"stage_rows": 14, "stages": 4, "partial_buffers": 4} | _PAIR,
        16: {"stage_rows": 14, "stages": 3, "held_tiles": 2} | _PAIR,
        32: {"held_tiles": 4, "stages": 5, "reducers": 2},
        64: {"held_tiles": 4, "stages": 3, "partial_buffers": 1, "reducers": 3},
    },
    768: {
        8: {"stage_rows": 14, "stages": 4, "partial_buffers": 4} | _PAIR,
        16: {"stage_rows": 14, "stages": 3, "held_tiles": 2} | _PAIR,
        32: {"held_tiles": 4, "stages": 5, "reducers": 2},
        64: {"held_tiles": 4, "stages": 3, "partial_buffers": 1, "reducers": 3},
    },
    1056: {
        8: {"stages": 4},
        16: {"held_tiles": 2, "stages": 3, "reducers": 2},
        32: {"held_tiles": 2, "stages": 2, "reducers": 2},
    },
    1536: {
        8: {"stages": 3} | _PAIR,
        16: {"cluster": 2, "held_tiles": 2, "stages": 3, "reducers": 2} | _PAIR,
        32: {"cluster": 2, "held_tiles": 4, "stages": 5, "reducers": 2},
        64: {"cluster": 2, "held_tiles": 4, "stages": 3, "reducers": 3}
        | {"partial_buffers": 1, "exchange_buffers": 2},
    },
    2112: {
        8: {"cluster": 2, "span": 1, "stages": 4},
        16: {"cluster": 2, "held_tiles": 2, "stages": 3, "reducers": 2},
        32: {"cluster": 2, "held_tiles": 2, "stages": 2, "exchange_buffers": 2},
    },
    3072: {
        8: {"cluster": 2, "span": 2, "stages": 3},
        16: {"cluster": 4, "held_tiles": 2, "stages": 5, "reducers": 2},
        32: {"cluster": 4, "held_tiles": 4, "stages": 4, "reducers": 2},
        64: {"cluster": 4, "held_tiles": 4, "stages": 3, "exchange_buffers": 2}
        | {"reducers": 3},
    },
    3584: {
        8: {"cluster": 2, "span": 2, "stages": 3},
        16: {"cluster": 4, "held_tiles": 2, "stages": 5, "reducers": 2},
        32: {"cluster": 4, "held_tiles": 4, "stages": 4, "reducers": 2},
        64: {"cluster": 4, "held_tiles": 4, "stages": 3, "exchange_buffers": 2}
        | {"reducers": 3},
    },
    4224: {
        8: {"cluster": 4, "stages": 4},
        16: {"cluster": 4, "held_tiles": 2, "stages": 4, "reducers": 2},
        32: {"cluster": 4, "held_tiles": 2, "stages": 3, "exchange_buffers": 2},
    },
    6144: {
        8: {"cluster": 4, "span": 2, "stages": 3},
        16: {"cluster": 8, "held_tiles": 2, "stages": 6, "reducers": 2},
        32: {"held_tiles": 4, "stages": 5} | _DEEP,
        64: {"held_tiles": 4, "stages": 3} | _DEEP,
    },
    7168: {
        2: {"cluster": 2, "span": 2, "stages": 3},
        8: {"cluster": 4, "span": 2, "stages": 3},
        16: {"cluster": 8, "held_tiles": 2, "stages": 6, "reducers": 2},
        32: {"held_tiles": 4, "stages": 5} | _DEEP,
        64: {"held_tiles": 4, "stages": 3} | _DEEP,
    },
    8448: {
        8: {"cluster": 4, "stages": 4},
        16: {"cluster": 8, "held_tiles": 2, "stages": 4, "reducers": 2},
        32: {"held_tiles": 2, "stages": 3} | _DEEP,
    },
    12288: {
        2: {"cluster": 4, "stages": 4},
        8: {"cluster": 8, "stages": 4},
        16: {"held_tiles": 2, "stages": 3} | _DEEP | {"reducers": 2},
        32: {"held_tiles": 3, "stages": 3} | _DEEP,
    },
    16896: {
        8: {"cluster": 8, "stages": 3},
        16: {"cluster": 8, "held_tiles": 2, "stages": 2, "reducers": 2},
    },
    33792: {
        8: {"cluster": 8, "stages": 1},
        16: {"cluster": 8, "stages": 1, "partial_buffers": 1}
        | {"exchange_buffers": 2, "reducers": 2},
    },
}
#: K -> {M at most: ring}, the best of a search through the ring's constants alone (one
#: H200, 2026-11-29), but for the K of `UNSEARCHED`, whose rings are the like of those
#: of the nearest K; where M ends early, X and sums of more rows do not fit.
RING = {
    k: {
        rows: Tiling(k, token_tiles=-(-rows // TOKEN_TILE), **fields)
        for rows, fields in by_rows.items()
    }
    for k, by_rows in _RING.items()
}

#: More rings for one token tile: fewer columns a stage and more buffers between roles
#: were faster at M = 8 (H200, 2026-11-30).
RING_OF_ONE_TILE: dict[int, tuple[dict[str, int], ...]] = {
    1536: ({"cluster": 2, "stages": 3, "partial_buffers": 4} | _PAIR,),
    7168: (
        {"cluster": 8, "stages": 7, "exchange_buffers": 2},
        {"cluster": 4, "stages": 6, "partial_buffers": 3}
        | {"exchange_buffers": 2, "reducers": 2},
    ),
}
#: Rows of W a cluster up to which a ring's stages may hold all of them.
SMALL_RUN = 3 * ROW_TILE

#: K -> (warps, depth) of direct kernels: each warp has 1 to 8 segments and asks for all
#: of them or a part at once. Against every split that fits, with up to 4 CTAs an SM,
#: these lost 1.8 % at most at 250 points (H200, M = 1 to 16, programmatic and plain).
#: For K = 6144, 12288, 33792 and `UNSEARCHED` other splits were not tried: these are
#: the like of those of the nearest K.
DIRECT: dict[int, tuple[tuple[int, int], ...]] = {
    64: ((2, 1), (1, 2)),
    128: ((4, 1), (2, 2), (1, 4)),
    192: ((6, 1), (3, 2)),
    256: ((4, 1), (2, 2)),
    384: ((6, 1), (3, 2)),
    512: ((4, 1), (2, 2)),
    768: ((6, 1), (3, 2)),
    1056: ((11, 1),),
    1536: ((12, 1), (6, 2), (6, 1)),
    2112: ((22, 1), (11, 2)),
    3072: ((24, 1), (12, 2), (12, 1)),
    3584: ((28, 1), (14, 2), (14, 1)),
    4224: ((22, 2), (22, 1), (11, 4), (11, 2)),
    6144: ((24, 2), (16, 3), (12, 4), (12, 2)),
    7168: ((28, 2), (28, 1), (14, 2), (7, 2)),
    8448: ((22, 2), (22, 1), (11, 4), (11, 2)),
    12288: ((24, 2), (24, 1), (16, 1), (12, 2)),
    16896: ((22, 1), (11, 2), (11, 1)),
    33792: ((32, 1), (24, 1), (16, 1), (12, 1)),
}
#: M up to which direct kernels are tried. At 16 rings are faster by a tenth and more at
#: K = 7168: each CTA reads all tokens for 16 rows at most. Up to `SMALL_K` that is
#: little.
DIRECT_ROWS = 16
SMALL_K = 128
#: M up to which their tokens may be staged in shared memory: one tile.
STAGED_ROWS = TOKEN_TILE
#: M from which wide kernels are tried: below, tensor cores are idle in any design.
WIDE_ROWS = 8
#: Loads in flight of the threads that copy X.
TOKEN_LOADS = (8, 16)
#: Rows of W a cluster, beside an equal share of the device: where weights are small,
#: fewer CTAs with more rows read X less often.
WIDE_RUNS = (GROUP_ROWS, 3 * GROUP_ROWS // 2, 2 * GROUP_ROWS)
#: K up to which they are tried.
WIDE_RUNS_K = 2112
#: (warpgroups along the rows, warpgroups that share K) of a wide kernel; another one
#: copies X, and with five in all too few registers are left for weights in flight.
WIDE_GROUPS = ((1, 1), (1, 2), (2, 1), (3, 1))
#: Parts of X in shared memory where not all of it fits, and their bytes at most.
STAGES, PART_BYTES = 4, 16 * 1024
#: Rows a direct CTA that are tried beside equal shares, and the N up to which.
MORE_RUNS, MORE_RUNS_N = (11, 14), 7168
#: Direct CTAs one after the other on a slot; each has a launch and an end of its own.
MAX_WAVES = 12


def _token_tiles(rows: int) -> int:
    """Tiles of 8 tokens, a power of two."""
    return 1 << max(-(-rows // TOKEN_TILE) - 1, 0).bit_length()


def _small_ring(n: int, k: int, cluster: int, clusters: int) -> Iterator[Choice]:
    """Rings for one token tile whose stages hold all rows of a cluster, so that
    everything is requested at once, with as many CTAs an SM as fit: the next kernel of
    a chain of launches asks for its weights while this one runs."""
    run = -(-n // clusters)
    tiles = -(-run // ROW_TILE)
    local = SUM_ORDER[k][0] // cluster
    if local < 1:
        return
    for span in (s for s in (1, 2, 4) if local % s == 0):
        for resident in (3, 2, 1):
            try:
                cut = Tiling(
                    k,
                    cluster=cluster,
                    stage_rows=-(-run // tiles),
                    span=span,
                    stages=tiles * local // span,
                    partial_buffers=min(2, tiles),
                    exchange_buffers=min(2, tiles),
                    ctas_per_sm=resident,
                )
            except ValueError:
                continue
            yield Choice(cut, run)
            break


def _ring(n: int, k: int, rows: int, held: Held) -> Iterator[Choice]:
    """The rings for so many token tiles, and small ones for few rows of W."""
    enough = [t for most, t in RING[k].items() if most >= rows]
    for tiling in enough:
        if tiling.tokens > enough[0].tokens:
            break
        yield Choice(tiling)
    if rows <= TOKEN_TILE:
        for fields in RING_OF_ONE_TILE.get(k, ()):
            yield Choice(Tiling(k, **fields))
        for cluster, times in itertools.product((2, 4, 8), (1, 2, 3)):
            if n <= SMALL_RUN * times * held[cluster]:
                yield from _small_ring(n, k, cluster, times * held[cluster])


def _runs(n: int, slots: int, rows: int) -> list[int]:
    """Rows a CTA so that all CTAs end at once: as many waves of resident CTAs as are
    needed, and if that is one also two; and `MORE_RUNS`."""
    fewest = -(-n // (slots * rows))
    waves = (1, 2) if fewest == 1 else (fewest,)
    even = [-(-n // (slots * w)) for w in waves if w <= MAX_WAVES]
    more = MORE_RUNS if n <= MORE_RUNS_N else ()
    return even + [r for r in more if r <= rows < 2 * r and r not in even]


def _first_valid(cut: Any, field: str, values: Iterable[int]) -> Any:
    """``cut`` with the first of the values that the field can have, or None."""
    for value in values:
        try:
            return dataclasses.replace(cut, **{field: value})
        except ValueError:
            continue
    return None


def _direct_cuts(k: int, rows: int) -> Iterator[DirectTiling]:
    """8 or 16 rows, 1, 2 or 4 CTAs an SM, tokens as far ahead as registers allow."""
    for warps, depth in DIRECT[k]:
        for halves, resident in ((1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (2, 4)):
            try:
                cut = DirectTiling(
                    k,
                    _token_tiles(rows),
                    halves,
                    warps,
                    depth,
                    token_chunks=1,
                    ctas_per_sm=resident,
                )
            except ValueError:
                continue
            yield _first_valid(cut, "token_chunks", (4, 2, 1))


def _staged(cut: DirectTiling, rows: int) -> DirectTiling | None:
    """``cut`` with its tokens in shared memory, read as far ahead as fits."""
    base = dataclasses.replace(cut, token_chunks=1)
    first = _first_valid(base, "staged", (rows,))
    return first and _first_valid(first, "token_chunks", (8, 4, 2, 1))


def _direct(n: int, k: int, rows: int, held: Held) -> Iterator[Choice]:
    """Direct kernels. Below M = 8 those that do not stage their tokens were faster at
    K = 128 alone, the smallest that was timed."""
    small = k <= SMALL_K
    if rows > DIRECT_ROWS and not small:
        return
    for cut in _direct_cuts(k, rows):
        kinds = [cut] if rows >= TOKEN_TILE or small else []
        staged = _staged(cut, rows) if rows <= STAGED_ROWS else None
        kinds += [staged] if staged else []
        for run in _runs(n, held[1] * cut.ctas_per_sm, cut.rows):
            # 8 rows are one half, and a CTA that is alone on its SM is not one of two.
            if cut.halves == 2 and run <= ROW_TILE // 2:
                continue
            if cut.ctas_per_sm > 1 and -(-n // run) <= held[1]:
                continue
            for kind in kinds:
                yield Choice(kind, run)


def _wide_depths(cut: WideTiling) -> Iterator[WideTiling]:
    """``cut`` with its weights as many steps ahead as registers allow, then fewer."""
    for depth in range(cut.slice_chunks, cut.chunks - 1, -1):
        found = _first_valid(cut, "depth", (depth,))
        if found is not None:
            yield found


def _wide(n: int, k: int, rows: int, held: Held) -> Iterator[Choice]:
    """Wide kernels with no warpgroup idle in a cluster's share. Above `DIRECT_ROWS`
    those with fewer loads of X at two depths each."""
    if rows < WIDE_ROWS:
        return
    shortest = k // SUM_ORDER[k][0] // SUM_ORDER[k][1] // CHUNK
    for cluster, resident, (groups, k_groups) in itertools.product(
        CLUSTER_SIZES, (1, 2), WIDE_GROUPS
    ):
        share = -(-n // (held[cluster] * resident))
        # Of two CTAs that fit one may be the next kernel's, which then has its weights
        # under way when its turn comes.
        alone = {-(-n // held[cluster])} - {share}
        more = sorted({*alone, *(WIDE_RUNS if k <= WIDE_RUNS_K else ())})
        loads = TOKEN_LOADS if rows > DIRECT_ROWS else TOKEN_LOADS[1:]
        for token_loads, run in itertools.product(
            loads, (share, *(r for r in more if r > share))
        ):
            if groups > 1 and run <= GROUP_ROWS * (groups - 1):
                continue
            try:
                cut = WideTiling(
                    k,
                    _token_tiles(rows),
                    cluster,
                    groups,
                    k_groups,
                    depth=shortest,
                    token_loads=token_loads,
                    ctas_per_sm=resident,
                )
            except ValueError:
                continue
            tried = 1 if rows <= DIRECT_ROWS or token_loads == 16 else 2
            for found in itertools.islice(_wide_depths(cut), tried):
                yield Choice(found, run)


def _staged_depths(cut: WideTiling) -> Iterator[WideTiling]:
    """``cut`` with as many weights under way as fit, and half as many."""
    deepest = range(min(cut.slice_chunks, MOST_GROUPS), cut.piece - 1, -1)
    found = _first_valid(cut, "depth", deepest)
    yield found
    half = _first_valid(found, "depth", (found.depth // 2,))
    if half is not None and cut.ctas_per_sm == 1:
        yield half


def _part_loads(k: int, tiles: int) -> tuple[int, int]:
    """Loads of X so that a part is about a segment, and so that it divides a slice and
    has `PART_BYTES` at most; 0 if none does."""
    slices, segments = SUM_ORDER[k]
    chunks = k // slices // segments // CHUNK
    every = [n for n in range(1, WARPS * tiles * chunks) if n * WARPS % tiles == 0]
    whole = next(n for n in every if n * WARPS >= chunks * tiles)
    dividing = [
        n
        for n in every
        if chunks * segments % (n * WARPS // tiles) == 0
        and n * WARPS * CHUNK_BYTES <= PART_BYTES
    ]
    return whole, max(dividing, default=0)


def _staged_cuts(k: int, rows: int) -> Iterator[WideTiling]:
    """Staged kernels; X through stages where it fits in no other way, or so that two
    CTAs fit an SM."""
    tiles = _token_tiles(rows)
    whole, part = _part_loads(k, tiles)
    fits = set()
    for stages, cluster, resident, (groups, k_groups) in itertools.product(
        (0, STAGES), CLUSTER_SIZES, (1, 2), WIDE_GROUPS
    ):
        if stages and (
            not part or resident in fits or (resident == 2 and k > WIDE_RUNS_K)
        ):
            continue
        for depth in range(1, MOST_TOGETHER + 1):
            try:
                cut = WideTiling(
                    k,
                    tiles,
                    cluster,
                    groups,
                    k_groups,
                    depth,
                    part if stages else whole,
                    resident,
                    staged=1,
                    stages=stages,
                )
            except ValueError:
                continue
            found = list(_staged_depths(cut))
            if not stages and found[0].depth > MOST_TOGETHER:
                fits.add(resident)
            yield from found
            break


def _staged_choices(n: int, k: int, rows: int, held: Held) -> Iterator[Choice]:
    """Staged wide kernels with no warpgroup idle in a cluster's share."""
    if rows <= TOKEN_TILE:
        return
    for cut in _staged_cuts(k, rows):
        share = -(-n // (held[cut.cluster] * cut.ctas_per_sm))
        alone = {-(-n // held[cut.cluster])} - {share}
        more = {*alone, *(WIDE_RUNS if k <= WIDE_RUNS_K else ())}
        for run in (share, *sorted(r for r in more if r > share)):
            if cut.warpgroups == 1 or run > GROUP_ROWS * (cut.warpgroups - 1):
                yield Choice(cut, run)


def _all_wide(n: int, k: int, rows: int, held: Held) -> Iterator[Choice]:
    yield from _wide(n, k, rows, held)
    yield from _staged_choices(n, k, rows, held)


_MAKERS: dict[str, Callable[[int, int, int, Held], Iterator[Choice]]] = {
    "ring": _ring,
    "direct": _direct,
    "wide": _all_wide,
}


def candidates(
    n: int, k: int, rows: int, held: Held = H200, designs: Sequence[str] = ()
) -> list[Choice]:
    """What is worth trying for ``n`` rows of W, all matrices together, at M = rows.

    Args:
        n, k: rows and columns.
        rows: M.
        held: of the device.
        designs: keys of `choice.DESIGNS`; all if empty.

    Raises:
        ValueError: for a K without a fixed order of sums, M outside 1..64, no rows of
            W, or a design that is not there.
    """
    check_k(k)
    if not 1 <= rows <= MAX_ROWS:
        raise ValueError(f"rows={rows}: a step has 1 to {MAX_ROWS} rows")
    if n < 1:
        raise ValueError(f"n={n}: a weight has at least 1 row")
    for design in designs:
        if design not in DESIGNS:
            raise ValueError(f"design={design!r}: use one of {', '.join(DESIGNS)}")
    found = (
        choice
        for design in designs or DESIGNS
        for choice in _MAKERS[design](n, k, rows, held)
    )
    return list(dict.fromkeys(found))
