# SPDX-License-Identifier: Apache-2.0
"""The table of kernels: every weight and every M is served by one that can."""

from __future__ import annotations

import json
from collections.abc import Iterator
from fractions import Fraction
from importlib import resources

import pytest

from verify_kernels.batch import MAX_ROWS
from verify_kernels.skinny_gemm import choice, host
from verify_kernels.skinny_gemm.choice import Choice, Entry, Outputs
from verify_kernels.skinny_gemm.direct_tiling import DirectTiling
from verify_kernels.skinny_gemm.tiling import SUM_ORDER, Tiling
from verify_kernels.skinny_gemm.wide_tiling import WideTiling

#: From one row to more than any weight of the model has, denser where CTAs are few.
SIZES = (*range(1, 300), *range(300, 4000, 37), *range(4000, 300_001, 1733), 300_000)
HELD = {1: 132, 2: 66, 4: 30, 8: 15}
KINDS = [
    (k, outputs, pdl)
    for k in SUM_ORDER
    for outputs in choice.outputs_of(k)
    for pdl in (True, False)
]


@pytest.fixture(autouse=True)
def h200(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "clusters_held", lambda device, size: HELD[size])


def all_choices(k: int, outputs: Outputs, pdl: bool) -> Iterator[dict[int, Choice]]:
    """Of all weights of this kind."""
    for n in SIZES:
        yield choice.choices(k, n, outputs, pdl)


def test_every_k_has_kernels() -> None:
    assert {k for k, _, _ in KINDS} == set(SUM_ORDER)
    assert all(("bf16",) in choice.outputs_of(k) for k in SUM_ORDER)
    assert {("fp32",), ("fp32", "bf16", "bf16")} <= set(choice.outputs_of(7168))
    assert ("fp32",) in choice.outputs_of(512)


@pytest.mark.parametrize(("k", "outputs", "pdl"), KINDS)
def test_every_m_is_served_by_a_kernel_that_holds_it(
    k: int, outputs: Outputs, pdl: bool
) -> None:
    """An M beyond the last is cut into launches of it, so what is left is served."""
    for found in all_choices(k, outputs, pdl):
        assert found and list(found) == sorted(found)
        assert min(found) >= 1 and max(found) <= MAX_ROWS
        for rows, best in found.items():
            cut = best.cut
            assert cut.k == k
            if isinstance(cut, DirectTiling) and cut.staged:
                assert rows <= cut.staged
            assert rows <= cut.tokens


