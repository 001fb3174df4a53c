# SPDX-License-Identifier: Apache-2.0
"""The KDA verify kernel: its checks anywhere, its numbers on a GPU."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace

import pytest
import torch
from torch import Tensor

from experiments.bench.neighbours import neighbours
from verify_kernels import VerifyBatch
from verify_kernels.kda import KdaFoldState, KdaVerifyWeights, kda_verify, reference
from verify_kernels.kda.host import CLUSTERS, DIM, TAPS, cluster_size, packed_width
from verify_kernels.kda.reference import KdaRows, KdaState, KdaWeights

EPS = 3e-5
#: packed, weights, cache, batch, out -> nothing; cache and out are written.
Step = Callable[[Tensor, KdaVerifyWeights, KdaFoldState, VerifyBatch, Tensor], None]
#: packed, weights, state, window, slots, batch, out.
SnapshotStep = Callable[
    [Tensor, KdaVerifyWeights, Tensor, Tensor, Tensor, VerifyBatch, Tensor], None
]


def generator(seed: int, device: str = "cpu") -> torch.Generator:
    return torch.Generator(device).manual_seed(seed)


def weights(heads: int, seed: int = 0, device: str = "cpu") -> KdaVerifyWeights:
    """W_fb on a grid, as f_a: their products add up exactly in fp32, so that every way
    of computing r rounds the same number to bf16. Channels 0 and 1 decay by e^-5 and
    not at all."""
    g = generator(seed)
    grid = torch.randint(-8, 9, (heads * DIM, DIM), generator=g) / 32
    bias = torch.randn(heads, DIM, generator=g)
    bias[:, :2] = torch.tensor([90.0, -90.0])
    return KdaVerifyWeights(
        w_fb=grid.bfloat16().to(device),
        conv=torch.randn(3 * heads * DIM, TAPS, generator=g).to(device) / 2,
        a_log=(torch.randn(heads, generator=g) / 2).to(device),
        dt_bias=bias.to(device),
        norm=(1 + 0.3 * torch.randn(DIM, generator=g)).to(device),
        norm_eps=EPS,
    )


def projections(rows: int, heads: int, seed: int, device: str = "cpu") -> Tensor:
    """Packed rows 16 bytes into wider ones, NaN around them. Some of q, k, v and the
    gate are so far below 0 that e^-x is not finite."""
    g = generator(seed)
    width = packed_width(heads)
    packed = torch.randn(rows, width, generator=g)
    packed[:, 3 : 4 * heads * DIM : 3 * DIM // 2] = -300
    f_at = 4 * heads * DIM
    packed[:, f_at : f_at + DIM] = torch.randint(-8, 9, (rows, DIM), generator=g) / 8
    pitch = (width + 31) // 8 * 8
    buffer = torch.full((rows, pitch), torch.nan, dtype=torch.bfloat16)
    buffer[:, 8 : 8 + width] = packed
    return buffer.to(device)[:, 8:]


def cache_of(
    slots: int, heads: int, live: Sequence[int], seed: int = 0, device: str = "cpu"
) -> KdaFoldState:
    """Slots at strides of their own; all NaN but state and taps of the live ones."""
    plain = KdaFoldState.allocate(slots, heads, device)

    def apart(tensor: Tensor) -> Tensor:
        """The same, NaN or -1 everywhere, slots (and window entries) not adjacent."""
        fill = torch.nan if tensor.is_floating_point() else -1
        gap = 2 if tensor.dtype == torch.bfloat16 else 1
        shape = (slots, tensor.shape[1] + gap, *tensor.shape[2:])
        return tensor.new_full(shape, fill)[:, : tensor.shape[1]]

    cache = KdaFoldState(*(apart(getattr(plain, f.name)) for f in fields(plain)))
    g = generator(seed)
    for slot in live:
        cache.state[slot] = torch.randn(heads, DIM, DIM, generator=g).to(device)
        taps = torch.randn(TAPS - 1, 3 * heads * DIM, generator=g)
        cache.window[slot, : TAPS - 1] = taps.to(device)
        cache.counts[slot] = 0
    return cache


def clone(cache: KdaFoldState) -> KdaFoldState:
    """With the strides, so that what is between the slots is compared too."""

    def copy(x: Tensor) -> Tensor:
        return torch.empty_strided(
            x.shape, x.stride(), dtype=x.dtype, device=x.device
        ).copy_(x)

    return KdaFoldState(*(copy(getattr(cache, f.name)) for f in fields(cache)))


def batch_of(
    widths: Sequence[int],
    slots: Sequence[int],
    accepted: Sequence[int],
    device: str = "cpu",
) -> VerifyBatch:
    def ints(values: Sequence[int]) -> Tensor:
        return torch.tensor(list(values), dtype=torch.int32, device=device)

    starts = [0, *itertools.accumulate(widths)]
    return VerifyBatch(
        ints(starts), ints([0] * len(widths)), ints(slots), ints(accepted)
    )


def run_on_gpu(ctas: int | None = None, pdl: bool = True) -> Step:
    def step(
        packed: Tensor,
        w: KdaVerifyWeights,
        cache: KdaFoldState,
        batch: VerifyBatch,
        out: Tensor,
    ) -> None:
        kda_verify(packed, w, cache, batch, out, ctas=ctas, pdl=pdl)

    return step


def bits(x: Tensor) -> Tensor:
    """Contents, NaN and all."""
    kind = {2: torch.int16, 4: torch.int32}[x.element_size()]
    return x.contiguous().view(kind)


def same(one: KdaFoldState, other: KdaFoldState, slots: Sequence[int]) -> None:
    for f in fields(one):
        a, b = getattr(one, f.name), getattr(other, f.name)
        assert torch.equal(bits(a[slots]), bits(b[slots])), f.name


def run(
    step: Step,
    packed: Tensor,
    w: KdaVerifyWeights,
    cache: KdaFoldState,
    batch: VerifyBatch,
) -> Tensor:
    """Output rows, in rows of a NaN buffer that are not adjacent."""
    rows, heads = packed.shape[0], cache.state.shape[1]
    shape = (rows + 1, heads + 1, DIM)
    buffer = torch.full(shape, torch.nan, dtype=torch.bfloat16, device=packed.device)
    step(packed, w, cache, batch, buffer[:rows, :heads])
    assert torch.isnan(buffer[rows:]).all() and torch.isnan(buffer[:, heads:]).all()
    return buffer[:rows, :heads]


@dataclass
class Truth:
    """The reference of `verify_kernels.kda.reference` in one precision, beside the
    kernel's cache."""

    weights: KdaWeights
    cache: KdaState
    dtype: torch.dtype

    @classmethod
    def beside(
        cls, w: KdaVerifyWeights, cache: KdaFoldState, dtype: torch.dtype
    ) -> Truth:
        slots, heads = cache.state.shape[:2]
        taps = w.conv.to(dtype).view(3, heads, DIM, TAPS).permute(0, 3, 1, 2)
        own = KdaState.allocate(slots, heads, DIM, DIM, dtype, w.conv.device)
        own.state.copy_(cache.state)
        past = cache.window[:, : TAPS - 1].unflatten(2, (3, heads, DIM))
        for i, name in enumerate("qkv"):
            getattr(own, f"window_{name}").copy_(past[:, :, i])
        found = KdaWeights(
            taps[0],
            taps[1],
            taps[2],
            w.a_log.to(dtype),
            w.dt_bias.to(dtype),
            w.norm.to(dtype),
            w.lower_bound,
            w.norm_eps,
        )
        return cls(found, own, dtype)

    def step(
        self, packed: Tensor, w_fb: Tensor, batch: VerifyBatch, fold: bool = True
    ) -> Tensor:
        heads = self.cache.state.shape[1]
        rows = KdaRows.unpack(
            packed.to(self.dtype), w_fb.to(self.dtype), heads, DIM, bf16_decay=True
        )
        return reference.verify(batch, rows, self.weights, self.cache, fold=fold)


