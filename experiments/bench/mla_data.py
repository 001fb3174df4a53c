# SPDX-License-Identifier: Apache-2.0
"""Steps of MLA over a paged cache, in as many copies as a rotation needs, and what is
right for them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from experiments.byte_model import DRAFT_HEADS, HEADS, HIDDEN, Q_LORA
from verify_kernels.batch import VerifyBatch
from verify_kernels.mla.parts import LATENT, LINE, NOPE, ROPE, VALUE

#: Attention alone; that of a drafter's block, whose rows all see each other; all from
#: the packed projection's input to o_proj's output.
CORE, DRAFT, SUBLAYER = "core", "draft_block", "sublayer"
PARTS = (CORE, DRAFT, SUBLAYER)
#: Tokens of a page: the only size that FlashMLA serves.
PAGE = 64
SCALE = (NOPE + ROPE) ** -0.5
EPS = 1e-5
_BF16 = 2


@dataclass(frozen=True)
class MlaShape:
    """One rank's heads and a step of requests alike.

    Attributes:
        part: one of `PARTS`.
        tp: tensor-parallel size.
        heads: of the rank.
        requests, width: requests, and rows of each.
        context: keys of a request's last row, the step's own among them.
    """

    part: str
    tp: int
    heads: int
    requests: int
    width: int
    context: int

    @classmethod
    def of(
        cls, part: str, tp: int, requests: int, width: int, context: int
    ) -> MlaShape:
        """K3's heads over ``tp`` ranks, or its drafter's.

        Raises:
            ValueError: if they do not divide.
        """
        heads = DRAFT_HEADS if part == DRAFT else HEADS
        if heads % tp:
            raise ValueError(f"tp={tp}: it must divide the {heads} heads of {part}")
        return cls(part, tp, heads // tp, requests, width, context)

    @property
    def label(self) -> str:
        """For tables."""
        return (
            f"{self.part} H={self.heads} B={self.requests} q={self.width} "
            f"c={self.context}"
        )

    @property
    def rows(self) -> int:
        """M."""
        return self.requests * self.width

    @property
    def causal(self) -> bool:
        """Whether a row sees no later one."""
        return self.part != DRAFT

    @property
    def packed_columns(self) -> int:
        """Of the packed projection: q_a, kv_a and gate."""
        return Q_LORA + LINE + self.heads * VALUE

    @property
    def copy_bytes(self) -> int:
        """What every copy has for itself and a step reads: lines, and weights."""
        lines = self.requests * self.context * LINE
        if self.part != SUBLAYER:
            return _BF16 * lines
        heads = self.heads
        return _BF16 * (
            lines
            + self.packed_columns * HIDDEN
            + heads * (NOPE + ROPE) * Q_LORA
            + heads * (NOPE + VALUE) * LATENT
            + heads * VALUE * HIDDEN
        )

    @property
    def moved_bytes(self) -> int:
        """All that must be read or written: that, and the step's rows in and out."""
        ends = 2 * HIDDEN if self.part == SUBLAYER else self.heads * (LINE + LATENT)
        return self.copy_bytes + _BF16 * self.rows * ends

    def described(self) -> dict[str, Any]:
        """What a result line calls ``shape``."""
        return {
            "part": self.part,
            "heads": self.heads,
            "tp": self.tp,
            "requests": self.requests,
            "width": self.width,
            "m": self.rows,
            "context": self.context,
            "page": PAGE,
        }


@dataclass(frozen=True)
class SublayerWeights:
    """qkv_a_g [P, 7168], q_b [H 192, 1536], kv_b [H, 128 + 128, 512] as vLLM holds
    kv_b_proj, o_proj [7168, H 128], and the norms [1536] and [512]; all bf16."""

    qkv_a_g: Tensor
    q_b: Tensor
    kv_b: Tensor
    o_proj: Tensor
    q_norm: Tensor
    kv_norm: Tensor

    @property
    def w_uk(self) -> Tensor:
        """[H, 128, 512], a view."""
        return self.kv_b[:, :NOPE]

    @property
    def w_uv(self) -> Tensor:
        """[H, 128, 512], a view."""
        return self.kv_b[:, NOPE:]


