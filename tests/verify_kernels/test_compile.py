# SPDX-License-Identifier: Apache-2.0
"""Every variant of every kernel, for every architecture: it compiles, within budget."""

from __future__ import annotations

import re

import pytest

from verify_kernels.audit import audit
from verify_kernels.audit.sass import NoDisassembler, find_nvdisasm
from verify_kernels.common.variant import ARCHITECTURES, OPS, Variant, variants

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

ALL = list(variants())
#: The compiler gives little memory back: several processes share the work, but one has
#: all architectures of a variant, as `audit` asks.
SHARES = 8


def disassembles() -> bool:
    try:
        find_nvdisasm()
    except NoDisassembler:
        return False
    return True


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize(
    "variant",
    [
        pytest.param(
            variant,
            id=f"{variant.op}-{variant.name}",
            marks=pytest.mark.xdist_group(f"compile{at % SHARES}"),
        )
        for at, variant in enumerate(ALL)
    ],
)
def test_variant_compiles_within_budget_and_passes_the_audit(
    variant: Variant, arch: str
) -> None:
    """Field case F08: no load before the wait but the listed ones, and all of those."""
    report = audit(variant, arch)
    assert report.findings == ()
    # A name on the list that is not read early would let a later fault through.
    if variant.kernel.pdl:
        assert set(report.early) == set(variant.kernel.early_loads)
    assert (report.arrivals is not None) == disassembles(), report.unchecked


def test_names_say_which_variant_it_is() -> None:
    """Field case F15: the cache tells variants apart by op and name."""
    keys = [(variant.op, variant.name) for variant in ALL]
    assert len(set(keys)) == len(keys)
    assert {op for op, _ in keys} == set(OPS)
    assert all(re.fullmatch(r"\w+", name) for _, name in keys)