def check_close(name: str, found: Tensor, exact: Tensor, plain: Tensor) -> None:
    """At most twice the error of the same in fp32 torch, by norm over the last axis,
    beside 2^-23 of it for the approximate exponential and root."""
    error = (found.double() - exact).norm(dim=-1)
    allowed = 2 * (plain.double() - exact).norm(dim=-1)
    floor = 2.0**-23 * exact.norm(dim=-1)
    assert torch.isfinite(found).all(), name
    excess = error - (allowed + floor)
    assert (excess <= 0).all(), f"{name}: {error.tolist()}, allowed {allowed.tolist()}"


#: Widths, and accepted counts of the step before: 0, more than recorded, and -1 among
#: them. Request 2 is padding with rows; the others skip a step or two.
PLAN = [
    ((2, 0, 1, 8), (0, 7, 3, 1)),
    ((3, 1, 2, 0), (2, 0, 1, 4)),
    ((1, 4, 0, 5), (4, 1, 0, 6)),
    ((2, 2, 1, 1), (0, -1, 1, 5)),
]
SLOTS = (3, 5, 0, 1)
OVERRUNS = {3: 1, 5: 0, 1: 1}


def check_ragged_steps(step: Step, device: str = "cpu", heads: int = 2) -> None:
    """Ragged steps against fp64: results, state, records, windows; what is not of a
    live request keeps its NaN."""
    w = weights(heads, device=device)
    live = [s for s in SLOTS if s > 0]
    cache = cache_of(7, heads, live, device=device)
    before = clone(cache)
    exact = Truth.beside(w, cache, torch.float64)
    plain = Truth.beside(w, cache, torch.float32)
    for number, (widths, accepted) in enumerate(PLAN):
        batch = batch_of(widths, SLOTS, accepted, device)
        total = sum(widths)
        packed = projections(total + 1, heads, 10 + number, device)
        packed[total:] = torch.nan
        out = run(step, packed, w, cache, batch)
        assert torch.isnan(out[total]).all()
        right = exact.step(packed, w.w_fb, batch)
        near = plain.step(packed, w.w_fb, batch)
        check_close("out", out[:total], right[:total], near[:total].bfloat16())
        for slot in live:
            rows = int(exact.cache.width[slot])
            assert (cache.counts[slot, :, 0] == rows).all()
            for name in ("state", "u", "key", "decay"):
                kept = slice(None) if name == "state" else slice(0, rows)
                pair = []
                for truth in (exact, plain):
                    other = getattr(truth.cache, name if name != "decay" else "g")
                    other = other[slot] if name == "state" else other[slot, kept]
                    other = other.exp() if name == "decay" else other
                    flat = (
                        other.flatten(1) if name == "state" else other.transpose(0, 1)
                    )
                    pair.append(flat)
                got = getattr(cache, name)[slot]
                got = got.flatten(1) if name == "state" else got[:, kept]
                check_close(f"{name} of slot {slot}", got, *pair)
            line = [exact.cache.window_q, exact.cache.window_k, exact.cache.window_v]
            drafts = [exact.cache.z_q, exact.cache.z_k, exact.cache.z_v]
            taps = torch.stack([x[slot] for x in line], 1).flatten(1)
            own = torch.stack([x[slot, :rows] for x in drafts], 1).flatten(1)
            whole = torch.cat((taps, own))
            assert torch.equal(cache.window[slot, : len(whole)].double(), whole)
    for slot, count in OVERRUNS.items():
        assert (cache.counts[slot, :, 1] == count).all(), slot
    assert plain.cache.overruns == sum(OVERRUNS.values())
    same(cache, before, [s for s in range(7) if s not in live])


