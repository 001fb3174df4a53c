# SPDX-License-Identifier: Apache-2.0
"""MLA's kernels on a GPU: numbers, row invariance, 1,000 repeats; refusals anywhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from experiments.bench.neighbours import neighbours
from tests.verify_kernels import mla_cases
from tests.verify_kernels.mla_cases import LATENT, LINE, SCALE, Case, expected
from verify_kernels.batch import VerifyBatch
from verify_kernels.mla import (
    MlaSpace,
    mla_absorb,
    mla_attend,
    mla_front,
    mla_value,
    reference,
)
from verify_kernels.mla.host import split_bits

EPS = 1e-5


def attend(
    case: Case,
    *,
    causal: bool = True,
    counted: bool = False,
    pdl: bool = True,
    lse: bool = False,
    space: MlaSpace | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Latents, and log-sum-exps if wanted, of outputs that begin as NaN."""
    rows, heads, _ = case.query.shape
    space = space or MlaSpace.allocate(heads, case.query.device)
    latent = case.query.new_full((rows, heads, LATENT), torch.nan)
    found = case.query.new_full((rows, heads), torch.nan).float() if lse else None
    mla_attend(
        case.query,
        case.cache,
        case.batch,
        space,
        latent,
        scale=SCALE,
        causal=causal,
        counted=counted,
        lse=found,
        pdl=pdl,
    )
    return latent, found


def check(case: Case, causal: bool = True) -> None:
    """No further from fp64 than twice plain bf16 torch."""
    latent, lse = attend(case, causal=causal, lse=True)
    assert lse is not None
    truth, true_lse = expected(case, causal)
    plain, _ = expected(case, causal, torch.bfloat16)
    error = (latent.double() - truth).norm()
    assert error <= 2 * (plain.double() - truth).norm()
    live = torch.isfinite(true_lse)
    assert torch.equal(torch.isfinite(lse), live)
    assert (lse[live] - true_lse[live]).abs().max() < 1e-3
    assert not latent[~live].any()


def alone(case: Case, request: int, t: int) -> Case:
    """A step with nothing but row t of a request."""
    batch = case.batch
    row = int(batch.row_start[request]) + t
    one = slice(request, request + 1)
    assert batch.block_table is not None
    return Case(
        VerifyBatch(
            torch.tensor([0, 1], dtype=torch.int32, device=case.query.device),
            batch.history[one] + t,
            batch.state_slots[one],
            batch.accepted[one],
            batch.block_table[one],
        ),
        case.query[row : row + 1],
        case.cache,
    )


SHAPES = [
    ([1000], [1], 6, 64),
    ([8191], [8], 6, 3072),
    ([4093, 0, 17, 777], [8, 1, 0, 5], 12, 64),
    ([511, 512, 513], [8, 8, 8], 24, 128),
    ([2047, 4090], [1, 8], 48, 5760),
    ([1020, 3, 64, 63, 65, 128, 900, 1], [8, 7, 6, 5, 4, 3, 2, 1], 96, 16),
    ([100] * 64, [1] * 64, 6, 64),
    ([300] * 8, [8] * 8, 1, 64),
]


@pytest.mark.gpu
@pytest.mark.parametrize(("histories", "widths", "heads", "page"), SHAPES)
def test_numbers(
    histories: Sequence[int], widths: Sequence[int], heads: int, page: int
) -> None:
    rows = min(sum(widths) + 3, 64)
    case = mla_cases.make(
        histories, widths, heads, page=page, rows=rows, gap=64, device="cuda"
    )
    check(case)


@pytest.mark.gpu
def test_requests_without_a_slot() -> None:
    case = mla_cases.make(
        [700, 90, 30], [4, 4, 4], heads=12, dead=(0, 2), device="cuda"
    )
    check(case)


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [4, 64])
def test_a_draft_block(heads: int) -> None:
    check(mla_cases.make([3000], [7], heads, device="cuda"), causal=False)


@pytest.mark.gpu
@pytest.mark.parametrize("spread", [0.0, 30.0], ids=["uniform", "one_hot"])
def test_flat_and_sharp_attention(spread: float) -> None:
    check(mla_cases.make([2500], [8], 6, spread=spread, device="cuda"))


@pytest.mark.gpu
def test_outlying_channels() -> None:
    case = mla_cases.make([1500], [8], 12, device="cuda")
    case.cache[..., 5::97] *= 60
    case.query[..., 7::101] *= 20
    check(case)


@pytest.mark.gpu
def test_a_long_context() -> None:
    check(mla_cases.make([131065], [8], 6, device="cuda"))


