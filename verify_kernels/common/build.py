# SPDX-License-Identifier: Apache-2.0
"""Ahead-of-time compilation of the kernels into the cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from verify_kernels.common.variant import (
    ARCHITECTURES,
    OPS,
    Variant,
    cached,
    check_arch,
    compilations,
    variants,
)


@dataclass(frozen=True)
class Built:
    """How many kernels were compiled, and how many the cache already had."""

    compiled: int
    present: int


def plan(ops: Sequence[str], archs: Sequence[str]) -> list[tuple[Variant, str]]:
    """Every variant of ``ops`` for every architecture; empty lists mean all.

    Raises:
        ValueError: an op or an architecture that does not exist.
    """
    for arch in archs:
        check_arch(arch)
    if unknown := sorted(set(ops) - set(OPS)):
        raise ValueError(f"op={', '.join(unknown)}: the kernels are {', '.join(OPS)}")
    return [
        (variant, arch)
        for variant in variants(ops or OPS)
        for arch in dict.fromkeys(archs or ARCHITECTURES)
    ]


def build(
    wanted: Sequence[tuple[Variant, str]], progress: Callable[[str], None]
) -> Built:
    """Put every kernel of ``wanted`` into the cache; ``progress`` hears of each."""
    before = compilations()
    for variant, arch in wanted:
        cached(variant, arch)
        progress(f"{variant.op}/{variant.name} {arch}")
    compiled = compilations() - before
    return Built(compiled, len(wanted) - compiled)