def check_widths_and_folds(step: Step, device: str = "cpu", heads: int = 1) -> None:
    """Field case F40: eight rows in one step, in two, and one at a time have the same
    bits, and so has what the next step folds of them."""
    w = weights(heads, 1, device)
    start = cache_of(2, heads, [1], 1, device)
    packed = projections(9, heads, 30, device)
    first: tuple[Tensor, KdaFoldState] | None = None
    for cut in ([8, 1], [3, 5, 1], [1] * 9):
        cache, parts, begin, done = clone(start), [], 0, 0
        for width in cut:
            batch = batch_of([width], [1], [done], device)
            rows = packed[begin : begin + width]
            parts.append(run(step, rows, w, cache, batch).clone())
            begin, done = begin + width, width
        out = torch.cat(parts)
        assert torch.isfinite(out).all()
        if first is None:
            first = out, cache
        assert torch.equal(bits(out), bits(first[0])), cut
        assert torch.equal(bits(cache.state[1]), bits(first[1].state[1])), cut
        for name in ("u", "key", "decay"):
            got, right = (getattr(c, name)[1, :, 0] for c in (cache, first[1]))
            assert torch.equal(bits(got), bits(right)), (cut, name)


def check_random_accepts(step: Step, steps: int, device: str = "cpu") -> None:
    """Field cases F02, F13: whatever widths and accepted counts, state, window and
    results are bit for bit those of decoding the accepted rows one by one."""
    heads = 1
    w = weights(heads, 4, device)
    cache = cache_of(3, heads, [2], 4, device)
    alone = clone(cache)
    g = generator(5)
    told, before = 0, 0
    for number in range(steps):
        width = int(torch.randint(1, 9, (1,), generator=g))
        packed = projections(width, heads, 50 + number, device)
        out = run(step, packed, w, cache, batch_of([width], [2], [told], device))
        told = int(torch.randint(0, width + 1, (1,), generator=g))
        for t in range(told):
            batch = batch_of([1], [2], [before], device)
            one = run(step, packed[t : t + 1], w, alone, batch)
            assert torch.equal(bits(one), bits(out[t : t + 1])), (number, t)
            before = 1
    packed = projections(1, heads, 49, device)
    for found, count in ((cache, told), (alone, before)):
        run(step, packed, w, found, batch_of([1], [2], [count], device))
    assert torch.equal(bits(cache.state[2]), bits(alone.state[2]))
    assert torch.equal(bits(cache.window[2, :4]), bits(alone.window[2, :4]))
    for name in ("u", "key", "decay"):
        got, right = (getattr(c, name)[2, :, 0] for c in (cache, alone))
        assert torch.equal(bits(got), bits(right)), name


