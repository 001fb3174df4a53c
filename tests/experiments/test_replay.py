# SPDX-License-Identifier: Apache-2.0
"""Recorded rounds: the file, and adaptive verification replayed on a profile."""

from __future__ import annotations

import json
import lzma
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose
from typer.testing import CliRunner

from drafters.calibration import SequentialTemperatureScaling, survival_from_confidence
from dspark_k3.cli import app
from experiments import rounds, speedup
from experiments.acceptance import AcceptanceCurve
from experiments.difficulty import panel_mixture, survival_of
from experiments.replay import adaptive, fixed, replay
from experiments.step_time import RecordedProfile, load_profile

FLOOR = load_profile("floor:k3-tp16-h200")
CURVE = AcceptanceCurve.from_conditional("c", (0.85, 0.8, 0.75, 0.7, 0.7), "recorded")
DRAFTS = 5


def flat() -> RecordedProfile:
    """Rows cost nothing beyond the first, drafts a tenth of a step."""
    return RecordedProfile(
        "flat", "gpu", "made up", "linear", {1: 10.0, 8: 10.0}, {5: {1: 1.0, 8: 1.0}},
        {1: 10.0, 48: 10.0},
    )  # fmt: skip


def drawn(count: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Survival of rounds of unequal difficulty, and what is accepted of them."""
    rng = np.random.default_rng(seed)
    alpha = panel_mixture(CURVE, "code").sample(count, rng)
    accepted = np.cumprod(rng.random(alpha.shape) < alpha, axis=1).sum(axis=1)
    return survival_of(alpha), accepted


@pytest.mark.parametrize("batch", [1, 4])
def test_rounds_that_the_model_draws_give_what_the_model_says(batch: int) -> None:
    """The scheduler believes the truth: then replayed and expected tokens agree."""
    survival, accepted = drawn(60_000)
    found = adaptive(survival, accepted, FLOOR, batch)
    wanted = speedup.scheduled(panel_mixture(CURVE, "code"), FLOOR, batch, DRAFTS)
    assert found.speedup == pytest.approx(wanted.speedup, rel=0.02)
    assert found.mean_drafts == pytest.approx(wanted.mean_drafts, rel=0.05)
    best = fixed(accepted, DRAFTS, FLOOR, batch)
    same = speedup.best_draft_length(CURVE, FLOOR, batch, DRAFTS)
    assert best.k == same.k
    assert best.speedup == pytest.approx(same.speedup, rel=0.02)


def test_what_costs_nothing_is_verified_whole() -> None:
    survival, accepted = drawn(5000)
    for batch in (1, 8):
        found = adaptive(survival, accepted, flat(), batch)
        assert found.mean_drafts == DRAFTS
        assert found.acceptance_length == pytest.approx(1 + accepted.mean(), rel=0.02)


def test_a_doubtful_head_is_cured_by_its_calibration() -> None:
    """A head that says a fifth of its logits trims where it should not."""
    survival, accepted = drawn(40_000)
    alpha = survival / np.concatenate(
        (np.ones((len(survival), 1)), survival[:, :-1]), axis=1
    )
    logits = np.log(alpha / (1 - alpha)).clip(-30, 30)
    given = rounds.RecordedRounds(np.zeros(len(accepted), int), logits / 5, accepted)
    found = replay(given, FLOOR, 4, given.survival([0.2] * DRAFTS))
    assert found.calibrated is not None
    assert found.calibrated.speedup > found.recorded.speedup * 1.02
    assert found.calibrated.speedup > found.best.speedup
    truth = adaptive(survival, accepted, FLOOR, 4)
    assert found.calibrated.speedup == pytest.approx(truth.speedup, rel=1e-3)
    with pytest.raises(ValueError, match="has 2 temperatures and the rounds 5 drafts"):
        given.survival([1.0, 1.0])


def test_survival_is_that_of_the_calibration() -> None:
    """Large logits overflow nothing."""
    logits = np.array([[0.3, -2.0, 800.0], [-900.0, 1.0, 0.0]])
    given = rounds.RecordedRounds(np.zeros(2, int), logits, np.array([1, 0]))
    for shifts in ((), (0.3, -1.0, 0.0, 2.0)):
        scaling = SequentialTemperatureScaling((0.5, 2.0, 1.0, 4.0), shifts)
        wanted = survival_from_confidence(scaling.apply(torch.from_numpy(logits)))
        found = given.survival(scaling.temperatures, scaling.shifts)
        assert_allclose(found, wanted, rtol=1e-12)
    plain = survival_from_confidence(torch.sigmoid(torch.from_numpy(logits)))
    assert_allclose(given.survival(), plain, rtol=1e-12)


def test_a_file_gives_back_what_was_written(tmp_path: Path) -> None:
    given = rounds.RecordedRounds(
        np.array([0, 0, 4]),
        np.array([[0.1, 1e-17], [3.5, -2.0], [1 / 3, 7.0]]),
        np.array([2, 0, 1]),
    )
    rounds.write(tmp_path / "r.jsonl", given)
    (tmp_path / "r.jsonl.xz").write_bytes(
        lzma.compress((tmp_path / "r.jsonl").read_bytes())
    )
    packed = rounds.read(tmp_path / "r.jsonl.xz")
    found = rounds.read(tmp_path / "r.jsonl")
    for name, value in vars(given).items():
        assert np.array_equal(getattr(found, name), value), name
        assert np.array_equal(getattr(packed, name), value), name


GOOD = {"prompt": 0, "logits": [1.0, 2.0], "accepted": 1}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("{", "line 2: not JSON"),
        ("3", "line 2: is int; give one JSON object"),
        ({"prompt": -1}, "line 2: prompt is -1"),
        ({"prompt": True}, "line 2: prompt is True"),
        ({"logits": []}, r"line 2: logits is \[\]"),
        ({"logits": [1.0, float("nan")]}, "line 2: logits is .* one a draft"),
        ({"accepted": 3}, "line 2: accepted is 3; of 2 drafts it must be 0 to 2"),
        ({"accepted": None}, "line 2: accepted is None"),
        ({"logits": [1.0], "accepted": 0}, "line 2: 1 logits, and 2 on the first"),
    ],
)
def test_a_bad_line_is_named(
    tmp_path: Path, change: str | dict[str, object], words: str
) -> None:
    second = change if isinstance(change, str) else json.dumps(GOOD | change)
    path = tmp_path / "r.jsonl"
    path.write_text(f"{json.dumps(GOOD)}\n{second}\n")
    with pytest.raises(ValueError, match=words):
        rounds.read(path)


def test_a_file_of_nothing_is_refused(tmp_path: Path) -> None:
    (tmp_path / "r.jsonl").write_text("\n\n")
    with pytest.raises(ValueError, match="has no rounds"):
        rounds.read(tmp_path / "r.jsonl")
    with pytest.raises(ValueError, match="is no file; `dspark-k3 calibrate --record"):
        rounds.read(tmp_path / "none.jsonl")
    for name in ("r.jsonl", "r.jsonl.xz"):
        (tmp_path / name).write_bytes(b"\xfd7z and no more")
        with pytest.raises(ValueError, match="holds no text"):
            rounds.read(tmp_path / name)


def advise(*options: str) -> str:
    done = CliRunner().invoke(app, ["advise", *options], env={"COLUMNS": "120"})
    return f"{done.exit_code}: {done.output}"


def test_advise_tells_what_adaptive_verification_would_gain(tmp_path: Path) -> None:
    survival, accepted = drawn(4000)
    given = rounds.RecordedRounds(np.arange(4000), survival * 0 + 1.5, accepted)
    path, scaling = tmp_path / "r.jsonl", tmp_path / "own.json"
    rounds.write(path, given)
    scaling.write_text(
        json.dumps(SequentialTemperatureScaling((1.5,) * DRAFTS).to_dict())
    )
    said = advise("--confidence", str(path), "--batch", "1,4")
    assert said.startswith("0: ") and "4000 rounds of r.jsonl" in said
    assert "calibrated" not in said.split("Speed-ups")[0]
    assert "Batch 4: adaptive verification by the confidence as it is commits" in said
    best = fixed(accepted, DRAFTS, FLOOR, 4)
    assert f"against k = {best.k}" in said
    said = advise("--confidence", str(path), "--calibration", str(scaling))
    assert "Batch 8: adaptive verification by the calibrated confidence" in said


def test_advise_refuses_what_does_not_belong_together(tmp_path: Path) -> None:
    assert "--calibration is for the confidences" in advise("--calibration", "x")
    path = tmp_path / "r.jsonl"
    path.write_text(json.dumps(GOOD))
    said = advise("--confidence", str(path), "--calibration", str(tmp_path))
    assert said.startswith("2: ") and "there is none" in said
