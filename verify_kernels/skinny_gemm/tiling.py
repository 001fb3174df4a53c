# SPDX-License-Identifier: Apache-2.0
"""How a skinny GEMM is cut: the order of its sums, and what a CTA holds.

The order of the sums depends on K alone. K is cut into slices, a slice into segments;
a segment is summed by the tensor cores in ascending k, the segments of a slice one
after the other in ascending k, the slices in a balanced tree. Everything else (design,
cluster size, row tile, stages) may differ by M or by architecture without changing a
bit. `Tiling` is the ring's; `direct_tiling` and `wide_tiling` are the other designs'.
"""

from __future__ import annotations

from dataclasses import dataclass

#: K -> (slices, segments of a slice); a segment is a multiple of 32 columns. The ring
#: multiplies with a warp a segment.
SUM_ORDER: dict[int, tuple[int, int]] = {
    64: (1, 2),
    128: (1, 4),
    192: (1, 6),
    256: (1, 4),
    384: (1, 6),
    512: (1, 4),
    768: (1, 6),
    1056: (1, 11),
    1536: (2, 6),
    2112: (2, 11),
    3072: (4, 6),
    3584: (4, 7),
    4224: (4, 11),
    6144: (8, 6),
    7168: (8, 7),
    8448: (8, 11),
    12288: (8, 6),
    16896: (8, 11),
    33792: (8, 12),
}
TOKEN_TILE = 8
ROW_TILE = 16
CHUNK = 32


def _pitch(elements: int) -> int:
    """Bytes from row to row of a bf16 tile: an odd multiple of 64, so that the eight
    16-byte reads of a quarter warp (two rows of 64 bytes) meet all 32 banks once."""
    size = 2 * elements
    return size + 64 if size % 128 == 0 else size


