# SPDX-License-Identifier: Apache-2.0
"""The skinny GEMM: its reference anywhere, its numbers on a GPU."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from torch import Tensor

from experiments.bench.neighbours import neighbours
from verify_kernels.common.variant import cached, device_arch
from verify_kernels.skinny_gemm import SkinnyGemm, choice, host, reference
from verify_kernels.skinny_gemm.direct_tiling import DirectTiling
from verify_kernels.skinny_gemm.tiling import SUM_ORDER

#: (N, K): for every K a projection of Kimi K3 at some TP, or of a tiny model, and N
#: that leave most CTAs, or most of a tile, without rows.
SHAPES = (
    (512, 64),
    (768, 128),
    (17, 128),
    (7168, 192),
    (384, 256),
    (7168, 384),
    (1, 384),
    (1154, 512),
    (264, 512),
    (16, 512),
    (7168, 768),
    (7168, 1056),
    (1152, 1536),
    (7168, 2112),
    (7168, 3072),
    (448, 3584),
    (7168, 4224),
    (7168, 6144),
    (3216, 7168),
    (56, 7168),
    (17, 7168),
    (1, 7168),
    (7168, 8448),
    (7168, 12288),
    (7168, 16896),
    (7168, 33792),
)
KINDS = ("plain", "outliers", "cancelling")
SIZES = (2, 3, 7, 8, 9, 16, 17, 31, 32, 33, 64)
MOE_OUTPUTS = (torch.float32, torch.bfloat16, torch.bfloat16)
#: About 30 us of an H200's clock: longer than the weights of these tests take to come.
SLOW = 60_000


def inputs(
    n: int, k: int, kind: str = "plain", rows: int = 64, *, device: str = "cuda"
) -> tuple[Tensor, Tensor]:
    """x [rows, K] and w [N, K] in bf16; products of order 1, or 300, or nearly none.

    "cancelling" has one half of the columns, at random places, undo the other but for
    one part in 128; "noise" undoes it wholly, so that nothing is left but the roundings
    of the sums: another order changes 20 to 70 % of the outputs (emulated), and on
    "cancelling" 1 %.
    """
    generator = torch.Generator(device).manual_seed(n + k)

    def normal(*shape: int) -> Tensor:
        return torch.randn(
            *shape, generator=generator, device=device, dtype=torch.bfloat16
        )

    x, w = normal(rows, k), normal(n, k).mul_(k**-0.5)
    if kind == "outliers":
        x[:, [0, 7, k // 2 - 1, k // 2, k - 1]] *= 300
    elif kind in ("cancelling", "noise"):
        one, other = torch.randperm(k, generator=generator, device=device).chunk(2)
        left = 2.0**-7 if kind == "cancelling" else 0.0
        x[:, other] = x[:, one] * (1 + left * normal(rows, k // 2))
        w[:, other] = -w[:, one]
    return x, w


def padded(values: Tensor) -> Tensor:
    """The same rows, not adjacent, starting 16 bytes in, with NaN around and after."""
    rows, width = values.shape
    buffer = values.new_full((rows + 8, width + 24), torch.nan)
    view = buffer[:rows, 8 : 8 + width]
    view.copy_(values)
    return view


def launch(
    gemm: SkinnyGemm, x: Tensor, ws: Sequence[Tensor], dtypes: Sequence[torch.dtype]
) -> list[Tensor]:
    """Every output of a launch, into rows of NaN of which the ends must stay NaN."""
    buffers = [
        torch.full(
            (x.shape[0] + 1, w.shape[0] + 3), torch.nan, dtype=d, device=x.device
        )
        for w, d in zip(ws, dtypes, strict=True)
    ]
    outs = [b[:-1, : w.shape[0]] for b, w in zip(buffers, ws, strict=True)]
    gemm(x, ws, outs)
    for buffer, out in zip(buffers, outs, strict=True):
        assert torch.isfinite(out).all()
        assert torch.isnan(buffer).sum() == buffer.numel() - out.numel()
    return outs


def run(
    k: int, x: Tensor, w: Tensor, dtype: torch.dtype = torch.bfloat16, pdl: bool = True
) -> Tensor:
    """One matrix's output, from x in padded rows."""
    gemm = SkinnyGemm(k, out_dtype=dtype, pdl=pdl)
    return launch(gemm, padded(x), [w], [dtype])[0]


