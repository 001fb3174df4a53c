# SPDX-License-Identifier: Apache-2.0
"""The PTX of what stands around MLA's attention, on the CPU, under many schedules.

Errors against fp64 are at most twice those of torch in fp32, rounded to bf16 once: the
kernels round once too, so what is left is the order of sums.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from tests.verify_kernels.machine import GlobalMemory, kernels, launch, tensor_argument
from verify_kernels.common.variant import Variant
from verify_kernels.mla import parts
from verify_kernels.mla.parts import LATENT, LINE, NOPE, ROPE, VALUE

TINY, K3 = 256, 1536
EPS = 1e-5
SEEDS = (0, 1, 2)
#: Columns behind kv_a, which nothing may read.
GATE = 24


@dataclass(frozen=True)
class Given:
    """A tensor, how many of its extents and strides are open, whether it is written;
    ``before``: bytes that its address is given too low."""

    tensor: Tensor
    extents: int
    strides: int
    writable: bool = False
    before: int = 0


@functools.cache
def compiled(name: str, *form: int) -> tuple[Any, str]:
    """A kernel and its PTX."""
    variant: Variant = getattr(parts, f"{name}_variant")(*form)
    return variant.kernel, kernels.ptx_of(variant)


def run(
    one: tuple[Any, str],
    tensors: dict[str, Given],
    numbers: list[bytes],
    grid: tuple[int, int, int],
    seed: int,
) -> None:
    kernel, ptx = one
    memory = GlobalMemory()
    arguments = []
    for name in kernel.parameters:
        given = tensors[name]
        tensor, early = given.tensor, name in kernel.early_loads
        at = memory.add(tensor, name, dynamic=not early, writable=given.writable)
        extents, strides = tensor.shape[: given.extents], tensor.stride()
        at -= given.before
        arguments.append(tensor_argument(at, extents, strides[: given.strides]))
    launch(
        ptx,
        memory,
        arguments + numbers,
        grid=grid,
        block=(kernel.threads, 1, 1),
        shared_bytes=kernel.shared_bytes,
        seed=seed,
        races=True,
    )


def apart(values: Tensor, gap: int = 8) -> Tensor:
    """The same values in items with NaN between them, 16 bytes in."""
    *lead, width = values.shape
    flat = values.reshape(lead[0], -1)
    buffer = torch.full((lead[0], flat.shape[1] + 8 + gap), torch.nan).bfloat16()
    view = buffer[:, 8 : 8 + flat.shape[1]]
    view.copy_(flat)
    return view.unflatten(1, (*lead[1:], width)) if len(lead) > 1 else view


def empty(*shape: int) -> Tensor:
    return apart(torch.full(shape, torch.nan).bfloat16())


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * weight


def check_error(found: Tensor, exact: Tensor, plain: Tensor) -> None:
    """Of each row."""
    assert torch.isfinite(found).all()
    error = (found.double() - exact).flatten(1).norm(dim=1)
    allowed = 2 * (plain.bfloat16().double() - exact).flatten(1).norm(dim=1)
    assert (error <= allowed).all(), (error / allowed).tolist()


@dataclass(frozen=True)
class Step:
    """What `FrontKernel` is given; ``history`` does not count the step's rows."""

    q_lora: int
    packed: Tensor
    q_norm: Tensor
    kv_norm: Tensor
    widths: tuple[int, ...]
    history: tuple[int, ...]
    slots: tuple[int, ...]
    table: Tensor
    page: int
    counted: bool = False

    @property
    def row_start(self) -> list[int]:
        return [0, *itertools.accumulate(self.widths)]

    def places(self) -> dict[int, tuple[int, int]]:
        """Block and line of every row that has them; of other live rows -1."""
        found = {}
        for b, slot in enumerate(self.slots):
            for t in range(self.widths[b] if slot > 0 else 0):
                position = self.history[b] + t
                column, line = divmod(position, self.page)
                inside = 0 <= column < self.table.shape[1]
                block = int(self.table[b, column]) if inside else -1
                found[self.row_start[b] + t] = (block, line)
        return found


