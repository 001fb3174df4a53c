# SPDX-License-Identifier: Apache-2.0
"""The eager KDA commit: the bits of the fold, the reference's numbers, its checks; on
the CPU machine and on a GPU."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence
from dataclasses import fields, replace

import pytest
import torch
from torch import Tensor

from experiments.bench.neighbours import neighbours
from tests.verify_kernels.test_kda_kernel import (
    Step,
    Truth,
    batch_of,
    bits,
    cache_of,
    check_close,
    check_ragged_steps,
    check_random_accepts,
    clone,
    projections,
    ragged_call,
    run,
    run_on_gpu,
    same,
    weights,
)
from verify_kernels import VerifyBatch
from verify_kernels.kda import (
    KdaFoldState,
    KdaVerifyWeights,
    kda_commit,
    kda_verify,
    reference,
)
from verify_kernels.kda.host import CLUSTERS, DIM, TAPS, packed_width

PAST = TAPS - 1
#: cache, slots, accepted -> nothing; the cache is written.
Commit = Callable[[KdaFoldState, Tensor, Tensor], None]
#: Changes PTX before it runs.
Edit = Callable[[str], str]


def ints(values: Sequence[int], device: str = "cpu") -> Tensor:
    return torch.tensor(list(values), dtype=torch.int32, device=device)


def commit_on_gpu(pdl: bool = True) -> Commit:
    def commit(cache: KdaFoldState, slots: Tensor, accepted: Tensor) -> None:
        kda_commit(cache, slots, accepted, pdl=pdl)

    return commit


def commit_on_machine(
    seed: int = 0, races: bool = True, edit: Edit = str, name: str = "commit"
) -> Commit:
    """Seeds count up from launch to launch."""
    from tests.verify_kernels.machine import GlobalMemory, launch, tensor_argument
    from tests.verify_kernels.machine.kernels import compiled

    variant, ptx = compiled("kda", name)
    seeds = itertools.count(seed)
    kernel = variant.kernel

    def commit(cache: KdaFoldState, slots: Tensor, accepted: Tensor) -> None:
        given = {f.name: getattr(cache, f.name) for f in fields(cache)}
        given |= {"slots": slots, "accepted": accepted}
        memory, parameters = GlobalMemory(), []
        for own in kernel.parameters:
            tensor = given[own]
            written = own in ("state", "window", "counts")
            at = memory.add(tensor, own, dynamic=True, writable=written)
            # Extents and strides that are open.
            extents, strides = (2, 1) if tensor.dim() > 1 else (1, 0)
            if own == "window":
                extents, strides = 3, 2
            shape, steps = tensor.shape[:extents], tensor.stride()[:strides]
            parameters.append(tensor_argument(at, shape, steps))
        launch(
            edit(ptx),
            memory,
            parameters,
            grid=(kernel.ctas, cache.state.shape[1], slots.shape[0]),
            block=(kernel.threads, 1, 1),
            cluster=(kernel.ctas, 1, 1),
            shared_bytes=kernel.shared_bytes,
            seed=next(seeds),
            races=races,
        )

    return commit


def eager(step: Step, commit: Commit) -> Step:
    """A step that commits before its rows what the fold would have folded."""

    def both(
        packed: Tensor,
        w: KdaVerifyWeights,
        cache: KdaFoldState,
        batch: VerifyBatch,
        out: Tensor,
    ) -> None:
        live = batch.row_start.diff() > 0
        commit(cache, torch.where(live, batch.state_slots, 0), batch.accepted)
        told = replace(batch, accepted=torch.zeros_like(batch.accepted))
        step(packed, w, cache, told, out)

    return both


#: Slot, rows, accepted: all, all, none, some, more than no rows, more than two, fewer
#: than none, more than eight, one, padding; and the rows of the step after.
CASES = [
    (1, 8, 8, 1),
    (5, 3, 3, 8),
    (3, 1, 0, 2),
    (4, 5, 2, 3),
    (2, 0, 2, 4),
    (8, 2, 7, 1),
    (7, 6, -1, 2),
    (6, 7, 100, 1),
    (9, 4, 1, 2),
    (0, 1, 1, 1),
    (-1, 0, 5, 2),
]
#: Of the commit.
OVERRUNS = (2, 8, 6)


def check_commit_is_the_fold(
    step: Step, commit: Commit, device: str = "cpu", heads: int = 1
) -> None:
    """Field cases F02, F13: verify, commit, verify has the bits of verify, verify;
    whatever the last is told, nothing is folded twice. Nothing else of a slot changes,
    and nothing of the others, which are NaN."""
    slots, widths, accepted, after = zip(*CASES, strict=True)
    live = [s for s in slots if s > 0]
    w = weights(heads, 11, device)
    start = cache_of(11, heads, live, 11, device)
    packed = projections(sum(widths), heads, 90, device)
    none = [0] * len(slots)
    run(step, packed, w, start, batch_of(widths, slots, none, device))

    packed = projections(sum(after), heads, 91, device)
    folded = clone(start)
    batch = batch_of(after, slots, accepted, device)
    right = run(step, packed, w, folded, batch)
    assert torch.isfinite(right).all()

    done = clone(start)
    commit(done, ints(slots, device), ints(accepted, device))
    same(done, start, [s for s in range(11) if s not in live])
    for slot, width, told, _ in CASES:
        if slot <= 0:
            continue
        count = min(max(told, 0), width)
        assert (done.counts[slot, :, 0] == 0).all(), slot
        assert (done.counts[slot, :, 1] == (slot in OVERRUNS)).all(), slot
        assert torch.isfinite(done.state[slot]).all(), slot
        assert torch.equal(bits(done.state[slot]), bits(folded.state[slot])), slot
        changed = not torch.equal(done.state[slot], start.state[slot])
        assert changed == (count > 0), slot
        taps = start.window[slot, count : count + PAST]
        assert torch.isfinite(taps).all()
        assert torch.equal(done.window[slot, :PAST], taps), slot
        found, kept = done.window[slot, PAST:], start.window[slot, PAST:]
        assert torch.equal(bits(found), bits(kept)), slot
        for name in ("u", "key", "decay"):
            found, kept = getattr(done, name)[slot], getattr(start, name)[slot]
            assert torch.equal(bits(found), bits(kept)), (slot, name)

    for again in (none, accepted):
        cache = clone(done)
        out = run(step, packed, w, cache, batch_of(after, slots, again, device))
        assert torch.equal(bits(out), bits(right))
        for (slot, _, _, width), told in zip(CASES, again, strict=True):
            if slot <= 0:
                continue
            assert torch.equal(bits(cache.state[slot]), bits(folded.state[slot])), slot
            entries = slice(0, PAST + width)
            found, kept = (c.window[slot, entries] for c in (cache, folded))
            assert torch.equal(found, kept), slot
            for name in ("u", "key", "decay"):
                found, kept = (
                    getattr(c, name)[slot, :, :width] for c in (cache, folded)
                )
                assert torch.equal(bits(found), bits(kept)), (slot, name)
            assert (cache.counts[slot, :, 0] == width).all(), slot
            overruns = folded.counts[slot, :, 1] + int(told > 0)
            assert torch.equal(cache.counts[slot, :, 1], overruns), slot


#: Widths, and accepted counts of this step's rows, which are committed after it.
STEPS = [
    ((2, 0, 1, 8), (1, 0, 1, 6)),
    ((3, 1, 2, 0), (0, 1, 1, -1)),
    ((8, 4, 0, 5), (8, 9, 3, 5)),
]
SLOTS = (3, 5, 0, 1)


def check_eager_steps(
    step: Step, commit: Commit, device: str = "cpu", heads: int = 2
) -> None:
    """Ragged steps, each committed, against the reference's eager layout in fp64."""
    w = weights(heads, 12, device)
    live = [s for s in SLOTS if s > 0]
    cache = cache_of(7, heads, live, 12, device)
    before = clone(cache)
    exact, plain = (Truth.beside(w, cache, k) for k in (torch.float64, torch.float32))
    for number, (widths, accepted) in enumerate(STEPS):
        batch = batch_of(widths, SLOTS, [0] * len(SLOTS), device)
        total = sum(widths)
        packed = projections(total, heads, 95 + number, device)
        out = run(step, packed, w, cache, batch)
        right, near = (
            t.step(packed, w.w_fb, batch, fold=False) for t in (exact, plain)
        )
        check_close("out", out, right, near.bfloat16())
        commit(cache, ints(SLOTS, device), ints(accepted, device))
        for truth in (exact, plain):
            for slot, told in zip(SLOTS, accepted, strict=True):
                if slot > 0:
                    reference.commit(truth.cache, slot, told)
        for slot in live:
            found, *wanted = (
                s[slot].flatten(1)
                for s in (cache.state, exact.cache.state, plain.cache.state)
            )
            check_close(f"state of slot {slot}", found, *wanted)
            line = [getattr(exact.cache, f"window_{n}")[slot] for n in "qkv"]
            taps = torch.stack(line, 1).flatten(1)
            assert torch.equal(cache.window[slot, :PAST].double(), taps), slot
            assert (cache.counts[slot, :, 0] == 0).all(), slot
    # Slot 5: nine of four.
    assert exact.cache.overruns == 1
    assert cache.counts[live, 0, 1].tolist() == [0, 1, 0]
    same(cache, before, [s for s in range(7) if s not in live])