@pytest.mark.gpu
@pytest.mark.parametrize(("histories", "widths", "heads", "page"), SHAPES[1:6])
def test_a_row_has_the_bits_that_it_has_alone(
    histories: Sequence[int], widths: Sequence[int], heads: int, page: int
) -> None:
    case = mla_cases.make(histories, widths, heads, page=page, device="cuda")
    whole, lse = attend(case, lse=True)
    assert lse is not None
    for request, width in enumerate(widths):
        for t in range(width):
            row = int(case.batch.row_start[request]) + t
            one, one_lse = attend(alone(case, request, t), lse=True)
            assert one_lse is not None
            assert torch.equal(whole[row], one[0]), (request, t)
            assert torch.equal(lse[row], one_lse[0]), (request, t)


@pytest.mark.gpu
@pytest.mark.parametrize("pdl", [True, False])
def test_repeats(pdl: bool) -> None:
    """1,000 launches, the steps in turn, beside a busy stream and in shared memory that
    others left."""
    space = MlaSpace.allocate(12, "cuda")
    cases = [
        mla_cases.make(histories, widths, 12, seed=seed, device="cuda")
        for seed, (histories, widths) in enumerate(
            [
                ([8185], [8]),
                ([1000], [1]),
                ([4090, 300, 17, 9000], [8, 1, 5, 2]),
                ([63] * 8, [8] * 8),
            ]
        )
    ]
    first = [attend(case, space=space, pdl=pdl)[0] for case in cases]
    wrong = torch.zeros(len(cases), dtype=torch.int64, device="cuda")
    with neighbours() as disturb:
        for i in range(1000):
            disturb()
            which = i % len(cases)
            found, _ = attend(cases[which], space=space, pdl=pdl)
            wrong[which] += (found != first[which]).any()
    assert wrong.tolist() == [0] * len(cases)


@pytest.mark.gpu
def test_a_row_sees_its_own_line_and_none_behind() -> None:
    case = mla_cases.make([640], [4], heads=6, device="cuda")
    before, _ = attend(case)
    assert case.batch.block_table is not None
    case.cache[case.batch.block_table[0, 10].long(), 2] *= -2
    after, _ = attend(case)
    for t in range(4):
        assert torch.equal(before[t], after[t]) == (t < 2)


@pytest.mark.gpu
def test_pages_behind_two_to_the_31() -> None:
    """Bytes, of a cache whose pages lie far apart."""
    case = mla_cases.make([130], [2], heads=6, device="cuda")
    pages, page, _ = case.cache.shape
    apart = 2**30 + 2**12
    storage = torch.empty(
        (pages - 1) * apart + page * LINE, dtype=torch.bfloat16, device="cuda"
    )
    far = storage.as_strided((pages, page, LINE), (apart, LINE, 1))
    far.copy_(case.cache)
    assert torch.equal(attend(case)[0], attend(replace(case, cache=far))[0])


@pytest.mark.gpu
def test_a_graph_follows_what_changes() -> None:
    case = mla_cases.make([700, 50], [5, 3], heads=6, device="cuda")
    other = mla_cases.make([652, 98], [3, 5], heads=6, seed=1, device="cuda")
    space = MlaSpace.allocate(6, "cuda")
    latent = case.query.new_full((8, 6, LATENT), torch.nan)
    held = Case(
        VerifyBatch(**{k: v.clone() for k, v in vars(case.batch).items()}),
        case.query.clone(),
        case.cache.clone(),
    )

    def launch() -> None:
        mla_attend(held.query, held.cache, held.batch, space, latent, scale=SCALE)

    launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    for one in (other, case):
        held.query.copy_(one.query)
        held.cache[: one.cache.shape[0]].copy_(one.cache)
        for name, tensor in vars(held.batch).items():
            new = getattr(one.batch, name)
            if name == "block_table":
                tensor[:, : new.shape[1]].copy_(new[:, : tensor.shape[1]])
            else:
                tensor.copy_(new)
        latent.fill_(torch.nan)
        graph.replay()
        assert torch.equal(latent, attend(one)[0])


def weights(heads: int, q_lora: int, seed: int = 0) -> reference.MlaWeights:
    random = torch.Generator().manual_seed(seed)

    def draw(*shape: int, scale: float = 1.0) -> Tensor:
        values = torch.randn(*shape, generator=random) * scale
        return values.bfloat16().double().cuda()

    return reference.MlaWeights(
        q_a_norm=1 + draw(q_lora, scale=0.3),
        kv_norm=1 + draw(LATENT, scale=0.3),
        w_qb=draw(heads * 192, q_lora, scale=q_lora**-0.5),
        w_uk=draw(heads, 128, LATENT, scale=128**-0.5),
        w_uv=draw(heads, 128, LATENT, scale=LATENT**-0.5),
        norm_eps=EPS,
    )


