# SPDX-License-Identifier: Apache-2.0
"""Calibration error by hand; temperatures planted and found again."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import mannwhitneyu

from drafters.calibration import (
    DEFAULT_GRID,
    SequentialTemperatureScaling,
    expected_calibration_error,
    roc_auc,
    survival_from_confidence,
)

torch.set_num_threads(1)


def _rounds(
    seed: int, rounds: int, temperatures: list[float]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Head logits T_i * logit(true rate) and accepted counts from the true rates."""
    gen = torch.Generator().manual_seed(seed)
    k = len(temperatures)
    true = 1.0 + 1.5 * torch.randn(rounds, k, generator=gen, dtype=torch.float64)
    passed = torch.rand(rounds, k, generator=gen, dtype=torch.float64) < true.sigmoid()
    return true * torch.tensor(temperatures), passed.long().cumprod(dim=1).sum(dim=1)


def _errors(confidence: torch.Tensor, accepted: torch.Tensor) -> list[float]:
    survival = survival_from_confidence(confidence)
    return [
        expected_calibration_error(survival[:, i], accepted > i)
        for i in range(confidence.shape[1])
    ]


def test_calibration_error_by_hand() -> None:
    """Bins [0, .5) and [.5, 1]: gaps of |.2 + .4 - 1| and |.6 + 1. - 1|, over 4."""
    predicted = torch.tensor([0.2, 0.4, 0.6, 1.0], dtype=torch.float64)
    observed = torch.tensor([0, 1, 1, 0])
    got = expected_calibration_error(predicted, observed, bins=2)
    assert got == pytest.approx((0.4 + 0.6) / 4, abs=1e-15)
    assert expected_calibration_error(torch.tensor([1.0, 0.0]), observed[1:3]) == 0.5


def test_calibration_error_of_a_constant_guess_is_its_bias() -> None:
    observed = torch.arange(100) < 30
    for guess, bias in ((0.3, 0.0), (0.7, 0.4)):
        predicted = torch.full((100,), guess, dtype=torch.float64)
        got = expected_calibration_error(predicted, observed)
        assert got == pytest.approx(bias, abs=1e-12)


@settings(max_examples=50, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.floats(0, 1), st.booleans()), min_size=1, max_size=30))
def test_one_bin_is_the_bias_and_more_bins_never_report_less(
    pairs: list[tuple[float, bool]],
) -> None:
    predicted = torch.tensor([p for p, _ in pairs], dtype=torch.float64)
    observed = torch.tensor([o for _, o in pairs])
    bias = abs(float(predicted.mean() - observed.double().mean()))
    coarse = expected_calibration_error(predicted, observed, bins=1)
    fine = expected_calibration_error(predicted, observed, bins=20)
    assert coarse == pytest.approx(bias, abs=1e-12)
    assert coarse - 1e-12 <= fine <= 1.0


@pytest.mark.parametrize("values", [3, 50, 10_000])
def test_area_under_the_curve_is_mann_whitneys(values: int) -> None:
    """With many ties and with none."""
    gen = torch.Generator().manual_seed(values)
    score = torch.randint(values, (400,), generator=gen).double() / values
    outcome = torch.rand(400, generator=gen) < 0.2 + 0.6 * score
    ones, zeros = score[outcome].numpy(), score[~outcome].numpy()
    wanted = mannwhitneyu(ones, zeros).statistic / (len(ones) * len(zeros))
    assert roc_auc(score, outcome) == pytest.approx(wanted, abs=1e-12)
    assert roc_auc(-score, outcome) == pytest.approx(1 - wanted, abs=1e-12)


def test_area_of_one_outcome_is_not_a_number() -> None:
    assert math.isnan(roc_auc(torch.tensor([0.1, 0.2]), torch.tensor([1, 1])))
    assert roc_auc(torch.tensor([0.1, 0.2]), torch.tensor([0, 1])) == 1


def test_survival_is_the_running_product() -> None:
    got = survival_from_confidence(torch.tensor([[0.5, 0.5, 1.0], [1.0, 0.0, 0.9]]))
    assert got.tolist() == [[0.5, 0.25, 0.25], [1.0, 0.0, 0.0]]
    with pytest.raises(ValueError, match=r"outside \[0, 1\]"):
        survival_from_confidence(torch.tensor([1.5]))