def check_equal_commits(
    commits: Sequence[Commit], device: str = "cpu", heads: int = 1
) -> None:
    """The same bits from each, and from slots on their own."""
    _, _, start, batch = ragged_call(device, heads)
    caches = []
    for commit in commits:
        cache = clone(start)
        commit(cache, batch.state_slots, batch.accepted)
        caches.append(cache)
        same(cache, caches[0], list(range(5)))
    cache = clone(start)
    for b in range(batch.size):
        one = slice(b, b + 1)
        commits[0](cache, batch.state_slots[one], batch.accepted[one])
    same(cache, caches[0], list(range(5)))
    for slot in (4, 1, 2):
        assert not torch.equal(cache.state[slot], start.state[slot])


@pytest.fixture
def dsl() -> None:
    pytest.importorskip("cutlass", reason="CuTe DSL is not installed")


@pytest.mark.usefixtures("dsl")
def test_a_commit_is_the_fold_on_the_machine() -> None:
    from tests.verify_kernels.test_kda_kernel_machine import on_machine

    check_commit_is_the_fold(on_machine(1, 200), commit_on_machine(200))


@pytest.mark.usefixtures("dsl")
def test_eager_steps_on_the_machine() -> None:
    from tests.verify_kernels.test_kda_kernel_machine import on_machine

    check_eager_steps(on_machine(1, 220), commit_on_machine(220))


