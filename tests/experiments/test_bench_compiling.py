# SPDX-License-Identifier: Apache-2.0
"""Tilings compiled in other processes, as a search does on a machine with a GPU."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from experiments.bench import space
from experiments.bench.compiling import Compilers, compile_one, compiled
from verify_kernels.common import variant
from verify_kernels.skinny_gemm.host import TILINGS
from verify_kernels.skinny_gemm.tiling import Tiling

A, B = space.candidates(128, 8, {"stages": (1, 3)})


def name_of(tiling: Tiling, output: str, arch: str) -> str:
    """Work of a process: says what it was given."""
    return f"{tiling.name} {output} {arch} {os.environ['CUDA_VISIBLE_DEVICES']!r}"


def fails(tiling: Tiling, output: str, arch: str) -> str:
    """Work of a process that the compiler takes down."""
    os._exit(11)


def compile_pinned(tiling: Tiling, output: str, arch: str) -> str:
    """Sources may be edited while the test runs."""
    variant._sources = lambda: "pinned"
    return compile_one(tiling, output, arch)


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
    compilers.start([A], "bf16")
    assert "BrokenProcessPool" in compilers.wait(A, "bf16", float("inf"))
    compilers.close()


def test_each_tiling_is_sent_once_to_a_process_without_a_device() -> None:
    compilers = Compilers("sm_90a", 1, name_of)
    compilers.start([A, B, A], "bf16")
    with pytest.raises(TimeoutError):
        compilers.wait(A, "bf16", 0.0)
    compilers.start([A], "bf16")
    compilers.start([A], "fp32")
    assert len(compilers._futures) == 3
    for tiling, output in ((B, "bf16"), (A, "fp32"), (A, "bf16")):
        found = compilers.wait(tiling, output, float("inf"))
        assert found == f"{tiling.name} {output} sm_90a ''"
    compilers.close()


def test_a_compiled_tiling_is_loaded_from_the_cache(cache: Path) -> None:
    """It is none of those the package ships, and this process compiles nothing."""
    pytest.importorskip("cutlass", reason="CuTe DSL is not installed")
    pytest.importorskip("quack", reason="quack is not installed")
    assert A not in TILINGS[128].values()
    compilers = Compilers("sm_90a", 1, compile_pinned)
    compilers.start([A], "bf16")
    assert compilers.wait(A, "bf16", float("inf")) == ""
    compilers.close()
    assert len(list(cache.rglob("*.o"))) == 1
    assert callable(compiled(A, "bf16", "sm_90a"))
    assert variant.compilations() == 0
