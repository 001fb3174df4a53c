# SPDX-License-Identifier: Apache-2.0
"""How a direct skinny GEMM (`direct`) is cut: what a warp holds in registers.

The sums keep the order of `tiling.SUM_ORDER`: K is a list of segments, slice after
slice, and a warp takes equally many consecutive ones. A tiling that is surely too large
for the registers is refused; one near the limit may still spill, which the audit finds.
"""

from __future__ import annotations

from dataclasses import dataclass

from verify_kernels.skinny_gemm.tiling import (
    TOKEN_TILE,
    GemmTiling,
    register_limit,
)

BANKS = 32
#: Fewest registers beside weights, tokens and sums that ptxas was seen to manage with
#: at a limit: addresses, and copies that put words in the order of the tensor cores.
_OTHER_REGISTERS = 8


@dataclass(frozen=True)
class DirectTiling(GemmTiling):
    """One way to cut Y[M, N] = X[M, K] W[N, K]^T without a ring.

    Attributes:
        halves: 8-row halves of the tensor cores' 16 rows that are used; a CTA has at
            most 8 * halves rows. Of one half the other is zero.
        warps: warps of a CTA; they share the segments of K equally.
        depth: segments whose weights a warp has in flight; all of its own, and every
            weight is requested at once.
        token_chunks: steps of 32 columns whose tokens a warp has in flight; staged,
            16-byte loads of tokens that a lane has in flight.
        staged: 0: tokens go from global memory to registers as they are needed. Else M
            is at most so many, and a warp first copies all its columns of them to
            shared memory: no register waits for them, and none is asked for late.
        ctas_per_sm: CTAs meant to be resident on one SM; bounds the registers.
    """

    halves: int = 2
    warps: int = 4
    depth: int = 1
    token_chunks: int = 4
    staged: int = 0
    ctas_per_sm: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.token_tiles not in (1, 2, 4, 8):
            raise ValueError(f"token_tiles={self.token_tiles} must be 1, 2, 4 or 8")
        if self.halves not in (1, 2):
            raise ValueError(f"halves={self.halves} must be 1 or 2: 8 or 16 rows a CTA")
        if not 0 < self.warps <= 32 or self.segments % self.warps:
            raise ValueError(
                f"warps={self.warps} must divide the {self.segments} segments of K "
                f"{self.k} and be at most 32"
            )
        if not 0 < self.depth <= self.warp_segments:
            raise ValueError(
                f"depth={self.depth} must lie in 1..{self.warp_segments}, the segments "
                f"of one of {self.warps} warps"
            )
        if self.staged and -(-self.staged // TOKEN_TILE) != self.token_tiles:
            raise ValueError(
                f"staged={self.staged} tokens are not {self.token_tiles} token_tiles "
                f"of {TOKEN_TILE}; give {-(-self.staged // TOKEN_TILE)} token_tiles"
            )
        most = self.staged * -(-self.steps // 8) if self.staged else self.steps
        if not 0 < self.token_chunks <= most:
            raise ValueError(
                f"token_chunks={self.token_chunks} must lie in 1..{most}, all that a "
                "warp reads of the tokens"
            )
        if not 0 < self.ctas_per_sm <= 2048 // self.threads:
            raise ValueError(
                f"ctas_per_sm={self.ctas_per_sm} must lie in 1..{2048 // self.threads}:"
                f" an SM holds 2048 threads, a CTA has {self.threads}"
            )
        if self.held_registers + _OTHER_REGISTERS > self.register_limit:
            raise ValueError(
                f"{self}: a thread would hold {self.held_registers} registers of "
                f"weights, tokens and sums and has {self.register_limit} in all; lower "
                "depth, token_chunks, warps or ctas_per_sm"
            )
        self._check_shared(
            self.shared_bytes,
            self.ctas_per_sm,
            "lower staged, token_tiles or ctas_per_sm, or let each "
            "warp have whole slices",
        )

    @property
    def segments(self) -> int:
        return self.slices * self.slice_segments

    @property
    def warp_segments(self) -> int:
        return self.segments // self.warps

    @property
    def steps(self) -> int:
        """Steps of 32 columns of a warp."""
        return self.warp_segments * self.chunks

    @property
    def cluster(self) -> int:
        """CTAs that share K: one has all of it."""
        return 1

    @property
    def max_tokens(self) -> int:
        """M at most."""
        return self.staged or self.tokens

    @property
    def rows(self) -> int:
        """Rows of a CTA at most."""
        return 8 * self.halves

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def whole(self) -> bool:
        """A warp has whole slices: it adds their segments, and then them, itself."""
        return self.warp_segments % self.slice_segments == 0

    @property
    def warp_parts(self) -> int:
        """Partial sums that a warp leaves."""
        return 1 if self.whole else self.warp_segments

    @property
    def leaves(self) -> int:
        """Sums that meet in the balanced tree after the warps' own."""
        return self.warps if self.whole else self.slices

    @property
    def leaf_parts(self) -> int:
        """Partial sums that are added in order to one leaf."""
        return self.warps * self.warp_parts // self.leaves

    @property
    def in_registers(self) -> bool:
        """One warp has all of K, so its sums are finished where they are."""
        return self.warps == 1

    @property
    def token_pitch(self) -> int:
        """Floats from token to token of a partial sum: 4 more than its rows, so that
        the stores of a warp's accumulators meet every bank once."""
        return self.rows + 4

    @property
    def part_pitch(self) -> int:
        """Floats from partial sum to partial sum. The lanes that read leaves of 32 /
        leaves rows at a time meet every bank once: leaves are that many banks apart.
        Two leaves of 8 rows are of two tokens, and meet some banks twice."""
        size = self.tokens * self.token_pitch
        apart = BANKS // self.leaves
        while self.leaves > 1 and size * self.leaf_parts % (2 * apart) != apart:
            size += 1
        return size

    @property
    def token_ahead(self) -> int:
        """Steps between the read of a token into registers and its use."""
        return min(2, self.steps) if self.staged else self.token_chunks

    @property
    def staged_pitch(self) -> int:
        """Bytes from token to token of a warp's columns: an odd multiple of 64, so that
        the eight 16-byte reads of a quarter warp meet all 32 banks once."""
        size = 64 * self.steps
        return size + 64 if size % 128 == 0 else size

    @property
    def staged_bytes(self) -> int:
        return self.warps * self.staged * self.staged_pitch

    @property
    def part_bytes(self) -> int:
        if self.in_registers:
            return 0
        return 4 * self.warps * self.warp_parts * self.part_pitch

    @property
    def shared_bytes(self) -> int:
        return self.staged_bytes + self.part_bytes

    @property
    def register_limit(self) -> int:
        """Registers of a thread at most."""
        return register_limit(self.threads, self.ctas_per_sm)

    @property
    def held_registers(self) -> int:
        """Registers of weights and tokens in flight and of sums."""
        weights = self.depth * self.chunks * 4 * self.halves
        tokens = 4 * self.token_ahead * self.token_tiles
        if self.staged:
            tokens = max(tokens, 4 * self.token_chunks)
        return weights + tokens + 4 * self.token_tiles

    @property
    def name(self) -> str:
        return (
            f"direct_k{self.k}_m{self.tokens}_r{self.rows}_w{self.warps}_d{self.depth}"
            f"_t{self.token_chunks}_g{self.staged}_o{self.ctas_per_sm}"
        )