@pytest.mark.parametrize(("k", "outputs", "pdl"), KINDS)
def test_every_row_has_a_cta_that_holds_it(k: int, outputs: Outputs, pdl: bool) -> None:
    """Clusters share N as evenly as can be: the longest run is ceil(N / clusters)."""
    for n in SIZES:
        for best in choice.choices(k, n, outputs, pdl).values():
            ctas = host.grid(best, n, 0)
            clusters, rest = divmod(ctas, best.cut.cluster)
            assert rest == 0 < clusters and ctas < 2**31
            longest = -(-n // clusters)
            if isinstance(best.cut, DirectTiling):
                assert longest <= best.cut.rows, (n, best.name)
            if best.run:
                assert longest <= best.run
                # No cluster is without a row.
                assert clusters <= n


def test_the_grid_follows_from_the_run_or_from_the_device() -> None:
    ring, direct = Tiling(7168, cluster=4), DirectTiling(7168, warps=28)
    wide = WideTiling(7168, cluster=2)
    assert host.grid(Choice(ring), 5, 0) == host.grid(Choice(ring), 9999, 0) == 120
    assert host.grid(Choice(ring, 100), 768, 0) == 4 * 8
    assert host.grid(Choice(ring, 100), 700, 0) == 4 * 7
    assert host.grid(Choice(direct, 7), 768, 0) == 110
    assert host.grid(Choice(wide, 12), 768, 0) == 2 * 64
    assert host.grid(Choice(wide), 768, 0) == 132


@pytest.mark.parametrize(("k", "outputs", "pdl"), KINDS)
def test_the_nearest_size_of_the_table_decides(
    k: int, outputs: Outputs, pdl: bool
) -> None:
    same = [e for e in choice.table() if (e.k, e.outputs, e.pdl) == (k, outputs, pdl)]
    sizes = {e.n for e in same}

    def ratio(n: int, m: int) -> tuple[Fraction, int]:
        return max(Fraction(n, m), Fraction(m, n)), m

    for n in {*SIZES[::7], *sizes, *(m + 1 for m in sizes)}:
        nearest = min(sizes, key=lambda m: ratio(n, m))
        wanted = {e.rows: e.choice for e in same if e.n == nearest}
        assert choice.choices(k, n, outputs, pdl) == wanted
    for n in sizes:
        assert choice.choices(k, n, outputs, pdl).keys() == {
            e.rows for e in same if e.n == n
        }


def test_what_is_not_there_is_refused() -> None:
    for k, outputs in ((700, ("bf16",)), (7168, ("fp16",)), (128, ("fp32",) * 3)):
        with pytest.raises(KeyError, match=f"k={k}, .*{outputs[0]}.*, programmatic"):
            choice.choices(k, 768, outputs, True)
    assert choice.outputs_of(700) == ()


def test_an_empty_weight_has_choices() -> None:
    """Nothing is launched for it, but it may be bound."""
    assert choice.choices(7168, 0, ("bf16",), True) == choice.choices(
        7168, 1, ("bf16",), True
    )


def text_of(name: str) -> str:
    return resources.files("verify_kernels.skinny_gemm").joinpath(name).read_text()


@pytest.mark.parametrize("name", ["choices.json", "choices_unmeasured.json"])
def test_no_cut_is_listed_in_vain(name: str) -> None:
    text = text_of(name)
    cuts = [choice.cut_of(cut) for cut in json.loads(text)["cuts"]]
    assert len(set(cuts)) == len(cuts)
    assert {entry.choice.cut for entry in choice.entries_of(text)} == set(cuts)


def test_what_is_not_measured_says_so() -> None:
    """Its file names no GPU, and for each K a measured one, whose designs it has, M for
    M, where that one has the M."""
    text = text_of("choices_unmeasured.json")
    entries, table = choice.entries_of(text), json.loads(text)
    assert "measured" not in table and "gpu" not in text
    assert "NVIDIA H200" in json.loads(text_of("choices.json"))["measured"]["gpu"]
    known = {e.k for e in choice.measured()}
    like = {int(k): other for k, other in table["like"].items()}
    assert like.keys() == {e.k for e in entries} >= set(SUM_ORDER) - known
    assert set(like.values()) <= known
    assert set(choice.unmeasured()) <= set(entries)
    for e in entries:
        same = [m for m in choice.measured() if (m.k, m.rows) == (like[e.k], e.rows)]
        designs = {choice.design_of(m.choice.cut) for m in same}
        assert not designs or choice.design_of(e.choice.cut) in designs, e


def test_a_measured_entry_ends_the_unmeasured_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of its K, outputs and launch mode, and of no others."""
    cut = DirectTiling(512, halves=1, warps=4)
    new = Entry(512, 99, ("bf16",), True, 8, Choice(cut, 5))
    before = choice.unmeasured()
    caches = (choice.unmeasured, choice.table, choice.outputs_of)
    monkeypatch.setattr(choice, "measured", lambda: (new,))
    try:
        for cache in caches:
            cache.cache_clear()
        assert choice.choices(512, 7, ("bf16",), True) == {8: Choice(cut, 5)}
        ended = [e for e in before if (e.k, e.outputs, e.pdl) == (512, ("bf16",), True)]
        assert ended and set(choice.unmeasured()) == set(before) - set(ended)
        others = ("fp32",), ("fp32", "bf16", "bf16")
        assert choice.outputs_of(512) == (("bf16",), *others)
    finally:
        for cache in caches:
            cache.cache_clear()


def test_no_kernel_is_shipped_in_vain() -> None:
    kernels = choice.kernels()
    assert len(set(kernels)) == len(kernels)
    assert set(kernels) == {(e.choice.cut, e.outputs) for e in choice.table()}
    # Each is reached by the weight of its entry.
    for e in choice.table():
        assert choice.choices(e.k, e.n, e.outputs, e.pdl)[e.rows] == e.choice


def test_a_spelled_cut_is_read_back() -> None:
    for cut in (
        Tiling(7168, cluster=4, span=2, stages=3),
        DirectTiling(7168, halves=1, warps=28, staged=8),
        WideTiling(7168, cluster=4, token_tiles=4),
        *(entry.choice.cut for entry in choice.table()),
    ):
        spelled = json.loads(json.dumps(choice.spell(cut)))
        again = choice.cut_of(spelled)
        assert again == cut and type(again) is type(cut)
        assert spelled["design"] == choice.design_of(cut)
    for bad in (
        {"design": "narrow", "k": 128},
        {"k": 128},
        {"design": "ring", "k": 128, "spam": 1},
    ):
        with pytest.raises(ValueError, match="is none of these designs"):
            choice.cut_of(bad)
    with pytest.raises(ValueError, match="k=129: no order of sums"):
        choice.cut_of({"design": "ring", "k": 129})


def test_a_choice_cannot_ask_for_more_than_its_kernel_holds() -> None:
    cut = DirectTiling(7168, warps=28, staged=4, halves=1)
    assert choice.most_rows(cut) == 4
    assert choice.most_rows(Tiling(7168, cluster=4, token_tiles=2, stages=2)) == 16
    for run in (0, 9):
        with pytest.raises(ValueError, match=f"run={run}: a CTA of {cut.name}"):
            Choice(cut, run)
    with pytest.raises(ValueError, match="run=-1"):
        Choice(Tiling(7168, cluster=4), -1)
    held = Choice(cut, 8)
    assert held.name == f"{cut.name}@8"
    assert Entry(7168, 768, ("bf16",), True, 4, held).rows == 4
    for rows in (0, 5):
        with pytest.raises(ValueError, match=f"rows={rows}: {cut.name} serves 1 to 4"):
            Entry(7168, 768, ("bf16",), True, rows, held)