def register_limit(threads: int, ctas_per_sm: int) -> int:
    """Registers of a thread at most, which is ptxas's own limit: a quarter of an SM has
    16,384 and a fourth of its warps; a warp's are counted in eights a thread."""
    warps = -(-ctas_per_sm * threads // 128)
    return min(255, 16384 // (32 * warps) // 8 * 8)


def check_k(k: int) -> None:
    """Raise ValueError unless an order of sums is fixed for ``k``."""
    if k not in SUM_ORDER:
        raise ValueError(
            f"k={k}: no order of sums is fixed for it; K is one of "
            f"{', '.join(map(str, SUM_ORDER))}"
        )


@dataclass(frozen=True)
class GemmTiling:
    """What the tilings of all designs share.

    Attributes:
        k: columns of X and W.
        token_tiles: tiles of 8 tokens; M <= 8 * token_tiles.
    """

    k: int
    token_tiles: int = 1

    def __post_init__(self) -> None:
        check_k(self.k)

    def _check_shared(self, size: int, ctas_per_sm: int, advice: str) -> None:
        # An SM has 228 KB; a resident CTA takes 1 KB more than it asks for.
        if size + 1024 > 228 * 1024 // ctas_per_sm:
            raise ValueError(f"{self}: needs {size} bytes of shared memory; {advice}")

    @property
    def slices(self) -> int:
        return SUM_ORDER[self.k][0]

    @property
    def slice_segments(self) -> int:
        """Segments of a slice."""
        return SUM_ORDER[self.k][1]

    @property
    def slice_width(self) -> int:
        """Columns of a slice."""
        return self.k // self.slices

    @property
    def chunks(self) -> int:
        """Steps of 32 columns in a segment."""
        return self.slice_width // self.slice_segments // CHUNK

    @property
    def tokens(self) -> int:
        return self.token_tiles * TOKEN_TILE


@dataclass(frozen=True)
class Tiling(GemmTiling):
    """One way to cut Y[M, N] = X[M, K] W[N, K]^T with a ring of weights (`kernel`).

    Attributes:
        cluster: CTAs that share K, each with slices / cluster consecutive slices.
        row_tiles: blocks of 16 rows of W that meet the same reads of X.
        stage_rows: rows of a tile at most; the tensor cores' rows past it are idle.
        span: slices of one stage; its copies are span * slice columns long.
        stages: depth of the weight ring.
        partial_buffers: 16-row blocks whose partial sums may wait for the reducers.
        exchange_buffers: 16-row blocks under way between the CTAs of a cluster.
        reducers: warps that add partial sums.
        held_tiles: token tiles whose X the multiplying warps hold in registers (16
            bytes a lane and chunk of 32 columns); the rest is in shared memory.
        ctas_per_sm: CTAs meant to be resident on one SM; with 2 the next kernel of a
            programmatic chain fills its ring while this one still runs.
    """

    cluster: int = 1
    row_tiles: int = 1
    stage_rows: int = 16
    span: int = 1
    stages: int = 4
    partial_buffers: int = 2
    exchange_buffers: int = 4
    reducers: int = 1
    held_tiles: int = 1
    ctas_per_sm: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.slices % self.cluster or self.local_slices % self.span:
            raise ValueError(
                f"cluster={self.cluster}, span={self.span}: their product must divide "
                f"the {self.slices} slices of K {self.k}"
            )
        if not 0 < self.stage_rows <= self.rows:
            raise ValueError(
                f"stage_rows={self.stage_rows} must lie in 1..{self.rows}, the rows "
                "that are multiplied together"
            )
        if not 0 <= self.held_tiles <= self.token_tiles:
            raise ValueError(
                f"held_tiles={self.held_tiles} must lie in 0..{self.token_tiles}"
            )
        if self.tokens % self.cluster:
            raise ValueError(
                f"cluster={self.cluster} must divide {self.tokens} tokens: each CTA "
                "finishes the same number of them"
            )
        self._check_shared(self.shared_bytes, self.ctas_per_sm, "lower stages or span")

    @property
    def warps(self) -> int:
        """Warps that multiply, one a segment of a slice."""
        return self.slice_segments

    @property
    def rows(self) -> int:
        return self.row_tiles * ROW_TILE

    @property
    def local_slices(self) -> int:
        return self.slices // self.cluster

    @property
    def local_k(self) -> int:
        return self.k // self.cluster

    @property
    def stages_per_tile(self) -> int:
        return self.local_slices // self.span

    @property
    def threads(self) -> int:
        return 32 * (self.warps + 1 + self.reducers + (self.cluster > 1))

    @property
    def weight_pitch(self) -> int:
        return _pitch(self.span * self.slice_width)

    @property
    def token_pitch(self) -> int:
        return _pitch(self.local_k)

    @property
    def partial_pitch(self) -> int:
        """Floats from token to token of a partial tile: 4 more than its rows, so that
        the stores of a warp's accumulators meet every bank once."""
        return ROW_TILE + 4

    @property
    def barrier_bytes(self) -> int:
        count = 1 + 2 * self.stages + 2 * self.partial_buffers
        return -(-8 * (count + 2 * self.exchange_buffers) // 128) * 128

    @property
    def stage_bytes(self) -> int:
        return self.stage_rows * self.weight_pitch

    @property
    def token_bytes(self) -> int:
        resident = self.token_tiles - self.held_tiles
        return resident * TOKEN_TILE * self.token_pitch

    @property
    def partial_bytes(self) -> int:
        return self.local_slices * self.warps * self.tokens * self.partial_pitch * 4

    @property
    def exchange_bytes(self) -> int:
        """One row tile's sums from every CTA, for the tokens this CTA finishes."""
        return self.tokens * ROW_TILE * 4 if self.cluster > 1 else 0

    @property
    def shared_bytes(self) -> int:
        return (
            self.barrier_bytes
            + self.stages * self.stage_bytes
            + self.token_bytes
            + self.partial_buffers * self.partial_bytes
            + self.exchange_buffers * self.exchange_bytes
        )

    @property
    def name(self) -> str:
        return (
            f"k{self.k}_m{self.tokens}_c{self.cluster}_r{self.rows}_h{self.stage_rows}_p{self.span}"
            f"_s{self.stages}_b{self.partial_buffers}_x{self.exchange_buffers}"
            f"_d{self.reducers}_t{self.held_tiles}_o{self.ctas_per_sm}"
        )
