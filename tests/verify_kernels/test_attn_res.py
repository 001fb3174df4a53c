# SPDX-License-Identifier: Apache-2.0
"""The attention residual kernel: its checks anywhere, its numbers on a GPU."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from experiments.bench.neighbours import neighbours
from verify_kernels.attn_res import attn_res, reference
from verify_kernels.attn_res.host import FORMS, Form, variant_name, variants

#: Kimi K3's hidden size, and that of a tiny model.
HIDDEN, TINY = 7168, 512
CASES = [(hidden, form) for hidden, forms in FORMS.items() for form in forms]
EPS, OUTPUT_EPS = 1e-5, 3e-5
LAYERS, BLOCK_LAYERS = 93, 12
KINDS = ("plain", "outliers", "ties", "sharp")


def name_of(value: object) -> str:
    """Of a form, without the hidden size, or of a hidden size."""
    if isinstance(value, tuple):
        return variant_name(0, *value).removeprefix("h0_")
    return str(value)


def inputs(
    form: Form,
    rows: int,
    kind: str = "plain",
    *,
    hidden: int = HIDDEN,
    seed: int = 0,
    device: str = "cuda",
    more: bool = False,
) -> dict[str, Any]:
    """Arguments of one call, all strided; blocks it must not read hold NaN. ``more``:
    with an extra delta."""
    num_blocks, update, write, norm = form
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    def padded(values: Tensor) -> Tensor:
        """The same values, in rows that are not adjacent and start 16 bytes in."""
        *lead, width = values.shape
        buffer = values.new_full((*lead, width + 24), torch.nan, dtype=torch.bfloat16)
        view = buffer[..., 8 : 8 + width]
        view.copy_(values)
        return view

    growth = torch.linspace(0.3, 3, 8, device=device)[:, None]
    prefix, delta = 3 * normal(rows, hidden), normal(rows, hidden)
    blocks = growth * normal(rows, 8, hidden)
    # A score is of order 2.5 whatever the hidden size is.
    query = 0.03 * (HIDDEN / hidden) ** 0.5
    weights = {
        "norm_weight": 1 + 0.3 * normal(hidden),
        "query_weight": query * normal(hidden),
        "output_norm_weight": 1 + 0.3 * normal(hidden),
    }
    if kind == "outliers":
        for channel in {0, 5, *(c for c in (255, 1023, 1024, 4000) if c < hidden)}:
            blocks[..., channel] *= 300
            prefix[:, channel] *= 300
    elif kind == "ties":
        blocks[:] = blocks[:, :1] * (1 + 2.0**-7 * normal(rows, 8, 1))
    elif kind == "sharp":
        weights["query_weight"] *= 40
    blocks[:, num_blocks:] = torch.nan
    extra = padded(normal(rows, hidden)) if more else None
    found: dict[str, Any] = {
        "prefix": padded(prefix),
        "delta": None if update == "keep" else padded(delta),
        "extra": extra,
        "blocks": padded(blocks),
        **{name: w.bfloat16() for name, w in weights.items()},
        "num_blocks": num_blocks,
        "write_block": num_blocks if write else None,
        "restart": update == "restart",
        "eps": EPS,
        "output_norm_eps": OUTPUT_EPS,
    }
    if not norm:
        found["output_norm_weight"] = None
    return found


def fresh(arguments: dict[str, Any], rows: slice = slice(None)) -> dict[str, Any]:
    """A copy of a call for some of its rows, with what the call writes kept apart."""
    copy = dict(arguments)
    for name in ("prefix", "delta", "extra", "blocks"):
        if copy[name] is not None:
            copy[name] = copy[name][rows].clone()
    return copy


def run(arguments: dict[str, Any], **more: Any) -> Tensor:
    """The kernel, into an output full of NaN whose rows are not adjacent."""
    rows, hidden = arguments["prefix"].shape
    buffer = arguments["prefix"].new_full((rows, hidden + 8), torch.nan)
    out = attn_res(**arguments, out=buffer[:, :hidden], **more)
    assert torch.isnan(buffer[:, hidden:]).all()
    return out


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.int16)


def elementwise_bound(arguments: dict[str, Any], exact: Tensor) -> Tensor:
    """How far fp32 sums and one rounding to bf16 may be from ``exact``, at worst.

    A score is a sum of 7168 products in chains of at most 8 + 5 + 3 + 7 additions,
    twice (the squares count half through the square root), and a share is its
    exponential: 64 roundings of fp32 cover both, the mix and the norm. They act on a
    score's absolute size, sum |wn wq v| rsqrt(mean v^2), and through it on any source's
    value.
    """
    call = fresh(arguments)
    _, prefix = reference.attn_res(**call)
    sources = torch.cat(
        (call["blocks"][:, : call["num_blocks"]], prefix[:, None]), 1
    ).double()
    weight = (call["norm_weight"].double() * call["query_weight"].double()).abs()
    spread = torch.rsqrt(sources.pow(2).mean(-1) + EPS)
    score = ((sources.abs() * weight).sum(-1) * spread).amax(1)
    size = sources.abs().amax(1)
    if call["output_norm_weight"] is not None:
        plain, _ = reference.attn_res(**fresh(arguments) | {"output_norm_weight": None})
        scale = torch.rsqrt(plain.pow(2).mean(-1, keepdim=True) + OUTPUT_EPS)
        size = size * scale * call["output_norm_weight"].double().abs()
    return 2.0**-8 * exact.abs() + 64 * 2.0**-24 * (1 + score)[:, None] * size


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("hidden", "form"), CASES, ids=name_of)
def test_every_form_against_the_reference(hidden: int, form: Form, kind: str) -> None:
    """Error at most twice that of fp32 torch, every element in its bound, and the
    prefix, the written block and the untouched blocks exact."""
    arguments = inputs(form, 5, kind, hidden=hidden)
    expected = fresh(arguments)
    exact, prefix = reference.attn_res(**expected)
    plain, _ = reference.attn_res(**fresh(arguments), compute=torch.float32)
    bound = elementwise_bound(arguments, exact)
    out = run(arguments)
    assert torch.equal(bits(arguments["prefix"]), bits(prefix))
    assert torch.equal(bits(arguments["blocks"]), bits(expected["blocks"]))
    error = (out.double() - exact).norm(dim=1)
    allowed = 2 * (plain.bfloat16().double() - exact).norm(dim=1)
    assert (error <= allowed).all(), (error / allowed).tolist()
    excess = (out.double() - exact).abs() - bound
    assert (excess <= 0).all(), f"{int((excess > 0).sum())} elements past their bound"


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("hidden", "form"), [case for case in CASES if case[1][1] == "add"], ids=name_of
)
def test_a_delta_may_come_in_two(hidden: int, form: Form) -> None:
    """The bits of their sum in bf16 as one, and the reference's prefix."""
    arguments = inputs(form, 5, hidden=hidden, more=True)
    _, prefix = reference.attn_res(**fresh(arguments))
    summed = arguments["delta"] + arguments["extra"]
    one = fresh(arguments) | {"delta": summed, "extra": None}
    out, wanted = run(arguments), run(one)
    assert torch.equal(bits(out), bits(wanted)) and torch.isfinite(out).all()
    assert torch.equal(bits(arguments["prefix"]), bits(prefix))
    assert torch.equal(bits(arguments["blocks"]), bits(one["blocks"]))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("hidden", "form"),
    [
        (HIDDEN, (4, "add", False, True)),
        (HIDDEN, (8, "add", False, True)),
        (HIDDEN, (7, "add", True, True)),
        (HIDDEN, (5, "restart", False, True)),
        (HIDDEN, (0, "keep", True, True)),
        (HIDDEN, (8, "add", False, False)),
        (HIDDEN, (1, "add", False, False)),
        *((TINY, form) for form in FORMS[TINY]),
    ],
    ids=name_of,
)
def test_rows_do_not_depend_on_batch_mates(hidden: int, form: Form) -> None:
    """Field case F40: each row alone and the first M of 64 for every M, bit for bit."""
    arguments = inputs(form, 64, "outliers", hidden=hidden, seed=1)
    whole = fresh(arguments)
    together = run(whole)
    assert torch.isfinite(together).all()
    picks = [slice(m, m + 1) for m in range(64)] + [slice(0, m) for m in range(2, 64)]
    for rows in picks:
        call = fresh(arguments, rows)
        assert torch.equal(bits(run(call)), bits(together[rows])), rows
        assert torch.equal(bits(call["prefix"]), bits(whole["prefix"][rows])), rows
        assert torch.equal(bits(call["blocks"]), bits(whole["blocks"][rows])), rows


