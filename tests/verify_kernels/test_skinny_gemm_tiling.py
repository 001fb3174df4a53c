# SPDX-License-Identifier: Apache-2.0
"""The skinny GEMM's arithmetic without a GPU: order of sums, layout, banks, cuts."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.bench.shapes import SIZES, projections
from experiments.bench.space import RING
from verify_kernels.skinny_gemm import SkinnyGemm, choice, host
from verify_kernels.skinny_gemm.tiling import SUM_ORDER, Tiling

#: Columns of every bf16 projection of Kimi K3 at TP 1 to 32, and of a tiny model.
MODEL_WIDTHS = {shape.k for tp in SIZES for shape in projections(tp)}
TINY_WIDTHS = {512, 256, 128, 64}
#: Rings that are tried first, and those that are shipped.
ALL = list(
    dict.fromkeys(
        [
            *(tiling for by_rows in RING.values() for tiling in by_rows.values()),
            *(cut for cut, _ in choice.kernels() if isinstance(cut, Tiling)),
        ]
    )
)
LANES = range(32)


def name_of(tiling: Tiling) -> str:
    return tiling.name


def test_every_width_of_the_model_has_an_order_and_rings() -> None:
    assert set(SUM_ORDER) == set(RING) == MODEL_WIDTHS | TINY_WIDTHS
    assert {16896, 8448, 3072, 1056, 192} < MODEL_WIDTHS
    for k, by_rows in RING.items():
        assert list(by_rows) == sorted(by_rows)
        for rows, tiling in by_rows.items():
            assert (tiling.k, rows <= tiling.tokens) == (k, True)
    # The cache tells tilings apart by name.
    assert len({tiling.name for tiling in ALL}) == len(ALL)


@pytest.mark.parametrize("tiling", ALL, ids=name_of)
def test_lanes_read_every_column_once(tiling: Tiling) -> None:
    """Each CTA, slice, warp, chunk and 8 columns of a lane: K exactly once, and a warp
    of a slice the same part of K whatever the cluster and the stages are."""
    width = tiling.slice_width
    seen: Counter[int] = Counter()
    for rank in range(tiling.cluster):
        for local in range(tiling.local_slices):
            stage, inside = divmod(local, tiling.span)
            copied = rank * tiling.local_k + stage * tiling.span * width
            for warp in range(tiling.warps):
                for chunk in range(tiling.chunks):
                    for q in range(4):
                        read = (warp * tiling.chunks + chunk) * 32 + q * 8
                        column = copied + inside * width + read
                        seen.update(range(column, column + 8))
                        first = rank * tiling.local_slices + local
                        assert column // width == first
                        assert column % width // (width // tiling.warps) == warp
    assert sorted(seen.elements()) == list(range(tiling.k))


def in_order(values: list[np.float32]) -> np.float32:
    total = values[0]
    for value in values[1:]:
        total = total + value
    return total


def tree(values: list[np.float32]) -> np.float32:
    """Halves, then the two halves: the balanced tree, written from the top."""
    if len(values) == 1:
        return values[0]
    middle = len(values) // 2
    return tree(values[:middle]) + tree(values[middle:])


def segment(products: np.ndarray) -> np.float32:
    """A warp's sum: 16 products at a time into the running sum."""
    total = np.float32(0)
    for step in products.reshape(-1, 16):
        total = total + np.add.reduce(step, dtype=np.float32)
    return total