@pytest.mark.gpu
@pytest.mark.parametrize(("heads", "q_lora"), [(2, 256), (6, 1536), (96, 1536)])
def test_a_whole_sublayer(heads: int, q_lora: int) -> None:
    """From the packed projection to the gated values, against the reference in fp64;
    and a row alone gives the same bits."""
    w = weights(heads, q_lora)
    case = mla_cases.make([190, 64, 5], [5, 0, 3], heads, page=64, device="cuda")
    packed = torch.randn(8, q_lora + LINE + heads * 128, device="cuda").bfloat16()

    def run(packed: Tensor, batch: VerifyBatch, cache: Tensor) -> Tensor:
        rows = packed.shape[0]
        gate = packed[:, q_lora + LINE :]
        normed = packed.new_full((rows, q_lora), torch.nan)
        low = {
            name: value.bfloat16()
            for name, value in vars(w).items()
            if isinstance(value, Tensor)
        }
        mla_front(
            packed, low["q_a_norm"], low["kv_norm"], batch, cache, normed, eps=EPS
        )
        # A row at a time: cuBLAS's rows depend on how many there are.
        q = torch.cat([normed[r : r + 1] @ low["w_qb"].T for r in range(rows)])
        query = packed.new_full((rows, heads, LINE), torch.nan)
        mla_absorb(q, low["w_uk"], query)
        latent = packed.new_full((rows, heads, LATENT), torch.nan)
        space = MlaSpace.allocate(heads, "cuda")
        mla_attend(query, cache, batch, space, latent, scale=w.scale)
        out = torch.full_like(gate, torch.nan)
        return mla_value(latent, low["w_uv"], gate, out)

    cache = case.cache.clone()
    found = run(packed, case.batch, cache)
    rows = reference.MlaRows.unpack(packed.double(), w)
    wide = case.cache.double()
    truth = reference.verify(case.batch, rows, w, wide)
    lines = case.cache.bfloat16()
    narrow = reference.MlaRows.unpack(packed, w)
    low = reference.MlaWeights(
        **{
            name: value.bfloat16() if isinstance(value, Tensor) else value
            for name, value in vars(w).items()
        }
    )
    plain = reference.verify(case.batch, narrow, low, lines)
    error = (found.double() - truth).norm()
    assert error <= 2 * (plain.double() - truth).norm()
    written = torch.isfinite(cache)
    assert torch.equal(written, torch.isfinite(wide))
    assert (cache[written].double() - wide[written]).abs().max() < 0.05
    for request, t in ((0, 0), (0, 4), (2, 1)):
        row = int(case.batch.row_start[request]) + t
        one = run(packed[row : row + 1], alone(case, request, t).batch, cache.clone())
        assert torch.equal(one[0], found[row])


def test_refusals() -> None:
    """Nothing is launched: all of it is on the CPU."""
    case = mla_cases.make([5], [2], heads=2)
    space = MlaSpace.allocate(2, "cpu")
    latent = torch.zeros(2, 2, LATENT, dtype=torch.bfloat16)

    def call(**changed: object) -> None:
        arguments = {
            "query": case.query,
            "cache": case.cache,
            "batch": case.batch,
            "space": space,
            "latent": latent,
            **changed,
        }
        mla_attend(**{"scale": SCALE, **arguments})  # type: ignore[arg-type]

    wrong = {
        "query": (case.query[..., :-1], "query is"),
        "cache": (case.cache.float(), "cache is torch.float32"),
        "batch": (replace(case.batch, block_table=None), "block_table is None"),
        "space": (MlaSpace.allocate(1, "cpu"), "space.sums"),
        "latent": (latent[:1], "latent is"),
    }
    for name, (value, message) in wrong.items():
        with pytest.raises(ValueError, match=message):
            call(**{name: value})
    for scale in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="scale is"):
            call(scale=scale)
    flat = replace(case.batch, row_start=case.batch.row_start[0])
    with pytest.raises(ValueError, match="row_start is"):
        call(batch=flat)
    with pytest.raises(ValueError, match="multiple of 16"):
        call(cache=case.cache[:, :15])
    with pytest.raises(ValueError, match="a CUDA device"):
        call()
    with pytest.raises(ValueError, match="heads is 97"):
        split_bits(97)
    with pytest.raises(ValueError, match="columns"):
        mla_front(
            torch.zeros(2, 800, dtype=torch.bfloat16),
            torch.zeros(256, dtype=torch.bfloat16),
            torch.zeros(LATENT, dtype=torch.bfloat16),
            case.batch,
            case.cache,
            torch.zeros(2, 256, dtype=torch.bfloat16),
            eps=EPS,
        )
