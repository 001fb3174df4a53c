# SPDX-License-Identifier: Apache-2.0
"""``dspark-k3 calibrate``: rounds, the fit and its judgement, the file, the command."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from drafters.calibration import FILE_NAME, read_calibration
from dspark_k3.cli import app
from experiments.calibrate import (
    Rounds,
    calibrate,
    document,
    load_pair,
    read_prompts,
    record,
)

#: How much too sure of itself the head of `drawn` is.
SHARP = 3.0


def drawn(rounds: int, seed: int, sharp: float = SHARP) -> Rounds:
    """Rounds of three drafts whose true conditional rates are sigmoid(z), of a head
    that says ``sharp`` z."""
    generator = torch.Generator().manual_seed(seed)
    z = 1 + torch.randn(rounds, 3, generator=generator, dtype=torch.float64)
    kept = torch.rand(rounds, 3, generator=generator) < torch.sigmoid(z)
    return Rounds(sharp * z, kept.long().cumprod(1).sum(1))


def test_what_was_too_sure_is_toned_down_on_rounds_not_seen() -> None:
    found = calibrate([drawn(4000, 1), drawn(3000, 2)])
    assert (found.fitted, found.judged) == (4000, 3000)
    for temperature in found.scaling.temperatures:
        assert temperature == pytest.approx(SHARP, rel=0.35)
    before, after = found.errors
    assert after < before / 3
    assert before == pytest.approx(sum(e.error[0] for e in found.positions) / 3)
    rates = [each.observed for each in found.positions]
    assert rates == sorted(rates, reverse=True)
    for each in found.positions:
        assert abs(each.predicted[1] - each.observed) < 0.02
        assert each.auc[0] > 0.6
    # One temperature keeps the order of one position's logits.
    assert found.positions[0].auc[0] == found.positions[0].auc[1]


def test_every_other_prompt_is_fitted_to() -> None:
    """The judged ones could be anything: here they accept nothing."""
    refused = Rounds(torch.ones(50, 3, dtype=torch.float64), torch.zeros(50).long())
    found = calibrate([drawn(500, 3), refused, drawn(300, 4), refused])
    assert found.scaling == calibrate([drawn(500, 3), refused, drawn(300, 4)]).scaling
    assert (found.fitted, found.judged) == (800, 100)
    for each in found.positions:
        assert each.observed == 0 and math.isnan(each.auc[0])
    written = json.loads(json.dumps(document(found, {"of": "a test"})))
    assert written["positions"][0]["roc_auc"] == {"before": None, "after": None}
    assert written["provenance"] == {"of": "a test"}


@pytest.mark.parametrize("rounds", [[drawn(9, 1)], [drawn(9, 1), drawn(0, 2)]])
def test_both_sides_need_rounds(rounds: list[Rounds]) -> None:
    with pytest.raises(ValueError, match="9 rounds to fit and 0 to judge"):
        calibrate(rounds)


def test_rounds_are_those_of_the_loop(tiny_target: Path, tiny_draft: Path) -> None:
    target, drafter = load_pair(tiny_target, tiny_draft)
    prompts = [list(b"def read(path):\n"), list(b"class A:\n")]
    said: list[int] = []
    found = record(
        target,
        drafter,
        prompts,
        temperature=1.0,
        max_new_tokens=12,
        progress=said.append,
    )
    assert said == [1, 2]
    for each in found:
        assert each.logits.shape == (len(each.accepted), 7)
        assert (each.accepted >= 0).all() and (each.accepted <= 7).all()
        # Twelve tokens: a first, then at most eight a round.
        assert 2 <= len(each.accepted) <= 11
    again = record(target, drafter, prompts[:1], temperature=1.0, max_new_tokens=12)
    assert torch.equal(again[0].logits, found[0].logits)
    none = record(target, drafter, prompts[:1], temperature=1.0, max_new_tokens=1)
    assert none[0].logits.shape == (0, 7)


def test_kimi_k3_is_known_by_its_architecture() -> None:
    tiny = Path(__file__).resolve().parents[2] / "experiments" / "tiny"
    target, drafter = load_pair(tiny / "k3-target", tiny / "k3-dspark")
    (found,) = record(
        target, drafter, [list(b"def f(x):\n")], temperature=0.0, max_new_tokens=5
    )
    assert len(found.accepted) and torch.isfinite(found.logits).all()


def test_prompts_are_text_or_ids(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "ab"}\n\n{"prompt": [3, 1], "max_tokens": 4}\n')
    assert read_prompts(path, lambda text: list(text.encode())) == [[97, 98], [3, 1]]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "line 2: not JSON"),
        ("[1]", "line 2: needs a"),
        ('{"messages": []}', "of chats give the text that their template makes"),
        ('{"prompt": ""}', "line 2: needs a"),
        ('{"prompt": [1, -1]}', "line 2: needs a"),
        ('{"prompt": [true]}', "line 2: needs a"),
    ],
)
def test_other_lines_are_refused(tmp_path: Path, line: str, words: str) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "ab"}\n' + line + "\n")
    with pytest.raises(ValueError, match=words):
        read_prompts(path, lambda text: [1])


def test_a_file_without_prompts_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text("\n")
    with pytest.raises(ValueError, match="has no prompts"):
        read_prompts(path, lambda text: [1])


@pytest.fixture
def pair(tmp_path: Path, tiny_target: Path, tiny_draft: Path) -> list[str]:
    """Options for copies of the tiny pair."""
    found = []
    for option, source in (("--target", tiny_target), ("--draft", tiny_draft)):
        shutil.copytree(source, tmp_path / option.strip("-"))
        found += [option, str(tmp_path / option.strip("-"))]
    return found


def stand_in(monkeypatch: pytest.MonkeyPatch, judged: float) -> list[Any]:
    """`drawn` rounds in place of the loop's, of a head that is SHARP where it is fitted
    to and ``judged`` where it is judged; returns what is asked for."""
    from experiments import calibrate as module

    asked: list[Any] = []

    def recorded(target: Any, drafter: Any, prompts: Any, **options: Any) -> Any:
        asked.append((prompts, options))
        sharp = SHARP, judged
        return [drawn(900, seed, sharp[seed % 2]) for seed in range(len(prompts))]

    monkeypatch.setattr(module, "record", recorded)
    return asked


def test_the_command_writes_beside_the_drafter(
    pair: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = stand_in(monkeypatch, SHARP)
    found = CliRunner().invoke(app, ["calibrate", *pair, "--count", "6"])
    assert found.exit_code == 0, found.output
    assert "it was not fitted on [measured]" in found.output
    assert f"{FILE_NAME} written" in found.output.replace("\n", "")
    scaling = read_calibration(pair[3])
    assert scaling is not None and len(scaling.temperatures) == 3
    written = json.loads((Path(pair[3]) / FILE_NAME).read_text())
    assert written["rounds"] == {"fitted": 2700, "judged": 2700}
    assert written["provenance"]["temperature"] == 1.0
    ((prompts, options),) = asked
    assert len(prompts) == 6 and len(prompts[0]) == 96
    assert options["temperature"] == 1.0 and options["max_new_tokens"] == 96


def test_recorded_rounds_are_fitted_to_as_the_loops_are(
    pair: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Kept by one run, they give another the same temperatures without a model."""
    stand_in(monkeypatch, SHARP)
    path = tmp_path / "rounds.jsonl"
    options = [*pair, "--count", "4", "--record", str(path)]
    assert CliRunner().invoke(app, ["calibrate", *options]).exit_code == 0
    first = read_calibration(pair[3])
    (Path(pair[3]) / FILE_NAME).unlink()
    options = ["--draft", pair[3], "--recorded", str(path)]
    found = CliRunner().invoke(app, ["calibrate", *options])
    assert found.exit_code == 0, found.output
    assert read_calibration(pair[3]) == first and first is not None
    written = json.loads((Path(pair[3]) / FILE_NAME).read_text())
    assert written["rounds"] == {"fitted": 1800, "judged": 1800}
    assert written["provenance"]["rounds_of"] == str(path)


