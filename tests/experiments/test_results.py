# SPDX-License-Identifier: Apache-2.0
"""Result lines: what is accepted, what is refused and how it is said."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from experiments import results
from experiments.acceptance_spec import parse_acceptance

GOOD = {"lossless": True, "drafts_proposed": True}


def speedup_line(**changes: Any) -> results.Line:
    recorder = results.Recorder(command="test")
    recorder.add(
        "speedup",
        1.5,
        label="measured",
        variant="tiny",
        shape={"k": 3, "batch": 1},
        gpu="none",
        gates=GOOD,
    )
    return {**recorder.lines[0], **changes}


def op_line(**changes: Any) -> results.Line:
    line = speedup_line(op="kda_verify", us=12.5, floor_us=8.0, **changes)
    del line["metric"], line["value"]
    return line


def test_lines_read_back_as_written(tmp_path: Path) -> None:
    path = tmp_path / results.FILE_NAME
    lines = [speedup_line(), op_line(), speedup_line(value=2.0)]
    assert results.append(path, lines[:2]) == 2
    assert results.append(path, lines[2:]) == 1
    assert results.read(tmp_path) == lines


def test_provenance_is_filled_in() -> None:
    line = speedup_line()
    assert line["versions"]["python"] and line["commit"] and line["date"]


@pytest.mark.parametrize("gate", sorted(GOOD))
def test_speedup_with_a_red_gate_is_refused(gate: str) -> None:
    """Field case F25: no speed-up from a wrong run or a silent drafter."""
    with pytest.raises(ValueError, match=f"'{gate}' is red"):
        results.validate(speedup_line(gates={**GOOD, gate: False}))
    with pytest.raises(ValueError, match=f"lacks '{gate}'"):
        results.validate(
            speedup_line(gates={name: True for name in GOOD if name != gate})
        )
    with pytest.raises(ValueError, match="is red"):
        results.validate(op_line(gates={gate: False}))


def test_red_gate_may_be_recorded_where_no_speed_is_claimed() -> None:
    """Field case F25: the failed run itself stays on record."""
    results.validate(
        speedup_line(metric="acceptance_length", gates={"lossless": False})
    )
    results.validate(speedup_line(shape={"k": 0}, gates={"lossless": False}))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"label": "guessed"}, "'label'"),
        ({"value": None}, "'value'"),
        ({"value": float("nan")}, "'value'"),
        ({"op": "x"}, "exactly one"),
        ({"shape": []}, "'shape'"),
        ({"gpu": ""}, "'gpu'"),
        ({"gates": {"lossless": 1}}, "'gates'"),
        ({"peers": {"stock": "fast"}}, "'peers'"),
        ({"kernels": "k"}, "'kernels'"),
        ({"spread": "wide"}, "'spread'"),
        ({"speed": 1}, "'speed' is unknown"),
    ],
)
def test_bad_line_names_the_key(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        results.validate(speedup_line(**changes))


def test_op_needs_a_positive_time() -> None:
    with pytest.raises(ValueError, match="'us' is 0"):
        results.validate(op_line() | {"us": 0})


def test_reading_names_the_line(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    good = json.dumps(speedup_line())
    for bad, words in (("{", "line 2"), ("[]", "line 2"), ('{"op": 1}', "line 2.*key")):
        path.write_text(f"{good}\n{bad}\n")
        with pytest.raises(ValueError, match=words):
            results.read(path)
    path.write_text("\n")
    with pytest.raises(ValueError, match="empty"):
        results.read(path)
    with pytest.raises(ValueError, match="dspark-k3 sweep"):
        results.read(tmp_path / "missing")


def test_nothing_is_written_when_one_line_is_bad(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    with pytest.raises(ValueError, match="line 2"):
        results.append(path, [speedup_line(), speedup_line(label="x")])
    assert not path.exists()


def survival_lines(rates: list[float], **common: Any) -> list[results.Line]:
    return [
        speedup_line(metric="survival", value=rate, shape={"position": j}, **common)
        for j, rate in enumerate(rates, start=1)
    ]


def test_measured_file_as_acceptance(tmp_path: Path) -> None:
    path = tmp_path / results.FILE_NAME
    results.append(path, survival_lines([0.9, 0.5], variant="a"))
    results.append(path, survival_lines([0.8], variant="b"))
    curves = parse_acceptance(str(tmp_path))
    assert [(c.name, c.survival) for c in curves] == [("a", (0.9, 0.5)), ("b", (0.8,))]
    assert curves[0].label == "measured"
    own = speedup_line(
        metric="acceptance_length", value=1.8, variant="a", shape={"k": 1}
    )
    results.append(path, [own])
    assert parse_acceptance(f"{path}#a")[0].length(1) == 1.8
    assert [c.name for c in parse_acceptance(f"{path}#b")] == ["b"]
    with pytest.raises(ValueError, match="it has a, b"):
        parse_acceptance(f"{path}#c")


def test_acceptance_of_a_failed_run_is_refused(tmp_path: Path) -> None:
    """Field case F25: acceptance measured with corrupt rollback is not usable."""
    path = tmp_path / results.FILE_NAME
    results.append(path, survival_lines([0.9], gates={"lossless": False}))
    with pytest.raises(ValueError, match="checks failed"):
        parse_acceptance(str(path))


def test_acceptance_grammar() -> None:
    """Field case F24: a bare list is survival, conditional rates say so."""
    assert parse_acceptance("0.9,0.8,0.5")[0].length(3) == pytest.approx(3.2)
    conditional = parse_acceptance("conditional:0.5,0.9")[0]
    assert conditional.survival == pytest.approx((0.5, 0.45))
    lengths = [c.length(7) for c in parse_acceptance("length:2..3.2:geometric")]
    assert lengths == pytest.approx([2.0, 2.5, 3.0, 3.2])
    assert parse_acceptance("length:3.84:minvar")[0].survival[2] == pytest.approx(0.84)
    assert parse_acceptance("k3-golden")[0].name == "k3-golden"


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("0.5,0.6", "rises at position 2"),
        ("0.5,,", "not a list of numbers"),
        ("length:3..2:geometric", "LOW..HIGH"),
        ("length:2..9:minvar", r"\[1, 8\]"),
        ("length:2:uniform", "not understood"),
        ("k3-goldem", "k3-golden"),
        ("none/results.jsonl", "does not exist"),
        ("", "no published"),
    ],
)
def test_bad_acceptance(spec: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        parse_acceptance(spec)


def test_the_command_is_what_was_typed(tmp_path: Path) -> None:
    """A module by its name, not by the name of its file."""
    (tmp_path / "typed").mkdir()
    says = "from experiments.results import Recorder as R; "
    says += "print(R(commit='x').provenance['command'])"
    for name in ("__main__", "other"):
        (tmp_path / "typed" / f"{name}.py").write_text(says)

    def said(*arguments: str) -> str:
        paths = [str(tmp_path), str(Path(results.__file__).parents[1])]
        return subprocess.run(
            [sys.executable, *arguments, "--tp", "16"],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()

    assert said("-m", "typed") == "python -m typed --tp 16"
    assert said("-m", "typed.other") == "python -m typed.other --tp 16"
    assert said(str(tmp_path / "typed" / "other.py")) == "other.py --tp 16"
