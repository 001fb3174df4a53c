# SPDX-License-Identifier: Apache-2.0
"""Acceptance arithmetic against hand counts."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.acceptance import AcceptanceCounts, AcceptanceCurve

rates = st.lists(st.floats(0, 1), min_size=1, max_size=8)


def test_counts_of_the_reported_case() -> None:
    """Field case F23: rates come from what was verified, not from configured K."""
    counts = AcceptanceCounts.from_steps([7, 3, 0, 1, 7], [2, 3, None, 0, 7])
    assert (counts.proposed, counts.verified, counts.accepted) == (18, 18, 12)
    assert counts.verify_steps == 4
    assert counts.acceptance_length == 4.0
    assert counts.reached == (4, 3, 3, 2, 2, 2, 2)
    assert counts.accepted_at == (3, 3, 2, 1, 1, 1, 1)
    assert counts.survival_rates == (0.75, 1.0, 2 / 3, 0.5, 0.5, 0.5, 0.5)
    assert counts.draft_acceptance_rate == 12 / 18


def test_trimmed_drafts_are_proposed_but_not_verified() -> None:
    """Field case F23: drafted-but-dropped tokens do not deflate the rate."""
    counts = AcceptanceCounts.from_steps([2, 0], [2, None], proposed=[7, 7])
    assert (counts.proposed, counts.verified) == (14, 2)
    assert counts.draft_acceptance_rate == 1.0
    assert counts.acceptance_length == 3.0


def test_no_drafts_is_nan_and_not_a_crash() -> None:
    """Field case F23: a run without drafts has no rate."""
    counts = AcceptanceCounts.from_steps([0, 0], [None, None])
    assert counts.verify_steps == 0
    assert math.isnan(counts.acceptance_length)
    assert math.isnan(counts.draft_acceptance_rate)
    assert counts.survival_rates == ()


@pytest.mark.parametrize("bad", [([1], [2]), ([1], [-1])])
def test_impossible_counts_name_the_step(bad: tuple[list[int], list[int]]) -> None:
    """Field case F23: negative or excess counts are refused."""
    with pytest.raises(ValueError, match="step 0"):
        AcceptanceCounts.from_steps(*bad)


def test_marginal_list_is_survival() -> None:
    """Field case F24: the marginal list [.9, .8, .5] has acceptance length 3.2."""
    curve = AcceptanceCurve.from_survival("c", [0.9, 0.8, 0.5], "modelled")
    assert curve.length(3) == pytest.approx(3.2)
    assert curve.conditional == pytest.approx((0.9, 8 / 9, 5 / 8))


@pytest.mark.parametrize("drafts", [3, 7])
def test_one_length_means_the_same_for_every_k(drafts: int) -> None:
    """Field case F24: length 3 is length 3 with 3 and with 7 drafts."""
    for build in (AcceptanceCurve.geometric, AcceptanceCurve.minimum_variance):
        assert build(3.0, drafts).length(drafts) == pytest.approx(3.0, abs=1e-12)


def test_minimum_variance_is_vllms_schedule() -> None:
    """Field case F24: L = 3.84 with 7 drafts is [1, 1, .84, 0, 0, 0, 0]."""
    curve = AcceptanceCurve.minimum_variance(3.84, 7)
    assert curve.survival == pytest.approx((1, 1, 0.84, 0, 0, 0, 0))
    assert curve.conditional == pytest.approx((1, 1, 0.84, 0, 0, 0, 0))


@given(rates)
def test_length_is_one_plus_the_mean_of_the_distribution(a: list[float]) -> None:
    curve = AcceptanceCurve.from_conditional("c", a, "modelled")
    for k in range(len(a) + 1):
        law = curve.accepted_distribution(k)
        assert sum(law) == pytest.approx(1)
        assert min(law) >= -1e-12
        mean = sum(m * p for m, p in enumerate(law))
        assert curve.length(k) == pytest.approx(1 + mean)


@given(rates)
def test_conditional_rates_come_back(a: list[float]) -> None:
    curve = AcceptanceCurve.from_conditional("c", a, "modelled")
    again = AcceptanceCurve.from_conditional("c", curve.conditional, "modelled")
    assert again.survival == pytest.approx(curve.survival, abs=1e-12)


@given(st.floats(1, 8))
def test_geometric_rate_is_constant(length: float) -> None:
    curve = AcceptanceCurve.geometric(length, 7)
    assert curve.length(7) == pytest.approx(length, abs=1e-9)
    assert curve.survival[1] == pytest.approx(curve.survival[0] ** 2)


def test_power_acts_on_conditional_rates() -> None:
    curve = AcceptanceCurve.from_conditional("c", [0.9, 0.8], "recorded").power(2)
    assert curve.conditional == pytest.approx((0.81, 0.64))
    assert curve.label == "modelled"


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ([0.5, 0.6], "rises at position 2"),
        ([0.5, 1.2], "position 2 is 1.2"),
        ([-0.1], "position 1"),
        ([], "empty"),
        ([float("nan")], "position 1"),
    ],
)
def test_bad_rates_name_the_position(values: list[float], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        AcceptanceCurve.from_survival("c", values, "modelled")


@pytest.mark.parametrize("length", [0.9, 8.1])
def test_length_outside_the_possible_range(length: float) -> None:
    for build in (AcceptanceCurve.geometric, AcceptanceCurve.minimum_variance):
        with pytest.raises(ValueError, match=r"\[1, 8\]"):
            build(length, 7)


def test_a_runs_own_acceptance_length_takes_precedence() -> None:
    """Field case F23: AL at k comes from the run that drafted k, not from trimming a
    longer one, whose rounds start at other anchors."""
    curve = AcceptanceCurve("x", (0.25, 0.2), "measured", "", {1: 1.42})
    assert curve.length(1) == 1.42
    assert curve.length(2) == pytest.approx(1.45)
    with pytest.raises(ValueError, match=r"k = 1 is 2\.5"):
        AcceptanceCurve("x", (0.25,), "measured", "", {1: 2.5})