def step(
    q_lora: int,
    widths: tuple[int, ...],
    slots: tuple[int, ...] | None = None,
    *,
    page: int = 4,
    padding: int = 2,
    seed: int = 0,
) -> Step:
    g = torch.Generator().manual_seed(seed)
    requests, rows = len(widths), sum(widths) + padding
    packed = torch.randn(rows, q_lora + LINE + GATE, generator=g)
    packed[:, 5] *= 300
    packed[:, q_lora + 511] *= 50
    packed[:, q_lora + LINE :] = torch.nan
    # Every block in one place only.
    history = torch.randint(0, 3 * page, (requests,), generator=g).tolist()
    pages = -(-(3 * page + 8) // page)
    table = torch.randperm(requests * pages, generator=g).view(requests, pages).int()
    return Step(
        q_lora,
        apart(packed.bfloat16()),
        (1 + 0.3 * torch.randn(q_lora, generator=g)).bfloat16(),
        (1 + 0.3 * torch.randn(LATENT, generator=g)).bfloat16(),
        widths,
        tuple(history),
        slots or tuple(range(3, 3 + requests)),
        table,
        page,
    )


def front(s: Step, seed: int = 0, far: int = 0) -> tuple[Tensor, Tensor]:
    """The rows and the cache; ``far`` is what all block numbers begin from."""
    rows = s.packed.shape[0]
    out = empty(rows, s.q_lora)
    blocks = max(int(s.table.max()) + 1, 1)
    cache = empty(blocks, s.page, LINE)
    wide = torch.full((len(s.widths), s.table.shape[1] + 3), -7, dtype=torch.int32)
    table = wide[:, : s.table.shape[1]]
    table.copy_(torch.where(s.table >= 0, s.table + far, s.table))
    history = torch.tensor(s.history, dtype=torch.int32)
    if s.counted:
        history += torch.tensor(s.widths, dtype=torch.int32)
    tensors = {
        "packed": Given(s.packed, 2, 1),
        "q_norm": Given(s.q_norm, 0, 0),
        "kv_norm": Given(s.kv_norm, 0, 0),
        "cache": Given(cache, 2, 1, True, 2 * far * cache.stride(0)),
        "block_table": Given(table, 2, 1),
        "row_start": Given(torch.tensor(s.row_start, dtype=torch.int32), 1, 0),
        "history": Given(history, 1, 0),
        "slots": Given(torch.tensor(s.slots, dtype=torch.int32), 1, 0),
        "out": Given(out, 1, 1, True),
    }
    numbers = [
        np.int32(s.page).tobytes(),
        np.int32(table.shape[1]).tobytes(),
        np.float32(EPS).tobytes(),
        np.int32(3 * s.counted).tobytes(),
    ]
    run(compiled("front", s.q_lora), tensors, numbers, (rows, 1, 1), seed)
    return out, cache


def check_front(s: Step, out: Tensor, cache: Tensor) -> None:
    """Every row and line, and NaN wherever none is."""
    places = s.places()
    live = sorted(places)
    dead = [row for row in range(len(out)) if row not in places]
    assert not out[dead].any() and not out[dead].isnan().any()
    q_a = s.packed[live, : s.q_lora]
    kv_a = s.packed[live, s.q_lora : s.q_lora + LINE]

    def normed(kind: torch.dtype) -> tuple[Tensor, Tensor]:
        return (
            rms(q_a.to(kind), s.q_norm.to(kind)),
            rms(kv_a[:, :LATENT].to(kind), s.kv_norm.to(kind)),
        )

    exact, plain = normed(torch.float64), normed(torch.float32)
    if live:
        check_error(out[live], exact[0], plain[0])
    held = [i for i, row in enumerate(live) if places[row][0] >= 0]
    untouched = torch.ones(cache.shape[:2], dtype=torch.bool)
    for i in held:
        block, line = places[live[i]]
        untouched[block, line] = False
        found = cache[block, line]
        assert torch.equal(found[LATENT:], kv_a[i, LATENT:])
        check_error(found[None, :LATENT], exact[1][i : i + 1], plain[1][i : i + 1])
    assert cache[untouched].isnan().all()


RAGGED = (0, 3, 1, 0, 2)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("q_lora", [TINY, K3])
def test_rows_are_normed_and_lines_written(q_lora: int, seed: int) -> None:
    """Widths of 0, a request without a slot, rows of padding."""
    s = step(q_lora, RAGGED, (4, 1, 0, 9, 2), seed=seed)
    check_front(s, *front(s, seed))


@pytest.mark.parametrize(
    ("widths", "page", "padding"),
    [((1,), 4, 0), ((5,), 3, 0), ((8, 1), 16, 0), ((0,), 4, 1), ((0, 0), 4, 2)],
)
def test_widths_pages_and_padding(
    widths: tuple[int, ...], page: int, padding: int
) -> None:
    s = step(TINY, widths, page=page, padding=padding, seed=sum(widths))
    check_front(s, *front(s))


def test_a_step_of_64_requests() -> None:
    """The largest, half of them in a lane's second place; some without rows."""
    g = torch.Generator().manual_seed(3)
    widths = torch.randint(0, 3, (64,), generator=g)
    widths[0], widths[63] = 0, 1
    while int(widths.sum()) > 64:
        widths[int(widths.argmax())] -= 1
    slots = torch.randint(-1, 9, (64,), generator=g)
    s = step(TINY, tuple(widths.tolist()), tuple(slots.tolist()), padding=0)
    check_front(s, *front(s))


@pytest.mark.parametrize("q_lora", [TINY, K3])
def test_a_history_may_count_the_rows_of_the_step(q_lora: int) -> None:
    s = step(q_lora, RAGGED)
    out, cache = front(s)
    counted = replace(s, counted=True)
    check_front(counted, *front(counted))
    for found, wanted in zip(front(counted), (out, cache), strict=True):
        assert torch.equal(bits(found), bits(wanted))


def test_a_page_that_is_not_there_takes_no_line() -> None:
    """A negative block; a position behind the table; a negative one."""
    s = step(TINY, (3, 2, 2, 4))
    s.table[0] = -1
    end = s.page * s.table.shape[1]
    s = replace(s, history=(1, end - 1, 5, -2))
    places = s.places()
    assert sorted(block < 0 for block, _ in places.values()) == 5 * [False] + 6 * [True]
    check_front(s, *front(s))


def test_blocks_far_behind_two_gigabytes() -> None:
    s = step(TINY, (2, 1))
    far = 2**20
    out, cache = front(s, far=far)
    assert 2 * far * cache.stride(0) > 2**32
    check_front(s, out, cache)


@pytest.mark.parametrize("q_lora", [TINY, K3])
def test_a_row_depends_on_itself_alone(q_lora: int) -> None:
    """Alone, in another page and place of the step."""
    s = step(q_lora, (2, 0, 3), padding=0)
    out, cache = front(s)
    for row, (block, line) in s.places().items():
        alone = replace(
            s,
            packed=apart(s.packed[row : row + 1]),
            widths=(1,),
            history=(line,),
            slots=(1,),
            table=torch.zeros(1, 1, dtype=torch.int32),
        )
        one, lines = front(alone, seed=row)
        assert torch.equal(one[0], out[row])
        assert torch.equal(lines[0, line], cache[block, line])


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.int16)