def ragged_call(
    device: str = "cpu", heads: int = 1
) -> tuple[Tensor, KdaVerifyWeights, KdaFoldState, VerifyBatch]:
    """A step of widths 3, 0, 8 and 1 with rows to fold, as one run before left them."""
    w = weights(heads, 2, device)
    cache = cache_of(5, heads, [4, 1, 2], 2, device)
    g = generator(3)
    for slot, waiting in ((4, 2), (1, 3), (2, 8)):
        shape = (heads, waiting, DIM)
        for name in ("u", "key", "decay"):
            values = torch.rand(*shape, generator=g).to(device)
            getattr(cache, name)[slot, :, :waiting] = values / 4
        drafts = torch.randn(waiting, 3 * heads * DIM, generator=g)
        cache.window[slot, 3 : 3 + waiting] = drafts.to(device)
        cache.counts[slot, :, 0] = waiting
    batch = batch_of([3, 0, 8, 1], [4, 1, 2, 0], [2, 3, 5, 1], device)
    return projections(12, heads, 40, device), w, cache, batch


def check_equal_over(
    steps: Sequence[Step], device: str = "cpu", heads: int = 1
) -> None:
    """The same bits from every one of ``steps``, and from requests on their own."""
    packed, w, start, batch = ragged_call(device, heads)
    first: tuple[Tensor, KdaFoldState] | None = None
    for step in steps:
        cache = clone(start)
        out = run(step, packed, w, cache, batch)
        if first is None:
            first = out, cache
            assert torch.isfinite(out).all() and (out[11] == 0).all()
            assert not torch.equal(cache.state[2], start.state[2])
        assert torch.equal(bits(out), bits(first[0]))
        same(cache, first[1], list(range(5)))
    assert first is not None
    for slot, rows, told in ((4, slice(0, 3), 2), (2, slice(3, 11), 5)):
        cache = clone(start)
        alone = batch_of([rows.stop - rows.start], [slot], [told], device)
        out = run(steps[0], packed[rows], w, cache, alone)
        assert torch.equal(bits(out), bits(first[0][rows]))
        same(cache, first[1], [slot])


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [1, 6])
@pytest.mark.parametrize("ctas", CLUSTERS)
def test_ragged_steps_against_the_reference(ctas: int, heads: int) -> None:
    check_ragged_steps(run_on_gpu(ctas), "cuda", heads)