@pytest.mark.gpu
@pytest.mark.parametrize("pdl", [False, True])
@pytest.mark.parametrize("more", [False, True])
@pytest.mark.parametrize(("hidden", "blocks"), [(HIDDEN, 8), (TINY, 2)])
def test_a_thousand_repeats_with_another_stream_busy(
    hidden: int, blocks: int, more: bool, pdl: bool
) -> None:
    """Same bits each time, M cycling, while another stream fills the GPU."""
    form = (blocks, "add", False, True)
    arguments = inputs(form, 64, "outliers", hidden=hidden, seed=2, more=more)
    expected = run(fresh(arguments), pdl=False)
    sizes = (1, 64, 2, 33, 8, 5, 16, 3)
    calls = {m: fresh(arguments, slice(0, m)) for m in sizes}
    outs = {m: torch.empty_like(expected[:m]) for m in sizes}
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    with neighbours() as disturb:
        for i in range(1000):
            disturb()
            m = sizes[i % len(sizes)]
            calls[m]["prefix"].copy_(arguments["prefix"][:m])
            outs[m].fill_(torch.nan)
            attn_res(**calls[m], out=outs[m], pdl=pdl)
            wrong += (bits(outs[m]) != bits(expected[:m])).sum()
    assert int(wrong) == 0


