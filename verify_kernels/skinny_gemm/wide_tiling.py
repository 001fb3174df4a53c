# SPDX-License-Identifier: Apache-2.0
"""How a wide skinny GEMM (`wide`) is cut: warpgroups own rows, X stays in the SM.

The sums keep the order of `tiling.SUM_ORDER`. Warpgroups share K by whole slices, a
power of two of consecutive ones each, so what one has in the end is a subtree of the
sum.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from verify_kernels.skinny_gemm.tiling import (
    CHUNK,
    GemmTiling,
    register_limit,
)

#: Warps of a warpgroup, and the rows that it multiplies at a time.
WARPS, GROUP_ROWS = 4, 64
#: Bytes of a 16 x 8 tile of fp32 sums, 16 a lane.
TILE_BYTES = 512
#: Bytes of 8 tokens' 32 columns of X.
CHUNK_BYTES = 512
#: Registers of the warps that copy X, beside 4 for each load under way.
_COPY_REGISTERS = 36
#: Registers beside weights and sums that ptxas takes without spilling (found by
#: compiling for the three architectures): by token tiles where the warps that copy X
#: leave registers to the others, and where they do not.
_OTHER_REGISTERS = {1: 28, 2: 36, 4: 40, 8: 44}
_OTHER_REGISTERS_ALONE = 28


#: Of a staged tiling: steps of 32 columns that are multiplied at a time, at most, and
#: groups of copies under way that a thread counts, at most.
MOST_TOGETHER = 4
MOST_GROUPS = 48
#: Parts of X that are waited for or multiplied while others come.
LAG = 2


@dataclass(frozen=True)
class WideTiling(GemmTiling):
    """One way to cut Y[M, N] = X[M, K] W[N, K]^T with warpgroups that own rows.

    Attributes:
        cluster: CTAs that share K, each with slices / cluster consecutive slices; they
            share the tiles that are to be finished too.
        warpgroups: along the rows, each with up to 64 rows at a time.
        k_groups: warpgroups that share the CTA's slices of the same rows.
        depth: steps of 32 columns whose weights a warp has in flight, 8 registers each.
        token_loads: 16-byte loads of X that a thread of the warps that copy it has in
            flight; what they bring together can be multiplied while more comes.
        ctas_per_sm: CTAs meant to be resident on one SM; bounds the registers.
        staged: 1: weights and X come by asynchronous copies (`wide_staged`). The
            ``depth`` steps of a warp's weights are under way to shared memory and take
            no registers; of X everything is, and ``token_loads`` only says what can be
            multiplied while more comes.
        stages: of a staged tiling, parts of X that are in shared memory at a time: each
            turn copies X anew. 0: all of X is, once.
    """

    token_tiles: int = 2
    cluster: int = 1
    warpgroups: int = 1
    k_groups: int = 1
    depth: int = 4
    token_loads: int = 8
    ctas_per_sm: int = 1
    staged: int = 0
    stages: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.token_tiles not in (1, 2, 4, 8):
            raise ValueError(f"token_tiles={self.token_tiles} must be 1, 2, 4 or 8")
        if self.cluster < 1 or self.k_groups < 1:
            raise ValueError(
                f"cluster={self.cluster}, k_groups={self.k_groups}: both must be at "
                "least 1"
            )
        if self.slices % (self.cluster * self.k_groups):
            raise ValueError(
                f"cluster={self.cluster}, k_groups={self.k_groups}: their product must "
                f"divide the {self.slices} slices of K {self.k}"
            )
        if not 256 <= self.threads <= 1024:
            raise ValueError(
                f"warpgroups={self.warpgroups}, k_groups={self.k_groups}: with the "
                f"warps that copy X {self.threads} threads; a CTA has 256 to 1024"
            )
        if not 0 < self.ctas_per_sm <= 2048 // self.threads:
            raise ValueError(
                f"ctas_per_sm={self.ctas_per_sm} must lie in 1..{2048 // self.threads}:"
                f" an SM holds 2048 threads, a CTA has {self.threads}"
            )
        if self.staged not in (0, 1) or (self.stages and not self.staged):
            raise ValueError(
                f"staged={self.staged} must be 0 or 1, and 1 for stages={self.stages}"
            )
        if not self.staged and (
            self.depth < self.chunks or self.slice_chunks % self.depth
        ):
            raise ValueError(
                f"depth={self.depth} must divide {self.slice_chunks}, the steps of 32 "
                f"columns in a slice of K {self.k}, and be at least {self.chunks}, "
                "those in a segment"
            )
        if self.token_loads < 1 or self.token_loads * WARPS % self.token_tiles:
            raise ValueError(
                f"token_loads={self.token_loads} must be positive, with 8 token tiles "
                "also even"
            )
        if self.staged:
            self._check_staged()
        if self.needed_registers > self.registers:
            raise ValueError(
                f"{self}: a thread would need {self.needed_registers} registers and "
                f"has {self.registers}; lower depth, warpgroups, k_groups or "
                "ctas_per_sm"
            )
        self._check_shared(
            self.shared_bytes, self.ctas_per_sm, "raise cluster or lower token_tiles"
        )

    def _check_staged(self) -> None:
        most = min(self.slice_chunks, MOST_GROUPS)
        if not self.piece <= self.depth <= most:
            raise ValueError(
                f"depth={self.depth}: a staged tiling of K {self.k} has {self.piece} "
                f"to {most} steps of 32 columns under way"
            )
        if not self.stages:
            if self.parts > MOST_GROUPS:
                raise ValueError(
                    f"token_loads={self.token_loads}: X comes in {self.parts} parts, "
                    f"at most {MOST_GROUPS}; raise it"
                )
            return
        if self.stages <= LAG or self.k_groups > 1:
            raise ValueError(
                f"stages={self.stages}, k_groups={self.k_groups}: X goes through at "
                f"least {LAG + 1} stages, to warpgroups that all have the same of it"
            )
        if self.slice_chunks % self.part_chunks:
            raise ValueError(
                f"token_loads={self.token_loads}: {self.part_chunks} steps of 32 "
                f"columns are a part, which must divide the {self.slice_chunks} of a "
                "slice where X goes through stages"
            )

    @property
    def piece(self) -> int:
        """Steps of 32 columns that are multiplied at a time, at most."""
        if not self.staged:
            return self.chunks
        free = self.registers - self._other_registers - self._sum_registers
        most = min(MOST_TOGETHER, max(free // 16, 1))
        return -(-self.chunks // -(-self.chunks // most))

    def pieces(self) -> Iterator[tuple[int, int]]:
        """Of a slice: first step and the one after the last. None goes on into another
        segment, nor into another part of X where parts leave."""
        part = self.part_chunks if self.stages else self.slice_chunks
        first = 0
        while first < self.slice_chunks:
            ends = [(first // n + 1) * n for n in (self.chunks, part)]
            end = min(first + self.piece, *ends)
            yield first, end
            first = end

    @property
    def slice_chunks(self) -> int:
        """Steps of 32 columns in a slice."""
        return self.slice_width // CHUNK

    @property
    def local_k(self) -> int:
        """Columns of a CTA."""
        return self.k // self.cluster

    @property
    def local_chunks(self) -> int:
        return self.local_k // CHUNK

    @property
    def unit_slices(self) -> int:
        """Slices of a warpgroup."""
        return self.slices // self.cluster // self.k_groups

    @property
    def unit_k(self) -> int:
        """Columns of a warpgroup."""
        return self.local_k // self.k_groups

    @property
    def levels(self) -> int:
        """Of the tree over a warpgroup's slices."""
        return self.unit_slices.bit_length() - 1

    @property
    def part_chunks(self) -> int:
        """Steps of 32 columns of a part of X: what is copied between two signals."""
        return self.token_loads * WARPS // self.token_tiles

    @property
    def parts(self) -> int:
        return -(-self.local_chunks // self.part_chunks)

    @property
    def contributors(self) -> int:
        """Warpgroups whose sums make up one output."""
        return self.cluster * self.k_groups

    @property
    def own_tiles(self) -> int:
        """Token tiles that a CTA finishes; with fewer tiles than CTAs one or none."""
        return max(1, self.token_tiles // self.cluster)

    @property
    def row_blocks(self) -> int:
        """Blocks of up to 16 rows that a CTA has at a time, one a warp."""
        return WARPS * self.warpgroups

    @property
    def turn_rows(self) -> int:
        """Rows that a CTA has at a time, at most."""
        return GROUP_ROWS * self.warpgroups

    @property
    def multipliers(self) -> int:
        """Warpgroups that multiply."""
        return self.warpgroups * self.k_groups

    @property
    def threads(self) -> int:
        return 32 * WARPS * (self.multipliers + 1)

    @property
    def register_limit(self) -> int:
        """Registers of a thread at launch."""
        return register_limit(self.threads, self.ctas_per_sm)

    @property
    def copy_registers(self) -> int:
        """Left to the warps that copy X."""
        return -(-(_COPY_REGISTERS + 4 * self.token_loads) // 8) * 8

    @property
    def moves_registers(self) -> bool:
        """Whether the warps that copy leave registers to those that multiply."""
        if self.staged:
            return False
        return 24 <= self.copy_registers < self.register_limit < 248

    @property
    def registers(self) -> int:
        """A multiplying thread's."""
        if not self.moves_registers:
            return self.register_limit
        spare = self.register_limit - self.copy_registers
        return min(240, self.register_limit + spare // self.multipliers // 8 * 8)

    @property
    def held_registers(self) -> int:
        """Registers of weights in flight, of a segment's weights and sums, of the
        slice's sums and of slices that wait for others. Staged: of a piece's weights,
        as they are loaded and as they are multiplied."""
        if self.staged:
            return 16 * self.piece + self._sum_registers
        return 8 * (self.depth + self.chunks) + self._sum_registers

    @property
    def _sum_registers(self) -> int:
        return 4 * self.token_tiles * (2 + self.levels)

    @property
    def _other_registers(self) -> int:
        if self.moves_registers:
            return _OTHER_REGISTERS[self.token_tiles]
        return _OTHER_REGISTERS_ALONE + (8 if self.stages else 0)

    @property
    def needed_registers(self) -> int:
        return self.held_registers + self._other_registers

    @property
    def tile_pitch(self) -> int:
        """Bytes from one tile of tokens to the next."""
        held = self.local_chunks
        if self.stages:
            held = self.part_chunks
        elif self.staged:
            # Whole parts, so that a part is loaded without asking how much there is.
            held = self.parts * self.part_chunks
        return held * CHUNK_BYTES

    @property
    def barrier_bytes(self) -> int:
        count = 2 * self.stages or self.parts
        if self.contributors > 1:
            count += 2 * self.row_blocks
        return -(-8 * count // 128) * 128

    @property
    def token_bytes(self) -> int:
        return (self.stages or 1) * self.token_tiles * self.tile_pitch

    @property
    def queue_bytes(self) -> int:
        """Weights under way."""
        warps = WARPS * self.multipliers
        return self.staged * warps * self.depth * 2 * CHUNK_BYTES

    @property
    def sum_bytes(self) -> int:
        """Every contributor's sums of the tiles that this CTA finishes."""
        if self.contributors == 1:
            return 0
        return self.row_blocks * self.own_tiles * self.contributors * TILE_BYTES

    @property
    def shared_bytes(self) -> int:
        held = self.barrier_bytes + self.token_bytes + self.sum_bytes
        return held + self.queue_bytes

    @property
    def name(self) -> str:
        return (
            f"wide_k{self.k}_m{self.tokens}_c{self.cluster}_w{self.warpgroups}"
            f"_g{self.k_groups}_d{self.depth}_l{self.token_loads}_o{self.ctas_per_sm}"
            + (f"_q{self.stages}" if self.staged else "")
        )