def test_shifts_are_fitted_unless_they_are_turned_off(
    pair: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(monkeypatch, SHARP)
    for more, count in (([], 3), (["--no-shifts"], 0)):
        found = CliRunner().invoke(app, ["calibrate", *pair, "--count", "4", *more])
        assert found.exit_code == 0, found.output
        scaling = read_calibration(pair[3])
        assert scaling is not None and len(scaling.shifts) == count
        assert len(scaling.temperatures) == 3


def test_models_and_recorded_rounds_are_one_or_the_other(pair: list[str]) -> None:
    for options in (
        pair[2:],
        [*pair, "--recorded", "r.jsonl"],
        [*pair[2:], "--recorded", "r.jsonl", "--record", "s.jsonl"],
    ):
        found = CliRunner().invoke(app, ["calibrate", *options])
        assert found.exit_code == 2
        assert "give --target DIR to run the models" in " ".join(found.output.split())


def test_a_calibration_that_is_no_better_is_not_written(
    pair: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The head is right as it is where it is judged."""
    stand_in(monkeypatch, 1.0)
    found = CliRunner().invoke(app, ["calibrate", *pair, "--count", "2"])
    assert found.exit_code == 1
    assert "the calibration is no better: mean error" in found.output
    assert "900 rounds may be too few" in found.output
    assert read_calibration(pair[3]) is None


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--count", "1"], "both must be 2 or more"),
        (["--prompts", "nowhere.jsonl"], "--prompts nowhere.jsonl is no file"),
        (["--out", "nowhere/c.json"], "there is no directory nowhere; make it first"),
        (["--record", "nowhere/r.jsonl"], "--record nowhere/r.jsonl: there is no"),
    ],
)
def test_bad_options_are_one_line(pair: list[str], more: list[str], words: str) -> None:
    found = CliRunner().invoke(app, ["calibrate", *pair, *more])
    assert found.exit_code == 2 and words in found.output


def test_other_models_need_prompts_of_their_own(pair: list[str]) -> None:
    config = Path(pair[1]) / "config.json"
    given = json.loads(config.read_text())
    config.write_text(json.dumps(given | {"vocab_size": 163840}))
    found = CliRunner().invoke(app, ["calibrate", *pair])
    assert found.exit_code == 2 and "give --prompts FILE" in found.output


def test_text_needs_a_tokenizer(pair: list[str], tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "ab"}\n{"prompt": "cd"}\n')
    (Path(pair[1]) / "tokenizer.json").unlink()
    found = CliRunner().invoke(app, ["calibrate", *pair, "--prompts", str(path)])
    assert found.exit_code == 2 and "give token ids as prompts" in found.output
