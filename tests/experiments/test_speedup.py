# SPDX-License-Identifier: Apache-2.0
"""Closed forms against the step-by-step simulator and hand-made numbers."""

import numpy as np
import pytest

from experiments import published, speedup
from experiments.acceptance import AcceptanceCurve
from experiments.byte_model import parse_floor
from experiments.difficulty import fit_mixture, panel_mixture
from experiments.simulate import simulate_request, simulate_speedup
from experiments.step_time import RecordedProfile

FLOOR = parse_floor("floor:k3-tp16-h200")
GOLDEN = published.curve("k3-golden")


def toy(slope: float, draft: float = 0.12) -> RecordedProfile:
    """T_plain = 1, T_draft = draft, T_verify(w) = 1 + slope (w - 1)."""
    return RecordedProfile(
        name="toy",
        gpu="toy",
        source="hand-made",
        interpolation="linear",
        plain={1: 1.0, 64: 1.0},
        draft={1: {1: draft, 64: draft}, 7: {1: draft, 64: draft}},
        verify={1: 1.0, 64: 1.0 + slope * 63},
    )


@pytest.mark.parametrize(
    ("domain", "slope", "gains", "best"),
    [
        ("math", 0.0, (1.70, 3.06, 4.13, 4.96), (7,)),
        ("math", 0.10, (1.56, 2.41, 2.85, 3.06), (7,)),
        ("math", 0.25, (1.39, 1.83, 1.95, 1.94), (5, 6)),
        ("chat", 0.0, (1.55, 2.39, 2.86, 3.13), (7,)),
        ("chat", 0.10, (1.42, 1.89, 1.98, 1.93), (5,)),
        ("chat", 0.25, (1.27, 1.43, 1.35, 1.22), (3,)),
    ],
)
def test_worked_examples(
    domain: str, slope: float, gains: tuple[float, ...], best: tuple[int, ...]
) -> None:
    curve = published.curve(f"dspark-{domain}")
    profile = toy(slope)
    got = [speedup.speedup(curve, profile, k) for k in (1, 3, 5, 7)]
    assert got == pytest.approx(gains, abs=0.011)
    assert speedup.best_draft_length(curve, profile).k in best


@pytest.mark.parametrize("k", range(8))
@pytest.mark.parametrize("batch", [1, 4])
def test_closed_form_against_simulation(k: int, batch: int) -> None:
    estimate = simulate_speedup(GOLDEN, FLOOR, k, batch, steps=4000, seed=k)
    assert abs(estimate.z(speedup.speedup(GOLDEN, FLOOR, k, batch))) < 4


@pytest.mark.parametrize("length", [1.0, 2.5, 3.84, 8.0])
def test_fractional_length_has_the_right_mean(length: float) -> None:
    """Field case F24: a fractional length is reached on average."""
    for build in (AcceptanceCurve.geometric, AcceptanceCurve.minimum_variance):
        curve = build(length, 7)
        estimate = simulate_speedup(curve, toy(0.1), 7, steps=8000, seed=1)
        even = speedup.break_even_length(toy(0.1), 7)
        assert abs(estimate.z(length / even)) < 4
        assert speedup.speedup_at(length, toy(0.1), 7) == pytest.approx(length / even)


def test_break_even_means_speedup_one() -> None:
    for k in range(1, 8):
        even = speedup.break_even_length(FLOOR, k)
        assert speedup.speedup_at(even, FLOOR, k) == pytest.approx(1.0)
    assert speedup.speedup(GOLDEN, FLOOR, 0) == 1.0


def test_single_request_rule_is_the_best_prefix() -> None:
    """On a convex cost the early stop finds the argmax of tokens over time."""
    rng = np.random.default_rng(0)
    survival = np.cumprod(rng.uniform(0.3, 1.0, (200, 7)), axis=1)
    verify = 1.0 + 0.08 * np.arange(8) ** 1.2
    lengths = speedup.single_request_length(survival, 0.1, verify)
    tokens = np.cumsum(np.pad(survival, ((0, 0), (1, 0)), constant_values=1), axis=1)
    assert (lengths == np.argmax(tokens / (0.1 + verify), axis=1)).all()
    assert len(set(lengths)) > 3