def bits(x: Tensor) -> Tensor:
    """NaN compares unequal to itself; its bits do not."""
    kind = torch.int16 if x.dtype == torch.bfloat16 else torch.int32
    return x.contiguous().view(kind)


def cuts(k: int) -> int:
    """Roundings between the products of one output and their fp32 sum.

    A tensor-core step adds 16 products and the running sum, each cut to the precision
    of the largest, and cuts the result; warps and slices follow, an addition each.
    """
    slices, warps = SUM_ORDER[k]
    return 18 * (k // slices // warps // 16) + warps + int(math.log2(slices))


def check_accuracy(out: Tensor, x: Tensor, w: Tensor) -> None:
    """Each element within its bound, and all together twice torch's bf16 product.

    An element may be off by its own rounding to bf16 and by `cuts` of at most 2^-23 of
    the sum of magnitudes. In norm, one such ulp an element is added to twice torch's
    error: where sums cancel, fp32 noise is all there is, in another order each.
    """
    exact = x.double() @ w.double().t()
    size = x.double().abs() @ w.double().abs().t()
    step = 2.0**-8 if out.dtype == torch.bfloat16 else 0.0
    k = x.shape[1]
    excess = (out.double() - exact).abs() - step * exact.abs()
    excess -= (1 + step) * cuts(k) * 2.0**-23 * size
    assert (excess <= 0).all(), f"{int((excess > 0).sum())} elements past their bound"
    if step:
        error = (out.double() - exact).norm()
        peer = (torch.mm(x, w.t()).double() - exact).norm()
        noise = 2.0**-23 * size.norm()
        assert error <= 2 * peer + noise, (float(error), float(peer), float(noise))


@pytest.fixture
def full_precision_sums() -> Iterator[None]:
    """torch may otherwise add partial sums in bf16 and be an easy peer to beat."""
    matmul = torch.backends.cuda.matmul
    before = matmul.allow_bf16_reduced_precision_reduction
    matmul.allow_bf16_reduced_precision_reduction = False
    yield
    matmul.allow_bf16_reduced_precision_reduction = before


@pytest.mark.gpu
@pytest.mark.usefixtures("full_precision_sums")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_error_is_that_of_the_formats(n: int, k: int, kind: str) -> None:
    x, w = inputs(n, k, kind)
    check_accuracy(run(k, x, w), x, w)


@pytest.mark.gpu
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_rows_do_not_depend_on_batch_mates(n: int, k: int) -> None:
    """Field case F40: each row alone has the bits of that row in the first and in the
    last M of 64, with NaN in the rows after them, with programmatic launch and without.
    """
    x, w = inputs(n, k, "noise")
    alone = torch.cat([run(k, x[t : t + 1], w) for t in range(64)])
    for m in SIZES:
        for rows in (slice(0, m), slice(64 - m, 64)):
            for pdl in (True, False):
                found = run(k, x[rows], w, pdl=pdl)
                assert torch.equal(bits(found), bits(alone[rows])), (m, rows, pdl)


@pytest.mark.gpu
@pytest.mark.usefixtures("full_precision_sums")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("n", "k"), [(1, 7168), (28, 7168), (56, 7168), (3216, 7168), (16, 512)]
)
def test_fp32_output_is_the_sum_before_its_rounding(n: int, k: int, kind: str) -> None:
    """The bound without bf16's step; rounded by torch it is the bf16 output exactly."""
    x, w = inputs(n, k, kind)
    wide = run(k, x, w, torch.float32)
    check_accuracy(wide, x, w)
    for m in (1, 8, 9, 64):
        assert torch.equal(bits(run(k, x[:m], w, torch.float32)), bits(wide[:m]))
        assert torch.equal(bits(wide[:m].bfloat16()), bits(run(k, x[:m], w)))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("k", "ns"),
    [
        (7168, (56, 224, 768)),
        (7168, (896, 3584, 768)),
        (7168, (896, 3584, 12288)),
        (7168, (1, 17, 33)),
        (7168, (3, 1, 1)),
        (512, (16, 128, 256)),
    ],
)
def test_matrices_of_one_launch_get_the_bits_of_their_own(
    k: int, ns: tuple[int, ...]
) -> None:
    """Router, latent down and shared gate-up at TP 16, sharded and whole, and at TP 1,
    of tiny-k3, and tiles that hold rows of all three."""
    x, _ = inputs(1, k, "outliers")
    ws = [inputs(n, k)[1] for n in ns]
    alone = [run(k, x, w, dtype) for w, dtype in zip(ws, MOE_OUTPUTS, strict=True)]
    for pdl in (True, False):
        gemm = SkinnyGemm(k, out_dtype=MOE_OUTPUTS, pdl=pdl)
        for m in (1, 2, 8, 9, 33, 64):
            together = launch(gemm, padded(x[:m]), ws, MOE_OUTPUTS)
            for found, wanted in zip(together, alone, strict=True):
                assert torch.equal(bits(found), bits(wanted[:m])), (m, pdl)


