# SPDX-License-Identifier: Apache-2.0
"""Schedules against brute force, by hand, and as pure functions of their inputs."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drafters.schedule import (
    early_stop_prefix,
    global_top_k,
    stale_budget,
    static_threshold,
)

torch.set_num_threads(1)

FAST = settings(max_examples=60, deadline=None, derandomize=True)


@st.composite
def confidences(draw: Any, max_requests: int = 3, max_k: int = 3) -> torch.Tensor:
    """[B, k] on a coarse grid, so ties and zeros are frequent."""
    batch, k = draw(st.integers(1, max_requests)), draw(st.integers(1, max_k))
    level = st.integers(0, 8).map(lambda n: n / 8)
    rows = draw(st.lists(level, min_size=batch * k, max_size=batch * k))
    return torch.tensor(rows, dtype=torch.float64).reshape(batch, k)


def _value(survival: torch.Tensor, lengths: tuple[int, ...]) -> float:
    return sum(float(survival[b, :n].sum()) for b, n in enumerate(lengths))


def _allocations(batch: int, k: int) -> list[tuple[int, ...]]:
    return list(itertools.product(range(k + 1), repeat=batch))


@FAST
@given(confidences(), st.integers(0, 10))
def test_global_top_k_is_the_brute_force_optimum(
    confidence: torch.Tensor, budget: int
) -> None:
    survival = confidence.cumprod(dim=1)
    lengths = tuple(global_top_k(survival, budget).tolist())
    batch, k = survival.shape
    best = max(
        _value(survival, option)
        for option in _allocations(batch, k)
        if sum(option) <= budget
    )
    assert _value(survival, lengths) == pytest.approx(best, abs=1e-12)
    assert sum(lengths) == min(budget, int((survival > 0).sum()))


@FAST
@given(confidences(), st.integers(0, 9))
def test_global_top_k_grows_with_its_budget(
    confidence: torch.Tensor, budget: int
) -> None:
    survival = confidence.cumprod(dim=1)
    small, large = (global_top_k(survival, budget + n) for n in (0, 1))
    assert bool((small <= large).all())


def test_global_top_k_breaks_ties_by_request_then_position() -> None:
    flat = torch.full((3, 2), 0.5)
    assert global_top_k(flat, 3).tolist() == [2, 1, 0]
    mixed = torch.tensor([[0.9, 0.5], [0.9, 0.9], [0.5, 0.5]])
    assert global_top_k(mixed, 2).tolist() == [1, 1, 0]
    assert global_top_k(mixed, 4).tolist() == [2, 2, 0]
    assert global_top_k(mixed, 99).tolist() == [2, 2, 2]


def test_slots_of_survival_zero_are_never_admitted() -> None:
    survival = torch.tensor([[0.8, 0.0], [0.0, 0.0]])
    assert global_top_k(survival, 4).tolist() == [1, 0]
    assert early_stop_prefix(survival, lambda tokens: 1.0).tolist() == [1, 0]


@FAST
@given(confidences(), st.lists(st.floats(0.01, 1.0), min_size=12, max_size=12))
def test_early_stop_is_algorithm_1(
    confidence: torch.Tensor, drops: list[float]
) -> None:
    """The paper's loop, written out with Python sorting."""
    survival = confidence.cumprod(dim=1)
    batch, k = survival.shape
    speed = [0.0]
    for drop in drops:
        speed.append((speed[-1] or 100.0) * (0.6 + 0.4 * drop))
    slots = sorted(
        (-float(survival[b, j]), b, j)
        for b in range(batch)
        for j in range(k)
        if survival[b, j] > 0
    )
    current, chosen = [0] * batch, [0] * batch
    tokens, tau = batch, float(batch)
    best = tau * speed[tokens]
    for minus, b, j in slots:
        current[b] = j + 1
        tokens += 1
        tau -= minus
        if tau * speed[tokens] <= best:
            break
        best, chosen = tau * speed[tokens], list(current)
    assert early_stop_prefix(survival, speed).tolist() == chosen