@pytest.mark.usefixtures("dsl")
def test_schedules_have_the_same_bits() -> None:
    """And no race, in six."""
    check_equal_commits([commit_on_machine(seed) for seed in range(240, 300, 10)])


def without(pattern: str) -> Edit:
    """PTX without what matches, which is there."""

    def edit(ptx: str) -> str:
        found, count = re.subn(pattern, "", ptx)
        assert count
        return found

    return edit


@pytest.mark.usefixtures("dsl")
@pytest.mark.parametrize(
    ("pattern", "sign"),
    [
        (r"barrier\.cluster\.\w+[\w.]*;", "other bits"),
        (r"bar\.sync\s[^;]*;", "not ordered with the store there"),
        (r"griddepcontrol\.wait;", "other bits"),
    ],
    ids=["cluster", "block", "earlier-kernels"],
)
def test_every_wait_is_needed(pattern: str, sign: str) -> None:
    """Some schedule goes wrong without it."""
    _, _, start, batch = ragged_call()
    right = clone(start)
    commit_on_machine()(right, batch.state_slots, batch.accepted)
    edit = without(pattern)
    assert any(sign in outcome(edit, seed, start, right, batch) for seed in range(40))


def outcome(
    edit: Edit, seed: int, start: KdaFoldState, right: KdaFoldState, batch: VerifyBatch
) -> str:
    """What is wrong with a commit, "" if nothing is."""
    from tests.verify_kernels.machine import Fault

    cache = clone(start)
    try:
        commit_on_machine(seed, edit=edit)(cache, batch.state_slots, batch.accepted)
    except Fault as fault:
        return str(fault)
    for f in fields(cache):
        if not torch.equal(bits(getattr(cache, f.name)), bits(getattr(right, f.name))):
            return f"{f.name} has other bits"
    return ""


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [1, 6, 96])
@pytest.mark.parametrize("pdl", [False, True])
def test_a_commit_is_the_fold(heads: int, pdl: bool) -> None:
    for ctas in CLUSTERS:
        step = run_on_gpu(ctas, pdl)
        check_commit_is_the_fold(step, commit_on_gpu(pdl), "cuda", heads)


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [1, 6])
def test_eager_steps_against_the_reference(heads: int) -> None:
    check_eager_steps(run_on_gpu(), commit_on_gpu(), "cuda", heads)
    check_ragged_steps(eager(run_on_gpu(), commit_on_gpu()), "cuda", heads)


