# SPDX-License-Identifier: Apache-2.0
"""What the figures have to reach, and the table a person reads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from experiments.bench import (
    attention_residual,
    experts,
    experts_targets,
    kda,
    kda_targets,
    markov,
    mla,
    weight_prefetch,
)
from experiments.bench.candidate import CUBLAS, OURS, Key, Mode, Point, spell
from experiments.bench.timing import floor_us

#: (weight bytes from, share of 4.31 TB/s) that skinny_gemm has to read in a PDL chain.
REQUIRED_SHARE = ((150e6, 0.95), (80e6, 0.92), (40e6, 0.85), (10e6, 0.75))
#: Rows of one request at most: up to here bandwidth decides.
DECODE_ROWS = 8
#: From here on the tensor cores' library is the one to beat.
CUBLAS_ROWS = 16
PEER_TOLERANCE = 1.03
ATTN_RES_SPEEDUP = 2.0
#: Of the sequential head over vLLM's loop: for one request, and for more.
MARKOV_SPEEDUP = (3.0, 2.0)

#: True, False, or None where the requirement does not apply or cannot be judged.
Verdicts = dict[str, bool | None]


def required_share(weight_bytes: int) -> float | None:
    """Share of 4.31 TB/s for weights of this size; None below 10 MB."""
    for size, share in REQUIRED_SHARE:
        if weight_bytes >= size:
            return share
    return None


def best_peer(point: Point, mode: Mode) -> tuple[Key, float] | None:
    """The fastest peer against ``mode``, with its microseconds.

    Plain launches meet plain launches. A chain of programmatic launches meets those,
    and peers that have no programmatic form as they are: it is what a chain of them
    costs.
    """
    peers = point.peers()
    with_pdl = {name for name, kind in peers if kind == "pdl"}
    pool = {
        key: timing.us
        for key, timing in peers.items()
        if key[1] == mode or (mode == "pdl" and key[0] not in with_pdl)
    }
    return min(pool.items(), key=lambda item: item[1]) if pool else None


def share(point: Point, mode: Mode) -> float | None:
    """The floor over our time."""
    timing = point.timings.get((OURS, mode))
    return None if timing is None else floor_us(point.bytes) / timing.us


def _against_peers(point: Point, allowed: float) -> Verdicts:
    found: Verdicts = {}
    for mode in ("plain", "pdl"):
        own, best = point.timings.get((OURS, mode)), best_peer(point, mode)
        found[f"peer_{mode}"] = (
            None if own is None or best is None else own.us <= allowed * best[1]
        )
    return found


def verdicts(point: Point) -> Verdicts:
    """Each requirement on this point.

    skinny_gemm: ``bandwidth`` (programmatic, M <= 8, by size of the weight);
    ``peer_plain`` and ``peer_pdl``, not slower than the best peer by more than 3 %;
    ``cublas``, M >= 16, each launch mode at least as fast as cuBLAS. attn_res: at least
    twice as fast as the best peer in the same mode, M <= 8. moe_front: as skinny_gemm,
    our separate launches being one of the peers. kda: as `kda_targets.TARGETS`;
    experts: as `experts_targets.TARGETS`; mla: ``peer_plain`` and ``peer_pdl``;
    markov: three times as fast as vLLM's loop for one request, twice for more.
    prefetch: none.
    """
    if point.op == weight_prefetch.OP:
        return {}
    if point.op == kda.OP:
        return kda_targets.verdicts(point)
    if point.op == experts.OP:
        return experts_targets.verdicts(point)
    if point.op == attention_residual.OP:
        if point.rows > DECODE_ROWS:
            return {"peer_plain": None, "peer_pdl": None}
        return _against_peers(point, 1 / ATTN_RES_SPEEDUP)
    found = _against_peers(point, PEER_TOLERANCE)
    if point.op == mla.OP:
        return found
    if point.op == markov.OP:
        return _against_peers(point, 1 / MARKOV_SPEEDUP[point.rows > 1])
    needed, reached = required_share(point.bytes), share(point, "pdl")
    judged = point.rows <= DECODE_ROWS and needed is not None and reached is not None
    found["bandwidth"] = reached >= needed if judged else None  # type: ignore[operator]
    cublas = point.timings.get((CUBLAS, "plain"))
    own = [t.us for key, t in point.timings.items() if key[0] == OURS]
    if point.rows >= CUBLAS_ROWS and cublas is not None and own:
        found["cublas"] = max(own) <= cublas.us
    else:
        found["cublas"] = None
    return found


_COLUMNS = (
    "shape", "N x K", "MB", "M", "plain", "PDL", "cuBLAS", "peer plain", "peer PDL",
    "floor", "share", "bw", "plain", "PDL", "cuBLAS",
)  # fmt: skip
_MARK: Mapping[bool | None, str] = {True: "ok", False: "MISS", None: "-"}


def _us(point: Point, key: Key) -> str:
    timing = point.timings.get(key)
    if timing is not None:
        return f"{timing.us:.2f}"
    return "RED" if key in point.red() else "-"


def _peer(point: Point, mode: Mode) -> str:
    best = best_peer(point, mode)
    return "-" if best is None else f"{best[1]:.2f} {best[0][0]}"


def _row(point: Point) -> list[str]:
    judged = verdicts(point)
    reached = share(point, "pdl") or share(point, "plain")
    size = {
        attention_residual.OP: "{width}",
        kda.OP: "{requests}x{width}",
        experts.OP: "{inner}x{latent}",
        mla.OP: "{heads}x{context}",
        markov.OP: "{drafts}x{vocab}",
    }.get(point.op, "{n}x{k}")
    return [
        point.label,
        size.format(**point.shape),
        f"{point.bytes / 1e6:.1f}",
        str(point.rows),
        _us(point, (OURS, "plain")),
        _us(point, (OURS, "pdl")),
        _us(point, (CUBLAS, "plain")),
        _peer(point, "plain"),
        _peer(point, "pdl"),
        f"{floor_us(point.bytes):.2f}",
        "-" if reached is None else f"{reached:.1%}",
        *(
            _MARK[judged.get(name)]
            for name in ("bandwidth", "peer_plain", "peer_pdl", "cublas")
        ),
    ]


def table(points: Iterable[Point]) -> str:
    """One line a point: microseconds, share of 4.31 TB/s, and the verdicts."""
    rows = [list(_COLUMNS), *map(_row, points)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(_COLUMNS))]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    )


def remarks(points: Sequence[Point]) -> str:
    """Red gates, peers that are missing or move bits, and what was not reached.

    A reason that holds for several points is said once, with the points it holds for.
    """
    said: dict[str, list[str]] = {}

    def say(text: str, point: Point) -> None:
        said.setdefault(text, []).append(f"{point.label}/{point.rows}")

    counts: dict[str, list[int]] = {}
    for point in points:
        for key, names in point.red().items():
            say(f"RED {spell(key)}: {', '.join(names)}; not timed", point)
        for name, why in point.missing.items():
            say(f"{name} not available: {why}", point)
        for name in point.moved:
            say(f"{name}: rows differ in bits from the same rows at M=1", point)
        for name, verdict in verdicts(point).items():
            if verdict is not None:
                counts.setdefault(name, [0, 0])[not verdict] += 1
            if verdict is False:
                say(f"MISS {name}", point)
    lines = [f"{text} [{', '.join(where)}]" for text, where in sorted(said.items())]
    lines += [
        f"{name}: {reached} of {reached + missed} points reach it"
        for name, (reached, missed) in counts.items()
    ]
    ours = [point for point in points if point.op == kda.OP]
    lines += [*kda_targets.summaries(ours), *kda_targets.lines(ours)]
    routed = [point for point in points if point.op == experts.OP]
    lines += [*experts_targets.summaries(routed), *experts_targets.lines(routed)]
    lines += mla.summaries(point for point in points if point.op == mla.OP)
    return "\n".join(lines)