def test_single_request_rule_stops_at_the_first_refusal() -> None:
    """A later, better prefix must not be seen: that would leak the token drawn.

    The paper's counter-example, with step times 1, 2 and 1/0.45.
    """
    verify = np.array([1.0, 2.0, 1 / 0.45])
    survival = np.array([[0.8, 0.72], [0.8, 0.0]])
    lengths = speedup.single_request_length(survival, 0.0, verify)
    assert lengths.tolist() == [0, 0]


def test_scheduling_beats_every_fixed_length_and_needs_spread() -> None:
    best = speedup.best_draft_length(GOLDEN, FLOOR)
    plan = speedup.scheduled(panel_mixture(GOLDEN, "code"), FLOOR)
    assert plan.speedup > best.speedup * 1.03
    assert 1 < plan.mean_drafts < 7
    equal = speedup.scheduled(fit_mixture(GOLDEN, 0, 0), FLOOR)
    block = speedup.step_ms(FLOOR, best.k) - FLOOR.draft_ms(best.k, 1)
    full = GOLDEN.length(best.k) * FLOOR.plain_ms(1) / (block + FLOOR.draft_ms(7, 1))
    assert equal.speedup == pytest.approx(full, rel=1e-6)
    assert equal.mean_drafts == best.k


def test_scheduled_batch_against_a_plain_loop() -> None:
    """Budget from the previous step, slots to the top survivals of this one."""
    mixture, batch, steps = panel_mixture(GOLDEN, "code"), 3, 50
    plan = speedup.scheduled(mixture, FLOOR, batch, steps=steps, seed=5)
    alpha = mixture.sample(steps * batch, np.random.default_rng(5))
    rounds = [
        sorted((float(x) for x in np.cumprod(part, axis=1).ravel()), reverse=True)
        for part in alpha.reshape(steps, batch, 7)
    ]
    draft = FLOOR.draft_ms(7, batch)

    def budget(slots: list[float]) -> int:
        return max(
            range(len(slots) + 1),
            key=lambda d: (
                (batch + sum(slots[:d])) / (draft + FLOOR.verify_ms(batch + d, batch))
            ),
        )

    tokens = time = 0.0
    for step in range(steps):
        chosen = budget(rounds[step - 1])
        tokens += batch + sum(rounds[step][:chosen])
        time += draft + FLOOR.verify_ms(batch + chosen, batch)
    assert plan.tokens_per_second == pytest.approx(tokens / batch / time * 1e3)


@pytest.mark.parametrize("drafter_limit", [None, 128])
def test_drafts_stop_at_the_context_limit(drafter_limit: int | None) -> None:
    """Field case F22: from 240 to 256 tokens no step drafts past either limit."""
    sure = AcceptanceCurve.minimum_variance(8, 7)
    counts, generated = simulate_request(sure, 7, 240, 256, drafter_limit)
    assert generated == 16
    if drafter_limit is None:
        assert counts.reached[0] == 2 and counts.accepted == 14
        counts, generated = simulate_request(sure, 7, 245, 256)
        assert generated == 11 and counts.reached == (2, 2, 1, 1, 1, 1, 1)
    else:
        assert counts.proposed == 0


def test_impossible_arguments() -> None:
    with pytest.raises(ValueError, match="k is -1"):
        speedup.step_ms(FLOOR, -1)
    with pytest.raises(ValueError, match="batch is 0"):
        speedup.step_ms(FLOOR, 1, 0)
    with pytest.raises(ValueError, match=r"\[1, 3\]"):
        speedup.speedup_at(3.5, FLOOR, 2)
    with pytest.raises(ValueError, match=r"0\.\.7"):
        GOLDEN.length(9)