@dataclass(frozen=True)
class MlaData:
    """A step, and what its copies have for themselves.

    Attributes:
        shape: of the step.
        caches: bf16 [pages, 64, 576] of each copy.
        batch: with the block table of every copy; pages lie in a random order.
        rows: what the step begins with: queries [M, H, 576], or in a sublayer hidden
            states [M, 7168].
        weights: of each copy; none but in a sublayer.
    """

    shape: MlaShape
    caches: tuple[Tensor, ...]
    batch: VerifyBatch
    rows: Tensor
    weights: tuple[SublayerWeights, ...]

    @classmethod
    def draw(
        cls, shape: MlaShape, copies: int, device: torch.device, seed: int = 0
    ) -> MlaData:
        """The same for the same arguments."""
        generator = torch.Generator(device).manual_seed(seed)

        def normal(*size: int, std: float = 1.0) -> Tensor:
            buffer = torch.empty(*size, dtype=torch.bfloat16, device=device)
            return buffer.normal_(0.0, std, generator=generator)

        def ints(*values: int) -> Tensor:
            return torch.tensor(values, dtype=torch.int32, device=device)

        requests, width, heads = shape.requests, shape.width, shape.heads
        count = -(-shape.context // PAGE)
        pages = torch.randperm(requests * count, device=device, generator=generator)
        slots = ints(*range(1, requests + 1))
        batch = VerifyBatch(
            row_start=ints(*range(0, shape.rows + 1, width)),
            history=ints(*[shape.context - width] * requests),
            state_slots=slots,
            accepted=slots,
            block_table=pages.int().view(requests, count),
        )
        caches = normal(copies, requests * count, PAGE, LINE).unbind(0)
        if shape.part != SUBLAYER:
            queries = normal(shape.rows, heads, LINE)
            return cls(shape, caches, batch, queries, ())
        norms = normal(Q_LORA, std=0.3) + 1, normal(LATENT, std=0.3) + 1
        w_uk = normal(copies, heads, NOPE, LATENT, std=NOPE**-0.5)
        w_uv = normal(copies, heads, VALUE, LATENT, std=LATENT**-0.5)
        stacks = (
            normal(copies, shape.packed_columns, HIDDEN, std=HIDDEN**-0.5),
            normal(copies, heads * (NOPE + ROPE), Q_LORA, std=Q_LORA**-0.5),
            torch.cat((w_uk, w_uv), 2),
            normal(copies, HIDDEN, heads * VALUE, std=(heads * VALUE) ** -0.5),
        )
        weights = tuple(
            SublayerWeights(*parts, *norms) for parts in zip(*stacks, strict=True)
        )
        return cls(shape, caches, batch, normal(shape.rows, HIDDEN), weights)

    @property
    def table(self) -> Tensor:
        """int32 [B, pages of a request]."""
        table = self.batch.block_table
        assert table is not None
        return table

    @property
    def lengths(self) -> Tensor:
        """int32 [B], keys of each request, as vLLM tells its kernels."""
        return self.batch.history + self.shape.width

    @property
    def slots(self) -> Tensor:
        """int64 [M], where the rows' lines go, as vLLM tells its kernels."""
        width = self.shape.width
        at = torch.arange(width, device=self.rows.device) + self.batch.history[:, None]
        pages = self.table.long().gather(1, at // PAGE)
        return (pages * PAGE + at % PAGE).flatten()

    def alone(self, row: int) -> MlaData:
        """A step of one row that sees what this one does; a sublayer's earlier rows
        must have left their lines in the caches."""
        shape, batch = self.shape, self.batch
        b, t = divmod(row, shape.width)
        seen = t if shape.causal else shape.width - 1
        one = slice(b, b + 1)
        start = batch.row_start[:2] * 0
        start[1] = 1
        step = VerifyBatch(
            start,
            batch.history[one] + seen,
            batch.state_slots[one],
            batch.accepted[one],
            self.table[one],
        )
        context = shape.context - shape.width + seen + 1
        small = replace(shape, requests=1, width=1, context=context)
        return replace(self, shape=small, batch=step, rows=self.rows[row : row + 1])

    def truth(self, kind: torch.dtype) -> Tensor:
        """The first copy's result: in fp64, or as plain bf16 torch has it, every
        product and norm in fp32 and rounded."""
        if self.shape.part == SUBLAYER:
            return _sublayer(self, kind)
        return _attention(self.rows, self._lines(), self.shape, kind)

    def _lines(self) -> Iterator[Tensor]:
        """[context, 576] of each request in the first copy."""
        for pages in self.table.long():
            yield self.caches[0][pages].flatten(0, 1)[: self.shape.context]


def _wide(kind: torch.dtype) -> torch.dtype:
    return torch.float64 if kind == torch.float64 else torch.float32


def _attention(
    query: Tensor, lines: Iterable[Tensor], shape: MlaShape, kind: torch.dtype
) -> Tensor:
    """Latents [M, H, 512] of ``query`` [M, H, 576] over each request's lines."""
    width, wide = shape.width, _wide(kind)
    found = []
    for rows, own in zip(query.split(width), lines, strict=True):
        keys = own.to(wide)
        scores = (rows.to(wide).flatten(0, 1) @ keys.t()).mul_(SCALE)
        scores = scores.unflatten(0, (width, -1))
        if shape.causal:
            number = torch.arange(len(keys), device=keys.device)
            last = len(keys) - width + number[:width]
            scores.masked_fill_(number > last[:, None, None], -torch.inf)
        weights = scores.sub_(scores.amax(-1, keepdim=True)).exp_()
        total = weights.sum(-1, keepdim=True)
        weights = weights.to(kind).to(wide).flatten(0, 1)
        sums = (weights @ keys[:, :LATENT]).unflatten(0, (width, -1))
        found.append((sums / total).to(kind))
    return torch.cat(found)


def _sublayer(data: MlaData, kind: torch.dtype) -> Tensor:
    """Outputs [M, 7168]; the step's own lines are taken as they come."""
    shape, w, wide = data.shape, data.weights[0], _wide(kind)

    def product(x: Tensor, weight: Tensor) -> Tensor:
        return (x.to(wide) @ weight.to(wide).t()).to(kind)

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        x = x.to(wide)
        root = (x.square().mean(-1, keepdim=True) + EPS).rsqrt()
        return (x * root * weight.to(wide)).to(kind)

    packed = product(data.rows, w.qkv_a_g)
    q_a, kv, rope, gate = packed.split([Q_LORA, LATENT, ROPE, shape.heads * VALUE], 1)
    own = torch.cat((norm(kv, w.kv_norm), rope), 1).split(shape.width)
    q = product(norm(q_a, w.q_norm), w.q_b).unflatten(1, (shape.heads, -1))
    nope, q_rope = q.split([NOPE, ROPE], -1)
    absorbed = torch.einsum("mhp,hpl->mhl", nope.to(wide), w.w_uk.to(wide)).to(kind)
    lines = (
        torch.cat((before[: -shape.width].to(kind), rows))
        for before, rows in zip(data._lines(), own, strict=True)
    )
    latent = _attention(torch.cat((absorbed, q_rope), -1), lines, shape, kind)
    value = torch.einsum("mhl,hvl->mhv", latent.to(wide), w.w_uv.to(wide)).to(kind)
    return product(value.flatten(1) * gate.sigmoid(), w.o_proj)