@pytest.mark.gpu
@pytest.mark.parametrize("clusters", [1, 3, 11])
def test_bits_do_not_depend_on_the_number_of_ctas(
    clusters: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A smaller device: rows fall on other tiles, and every ring turns many times."""

    def smaller(chosen: choice.Choice, n: int, device: int) -> int:
        least = -(-n // chosen.cut.rows) if isinstance(chosen.cut, DirectTiling) else 1
        return max(clusters, least) * chosen.cut.cluster

    for n, k in ((500, 7168), (500, 768), (300, 128), (300, 12288)):
        x, w = inputs(n, k, "noise")
        wanted = run(k, x, w)
        with monkeypatch.context() as small:
            small.setattr(host, "grid", smaller)
            for m in (1, 8, 9, 31, 64):
                assert torch.equal(bits(run(k, x[:m], w)), bits(wanted[:m])), (k, m)


@pytest.mark.gpu
@pytest.mark.parametrize("k", SUM_ORDER)
def test_every_kernel_gives_the_same_bits(k: int) -> None:
    """Each that is shipped for this K, in every design, plainly and programmatically,
    at the most rows it takes and at one, on an uneven number of weights."""
    n = 333
    x, w = inputs(n, k, "noise")
    wanted = run(k, x, w)
    both = ("fp32",) in choice.outputs_of(k)
    wide = run(k, x, w, torch.float32) if both else None
    arch = device_arch(torch.cuda.current_device())
    for cut, outputs in choice.kernels():
        if cut.k != k or len(outputs) > 1:
            continue
        expected = wide if outputs == ("fp32",) else wanted
        assert expected is not None
        kernel = cached(host.variant(cut, outputs), arch)
        run_of = cut.rows if isinstance(cut, DirectTiling) else 0
        ctas = host.grid(choice.Choice(cut, run_of), n, torch.cuda.current_device())
        most = getattr(cut, "max_tokens", cut.tokens)
        for m in (most, 1):
            for pdl in (0, 1):
                out = torch.full_like(expected[:m], torch.nan)
                kernel(x[:m], [w], [out], ctas, pdl)
                assert torch.equal(bits(out), bits(expected[:m])), (cut.name, m, pdl)


def wrong_of_repeats(gemm: SkinnyGemm, x: Tensor, w: Tensor, repeats: int) -> int:
    """Outputs with other bits than the first, of ``repeats`` launches, M cycling.

    Launches of a cycle follow each other directly, so that programmatic ones overlap.
    """
    sizes = (1, 64, 2, 33, 8, 5, 16, 3, 32, 9)
    expected = [
        torch.empty_like(x[:m, :1]).expand(m, w.shape[0]).clone() for m in sizes
    ]
    for m, out in zip(sizes, expected, strict=True):
        gemm(x[:m], w, out)
    outs = [torch.empty_like(out) for out in expected]
    wrong = torch.zeros((), dtype=torch.int64, device=x.device)
    with neighbours() as disturb:
        for _ in range(repeats // len(sizes)):
            for out in outs:
                out.fill_(torch.nan)
            disturb()
            for m, out in zip(sizes, outs, strict=True):
                gemm(x[:m], w, out)
            for out, wanted in zip(outs, expected, strict=True):
                wrong += (bits(out) != bits(wanted)).sum()
    return int(wrong)


@pytest.mark.gpu
@pytest.mark.parametrize("pdl", [False, True])
@pytest.mark.parametrize(
    ("n", "k"),
    [
        (768, 128),
        (1154, 512),
        (7168, 768),
        (1152, 1536),
        (7168, 3072),
        (3216, 7168),
        (7168, 12288),
    ],
)
def test_a_thousand_repeats_with_another_stream_busy(n: int, k: int, pdl: bool) -> None:
    x, w = inputs(n, k, "outliers")
    assert wrong_of_repeats(SkinnyGemm(k, pdl=pdl), padded(x), w, 1000) == 0


def captured(work: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """``work`` as a graph; it must have run before, so that nothing compiles."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 8, 33, 64])
def test_a_graph_reads_what_is_there_at_replay(rows: int) -> None:
    """Field case F38: captured once, replayed on other tokens and other weights."""
    gemm = SkinnyGemm(7168, out_dtype=MOE_OUTPUTS)
    x = torch.empty(rows, 7168, dtype=torch.bfloat16, device="cuda")
    ws = [x.new_empty(n, 7168) for n in (56, 224, 768)]
    outs = [
        torch.empty(rows, len(w), dtype=d, device="cuda")
        for w, d in zip(ws, MOE_OUTPUTS, strict=True)
    ]

    def fill(seed: int) -> None:
        generator = torch.Generator("cuda").manual_seed(seed)
        for tensor in (x, *ws):
            tensor.normal_(generator=generator)

    fill(0)
    gemm(x, ws, outs)
    graph = captured(lambda: gemm(x, ws, outs))
    for seed in range(1, 4):
        fill(seed)
        wanted = launch(gemm, x, ws, MOE_OUTPUTS)
        for out in outs:
            out.fill_(torch.nan)
        graph.replay()
        for out, value in zip(outs, wanted, strict=True):
            assert torch.equal(bits(out), bits(value))


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 8, 64])
def test_dependent_launches_give_the_bits_of_plain_ones(rows: int) -> None:
    """Field case F08: each kernel releases the next at entry, which reads what this one
    still writes and overwrites what it still reads. 100 replays of 48 GEMMs back and
    forth between two buffers equal the same chain launched plainly."""
    _, down = inputs(768, 7168)
    _, up = inputs(7168, 768)
    start, _ = inputs(1, 7168, rows=rows)
    wide, narrow = torch.empty_like(start), start.new_empty(rows, 768)
    gemms = [(SkinnyGemm(7168, pdl=p), SkinnyGemm(768, pdl=p)) for p in (False, True)]

    def chain(pdl: bool) -> None:
        first, second = gemms[pdl]
        wide.copy_(start)
        for _ in range(24):
            first(wide, down, narrow)
            second(narrow, up, wide)

    chain(False)
    expected = wide.clone(), narrow.clone()
    assert expected[0].float().std() > 0.1
    chain(True)
    graph = captured(lambda: chain(True))
    for _ in range(100):
        wide.fill_(torch.nan)
        narrow.fill_(torch.nan)
        graph.replay()
        assert torch.equal(bits(wide), bits(expected[0]))
        assert torch.equal(bits(narrow), bits(expected[1]))