def test_fit_recovers_planted_temperatures() -> None:
    """Over- and underconfident positions; found to within a sixth of an octave."""
    planted = [2.0, 0.7, 1.5, 3.0]
    fitted = SequentialTemperatureScaling.fit(*_rounds(0, 30_000, planted))
    for found, true in zip(fitted.temperatures, planted, strict=True):
        assert abs(math.log2(found / true)) < 1 / 6


def test_error_falls_on_held_out_rounds() -> None:
    """Every position's cumulative error, as in the paper's reliability plots."""
    planted = [2.0, 2.0, 1.8, 2.5]
    fitted = SequentialTemperatureScaling.fit(*_rounds(1, 20_000, planted))
    logits, accepted = _rounds(2, 20_000, planted)
    raw = _errors(torch.sigmoid(logits), accepted)
    scaled = _errors(fitted.apply(logits), accepted)
    assert min(raw) > 0.03
    assert max(scaled) < 0.015


def test_each_position_is_a_grid_minimum_given_the_earlier_ones() -> None:
    logits, accepted = _rounds(3, 3000, [1.7, 0.8, 2.2])
    fitted = SequentialTemperatureScaling.fit(logits, accepted)
    survival = torch.ones(3000, dtype=torch.float64)
    for i, chosen in enumerate(fitted.temperatures):
        errors = {
            t: expected_calibration_error(
                survival * torch.sigmoid(logits[:, i] / t), accepted > i
            )
            for t in DEFAULT_GRID
        }
        assert errors[chosen] == min(errors.values())
        survival = survival * torch.sigmoid(logits[:, i] / chosen)


def test_unverified_positions_are_left_out() -> None:
    """Rounds cut at random keep the fit; counting them as rejections would not."""
    planted = [1.5, 1.5]
    logits, accepted = _rounds(4, 30_000, planted)
    gen = torch.Generator().manual_seed(5)
    lengths = torch.randint(1, 3, (30_000,), generator=gen)
    cut = torch.minimum(accepted, lengths)
    fitted = SequentialTemperatureScaling.fit(logits, cut, lengths)
    assert abs(math.log2(fitted.temperatures[1] / 1.5)) < 1 / 6
    wrong = SequentialTemperatureScaling.fit(logits, cut)
    assert abs(math.log2(wrong.temperatures[1] / 1.5)) > 1 / 2


def test_order_is_kept_and_one_is_the_identity() -> None:
    logits = torch.linspace(-4, 4, 50).unsqueeze(-1).repeat(1, 2)
    scaled = SequentialTemperatureScaling((2.0, 0.5)).apply(logits)
    assert bool((scaled.diff(dim=0) > 0).all())
    same = SequentialTemperatureScaling((1.0, 1.0)).apply(logits)
    assert torch.equal(same, torch.sigmoid(logits))
    assert 1.0 in DEFAULT_GRID


def test_json_round_trip() -> None:
    fitted = SequentialTemperatureScaling((1.25, 0.5), (0.0, -0.75))
    text = json.dumps(fitted.to_dict())
    assert SequentialTemperatureScaling.from_dict(json.loads(text)) == fitted