@pytest.mark.gpu
@pytest.mark.parametrize("ctas", CLUSTERS)
def test_widths_and_folds_have_the_same_bits(ctas: int) -> None:
    check_widths_and_folds(run_on_gpu(ctas), "cuda", 12)


@pytest.mark.gpu
def test_random_accepts_are_plain_decoding() -> None:
    check_random_accepts(run_on_gpu(), 300, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [1, 12, 96])
def test_clusters_and_batches_have_the_same_bits(heads: int) -> None:
    """Launched plainly and programmatically."""
    forms = itertools.product(CLUSTERS, (False, True))
    check_equal_over([run_on_gpu(c, pdl) for c, pdl in forms], "cuda", heads)


@pytest.mark.gpu
@pytest.mark.parametrize("pdl", [False, True])
def test_a_thousand_repeats_with_another_stream_busy(pdl: bool) -> None:
    """Field case F40: the same bits each time, cluster sizes cycling."""
    packed, w, start, batch = ragged_call("cuda", 24)
    right = clone(start)
    expected = run(run_on_gpu(8, False), packed, w, right, batch).clone()
    out = torch.empty_like(expected)
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    cache = clone(start)
    with neighbours() as disturb:
        for i in range(1000):
            disturb()
            for f in fields(cache):
                getattr(cache, f.name).copy_(getattr(start, f.name))
            out.fill_(torch.nan)
            kda_verify(packed, w, cache, batch, out, ctas=CLUSTERS[i % 3], pdl=pdl)
            wrong += (bits(out) != bits(expected)).sum()
            wrong += (bits(cache.state) != bits(right.state)).sum()
            wrong += (bits(cache.u) != bits(right.u)).sum()
    assert int(wrong) == 0


