# SPDX-License-Identifier: Apache-2.0
"""Published data: Table 1, Fig. 2, Fig. 5 and the K3 golden curve."""

import pytest

from experiments import published
from experiments.difficulty import PANELS, fit_mixture, panel_mixture
from experiments.simulate import simulate_threshold

CELLS = [
    (target, drafter, benchmark)
    for target in published.TARGETS
    for drafter in published.DRAFTERS
    for benchmark in published.BENCHMARKS
]
#: Benchmark that Fig. 5's panel shows, judging by its length at threshold 0.
PANEL_BENCHMARK = {"math": "gsm8k", "code": "humaneval", "chat": "mt-bench"}


def test_table_1_from_per_position_rates() -> None:
    """All 108 cells within 0.05 tokens, and the macro means of the paper's text."""
    assert len(CELLS) == 108
    for target, drafter, benchmark in CELLS:
        cell = published.TABLE_1[target, drafter][published.BENCHMARKS.index(benchmark)]
        curve = published.curve(f"{drafter}-{target}-{benchmark}")
        assert curve.length(7) == pytest.approx(cell, abs=0.05), curve.name
        assert curve.label == "modelled"
    for target, eagle, flash in (
        ("qwen3-4b", 30.9, 16.3),
        ("qwen3-8b", 26.7, 18.4),
        ("qwen3-14b", 30.0, 18.3),
    ):
        ours = sum(published.TABLE_1[target, "dspark"])
        for drafter, gain in (("eagle3", eagle), ("dflash", flash)):
            other = sum(published.TABLE_1[target, drafter])
            assert 100 * (ours / other - 1) == pytest.approx(gain, abs=0.06)


@pytest.mark.parametrize("drafter", published.DRAFTERS)
@pytest.mark.parametrize("domain", ["math", "code", "chat"])
def test_figure_2_rates_against_table_1(domain: str, drafter: str) -> None:
    """Untransformed Fig. 2 rates give the Qwen3-4B domain mean within 0.05."""
    row = published.TABLE_1["qwen3-4b", drafter]
    cells = [
        value
        for value, name in zip(row, published.BENCHMARKS, strict=True)
        if published.DOMAIN_OF[name] == domain
    ]
    curve = published.curve(f"{drafter}-{domain}")
    assert curve.length(7) == pytest.approx(sum(cells) / 3, abs=0.05)
    assert curve.label == "recorded"


def test_golden_curve() -> None:
    """Field case F24: explicit rates, the differences of the golden lengths."""
    curve = published.curve("K3-golden")
    assert curve.survival == pytest.approx((0.85, 0.66, 0.49, 0.36, 0.26, 0.13, 0.09))
    for k, length in enumerate(published.K3_GOLDEN_LENGTHS[:7], start=1):
        assert curve.length(k) == pytest.approx(length)


def test_unknown_name_lists_close_ones() -> None:
    with pytest.raises(ValueError, match="dspark-qwen3-4b-gsm8k"):
        published.curve("dspark-qwen3-4b-gsm8")


@pytest.mark.parametrize("panel", sorted(PANELS))
def test_confidence_threshold_sweep(panel: str) -> None:
    """Fig. 5, every cell within 0.35 tokens, with Table 1's length untouched."""
    curve = published.table_1("qwen3-4b", "dspark", PANEL_BENCHMARK[panel])
    mixture = panel_mixture(curve, panel)
    for theta, (rows, length) in published.FIGURE_5[panel].items():
        got_rows, got_length = mixture.threshold(theta)
        assert got_rows == pytest.approx(rows, abs=0.35), theta
        assert got_length == pytest.approx(length, abs=0.35), theta
    assert mixture.threshold(0.0)[1] == pytest.approx(curve.length(7), abs=1e-6)


@pytest.mark.parametrize("spread", [(0.0, 0.0, 0.0), (1.0, 1.0, 0.0), (1.6, 0.8, 0.8)])
def test_threshold_quadrature_against_sampling(
    spread: tuple[float, float, float],
) -> None:
    mixture = fit_mixture(published.curve("dspark-chat"), *spread)
    for theta in (0.0, 0.6, 0.8):
        rows, length = simulate_threshold(mixture, theta, rounds=20_000, seed=3)
        expected = mixture.threshold(theta)
        assert abs(rows.z(expected[0])) < 4
        assert abs(length.z(expected[1])) < 4
