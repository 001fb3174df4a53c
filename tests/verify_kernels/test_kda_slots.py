# SPDX-License-Identifier: Apache-2.0
"""The fold in vLLM's slots: the bits of the fold layout, whose window begins one entry
earlier, after prompts, commits and wrong counts too; on the CPU machine and a GPU."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace

import pytest
import torch
from torch import Tensor

from tests.verify_kernels.test_kda_kernel import (
    Step,
    Truth,
    batch_of,
    bits,
    cache_of,
    clone,
    projections,
    run,
    run_on_gpu,
    weights,
)
from verify_kernels import VerifyBatch
from verify_kernels.kda import KdaFoldState, KdaVerifyWeights, bind_slots, rolling
from verify_kernels.kda.host import CLUSTERS, DIM, TAPS
from verify_kernels.kda.reference import KdaRows

PAST = TAPS - 1
ENTRIES = 10
#: cache, slots, accepted -> nothing; the cache is written.
Commit = Callable[[KdaFoldState, Tensor, Tensor], None]


@dataclass
class Form:
    """Steps and commits of one layout."""

    step: Step
    commit: Commit


def on_gpu(ctas: int | None = None, pdl: bool = True) -> Form:
    def step(
        packed: Tensor,
        w: KdaVerifyWeights,
        cache: KdaFoldState,
        batch: VerifyBatch,
        out: Tensor,
    ) -> None:
        launch = bind_slots(w, cache, 8, ctas=ctas, pdl=pdl)
        slots = batch.state_slots[:, None]
        launch(packed, cache, slots, batch.row_start, batch.accepted, out)

    def commit(cache: KdaFoldState, slots: Tensor, accepted: Tensor) -> None:
        heads = cache.state.shape[1]
        bind_slots(weights(heads, device="cuda"), cache, 8, pdl=pdl).commit(
            cache, slots, accepted
        )

    return Form(step, commit)


def on_machine(ctas: int, seed: int = 0, races: bool = False) -> Form:
    from tests.verify_kernels.test_kda_commit import commit_on_machine
    from tests.verify_kernels.test_kda_kernel_machine import run_on_machine

    seeds = itertools.count(seed)

    def step(
        packed: Tensor,
        w: KdaVerifyWeights,
        cache: KdaFoldState,
        batch: VerifyBatch,
        out: Tensor,
    ) -> None:
        tensors = {f.name: getattr(cache, f.name) for f in fields(cache)}
        tensors |= {"packed": packed, "out": out}
        # Of a table of two columns.
        table = torch.stack((batch.state_slots, torch.full_like(batch.accepted, 99)), 1)
        tensors["state_slots"] = table[:, :1]
        run_on_machine("slot", ctas, w, batch, tensors, next(seeds), races)

    return Form(step, commit_on_machine(seed, races, name="slot_commit"))


def by_reference() -> Form:
    def step(
        packed: Tensor,
        w: KdaVerifyWeights,
        cache: KdaFoldState,
        batch: VerifyBatch,
        out: Tensor,
    ) -> None:
        heads = cache.state.shape[1]
        rows = KdaRows.unpack(
            packed.float(), w.w_fb.float(), heads, DIM, bf16_decay=True
        )
        truth = Truth.beside(w, cache, torch.float32)
        out[:] = rolling.verify(batch, rows, truth.weights, cache)

    def commit(cache: KdaFoldState, slots: Tensor, accepted: Tensor) -> None:
        for slot, told in zip(slots.tolist(), accepted.tolist(), strict=True):
            if slot > 0:
                rolling.commit(cache, slot, told)

    return Form(step, commit)


def fold_by_reference() -> Step:
    """The fold layout by `reference`, its own cache beside the caller's."""
    held: dict[int, Truth] = {}

    def step(
        packed: Tensor,
        w: KdaVerifyWeights,
        cache: KdaFoldState,
        batch: VerifyBatch,
        out: Tensor,
    ) -> None:
        truth = held.setdefault(id(cache), Truth.beside(w, cache, torch.float32))
        out[:] = truth.step(packed, w.w_fb, batch)
        cache.state.copy_(truth.cache.state)
        cache.counts[:, :, 0] = truth.cache.width[:, None]

    return step


def rolled(cache: KdaFoldState) -> KdaFoldState:
    """A cache as prompts leave it, with vLLM's window: room for seven drafts, and the
    slots of a longer page. What a prompt does not write is of a former owner."""
    slots, heads = cache.state.shape[:2]
    made = clone(cache)
    window = torch.full(
        (slots, ENTRIES + 1, 3 * heads * DIM), torch.nan, device=cache.state.device
    )
    window = window.bfloat16()[:, :ENTRIES]
    window[:, :PAST] = cache.window[:, :PAST]
    return replace(made, window=window)


