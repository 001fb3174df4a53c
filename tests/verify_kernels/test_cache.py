# SPDX-License-Identifier: Apache-2.0
"""The kernel cache on disk and ``dspark-k3 build``."""

from __future__ import annotations

import multiprocessing
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")
pytest.importorskip("quack", reason="quack is not installed")

import quack.cache

from dspark_k3.cli import app
from tests.verify_kernels.race import race
from verify_kernels.common import build as ahead
from verify_kernels.common import variant as v
from verify_kernels.common.variant import Variant, cached, compilations, variants

ARCH, OTHER_ARCH = "sm_90a", "sm_100a"


@pytest.fixture(scope="module")
def two() -> list[Variant]:
    return list(variants(["attn_res"]))[:2]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache directory, and a process that has compiled nothing."""
    monkeypatch.setenv("DSPARK_K3_CACHE", str(tmp_path))
    restart()
    yield tmp_path
    restart()


def restart() -> None:
    """Forget what this process holds, as a new process would."""
    v._compiled.cache_clear()
    v._writable.cache_clear()


def objects(directory: Path) -> list[Path]:
    return sorted(directory.rglob("*.o"))


def test_a_second_start_compiles_nothing(cache: Path, two: list[Variant]) -> None:
    """Field case F14: an explicit compile uses the disk cache."""
    for variant in two:
        assert callable(cached(variant, ARCH))
    assert compilations() == 2 and len(objects(cache)) == 2
    cached(two[0], ARCH)
    assert compilations() == 2
    restart()
    for variant in two:
        assert callable(cached(variant, ARCH))
    assert compilations() == 0 and len(objects(cache)) == 2


def test_architecture_name_and_sources_are_in_the_key(
    cache: Path, two: list[Variant], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Field case F15: one cache directory, alternating configurations."""
    for _ in range(2):
        for variant in two:
            for arch in (ARCH, OTHER_ARCH):
                cached(variant, arch)
    assert compilations() == 4 and len(objects(cache)) == 4
    assert len({path.read_bytes() for path in objects(cache)}) == 4
    # An edit of a kernel, also one made after quack hashed its own sources.
    monkeypatch.setattr(v, "_sources", lambda: "edited")
    cached(two[0], ARCH)
    assert compilations() == 5 and len(objects(cache)) == 5


def test_an_object_cut_short_is_a_miss(cache: Path, two: list[Variant]) -> None:
    """Field case F14: a half-written object is compiled again, not an error."""
    cached(two[0], ARCH)
    (path,) = objects(cache)
    whole = path.read_bytes()
    for keep in (len(whole) // 2, 0):
        path.write_bytes(whole[:keep])
        restart()
        assert callable(cached(two[0], ARCH))
        assert compilations() == 1
        assert objects(cache) == [path] and path.stat().st_size == len(whole)


def test_four_processes_at_once_compile_each_kernel_once(
    cache: Path, two: list[Variant], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Field case F14: ranks race on one cache."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.verify_kernels.race"])
    barrier, results = context.Barrier(4), context.Queue()
    names = [variant.name for variant in two]
    arguments = (str(cache), names, barrier, results)
    ranks = [context.Process(target=race, args=arguments) for _ in range(4)]
    try:
        for rank in ranks:
            rank.start()
        compiled = [results.get(timeout=120) for _ in ranks]
        for rank in ranks:
            rank.join(60)
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.exitcode for rank in ranks] == [0] * 4
    assert sum(compiled) == 2, compiled
    assert len(objects(cache)) == 2
    monkeypatch.setattr(v, "_sources", lambda: "race")
    for variant in two:
        cached(variant, ARCH)
    assert compilations() == 0


def test_a_directory_that_cannot_be_written_works_uncached_with_a_warning(
    tmp_path: Path, two: list[Variant], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Field case F14: a read-only cache directory."""
    # A file in the way refuses root as well, which permission bits do not.
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DSPARK_K3_CACHE", str(tmp_path / "file" / "cache"))
    restart()
    with pytest.warns(UserWarning, match="cannot be written") as caught:
        assert callable(cached(two[0], ARCH))
    assert caught[0].filename == __file__
    assert compilations() == 1 and objects(tmp_path) == []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert callable(cached(two[0], ARCH))
    restart()


def test_quack_keeps_its_own_settings(cache: Path, two: list[Variant]) -> None:
    """The engine's process may use quack's cache for kernels of its own."""
    before = quack.cache.CACHE_DIR, quack.cache.CACHE_ENABLED
    extra = list(quack.cache.EXTRA_SOURCE_DIRS)
    cached(two[0], ARCH)
    assert before == (quack.cache.CACHE_DIR, quack.cache.CACHE_ENABLED)
    assert extra == quack.cache.EXTRA_SOURCE_DIRS


def test_build_counts_what_it_compiles_and_what_was_there(
    cache: Path, two: list[Variant], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Field case F38: after ``build``, a start compiles nothing."""
    monkeypatch.setattr(ahead, "variants", lambda ops: iter(two))
    command = ["build", "--op", "attn_res", "--arch", ARCH, "--cache", str(cache)]
    done = CliRunner().invoke(app, [*command, "--arch", OTHER_ARCH])
    assert done.exit_code == 0
    last = done.output.strip().splitlines()[-1]
    assert last == f"4 compiled, 0 already there, in {cache}"
    assert f"attn_res/{two[1].name} {OTHER_ARCH}" in done.output
    restart()
    done = CliRunner().invoke(app, command)
    assert done.output.strip().splitlines()[-1].startswith("0 compiled, 2 already")
    for variant in two:
        cached(variant, ARCH)
    assert compilations() == 0


@pytest.mark.parametrize(
    ("arguments", "code", "part"),
    [
        (["--arch", "sm_80"], 2, "arch='sm_80'"),
        (["--op", "gemm"], 2, "op=gemm: the kernels are skinny_gemm"),
        (["--op", "attn_res", "--cache", "FILE/cache"], 1, "cannot be written"),
    ],
)
def test_build_refuses_in_one_line(
    arguments: list[str], code: int, part: str, cache: Path
) -> None:
    (cache / "file").write_text("")
    given = [a.replace("FILE", str(cache / "file")) for a in arguments]
    done = CliRunner().invoke(app, ["build", *given])
    assert done.exit_code == code
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith("error: ") and part in line