@functools.cache
def slow_copy() -> Callable[[Tensor, Tensor, int], None]:
    """target.copy_(source), with dependents released about 30 us before it is done."""
    from tests.verify_kernels.slow_kernel import compiled

    kernel = compiled(device_arch(torch.cuda.current_device()))
    return lambda source, target, cycles: kernel(
        source.view(torch.int32).flatten(), target.view(torch.int32).flatten(), cycles
    )


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 8, 16, 64])
@pytest.mark.parametrize(("n", "k"), [(7168, 768), (56, 7168)])
def test_tokens_are_read_after_a_slow_producer(n: int, k: int, rows: int) -> None:
    """Field case F08: the kernel runs beside a producer that has not yet written x, a
    thousand times, with other tokens each time; held ones (up to M = 16) and ones that
    are copied to shared memory."""
    slow, gemm = slow_copy(), SkinnyGemm(k)
    tokens, w = inputs(n, k, rows=8 * rows)
    sources = tokens.view(8, rows, k)
    expected = torch.stack([run(k, source, w, pdl=False) for source in sources])
    x, outs = torch.empty_like(sources[0]), torch.empty_like(expected)

    def chain() -> None:
        for source, out in zip(sources, outs, strict=True):
            slow(source, x, SLOW)
            gemm(x, w, out)

    chain()
    graph = captured(chain)
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for i in range(125):
        outs.fill_(torch.nan)
        graph.replay() if i % 5 else chain()
        wrong += (bits(outs) != bits(expected)).sum()
    assert int(wrong) == 0