def normal(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    x = scale * torch.randn(*shape, generator=g)
    x[..., 3] *= 40
    return apart(x.bfloat16())


def absorb(q: Tensor, w_uk: Tensor, seed: int = 0) -> Tensor:
    rows, heads = len(q), len(w_uk)
    query = empty(rows, heads, LINE)
    tensors = {
        "q": Given(q, 2, 1),
        "w_uk": Given(w_uk, 1, 1),
        "query": Given(query, 2, 1, True),
    }
    one = compiled("absorb")
    run(one, tensors, [np.int32(rows).tobytes()], (one[0].parts, heads, 1), seed)
    return query


def value(latent: Tensor, w_uv: Tensor, gate: Tensor, seed: int = 0) -> Tensor:
    out = empty(len(latent), len(w_uv) * VALUE)
    tensors = {
        "latent": Given(latent, 2, 1),
        "w_uv": Given(w_uv, 1, 1),
        "gate": Given(gate, 2, 1),
        "out": Given(out, 2, 1, True),
    }
    one = compiled("value")
    rows = [np.int32(len(latent)).tobytes()]
    run(one, tensors, rows, (one[0].parts, len(w_uv), 1), seed)
    return out


#: Rows and heads: one tile, two, a turn and more.
SIZES = [(1, 2), (5, 3), (9, 1), (16, 1), (26, 1)]


@pytest.mark.parametrize(("rows", "heads"), SIZES)
def test_queries_are_absorbed(rows: int, heads: int) -> None:
    q = normal(rows, heads * (NOPE + ROPE), seed=rows)
    w_uk = normal(heads, NOPE, LATENT, seed=heads, scale=0.05)

    def right(kind: torch.dtype) -> Tensor:
        nope = q.view(rows, heads, -1)[..., :NOPE].to(kind)
        return torch.einsum("mhk,hkn->mhn", nope, w_uk.to(kind))

    found = [absorb(q, w_uk, seed) for seed in SEEDS]
    check_error(found[0][..., :LATENT], right(torch.float64), right(torch.float32))
    assert torch.equal(found[0][..., LATENT:], q.view(rows, heads, -1)[..., NOPE:])
    assert all(torch.equal(f, found[0]) for f in found)


@pytest.mark.parametrize(("rows", "heads"), SIZES)
def test_values_are_gated(rows: int, heads: int) -> None:
    latent = normal(rows, heads, LATENT, seed=rows)
    w_uv = normal(heads, VALUE, LATENT, seed=heads, scale=0.05)
    gate = normal(rows, heads * VALUE, seed=7, scale=3)
    largest = torch.finfo(torch.bfloat16).max
    hard = [torch.inf, -torch.inf, largest, -largest, 0.0, -0.0, 88.5, -88.5, -100.0]
    gate[0, 4 : 4 + len(hard)] = torch.tensor(hard).bfloat16()

    def right(kind: torch.dtype) -> Tensor:
        out = torch.einsum("mhc,hvc->mhv", latent.to(kind), w_uv.to(kind))
        return out.flatten(1) * torch.sigmoid(gate.to(kind))

    found = [value(latent, w_uv, gate, seed) for seed in SEEDS]
    check_error(found[0], right(torch.float64), right(torch.float32))
    assert not found[0][0, [5, 7]].any()
    assert all(torch.equal(f, found[0]) for f in found)


def test_a_row_of_a_head_depends_on_itself_alone() -> None:
    """In any column of a product, in either tile of a turn, beside NaN."""
    rows, heads = 18, 1
    q = normal(rows, heads * (NOPE + ROPE))
    w_uk = normal(heads, NOPE, LATENT, scale=0.05)
    latent = normal(rows, heads, LATENT)
    w_uv = normal(heads, VALUE, LATENT, scale=0.05)
    gate = normal(rows, heads * VALUE)
    queries, values = absorb(q, w_uk), value(latent, w_uv, gate)
    assert torch.isfinite(queries).all() and torch.isfinite(values).all()
    for row in (0, 7, 8, 13, 17):
        one = slice(row, row + 1)
        assert torch.equal(absorb(q[one], w_uk, row)[0], queries[row])
        found = value(latent[one], w_uv, gate[one], row)
        assert torch.equal(found[0], values[row])
    q[1:12], latent[1:12], gate[1:12] = torch.nan, torch.nan, torch.nan
    others = [0, *range(12, rows)]
    assert torch.equal(absorb(q, w_uk)[others], queries[others])
    assert torch.equal(value(latent, w_uv, gate)[others], values[others])