@pytest.mark.parametrize("k", SUM_ORDER)
def test_order_of_sums_is_that_of_k_in_every_tiling(k: int) -> None:
    """Field case F40: segments, warps in order, slices in a tree, split over the CTAs
    of a cluster as a tiling does, added with the kernel's own functions: for every
    legal cluster the bits of one order written down independently. The inputs notice
    another order: a plain sum over slices and warps differs in most rows."""
    kernel = pytest.importorskip("verify_kernels.skinny_gemm.kernel")
    slices, warps = SUM_ORDER[k]
    generator = np.random.default_rng(k)
    other = 0
    clusters = sorted({t.cluster for t in ALL if t.k == k} | {1, slices})
    for _ in range(16):
        products = generator.standard_normal(k).astype(np.float32)
        products *= np.exp2(generator.integers(-6, 7, k)).astype(np.float32)
        sums = [
            [segment(x) for x in part.reshape(warps, -1)]
            for part in products.reshape(slices, -1)
        ]
        wanted = tree([in_order(of_slice) for of_slice in sums])
        other += in_order([x for of_slice in sums for x in of_slice]) != wanted
        for cluster in clusters:
            local = slices // cluster
            per_cta = []
            for rank in range(cluster):
                mine = sums[rank * local : (rank + 1) * local]
                parts = [kernel.add_in_order([(x,) for x in s]) for s in mine]
                per_cta.append(kernel.add_tree(parts))
            (found,) = kernel.add_tree(per_cta)
            assert found.tobytes() == wanted.tobytes(), cluster
    assert slices == 1 or other >= 4


@dataclass(frozen=True)
class Region:
    """Where the kernel puts one kind of data: first byte, bytes, and what is used."""

    start: int
    size: int
    used: int


def regions(t: Tiling) -> dict[str, Region]:
    """In the kernel's order, with the bytes used counted anew."""
    barriers = 1 + 2 * t.stages + 2 * t.partial_buffers + 2 * t.exchange_buffers
    token_rows = 8 * (t.token_tiles - t.held_tiles)
    row = 2 * t.span * t.slice_width
    partials = t.local_slices * t.warps * t.tokens * 20 * 4
    sums = t.tokens // t.cluster * 16 * 4 * t.cluster if t.cluster > 1 else 0
    sizes = {
        "barriers": (t.barrier_bytes, 8 * barriers),
        "ring": (
            t.stages * t.stage_bytes,
            (t.stages * t.stage_rows - 1) * t.weight_pitch + row,
        ),
        "tokens": (
            t.token_bytes,
            max((token_rows - 1) * t.token_pitch + 2 * t.local_k, 0),
        ),
        "partials": (t.partial_buffers * t.partial_bytes, t.partial_buffers * partials),
        "sums": (t.exchange_buffers * t.exchange_bytes, t.exchange_buffers * sums),
    }
    found, at = {}, 0
    for name, (size, used) in sizes.items():
        found[name] = Region(at, size, used)
        at += size
    return found


def check_layout(t: Tiling) -> None:
    """Everything in its region, all of it in budget, copies in units of 16 bytes."""
    found = regions(t)
    for name, region in found.items():
        assert region.used <= region.size, name
        assert region.start % 16 == 0, name
    end = sum(region.size for region in found.values())
    assert end == t.shared_bytes <= 227 * 1024
    # H200, B200: 228 KB an SM, 1 KB of it taken by every resident CTA.
    assert t.ctas_per_sm * (end + 1024) <= 228 * 1024
    row, chunk = 2 * t.span * t.slice_width, 2 * t.local_k
    assert row % 16 == t.weight_pitch % 16 == t.token_pitch % 16 == chunk % 16 == 0
    assert row <= t.weight_pitch and chunk <= t.token_pitch
    assert t.threads <= 1024 and t.threads % 32 == 0
    # A copy to each of the cluster's CTAs, 16 bytes a CTA, for those without tokens.
    if t.cluster > 1:
        assert 16 * t.cluster <= t.exchange_bytes


@pytest.mark.parametrize("tiling", ALL, ids=name_of)
def test_layout_of_tilings_in_use(tiling: Tiling) -> None:
    check_layout(tiling)