def ints(values: Sequence[int], device: str) -> Tensor:
    return torch.tensor(list(values), dtype=torch.int32, device=device)


SLOTS = (3, 1, 0)
#: Widths, rows accepted of the first two, and what was committed before: slots.
PLAN: list[tuple[tuple[int, ...], tuple[int, int], tuple[int, ...]]] = [
    ((8, 3, 1), (6, 3), ()),
    ((2, 0, 1), (1, 3), ()),
    ((5, 8, 1), (5, 1), (1,)),
    ((1, 2, 0), (1, 2), (3, 1)),
    ((7, 1, 2), (7, 1), ()),
]


def check_same_as_fold(
    fold: Step,
    forms: Sequence[Form],
    device: str = "cpu",
    heads: int = 1,
    records: bool = True,
) -> None:
    """Field cases F02, F13: ragged steps with rejected rows, a request that waits,
    some committed in between; results, states, records and windows bit for bit."""
    w = weights(heads, 6, device)
    cache = cache_of(5, heads, [3, 1], 6, device)
    caches = [rolled(cache) for _ in forms]
    told, waiting = [1, 1], [0, 0]
    for number, (widths, accepted, committed) in enumerate(PLAN):
        packed = projections(sum(widths), heads, 70 + number, device)
        batch = batch_of(widths, SLOTS, [*waiting, 0], device)
        right = run(fold, packed, w, cache, batch)
        counts = [told[SLOTS.index(slot)] for slot in committed]
        for slot in committed:
            told[SLOTS.index(slot)] = 1  # As after a prompt.
        batch = batch_of(widths, SLOTS, [*told, 1], device)
        for form, own in zip(forms, caches, strict=True):
            if committed:
                form.commit(own, ints(committed, device), ints(counts, device))
                for slot in committed:
                    assert not own.counts[slot, :, 0].any()
            out = run(form.step, packed, w, own, batch)
            assert torch.equal(bits(out), bits(right)), number
            for slot, width in zip(SLOTS, widths, strict=True):
                if slot <= 0 or not width:
                    continue
                assert torch.equal(bits(own.state[slot]), bits(cache.state[slot]))
                assert torch.equal(own.counts[slot], cache.counts[slot])
                if records:
                    for name in ("u", "key", "decay"):
                        a, b = (getattr(c, name)[slot, :, :width] for c in (own, cache))
                        assert torch.equal(bits(a), bits(b)), (number, name)
                    found = own.window[slot, : PAST - 1 + width]
                    assert torch.equal(found, cache.window[slot, 1 : PAST + width])
        for b in range(2):
            if widths[b]:
                told[b] = waiting[b] = accepted[b]
    for own in caches:
        assert torch.equal(bits(own.state), bits(caches[0].state))
        assert not own.counts[[3, 1], :, 1].any()
        for slot in (0, 2, 4):
            assert torch.isnan(own.state[slot]).all()
            assert torch.isnan(own.window[slot]).all()


