# SPDX-License-Identifier: Apache-2.0
"""The bf16 projections of Kimi K3 that one tensor-parallel rank computes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from experiments.byte_model import (
    DENSE_INTERMEDIATE,
    EXPERTS,
    HEAD_DIM,
    HEADS,
    HIDDEN,
    KV_LORA,
    LATENT,
    PACKED_ROW_MULTIPLE,
    Q_LORA,
    ROPE_DIM,
    SHARED_INTERMEDIATE,
    VOCAB,
)

#: Sizes that are measured by default, and all that the kernels have shapes for.
TENSOR_PARALLEL = (8, 16, 1)
SIZES = (1, 2, 4, 8, 16, 32)


def integers(text: str) -> tuple[int, ...]:
    """A comma-separated list, each number once."""
    return tuple(dict.fromkeys(int(part) for part in text.split(",")))


@dataclass(frozen=True)
class Projection:
    """Y[M, n] = X[M, k] W[n, k]^T on one rank, bf16 in.

    Attributes:
        name: the projection, as in :func:`projections`.
        tp: tensor-parallel size it is a share of; 0 for a shape that is not K3's.
        n, k: rows and columns of the rank's weight.
        fp32_out: the output is fp32 (router logits) and not bf16.
        aliases: other ``name@tp`` with the same n, k and output.
    """

    name: str
    tp: int
    n: int
    k: int
    fp32_out: bool = False
    aliases: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """``name@tp``, or the name alone."""
        return f"{self.name}@{self.tp}" if self.tp else self.name

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weight, which is what a decode step must read."""
        return 2 * self.n * self.k

    def described(self) -> dict[str, Any]:
        """What a result line calls ``shape``, but for M."""
        return {
            "name": self.name,
            "tp": self.tp,
            "n": self.n,
            "k": self.k,
            "out": "fp32" if self.fp32_out else "bf16",
            "same_as": list(self.aliases),
        }


def _in_proj_rows(tp: int) -> int:
    """q, k, v, g and beta of the rank's heads and the whole f_a, padded."""
    rows = 4 * HEADS * HEAD_DIM // tp + HEAD_DIM + HEADS // tp
    return -(-rows // PACKED_ROW_MULTIPLE) * PACKED_ROW_MULTIPLE


def projections(tp: int) -> list[Projection]:
    """Every bf16 projection of one rank, in layer order.

    ``in_proj`` packs KDA's q, k, v, g, f_a and beta; ``qkv_a_g`` MLA's q_a, kv_a and
    gate; ``o_proj`` is the same for KDA and MLA. Router, latent down and latent up are
    sharded by their rows.

    Raises:
        ValueError: for a tp that is not one of `SIZES`.
    """
    if tp not in SIZES:
        raise ValueError(
            f"tp={tp}: use {', '.join(map(str, SIZES))}, the sizes the kernels have "
            "shapes for"
        )
    width = HEADS * HEAD_DIM // tp
    dense, shared = DENSE_INTERMEDIATE // tp, SHARED_INTERMEDIATE // tp
    table: list[tuple[str, int, int]] = [
        ("in_proj", _in_proj_rows(tp), HIDDEN),
        ("f_b", width, HEAD_DIM),
        ("qkv_a_g", Q_LORA + KV_LORA + ROPE_DIM + width, HIDDEN),
        ("q_b", HEADS * (HEAD_DIM + ROPE_DIM) // tp, Q_LORA),
        ("o_proj", HIDDEN, width),
        ("router", EXPERTS // tp, HIDDEN),
        ("latent_down", LATENT // tp, HIDDEN),
        ("latent_up", HIDDEN // tp, LATENT),
        ("shared_gate_up", 2 * shared, HIDDEN),
        ("shared_down", HIDDEN, shared),
        ("dense_gate_up", 2 * dense, HIDDEN),
        ("dense_down", HIDDEN, dense),
        ("lm_head", VOCAB // tp, HIDDEN),
    ]
    return [Projection(name, tp, n, k, name == "router") for name, n, k in table]


NAMES = tuple(shape.name for shape in projections(1))


def moe_front(tp: int) -> tuple[Projection, ...]:
    """The projections that read a MoE layer's input, in the order of a grouped launch.

    Raises:
        ValueError: as :func:`projections`.
    """
    names = ("router", "latent_down", "shared_gate_up")
    return tuple(shape for shape in projections(tp) if shape.name in names)


def select(
    tps: Iterable[int] = TENSOR_PARALLEL, names: Sequence[str] = ()
) -> list[Projection]:
    """Projections at the given sizes, each (n, k, output) once, others as aliases.

    The whole model's, TP 1, come last: they take longest and fit no budget first.

    Args:
        tps: tensor-parallel sizes.
        names: the projections wanted; all if empty.

    Raises:
        ValueError: for a name or a size that is not in the table.
    """
    for name in names:
        if name not in NAMES:
            raise ValueError(f"shape={name!r}: use one of {', '.join(NAMES)}")
    found: dict[tuple[int, int, bool], Projection] = {}
    for tp in sorted(tps, key=lambda tp: tp == 1):
        for shape in projections(tp):
            if names and shape.name not in names:
                continue
            key = (shape.n, shape.k, shape.fp32_out)
            first = found.get(key)
            found[key] = (
                replace(first, aliases=(*first.aliases, shape.label))
                if first
                else shape
            )
    return list(found.values())