@pytest.mark.parametrize("k", SUM_ORDER)
def test_clamped_tokens_are_read_inside_shared_memory(k: int) -> None:
    """Tokens past M repeat token M - 1; where that one is held in registers, the first
    resident one."""
    fewest = 1
    for most, t in RING[k].items():
        place = regions(t)["tokens"]
        for m in range(fewest, most + 1):
            for token in range(8 * t.held_tiles, t.tokens):
                resident = max(min(token, m - 1) - 8 * t.held_tiles, 0)
                read = resident * t.token_pitch + 2 * t.local_k
                assert read <= place.size, (t, m)
        fewest = most + 1


@st.composite
def some_tilings(draw: st.DrawFn) -> dict[str, int]:
    """Fields that pass every check but, often, those of shared memory."""
    k = draw(st.sampled_from(list(SUM_ORDER)))
    slices = SUM_ORDER[k][0]
    cluster = draw(st.sampled_from([c for c in (1, 2, 4, 8) if slices % c == 0]))
    spans = [s for s in (1, 2, 4, 8) if slices // cluster % s == 0]
    row_tiles, token_tiles = draw(st.integers(1, 4)), draw(st.integers(1, 8))
    return {
        "k": k,
        "token_tiles": token_tiles,
        "cluster": cluster,
        "row_tiles": row_tiles,
        "stage_rows": draw(st.integers(1, 16 * row_tiles)),
        "span": draw(st.sampled_from(spans)),
        "stages": draw(st.integers(1, 6)),
        "partial_buffers": draw(st.integers(1, 3)),
        "exchange_buffers": draw(st.integers(1, 4)),
        "reducers": draw(st.integers(1, 3)),
        "held_tiles": draw(st.integers(0, token_tiles)),
        "ctas_per_sm": draw(st.integers(1, 2)),
    }


@settings(max_examples=500, deadline=None)
@given(some_tilings())
def test_a_tiling_that_is_accepted_has_a_sound_layout(fields: dict[str, int]) -> None:
    """The constructor's checks against the layout counted here."""
    try:
        tiling = Tiling(**fields)
    except ValueError as error:
        assert "shared memory" in str(error)
    else:
        check_layout(tiling)


def banks(addresses: list[int], size: int) -> list[Counter[int]]:
    """Distinct words that a warp's access takes from each bank, a phase at a time.

    16-byte accesses are served a quarter warp at a time, 4-byte ones all at once.
    """
    lanes = 8 if size == 16 else 32
    return [
        Counter(
            word % 32
            for word in {
                (at + byte) // 4
                for at in addresses[first : first + lanes]
                for byte in range(0, size, 4)
            }
        )
        for first in range(0, 32, lanes)
    ]


def conflict_free(addresses: list[int], size: int) -> bool:
    return all(max(phase.values()) == 1 for phase in banks(addresses, size))


def test_banks_are_counted_as_the_hardware_does() -> None:
    """Rows of 128 bytes put the reads of two rows on the same banks; equal addresses
    are one read."""
    assert not conflict_free([lane // 4 * 128 + lane % 4 * 16 for lane in LANES], 16)
    assert conflict_free([lane // 8 * 128 for lane in LANES], 16)
    assert not conflict_free([lane * 128 for lane in LANES], 4)


@pytest.mark.parametrize("tiling", ALL, ids=name_of)
def test_shared_memory_accesses_meet_every_bank_once(tiling: Tiling) -> None:
    """Fragments of weights and tokens, partial sums stored and read, sums read."""
    t = tiling
    for offset in range(0, 64 * t.chunks, 64):
        reads = [lane // 4 * t.token_pitch + lane % 4 * 16 + offset for lane in LANES]
        assert conflict_free(reads, 16)
        # Rows past a stage repeat its last.
        for first in range(0, t.rows, 8):
            rows = [min(first + lane // 4, t.stage_rows - 1) for lane in LANES]
            reads = [
                row * t.weight_pitch + lane % 4 * 16 + offset
                for lane, row in zip(LANES, rows, strict=True)
            ]
            assert conflict_free(reads, 16), first
    # Accumulator i of a lane: token 2 q + i % 2, row g + 8 (i / 2).
    for i in range(4):
        stores = [
            4 * ((2 * (lane % 4) + i % 2) * t.partial_pitch + lane // 4 + 8 * (i // 2))
            for lane in LANES
        ]
        assert conflict_free(stores, 4)
    # A reducing warp reads four rows of 8 tokens; a finishing one 16 rows of 8.
    assert conflict_free(
        [4 * (lane % 8 * t.partial_pitch + 4 * (lane // 8)) for lane in LANES], 16
    )
    assert conflict_free([4 * (lane // 4 * 16 + 4 * (lane % 4)) for lane in LANES], 16)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"k": 1024}, "k=1024: no order of sums is fixed for it; K is one of 64, 128,"),
        ({"cluster": 3}, "cluster=3, span=1: their product must divide the 8 slices"),
        ({"k": 768, "cluster": 2}, "cluster=2, span=1: .* the 1 slices of K 768"),
        ({"cluster": 4, "span": 4}, "cluster=4, span=4: .* the 8 slices of K 7168"),
        ({"cluster": 8, "stage_rows": 17}, r"stage_rows=17 must lie in 1\.\.16"),
        ({"cluster": 8, "stage_rows": 0}, r"stage_rows=0 must lie in 1\.\.16"),
        ({"cluster": 8, "held_tiles": 2}, r"held_tiles=2 must lie in 0\.\.1"),
        ({"cluster": 8, "held_tiles": -1}, r"held_tiles=-1 must lie in 0\.\.1"),
        ({"cluster": 8, "stages": 12}, "needs .* shared memory; lower stages or span"),
        ({"cluster": 8, "stages": 4, "ctas_per_sm": 2}, "needs .* bytes of shared"),
    ],
)
def test_impossible_tilings_are_refused(fields: dict[str, int], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Tiling(**({"k": 7168} | fields))


@dataclass(frozen=True)
class Rows:
    """Rows first .. last - 1 of a matrix on a GPU that is not there."""

    first: int
    last: int
    device: torch.device = torch.device("cuda", 0)  # noqa: RUF009

    @property
    def shape(self) -> tuple[int, int]:
        return self.last - self.first, 1

    def __getitem__(self, part: slice) -> Rows:
        assert (part.step, 0 <= part.start <= part.stop) == (None, True)
        assert self.first + part.stop <= self.last
        return Rows(self.first + part.start, self.first + part.stop, self.device)


#: Clusters that an H200 holds at once, by their size.
HELD = {1: 132, 2: 66, 4: 30, 8: 15}


@dataclass
class Launches:
    """What a `SkinnyGemm` launched, in order, instead of launching it."""

    seen: list[tuple[Any, ...]]

    def kernel_of(self, cut: choice.Cut, arch: str) -> Any:
        assert arch == "sm_90a"
        return lambda x, ws, ys, ctas, pdl: self.seen.append(
            (cut, x, ws, ys, ctas, pdl)
        )


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    found = Launches([])
    monkeypatch.setattr(host, "variant", lambda cut, outputs: cut)
    monkeypatch.setattr(host, "cached", found.kernel_of)
    monkeypatch.setattr(host, "device_arch", lambda index: "sm_90a")
    monkeypatch.setattr(host, "clusters_held", lambda device, size: HELD[size])
    return found


@pytest.mark.parametrize("pdl", [False, True])
@pytest.mark.parametrize("n", [1, 448, 7168])
@pytest.mark.parametrize("k", SUM_ORDER)
def test_rows_are_cut_into_launches_that_cover_them_once(
    k: int, n: int, pdl: bool, launches: Launches
) -> None:
    """Every M: consecutive parts, each with the choice for the fewest rows that are
    enough, and with CTAs for all rows of the weight."""
    gemm = SkinnyGemm(k, pdl=pdl)
    w = torch.empty(n, 0)
    chosen = choice.choices(k, n, ("bf16",), pdl)
    for m in range(65):
        launches.seen.clear()
        gemm(Rows(0, m), w, [Rows(0, m)])  # type: ignore[arg-type, list-item]
        at = 0
        for cut, x, ws, ys, ctas, flag in launches.seen:
            count = x.last - x.first
            assert (x.first, x, flag) == (at, ys[0], pdl)
            assert len(ws) == 1 and ws[0] is w
            best = chosen[min(rows for rows in chosen if rows >= count)]
            assert cut is best.cut and count <= cut.tokens
            if best.run:
                assert ctas == cut.cluster * math.ceil(n / best.run)
            else:
                assert ctas == cut.cluster * HELD[cut.cluster]
            at = x.last
        assert at == m
        assert len(launches.seen) == -(-m // max(chosen))


def test_nothing_is_launched_for_no_weights(launches: Launches) -> None:
    gemm = SkinnyGemm(768)
    gemm(Rows(0, 3), torch.empty(0, 768), [Rows(0, 3)])  # type: ignore
    bound = host.BoundGemm(gemm._launches(Rows.device, 0), [], True, True)
    bound(Rows(0, 3), Rows(0, 3))  # type: ignore
    assert launches.seen == []


@pytest.mark.parametrize("pdl", [False, True])
@pytest.mark.parametrize(("k", "n"), [(7168, 448), (33792, 7168), (16896, 7168)])
def test_what_is_bound_launches_what_a_call_does(
    k: int, n: int, pdl: bool, launches: Launches
) -> None:
    """One launch, or several where rows are cut; more than 64 are refused, and so are
    other rows of an output that is cut."""
    gemm = SkinnyGemm(k, pdl=pdl)
    w = torch.empty(n, 0)
    bound = host.BoundGemm(gemm._launches(Rows.device, n), [w], True, pdl)
    for m in range(65):
        launches.seen.clear()
        gemm(Rows(0, m), w, [Rows(0, m)])  # type: ignore
        wanted = list(launches.seen)
        launches.seen.clear()
        bound(Rows(0, m), Rows(0, m))  # type: ignore[arg-type]
        assert launches.seen == wanted
        assert len(wanted) == -(-m // max(choice.choices(k, n, ("bf16",), pdl)))
    launches.seen.clear()
    with pytest.raises(ValueError, match="x has 65 rows; at most 64"):
        bound(Rows(0, 65), Rows(0, 65))  # type: ignore[arg-type]
    if max(choice.choices(k, n, ("bf16",), pdl)) < 64:
        with pytest.raises(ValueError, match="out has 63 rows and x 64; give it 64"):
            bound(Rows(0, 64), Rows(0, 63))  # type: ignore[arg-type]
    assert launches.seen == []


def test_matrices_of_one_launch_are_cut_alike(
    launches: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three outputs, each with its own rows of the part; weights whole."""
    gemm = SkinnyGemm(
        7168, out_dtype=(torch.float32, torch.bfloat16, torch.bfloat16), pdl=False
    )
    whole = choice.choices
    monkeypatch.setattr(
        choice, "choices", lambda *a: {m: c for m, c in whole(*a).items() if m <= 32}
    )
    ws = [torch.empty(9, 0) for _ in range(3)]
    gemm(Rows(0, 64), ws, [Rows(100 * g, 100 * g + 64) for g in range(3)])  # type: ignore
    for i, (_, x, weights, ys, *_) in enumerate(launches.seen):
        assert (x.first, x.last) == (32 * i, 32 * i + 32)
        assert [(y.first - 100 * g, y.last - 100 * g) for g, y in enumerate(ys)] == [
            (32 * i, 32 * i + 32)
        ] * 3
        assert all(a is b for a, b in zip(weights, ws, strict=True))
    assert len(launches.seen) == 2