def check_what_is_told(form: Form, device: str = "cpu", heads: int = 1) -> None:
    """Counts that fit no rows: after a prompt, in a slot of a former owner, below 1 and
    above what was recorded."""
    w = weights(heads, 7, device)
    start = rolled(cache_of(6, heads, [1, 2, 3, 4, 5], 7, device))
    # A prompt begins in slot 1, whose memory held other things.
    start.counts[1] = ints([-(2**31) + 5, 77], device)
    start.u[1] = start.key[1] = start.decay[1] = torch.nan
    before = clone(start)
    form.commit(start, ints([1, 0, -1], device), ints([0, 3, 1], device))
    assert not start.counts[1].any()
    start.counts[1] = before.counts[1]
    for f in fields(start):
        kept, found = (getattr(c, f.name) for c in (before, start))
        assert torch.equal(bits(found), bits(kept)), f.name
    # Nobody said so of slot 5, but its count is no count.
    start.counts[1] = 0
    start.counts[5, :, 0] = -9
    widths = [3, 2, 4, 1, 1]
    packed = projections(sum(widths), heads, 60, device)
    slots = [1, 2, 3, 4, 5]
    run(form.step, packed, w, start, batch_of(widths, slots, [1] * 5, device))
    assert start.counts[slots, 0, 0].tolist() == widths
    assert not start.counts[slots, :, 1].any()
    for slot in slots:
        assert torch.equal(bits(start.state[slot]), bits(before.state[slot]))
    # All, below 1, above what is there, above a plain step's one row.
    given, meant = [3, 0, 9, 2, 1], [3, 1, 4, 1, 1]
    packed = projections(5, heads, 61, device)
    results = []
    for told in (given, meant):
        cache = clone(start)
        out = run(form.step, packed, w, cache, batch_of([1] * 5, slots, told, device))
        assert torch.isfinite(out).all()
        results.append((out.clone(), cache))
        folded = clone(start)
        form.commit(folded, ints(slots[1:], device), ints(meant[1:], device))
        assert torch.equal(bits(folded.state[2:]), bits(cache.state[2:]))
        for slot, count in zip(slots[1:], meant[1:], strict=True):
            taps = start.window[slot, count - 1 : count - 1 + PAST]
            assert torch.equal(folded.window[slot, :PAST], taps)
            found, kept = folded.window[slot, PAST:], start.window[slot, PAST:]
            assert torch.equal(bits(found), bits(kept))
    (out, cache), (wanted, other) = results
    assert torch.equal(bits(out), bits(wanted))
    assert torch.equal(bits(cache.state), bits(other.state))
    assert torch.equal(cache.window[slots, :3], other.window[slots, :3])
    assert cache.counts[slots, 0, 1].tolist() == [0, 0, 1, 1, 0]
    assert not other.counts[slots, :, 1].any()
    form.commit(start, ints(slots, device), ints([9, 2, 5, 1, 1], device))
    assert start.counts[slots, 0, 1].tolist() == [1, 0, 1, 0, 0]
    assert not start.counts[slots, :, 0].any()


def test_the_reference_has_the_bits_of_the_folds() -> None:
    check_same_as_fold(fold_by_reference(), [by_reference()], records=False)


def test_the_reference_takes_what_it_is_told() -> None:
    check_what_is_told(by_reference())


@pytest.fixture
def dsl() -> None:
    pytest.importorskip("cutlass", reason="CuTe DSL is not installed")


@pytest.mark.usefixtures("dsl")
def test_slots_on_the_machine() -> None:
    """Under two schedules, with no race."""
    from tests.verify_kernels import test_kda_kernel_machine as machine

    forms = [on_machine(c, 40 + c, True) for c in (8, 2)]
    check_same_as_fold(machine.on_machine(4, 20), forms)


@pytest.mark.usefixtures("dsl")
@pytest.mark.parametrize("ctas", [1, 4])
def test_what_is_told_on_the_machine(ctas: int) -> None:
    check_what_is_told(on_machine(ctas, 70, True))


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [1, 6, 48])
def test_slots_have_the_bits_of_the_fold(heads: int) -> None:
    forms = [on_gpu(c, pdl) for c in (*CLUSTERS, None) for pdl in (False, True)]
    check_same_as_fold(run_on_gpu(), forms, "cuda", heads)


@pytest.mark.gpu
@pytest.mark.parametrize("ctas", CLUSTERS)
def test_what_is_told_on_a_gpu(ctas: int) -> None:
    check_what_is_told(on_gpu(ctas), "cuda", 6)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({}, "state is on cpu; the kernel needs a CUDA device"),
        ({"window": torch.zeros(2, 9, 384).bfloat16()}, "W at least 10"),
        ({"state": torch.zeros(2, DIM, DIM)}, r"state is \(2, 128, 128\)"),
        ({"u": torch.zeros(2, 1, 7, DIM)}, r"u is .*\(2, 1, 7, 128\)"),
        ({"counts": torch.zeros(2, 1, 2)}, "counts is torch.float32"),
    ],
)
def test_a_cache_that_does_not_fit_is_refused(
    change: dict[str, Tensor], words: str
) -> None:
    cache = replace(rolled(cache_of(2, 1, [1])), **change)
    with pytest.raises(ValueError, match=words):
        bind_slots(weights(1), cache, 8)


@pytest.mark.parametrize("rows", [0, 9])
def test_steps_that_a_slot_does_not_record_are_refused(rows: int) -> None:
    """The window would have had room for nine."""
    with pytest.raises(ValueError, match=f"rows is {rows}; a slot records 1 to 8"):
        bind_slots(weights(1), rolled(cache_of(2, 1, [1])), rows)


def test_another_cluster_size_is_refused() -> None:
    with pytest.raises(ValueError, match="ctas is 3; it must be one of"):
        bind_slots(weights(1), rolled(cache_of(2, 1, [1])), 8, ctas=3)