@FAST
@given(confidences())
def test_early_stop_is_optimal_where_throughput_has_one_peak(
    confidence: torch.Tensor,
) -> None:
    """Step time affine in tokens makes the throughput along the path unimodal."""
    survival = confidence.cumprod(dim=1)
    batch, k = survival.shape

    def speed(tokens: int) -> float:
        return 1.0 / (3.0 + tokens)

    def throughput(lengths: tuple[int, ...]) -> float:
        return (batch + _value(survival, lengths)) * speed(batch + sum(lengths))

    lengths = tuple(early_stop_prefix(survival, speed).tolist())
    best = max(throughput(option) for option in _allocations(batch, k))
    assert throughput(lengths) == pytest.approx(best, abs=1e-12)


@FAST
@given(confidences(), st.integers(0, 2**16))
def test_no_schedule_reads_past_the_slot_it_decides(
    confidence: torch.Tensor, seed: int
) -> None:
    """Whether slot i of request b is verified must not change when the request's
    confidences after i change: they have seen the draft at i."""
    batch, k = confidence.shape
    gen = torch.Generator().manual_seed(seed)
    b = int(torch.randint(batch, (), generator=gen))
    i = int(torch.randint(k, (), generator=gen))
    other = confidence.clone()
    other[b, i + 1 :] = torch.rand(k - i - 1, generator=gen, dtype=torch.float64)
    speed = [0.0] + [1.0 / (2.0 + n + 2.0 * (n // 4)) for n in range(12)]
    before, after = confidence.cumprod(1), other.cumprod(1)
    for one, two in (
        (static_threshold(confidence, 0.5), static_threshold(other, 0.5)),
        (early_stop_prefix(before, speed), early_stop_prefix(after, speed)),
        *((global_top_k(before, n), global_top_k(after, n)) for n in range(7)),
    ):
        assert bool(one[b] > i) == bool(two[b] > i)


def test_static_threshold_stops_at_the_first_low_confidence() -> None:
    confidence = torch.tensor([[0.9, 0.4, 0.9], [0.5, 0.5, 0.49], [0.1, 1.0, 1.0]])
    assert static_threshold(confidence, 0.5).tolist() == [1, 2, 0]
    assert static_threshold(confidence, 0.0).tolist() == [3, 3, 3]
    assert static_threshold(torch.ones(1, 2), 1.0).tolist() == [2]
    assert static_threshold(torch.ones(2, 0), 0.5).tolist() == [0, 0]


@FAST
@given(confidences(), st.integers(0, 8), st.integers(0, 8))
def test_a_higher_threshold_never_verifies_more(
    confidence: torch.Tensor, one: int, two: int
) -> None:
    low, high = min(one, two) / 8, max(one, two) / 8
    long, short = static_threshold(confidence, low), static_threshold(confidence, high)
    assert bool((short <= long).all())


@FAST
@given(
    confidences(),
    st.lists(st.integers(1, 40), min_size=13, max_size=13),
    st.sampled_from([0.0, 5.0]),
)
def test_stale_budget_is_the_brute_force_argmax(
    confidence: torch.Tensor, steps: list[int], draft_time: float
) -> None:
    """Any table, staircases and drops included; ties go to the smaller budget."""
    survival = confidence.cumprod(dim=1)
    batch = survival.shape[0]
    ranked = sorted(survival.flatten().tolist(), reverse=True)
    gains = [
        (batch + sum(ranked[:count])) / (draft_time + steps[batch + count])
        for count in range(int((survival > 0).sum()) + 1)
    ]
    budget = stale_budget(survival, [float(n) for n in steps], draft_time)
    assert gains[budget] == pytest.approx(max(gains), rel=1e-12)
    assert all(gain < gains[budget] * (1 + 1e-12) for gain in gains[:budget])


def test_stale_budget_sees_past_a_stair_where_the_early_stop_does_not() -> None:
    """Passes of 2 to 4 tokens cost the same: slot 1 does not pay, all three do."""
    survival = torch.tensor([[0.9, 0.8, 0.7]]).double()
    time = [0.0, 1.0, 2.0, 2.0, 2.0]
    assert stale_budget(survival, time) == 3
    assert early_stop_prefix(survival, [0.0, 1.0, 0.5, 0.5, 0.5]).tolist() == [0]


def test_paper_counter_example_stops_early_in_both_cases() -> None:
    speed = [0.0, 1.0, 0.5, 0.45]
    for second in (0.9, 0.0):
        survival = torch.tensor([[0.8, second]]).double().cumprod(dim=1)
        assert early_stop_prefix(survival, speed).tolist() == [0]


def test_ranks_that_consume_one_decision_agree() -> None:
    """Field case F04: two tensor-parallel ranks see confidences that differ by 1e-3.
    Deciding each on its own they part within 100 steps; consuming rank 0's lengths and
    total they cannot. The same inputs always give the same decision."""
    gen = torch.Generator().manual_seed(0)
    time = [0.0] + [1.0 + 0.05 * n + 0.4 * (n // 4) for n in range(40)]
    stale = [torch.ones(4, 7).double() for _ in range(2)]
    parted = agreed = 0
    for _ in range(100):
        rank0 = 0.6 + 0.35 * torch.rand(4, 7, generator=gen, dtype=torch.float64)
        drift = 1e-3 * (2 * torch.rand(4, 7, generator=gen, dtype=torch.float64) - 1)
        views = [rank0.cumprod(dim=1), (rank0 + drift).cumprod(dim=1)]
        own = [
            global_top_k(view, stale_budget(old, time))
            for view, old in zip(views, stale, strict=True)
        ]
        parted += not torch.equal(own[0], own[1])
        again = global_top_k(views[0].clone(), stale_budget(stale[0].clone(), time))
        message = {"lengths": own[0].tolist(), "total": 4 + int(own[0].sum())}
        received = torch.tensor(message["lengths"])
        agreed += torch.equal(again, received) and message["total"] == 4 + int(
            received.sum()
        )
        stale = views
    assert agreed == 100
    assert parted > 0


BAD: list[tuple[Any, str]] = [
    (
        lambda: static_threshold(torch.tensor([[1.2]]), 0.5),
        r"confidence\[0, 0\] is 1.2",
    ),
    (lambda: static_threshold(torch.tensor([[torch.nan]]), 0.5), "is nan"),
    (lambda: static_threshold(torch.ones(1, 1), 1.5), "theta is 1.5"),
    (lambda: static_threshold(torch.ones(3), 0.5), r"must be \[B, k\]"),
    (lambda: static_threshold(torch.ones(1, 1).long(), 0.5), "floating point"),
    (lambda: global_top_k(torch.tensor([[0.5, 0.6]]), 1), "must not increase"),
    (lambda: global_top_k(torch.ones(1, 1), -1), "budget is -1"),
    (lambda: early_stop_prefix(torch.ones(1, 2), [0.0, 1.0, 1.0]), "3 are needed"),
    (lambda: early_stop_prefix(torch.ones(1, 1), [0.0, 1.0, -1.0]), "must be positive"),
    (lambda: stale_budget(torch.ones(1, 1), [0.0, 0.0, 1.0]), "must be positive"),
    (lambda: stale_budget(torch.ones(1, 1), lambda n: 1.0, -1.0), "draft_time is -1"),
]


@pytest.mark.parametrize(("call", "message"), BAD)
def test_bad_input_is_named(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_an_empty_batch_is_fine() -> None:
    none = torch.ones(0, 3)
    assert global_top_k(none, 2).tolist() == []
    assert early_stop_prefix(none, [0.0]).tolist() == []
    assert stale_budget(none, [0.0]) == 0
