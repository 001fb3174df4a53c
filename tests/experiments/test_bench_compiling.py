# SPDX-License-Identifier: Apache-2.0
"""Kernels compiled in other processes, as a search does on a machine with a GPU."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from experiments.bench import compiling
from experiments.bench.compiling import (
    Compilers,
    audited,
    compile_one,
    compiled,
    faults,
)
from verify_kernels.audit.cubin import Resources, resources
from verify_kernels.common import variant
from verify_kernels.skinny_gemm import choice, host
from verify_kernels.skinny_gemm.choice import Cut, Outputs
from verify_kernels.skinny_gemm.direct_tiling import DirectTiling
from verify_kernels.skinny_gemm.tiling import Tiling

A, B = Tiling(128, stages=5), DirectTiling(128, warps=2, depth=1, token_chunks=1)
BF16: Outputs = ("bf16",)
TWO: Outputs = ("fp32", "bf16")


def name_of(cut: Cut, outputs: Outputs, arch: str) -> str:
    """Work of a process: says what it was given."""
    return f"{cut.name} {outputs} {arch} {os.environ['CUDA_VISIBLE_DEVICES']!r}"


def fails(cut: Cut, outputs: Outputs, arch: str) -> str:
    """Work of a process that the compiler takes down."""
    os._exit(11)


def compile_pinned(cut: Cut, outputs: Outputs, arch: str) -> str:
    """Sources may be edited while the test runs."""
    variant._sources = lambda: "pinned"
    return compile_one(cut, outputs, arch)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("DSPARK_K3_CACHE", str(tmp_path))
    monkeypatch.setattr(variant, "_sources", lambda: "pinned")
    variant._compiled.cache_clear()
    variant._writable.cache_clear()
    yield tmp_path
    variant._compiled.cache_clear()
    variant._writable.cache_clear()
    variant._registry.cache_clear()


def test_a_process_that_dies_is_a_reason_not_an_end() -> None:
    compilers = Compilers("sm_90a", 1, fails)
    compilers.start([A], BF16)
    assert "BrokenProcessPool" in compilers.wait(A, BF16, float("inf"))
    compilers.close()


def test_each_kernel_is_sent_once_to_a_process_without_a_device() -> None:
    compilers = Compilers("sm_90a", 1, name_of)
    compilers.start([A, B, A], BF16)
    with pytest.raises(TimeoutError):
        compilers.wait(A, BF16, 0.0)
    compilers.start([A], BF16)
    compilers.start([A], TWO)
    assert len(compilers._futures) == 3
    for cut, outputs in ((B, BF16), (A, TWO), (A, BF16)):
        found = compilers.wait(cut, outputs, float("inf"))
        assert found == f"{cut.name} {outputs} sm_90a ''"
    compilers.close()


def needs_compiler() -> None:
    pytest.importorskip("cutlass", reason="CuTe DSL is not installed")
    pytest.importorskip("quack", reason="quack is not installed")


def test_a_kernel_that_spills_is_not_compiled(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs_compiler()
    seen = []

    def spilled(cubin: bytes) -> dict[str, Resources]:
        seen.append(resources(cubin))
        return {name: Resources(80, 24, 24, 0) for name in seen[-1]}

    monkeypatch.setattr(compiling, "resources", spilled)
    why = compile_one(B, BF16, "sm_90a")
    assert why.startswith(f"ValueError: {B.name}_bf16: registers spill, 24 bytes")
    assert len(seen) == 1 and len(seen[0]) == 1
    assert not list(cache.rglob("*.o"))


def test_kernels_with_findings_are_told_from_those_without(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    needs_compiler()
    assert faults(B, TWO) == ""
    limited = dataclasses.replace(host.variant(B, TWO), max_registers=10)
    monkeypatch.setattr(host, "variant", lambda cut, outputs: limited)
    found = faults(B, TWO)
    for arch in variant.ARCHITECTURES:
        assert f"{arch}: " in found
    assert found.count("registers") == 3


def test_an_audit_that_fails_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(cut: Cut, outputs: Outputs) -> None:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(host, "variant", none)
    assert faults(A, BF16) == "RuntimeError: no compiler"


def test_audits_run_in_processes() -> None:
    needs_compiler()
    assert audited([(B, BF16)], workers=1) == {}
    assert audited([]) == {}


@pytest.mark.parametrize(("cut", "outputs"), [(A, BF16), (B, TWO)])
def test_a_compiled_kernel_is_loaded_from_the_cache(
    cut: Cut, outputs: Outputs, cache: Path
) -> None:
    """It is none of those the package ships, and this process compiles nothing."""
    needs_compiler()
    assert (cut, outputs) not in choice.kernels()
    compilers = Compilers("sm_90a", 1, compile_pinned)
    compilers.start([cut], outputs)
    assert compilers.wait(cut, outputs, float("inf")) == ""
    compilers.close()
    assert len(list(cache.rglob("*.o"))) == 1
    assert callable(compiled(cut, outputs, "sm_90a"))
    assert variant.compilations() == 0