def layers_of_the_model(
    rows: int, hidden: int, layers: range, block: int
) -> list[dict[str, Any]]:
    """The mixes of some layers, ``block`` of them a block, sharing prefix and blocks;
    of the blocks those before the first layer are there."""
    base = inputs((8, "add", False, True), rows, hidden=hidden, seed=3)
    base["blocks"][:, -(-layers[0] // block) :] = torch.nan
    base["prefix"] = base["prefix"].clone()
    generator = torch.Generator("cuda").manual_seed(4)
    calls = []
    for layer in layers:
        before = -(-layer // block)
        starts = layer % block == 0
        for mlp in (False, True):
            delta = torch.randn(rows, hidden, generator=generator, device="cuda")
            change = {
                "delta": delta.bfloat16() if layer or mlp else None,
                # As the MLPs behind the first layer's give it.
                "extra": delta.roll(1).bfloat16() if layer > 1 and not mlp else None,
                "num_blocks": before + (starts and mlp),
                "write_block": before if starts and not mlp else None,
                "restart": starts and mlp,
            }
            calls.append(base | change)
    return calls


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 8, 64])
@pytest.mark.parametrize(
    ("hidden", "layers", "block"),
    [(HIDDEN, range(10, 26), BLOCK_LAYERS), (TINY, range(4), 2)],
)
def test_dependent_launches_give_the_bits_of_plain_ones(
    hidden: int, layers: range, block: int, rows: int
) -> None:
    """Each kernel releases the next at entry, which reads what this one still writes:
    prefix and blocks. 100 graph replays of chained mixes, of 16 layers over two block
    boundaries or of a whole tiny model, with programmatic launch equal the same chain
    launched plainly, and the reference's prefix."""
    calls = layers_of_the_model(rows, hidden, layers, block)
    prefix, blocks = calls[0]["prefix"], calls[0]["blocks"]
    start, saved = prefix.clone(), blocks.clone()
    outs = [torch.empty_like(prefix) for _ in calls]

    def chain(pdl: bool) -> None:
        prefix.copy_(start)
        blocks.copy_(saved)
        for call, out in zip(calls, outs, strict=True):
            attn_res(**call, out=out, pdl=pdl)

    chain(False)
    expected = [x.clone() for x in (*outs, prefix, blocks)]
    true_prefix, true_blocks = start, saved.clone()
    for call in calls:
        shared = {"prefix": true_prefix, "blocks": true_blocks}
        _, true_prefix = reference.attn_res(**call | shared)
    assert torch.equal(bits(expected[-2]), bits(true_prefix))
    assert torch.equal(bits(expected[-1]), bits(true_blocks))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain(True)
    for _ in range(100):
        for x in (*outs, prefix):
            x.fill_(torch.nan)
        graph.replay()
        for found, wanted in zip((*outs, prefix, blocks), expected, strict=True):
            assert torch.equal(bits(found), bits(wanted))


@pytest.mark.gpu
def test_a_million_launches_leave_no_peer_behind() -> None:
    """Field case F36: a CTA that left early would be written to by its peers. A graph
    of programmatic launches at M = 1, beside a stream that shifts the timing."""
    arguments = fresh(inputs((8, "restart", False, True), 1, seed=5))
    expected = run(arguments, pdl=False)
    out = torch.full_like(expected, torch.nan)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(1000):
            attn_res(**arguments, out=out, pdl=True)
    side = torch.cuda.Stream()
    noise = torch.randn(2048, 2048, device="cuda", dtype=torch.bfloat16)
    sink = torch.empty_like(noise)
    for i in range(1000):
        if i % 10 == 0:
            with torch.cuda.stream(side):
                torch.mm(noise, noise, out=sink)
        graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(bits(out), bits(expected))


@pytest.mark.gpu
def test_rows_far_apart_in_memory() -> None:
    """Field case F37: block rows 2^31 elements apart need 64-bit offsets."""
    form = (3, "add", True, True)
    near = fresh(inputs(form, 2, seed=6))
    pool = torch.empty(2**31 + 8 * HIDDEN, dtype=torch.bfloat16, device="cuda")
    far = fresh(near)
    far["blocks"] = pool.as_strided((2, 8, HIDDEN), (2**31, HIDDEN, 1))
    far["blocks"].copy_(near["blocks"])
    assert torch.equal(bits(run(far)), bits(run(near)))
    assert torch.equal(bits(far["blocks"]), bits(near["blocks"]))


def cpu(form: Form = (2, "add", False, True)) -> dict[str, Any]:
    return inputs(form, 3, device="cpu")


def mixes(layers: int, block: int) -> set[Form]:
    """Every mix of a model, the last with the norm that follows and without."""
    last = -(-layers // block)
    needed: set[Form] = {(last, "add", False, True), (last, "add", False, False)}
    for layer in range(layers):
        before = -(-layer // block)
        starts = layer % block == 0
        needed.add((before, "add" if layer else "keep", starts, True))
        needed.add((before + starts, "restart" if starts else "add", False, True))
    return needed


def test_forms_are_those_of_the_models() -> None:
    """Every mix of the 93 layers has a form, and of every model with fewer of them;
    there is none besides. The tiny model's four layers, two a block, have theirs, and
    one writes a third block."""
    cut = [mixes(layers, BLOCK_LAYERS) for layers in range(1, LAYERS + 1)]
    assert set(FORMS[HIDDEN]) == set().union(*cut)
    tiny = [mixes(layers, 2) for layers in range(1, 5)]
    assert set(FORMS[TINY]) == set().union(*tiny) | {(2, "add", True, True)}
    assert len({variant_name(h, *form) for h, form in CASES}) == len(CASES)


def test_no_rows_and_no_device() -> None:
    """M = 0 is an empty result anywhere; rows on the CPU are refused."""
    arguments = fresh(cpu(), slice(0, 0))
    assert attn_res(**arguments).shape == (0, HIDDEN)
    with pytest.raises(ValueError, match=r"prefix is on cpu; the kernel needs a CUDA"):
        attn_res(**cpu())


WIDE = torch.zeros(3, HIDDEN + 8, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_blocks": 9}, "num_blocks is 9; it must be 0 to 8"),
        ({"num_blocks": -1}, "num_blocks is -1; it must be 0 to 8"),
        ({"write_block": 3}, "write_block is 3 with num_blocks 2"),
        ({"write_block": 1}, "write_block is 1 with num_blocks 2"),
        ({"delta": None, "restart": True}, "restart is True without delta"),
        ({"delta": None}, "num_blocks 2, update 'keep'.*no model of hidden size 7168"),
        ({"output_norm_weight": None, "write_block": 2}, "write_block 2, .* norm off"),
        (inputs((3, "add", False, True), 3, hidden=TINY, device="cpu"), "size 512 has"),
        ({"prefix": torch.zeros(65, HIDDEN)}, "prefix has 65 rows; at most 64"),
        ({"prefix": torch.zeros(3, HIDDEN)}, "prefix is torch.float32"),
        (
            {"prefix": WIDE[:, :1024]},
            r"prefix is \(3, 1024\); it must be \[M, H\] with H one of 7168, 512",
        ),
        ({"prefix": WIDE[0, :HIDDEN]}, r"prefix is \(7168,\); it must be \[M, H\]"),
        (
            {"prefix": WIDE[:, :TINY]},
            r"delta is torch.bfloat16 \(3, 7168\).*\(3, 512\)",
        ),
        ({"extra": WIDE[:2, :HIDDEN]}, r"extra is torch.bfloat16 \(2, 7168\)"),
        (
            {"extra": WIDE[:, :HIDDEN], "restart": True},
            "extra is given with update 'restart'; only where delta is added",
        ),
        ({"extra": WIDE[:, :HIDDEN].to("meta")}, "extra is on meta and prefix on cpu"),
        ({"delta": WIDE[:2, :HIDDEN]}, r"delta is torch.bfloat16 \(2, 7168\)"),
        ({"blocks": WIDE[:, None, :HIDDEN]}, r"blocks is \(3, 1, 7168\).*at least 2"),
        ({"blocks": WIDE[:, :HIDDEN]}, r"blocks is \(3, 7168\)"),
        ({"query_weight": WIDE[:, 0]}, r"query_weight is torch.bfloat16 \(3,\)"),
        ({"delta": WIDE[:, 1 : HIDDEN + 1]}, "delta has strides .* multiple of 16"),
        (
            {"delta": torch.zeros(3, HIDDEN + 4, dtype=torch.bfloat16)[:, :HIDDEN]},
            r"delta has strides \(7172, 1\)",
        ),
        ({"norm_weight": WIDE.new_zeros(2 * HIDDEN)[::2]}, "norm_weight has strides"),
        ({"out": WIDE[:1, :HIDDEN]}, r"out is torch.bfloat16 \(1, 7168\)"),
        ({"blocks": cpu()["blocks"].to("meta")}, "blocks is on meta and prefix on cpu"),
    ],
)
def test_bad_input_is_refused(change: dict[str, Any], words: str) -> None:
    arguments = cpu() | change
    kept = {n: arguments[n].clone() for n in ("prefix", "blocks")}
    with pytest.raises(ValueError, match=words):
        attn_res(**arguments)
    for name, before in kept.items():
        if before.device.type != "meta":
            assert torch.equal(bits(arguments[name]), bits(before))


def test_import_needs_no_kernel_compiler() -> None:
    """Without CuTe DSL the package, its checks and its reference still load."""
    code = (
        "import sys; sys.modules['cutlass'] = None\n"
        "import verify_kernels.attn_res, verify_kernels.prefetch\n"
        "from verify_kernels.attn_res import reference\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_no_cluster_is_one_cta() -> None:
    """What a CTA sends to itself then looks like an invalid write to memcheck."""
    assert all(variant.kernel.ctas > 1 for variant in variants())