def test_a_shift_mends_what_a_temperature_cannot() -> None:
    """A head that is too low everywhere: planted slopes and shifts are found, and the
    error on other rounds is a third of what temperatures alone leave."""
    shifts, temperatures = (0.8, 1.2, 0.9), [1.3, 0.7, 1.0]

    def rounds(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        logits, accepted = _rounds(seed, 30_000, temperatures)
        moved = torch.tensor(shifts) * torch.tensor(temperatures)
        return logits - moved, accepted

    fitted = SequentialTemperatureScaling.fit_shifted(*rounds(0))
    assert fitted.temperatures == pytest.approx(temperatures, rel=0.1)
    assert fitted.shifts == pytest.approx(shifts, abs=0.12)
    logits, accepted = rounds(1)
    plain = SequentialTemperatureScaling.fit(*rounds(0))
    for i in range(3):
        errors = [
            expected_calibration_error(
                survival_from_confidence(scaling.apply(logits))[:, i], accepted > i
            )
            for scaling in (fitted, plain)
        ]
        assert errors[0] < errors[1] / 3


def test_a_shifted_fit_stays_finite_and_keeps_the_order() -> None:
    """Where a position always ended alike, where the head says nothing, and where it
    says the opposite: a slope is never negative, and the rate is right."""
    g = torch.Generator().manual_seed(0)
    scores = torch.randn(4000, 4, generator=g, dtype=torch.float64)
    scores[:, 1] = 0.5
    good = torch.rand(4000, generator=g) < torch.sigmoid(-3 * scores[:, 2])
    accepted = torch.where(good, 3, 2)
    logits = torch.cat((scores, scores[:, :1]), 1)[:, :4]
    fitted = SequentialTemperatureScaling.fit_shifted(logits, accepted)
    assert all(0 < t < math.inf for t in fitted.temperatures)
    chance = fitted.apply(logits)
    assert (chance[:, :2] > 0.99).all()
    assert chance[:, 2].mean() == pytest.approx(float(good.double().mean()), abs=0.02)
    assert (chance[good, 3] < 0.01).all()


def test_a_position_that_no_round_reached_is_named() -> None:
    with pytest.raises(ValueError, match="no round reached draft position 2"):
        SequentialTemperatureScaling.fit_shifted(
            torch.zeros(5, 3), torch.zeros(5, dtype=torch.int64)
        )


FIT = SequentialTemperatureScaling.fit
READ = SequentialTemperatureScaling.from_dict
KIND = "sequential_temperature_scaling"
BAD: list[tuple[Any, str]] = [
    (lambda: FIT(torch.zeros(3, 2), torch.zeros(2).long()), r"must be \[N, k\]"),
    (lambda: FIT(torch.zeros(1, 2), torch.tensor([3])), "accepted <= lengths <= 2"),
    (
        lambda: FIT(torch.zeros(1, 2), torch.tensor([1]), torch.tensor([1])),
        "no round verified draft position 2",
    ),
    (lambda: FIT(torch.full((1, 1), torch.nan), torch.tensor([1])), "NaN"),
    (lambda: FIT(torch.zeros(1, 1), torch.tensor([1]), grid=[]), "grid is"),
    (lambda: FIT(torch.zeros(1, 1), torch.tensor([1]), grid=[0.0]), "grid is"),
    (lambda: SequentialTemperatureScaling((0.0,)), r"temperatures\[0\] is 0.0"),
    (
        lambda: SequentialTemperatureScaling((1.0,)).apply(torch.zeros(2, 3)),
        "3 draft positions",
    ),
    (lambda: READ({"kind": "platt"}), "kind is 'platt'"),
    (lambda: READ({"kind": KIND, "temperatures": ["1"]}), "list of numbers"),
    (
        lambda: READ({"kind": KIND, "temperatures": [1.0], "shifts": "0"}),
        "shifts is '0'; it must be a list of numbers",
    ),
    (
        lambda: SequentialTemperatureScaling((1.0, 1.0), (0.5,)),
        "1 shifts for 2 temperatures",
    ),
    (
        lambda: SequentialTemperatureScaling((1.0,), (math.inf,)),
        r"shifts\[0\] is inf",
    ),
    (
        lambda: expected_calibration_error(torch.zeros(2), torch.zeros(3)),
        "the same N",
    ),
    (lambda: expected_calibration_error(torch.zeros(1), torch.ones(1), 0), "bins is 0"),
    (lambda: roc_auc(torch.zeros(2), torch.zeros(3)), "the same N"),
    (lambda: roc_auc(torch.tensor([torch.nan]), torch.ones(1)), "predicted contains"),
    (lambda: roc_auc(torch.ones(1), torch.tensor([0.5])), "observed has"),
    (
        lambda: expected_calibration_error(torch.tensor([2.0]), torch.ones(1)),
        "predicted has",
    ),
    (
        lambda: expected_calibration_error(torch.ones(1), torch.tensor([0.5])),
        "observed has",
    ),
]


@pytest.mark.parametrize(("call", "message"), BAD)
def test_bad_input_is_named(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