@pytest.mark.gpu
def test_a_read_before_the_wait_is_seen_behind_that_producer() -> None:
    """The test above can fail: a planted kernel that reads x too early gets old
    values."""
    from tests.verify_kernels.planted.base import planted
    from tests.verify_kernels.planted.order import HoistedRead

    arch = device_arch(torch.cuda.current_device())
    hoisted = planted(HoistedRead()).compile(arch)
    slow = slow_copy()
    w = torch.ones(128, dtype=torch.bfloat16, device="cuda")
    x = torch.zeros(64, dtype=torch.bfloat16, device="cuda")
    y = torch.empty(64, 8, device="cuda")
    late = 0
    for i in range(1, 21):
        slow(torch.full_like(x, i), x, SLOW)
        hoisted(w, x, y)
        late += int((y[:, 0] != i).any())
    assert late > 0


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 8, 16])
def test_launches_without_end_leave_no_peer_behind(rows: int) -> None:
    """Field case F36: a CTA that left early would be written to by its peers. Clusters
    of 2, 4 and 8 without a closing barrier, 100,000 programmatic launches each, beside
    a stream that shifts the timing; every output of every launch is looked at."""
    x, w = inputs(56, 7168, rows=rows)
    gemm, expected = SkinnyGemm(7168), run(7168, x, w)
    outs = torch.empty(1000, rows, 56, dtype=torch.bfloat16, device="cuda")

    def chain() -> None:
        for out in outs:
            gemm(x, w, out)

    graph = captured(chain)
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    with neighbours() as disturb:
        for _ in range(100):
            disturb()
            outs.fill_(torch.nan)
            graph.replay()
            wrong += (bits(outs) != bits(expected)).sum()
    assert int(wrong) == 0


@pytest.mark.gpu
def test_weights_of_more_than_two_to_the_31_elements() -> None:
    """Field case F37: the last rows of W lie past 2^31 elements; their outputs have the
    bits that those rows give alone."""
    k, n = 7168, 300_100
    assert n * k > 2**31
    x, ends = inputs(600, k, "outliers")
    w = torch.zeros(n, k, dtype=torch.bfloat16, device="cuda")
    w[:300], w[-300:] = ends[:300], ends[300:]
    alone = run(k, x, ends)
    for m in (1, 8, 64):
        out = run(k, x[:m], w)
        assert torch.equal(bits(out[:, :300]), bits(alone[:m, :300]))
        assert torch.equal(bits(out[:, -300:]), bits(alone[:m, 300:]))
        assert not out[:, 300:-300].any()


@pytest.mark.gpu
def test_rows_far_apart_in_memory() -> None:
    """Field case F37: rows of x and of the output 2^31 elements apart."""
    k, n = 1536, 1152
    x, w = inputs(n, k, rows=2)
    pool = torch.empty(2**31 + k + n, dtype=torch.bfloat16, device="cuda")
    far = pool.as_strided((2, k), (2**31, 1))
    out = pool.as_strided((2, n), (2**31, 1), k)
    far.copy_(x)
    out.fill_(torch.nan)
    SkinnyGemm(k)(far, w, out)
    assert torch.equal(bits(out), bits(run(k, x, w)))
    assert torch.equal(bits(far), bits(x))


@pytest.mark.gpu
def test_no_rows_is_no_launch() -> None:
    x, w = inputs(17, 128, rows=8)
    out = torch.full((8, 17), torch.nan, dtype=torch.bfloat16, device="cuda")
    SkinnyGemm(128)(x[:0], w, out[:0])
    assert torch.isnan(out).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("n", "k"), [(17, 128), (40, 2112), (8, 12288)])
def test_reference_is_the_matrix_product(n: int, k: int, kind: str) -> None:
    """Against torch's fp64 product: K roundings of the sum of magnitudes on each side,
    2^-53 in fp64; then in fp32, 2^-24. Rows alone have the bits of rows together."""
    x, w = inputs(n, k, kind, rows=6, device="cpu")
    exact = x.double() @ w.double().t()
    size = x.double().abs() @ w.double().abs().t()
    found = reference.skinny_gemm(x, w)
    assert (found.dtype, found.shape) == (torch.float64, (6, n))
    assert ((found - exact).abs() <= 2 * k * 2.0**-53 * size).all()
    single = reference.skinny_gemm(x, w, torch.float32)
    assert single.dtype == torch.float32
    assert ((single - exact).abs() <= k * 2.0**-24 * size).all()
    for compute, together in ((torch.float64, found), (torch.float32, single)):
        for t in range(6):
            alone = reference.skinny_gemm(x[t : t + 1], w, compute)
            assert torch.equal(alone[0], together[t])