@pytest.mark.gpu
def test_random_accepts_are_plain_decoding() -> None:
    check_random_accepts(eager(run_on_gpu(), commit_on_gpu()), 300, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [1, 96])
def test_launches_have_the_same_bits(heads: int) -> None:
    commits = [commit_on_gpu(pdl) for pdl in (False, True)]
    check_equal_commits(commits, "cuda", heads)


@pytest.mark.gpu
@pytest.mark.parametrize("pdl", [False, True])
def test_a_thousand_repeats_with_another_stream_busy(pdl: bool) -> None:
    """Field case F40: after a step whose slots it commits, before the next."""
    packed, w, start, batch = ragged_call("cuda", 24)
    right, cache = clone(start), clone(start)
    told = replace(batch, accepted=torch.zeros_like(batch.accepted))
    expected = torch.full((12, 24, DIM), torch.nan, device="cuda").bfloat16()
    out = torch.empty_like(expected)

    def steps(into: KdaFoldState, result: Tensor, chained: bool) -> None:
        kda_verify(packed, w, into, batch, result, pdl=chained)
        kda_commit(into, batch.state_slots, batch.accepted, pdl=chained)
        kda_verify(packed, w, into, told, result, pdl=chained)

    steps(right, expected, False)
    assert torch.isfinite(expected).all()
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    with neighbours() as disturb:
        for _ in range(1000):
            disturb()
            for f in fields(cache):
                getattr(cache, f.name).copy_(getattr(start, f.name))
            out.fill_(torch.nan)
            steps(cache, out, pdl)
            wrong += (bits(out) != bits(expected)).sum()
            for f in fields(cache):
                found, kept = getattr(cache, f.name), getattr(right, f.name)
                wrong += (bits(found) != bits(kept)).sum()
    assert int(wrong) == 0