@pytest.mark.gpu
def test_a_graph_of_dependent_steps_reads_what_is_new() -> None:
    """Field case F06: one captured step, replayed with other rows, widths, slots and
    counts, chained programmatically with a second layer, equals eager launches."""
    w = [weights(2, seed, "cuda") for seed in (0, 1)]
    caches = [cache_of(7, 2, [3, 5, 1], seed, "cuda") for seed in (0, 1)]
    eager = [clone(c) for c in caches]
    packed = torch.zeros(16, 1168, dtype=torch.bfloat16, device="cuda")
    batch = batch_of([1] * 4, [0] * 4, [0] * 4, "cuda")
    outs = [torch.zeros(16, 2, DIM, dtype=torch.bfloat16, device="cuda") for _ in w]

    def layers(into: list[KdaFoldState], results: list[Tensor], pdl: bool) -> None:
        for one, cache, out in zip(w, into, results, strict=True):
            kda_verify(packed, one, cache, batch, out, pdl=pdl)

    layers(caches, outs, True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layers(caches, outs, True)
    for number in range(40):
        widths, accepted = PLAN[number % 4]
        total = sum(widths)
        rows = projections(total, 2, 60 + number, "cuda")
        packed[:total, : packed_width(2)] = rows[:, : packed_width(2)]
        new = batch_of(widths, SLOTS, accepted, "cuda")
        for name in ("row_start", "state_slots", "accepted"):
            getattr(batch, name).copy_(getattr(new, name))
        right = [torch.full_like(out, torch.nan) for out in outs]
        layers(eager, right, False)
        for out in outs:
            out.fill_(torch.nan)
        graph.replay()
        for found, wanted in zip(outs, right, strict=True):
            assert torch.isfinite(found[:total]).all()
            assert torch.equal(bits(found), bits(wanted)), number
        for one, other in zip(caches, eager, strict=True):
            same(one, other, [3, 5, 1])


@pytest.mark.gpu
def test_slots_far_apart_in_memory() -> None:
    """Field case F37: slots 2^31 bytes apart and more need 64-bit offsets."""
    packed, w, near, batch = ragged_call("cuda", 1)
    far = clone(near)
    pool = torch.empty(4 * 2**29 + DIM * DIM, device="cuda")
    state = pool.as_strided((5, 1, DIM, DIM), (2**29, DIM * DIM, DIM, 1))
    state.copy_(near.state)
    far = replace(far, state=state)
    expected = run(run_on_gpu(), packed, w, near, batch)
    assert torch.equal(bits(run(run_on_gpu(), packed, w, far, batch)), bits(expected))
    same(far, near, [4, 1, 2])


def test_start_forgets_the_rows_that_wait() -> None:
    cache = KdaFoldState.allocate(4, 2, "cpu")
    cache.counts[:] = 5
    cache.start(torch.tensor([1, 3]))
    assert cache.counts[:, 0].tolist() == [[5, 5], [0, 5], [5, 5], [0, 5]]


@pytest.mark.parametrize("fold", [True, False])
@pytest.mark.parametrize("requests", [1, 8, 64])
@pytest.mark.parametrize("heads", [6, 12, 24, 48, 96])
def test_a_cluster_size_that_is_compiled_is_chosen(
    heads: int, requests: int, fold: bool
) -> None:
    """And no wider clusters for more work than for less."""
    chosen = cluster_size(requests, heads, fold)
    assert chosen in CLUSTERS
    assert cluster_size(requests + 1, heads, fold) <= chosen


def test_no_rows_and_no_device() -> None:
    packed, w, cache, batch = ragged_call()
    assert kda_verify(packed[:0], w, cache, batch).shape == (0, 1, DIM)
    with pytest.raises(ValueError, match=r"packed is on cpu; the kernel needs a CUDA"):
        kda_verify(packed, w, cache, batch)


def change(part: str, **values: Tensor) -> Callable[[dict[str, object]], None]:
    """Replaces fields of one of a call's arguments."""

    def apply(call: dict[str, object]) -> None:
        call[part] = replace(call[part], **values)  # type: ignore[type-var]

    return apply


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda c: c.update(ctas=3), r"ctas is 3; it must be one of \(1, 2, 4, 8\)"),
        (
            lambda c: c.update(packed=torch.zeros(3, 640)),
            r"packed is \(3, 640\) .* P at least 641 for 1 heads",
        ),
        (
            lambda c: c.update(packed=torch.zeros(65, 641)),
            "packed has 65 rows; at most",
        ),
        (lambda c: c.update(packed=torch.zeros(3, 648)), "packed is torch.float32"),
        (
            lambda c: c.update(packed=torch.zeros(3, 641).bfloat16()),
            r"packed has strides \(641, 1\).*multiple of 16",
        ),
        (change("w", w_fb=torch.zeros(128, 64)), r"w_fb is .*\(128, 64\); it must be"),
        (change("w", conv=torch.zeros(4, 384).T), "conv has strides"),
        (change("w", a_log=torch.zeros(2)), r"a_log is torch.float32 \(2,\)"),
        (
            change("cache", window=torch.zeros(5, 10, 384).bfloat16()),
            r"window is \(5, 10, 384\); .* W at least 11",
        ),
        (
            change("cache", state=torch.zeros(5, 1, 128, 129)[..., :128]),
            "state has strides",
        ),
        (change("cache", counts=torch.zeros(5, 1, 2)), "counts is torch.float32"),
        (change("batch", accepted=torch.zeros(4)), "accepted is torch.float32"),
        (change("w", norm=torch.zeros(128, device="meta")), "norm is on meta and"),
        (lambda c: c.update(out=torch.zeros(12, 1, 128)), "out is torch.float32"),
    ],
)
def test_bad_input_is_refused(
    edit: Callable[[dict[str, object]], None], words: str
) -> None:
    packed, w, cache, batch = ragged_call()
    call: dict[str, object] = {"packed": packed, "w": w, "cache": cache}
    call |= {"batch": batch, "out": None, "ctas": None}
    edit(call)
    with pytest.raises(ValueError, match=words):
        kda_verify(
            *(call[n] for n in ("packed", "w", "cache", "batch", "out")),  # type: ignore[arg-type]
            ctas=call["ctas"],  # type: ignore[arg-type]
        )