@pytest.mark.gpu
def test_a_graph_of_commits_reads_what_is_new() -> None:
    """Field case F06: one captured commit and step, replayed with other slots, counts
    and rows, equals launches one by one, and these the fold."""
    w = weights(2, 0, "cuda")
    cache = cache_of(7, 2, [3, 5, 1], 0, "cuda")
    others = [clone(cache), clone(cache)]
    packed = torch.zeros(32, 1168, dtype=torch.bfloat16, device="cuda")
    batch = batch_of([1] * 4, [0] * 4, [0] * 4, "cuda")
    outs = [torch.zeros(32, 2, DIM, device="cuda").bfloat16() for _ in range(3)]
    graphed = eager(run_on_gpu(), commit_on_gpu())
    graphed(packed, w, cache, batch, outs[0])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        graphed(packed, w, cache, batch, outs[0])
    one_by_one = eager(run_on_gpu(pdl=False), commit_on_gpu(False))
    told = [0] * 4
    for number in range(30):
        widths, accepted = STEPS[number % 3]
        total = sum(widths)
        rows = projections(total, 2, 60 + number, "cuda")
        packed[:total, : packed_width(2)] = rows[:, : packed_width(2)]
        new = batch_of(widths, SLOTS, told, "cuda")
        for name in ("row_start", "state_slots", "accepted"):
            getattr(batch, name).copy_(getattr(new, name))
        for out in outs:
            out.fill_(torch.nan)
        graph.replay()
        one_by_one(packed, w, others[0], batch, outs[1])
        run_on_gpu()(packed, w, others[1], batch, outs[2])
        assert torch.isfinite(outs[0][:total]).all()
        for out, other in zip(outs[1:], others, strict=True):
            assert torch.equal(bits(out), bits(outs[0])), number
            assert torch.equal(bits(other.state), bits(cache.state)), number
            assert torch.equal(other.counts, cache.counts), number
        told = [a if n else t for a, n, t in zip(accepted, widths, told, strict=True)]


@pytest.mark.gpu
def test_all_of_a_slot_far_away() -> None:
    """Field case F37: slots 2^31 bytes apart need 64-bit offsets."""
    from tests.verify_kernels.test_kda_kernel_long import pages

    _, _, near, batch = ragged_call("cuda", 2)
    far = KdaFoldState(
        **pages(5, {f.name: getattr(near, f.name) for f in fields(near)})
    )
    before = clone(near)
    for cache in (near, far):
        kda_commit(cache, batch.state_slots, batch.accepted)
    assert not torch.equal(near.state[2], before.state[2])
    same(far, near, list(range(5)))


def test_no_slots_and_no_device() -> None:
    cache = KdaFoldState.allocate(4, 2, "cpu")
    kda_commit(cache, ints([]), ints([]))
    with pytest.raises(ValueError, match=r"state is on cpu; the kernel needs a CUDA"):
        kda_commit(cache, ints([1]), ints([1]))


@pytest.mark.parametrize(
    ("part", "value", "words"),
    [
        ("slots", torch.zeros(2), r"slots is torch.float32 \(2,\); it must be"),
        ("slots", torch.zeros(1, 2).int(), r"slots is \(1, 2\); it must be \[B\]"),
        ("slots", torch.zeros(65536).int(), r"slots is \(65536,\).* up to 65535"),
        ("slots", torch.zeros(4).int()[::2], r"slots has strides \(2,\)"),
        ("accepted", torch.zeros(3).int(), r"accepted is .*\(3,\); .*\(2,\)"),
        ("accepted", torch.zeros(2).long(), "accepted is torch.int64"),
        ("accepted", torch.zeros(2, device="meta").int(), "accepted is on meta and"),
        ("state", torch.zeros(4, 128, 128), r"state is \(4, 128, 128\); it must be"),
        ("state", torch.zeros(4, 2, 128, 129)[..., :128], "state has strides"),
        (
            "window",
            torch.zeros(4, 10, 768).bfloat16(),
            r"window is \(4, 10, 768\); .*at least 11",
        ),
        ("window", torch.zeros(4, 11, 384).bfloat16(), r"window is .*\(4, 11, 384\);"),
        ("u", torch.zeros(4, 2, 7, 128), r"u is .*\(4, 2, 7, 128\); it must be"),
        ("key", torch.zeros(4, 2, 8, 128).bfloat16(), "key is torch.bfloat16"),
        ("decay", torch.zeros(3, 2, 8, 128), r"decay is .*\(3, 2, 8, 128\);"),
        ("counts", torch.zeros(4, 2, 2), "counts is torch.float32"),
    ],
)
def test_bad_input_is_refused(part: str, value: Tensor, words: str) -> None:
    cache = KdaFoldState.allocate(4, 2, "cpu")
    call = {"slots": ints([1, 2]), "accepted": ints([1, 1])}
    if part in call:
        call[part] = value
    else:
        cache = replace(cache, **{part: value})
    with pytest.raises(ValueError, match=words):
        kda_commit(cache, **call)
