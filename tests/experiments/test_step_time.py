# SPDX-License-Identifier: Apache-2.0
"""Recorded step-time profiles: reading, interpolation, refusals."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from experiments.step_time import load_profile, read_profile

Document = dict[str, Any]


def document() -> Document:
    return {
        "schema": 1,
        "name": "test",
        "gpu": "NVIDIA H200",
        "source": "hand-made",
        "interpolation": "staircase",
        "plain": [{"batch": 1, "ms": 8.0}, {"batch": 8, "ms": 9.0}],
        "draft": [
            {"k": 1, "batch": 1, "ms": 0.5},
            {"k": 7, "batch": 1, "ms": 1.1},
            {"k": 1, "batch": 8, "ms": 0.6},
            {"k": 7, "batch": 8, "ms": 1.2},
        ],
        "verify": [
            {"rows": r, "executed_rows": r, "ms": 8.0 + 0.1 * r} for r in (2, 8, 64)
        ],
    }


def write(folder: Path, content: Document) -> Path:
    path = folder / "profile.json"
    path.write_text(json.dumps(content))
    return path


def test_staircase_pads_up_and_linear_joins(tmp_path: Path) -> None:
    padded = read_profile(write(tmp_path, document()))
    assert padded.verify_ms(3, 1) == padded.verify_ms(8, 1) == 8.8
    assert padded.verify_ms(1, 1) == 8.2
    assert padded.draft_ms(4, 1) == pytest.approx(0.8)
    assert padded.draft_ms(0, 1) == 0
    joined = read_profile(write(tmp_path, document() | {"interpolation": "linear"}))
    assert joined.verify_ms(5, 1) == pytest.approx(8.5)
    assert joined.plain_ms(8) == 9.0
    with pytest.raises(ValueError, match=r"rows = 1 lies outside .* 2\.\.64"):
        joined.verify_ms(1, 1)


def test_rows_beyond_the_recorded_range_are_refused(tmp_path: Path) -> None:
    """Field case F21: 16 requests x 8 rows do not fit a 64-row profile."""
    profile = read_profile(write(tmp_path, document()))
    with pytest.raises(ValueError, match=r"rows = 128 lies outside .* 2\.\.64"):
        profile.verify_ms(128, 16)
    with pytest.raises(ValueError, match="batch = 16"):
        profile.plain_ms(16)


def test_written_file_reads_back(tmp_path: Path) -> None:
    profile = read_profile(write(tmp_path, document()))
    profile.write(tmp_path / "again.json")
    assert read_profile(tmp_path / "again.json") == profile


def _set(key: str, index: int, **changes: object) -> Callable[[Document], object]:
    return lambda content: content[key][index].update(changes)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_set("verify", 1, ms=-1), "must be positive"),
        (_set("verify", 2, ms=1.0), "falls from"),
        (_set("verify", 0, ms="fast"), "number 'ms'"),
        (_set("plain", 0, batch=0.5), "not whole"),
        (_set("plain", 1, batch=1), "twice"),
        (_set("draft", 0, k=0), "start at 1"),
        (lambda c: c.update(schema=2), "'schema'"),
        (lambda c: c.pop("gpu"), "'gpu'"),
        (lambda c: c.pop("verify"), "'verify'"),
        (lambda c: c.update(interpolation="cubic"), "cubic"),
        (lambda c: c.update(draft=[]), "draft is empty"),
    ],
)
def test_bad_values_name_file_and_key(
    tmp_path: Path, change: Callable[[Document], object], words: str
) -> None:
    content = document()
    change(content)
    path = write(tmp_path, content)
    with pytest.raises(ValueError, match=words) as caught:
        read_profile(path)
    assert str(path) in str(caught.value)


def test_executed_rows_must_be_the_requested_ones(tmp_path: Path) -> None:
    """Field case F26: a partial budget that ran as the full one is refused."""
    content = document()
    content["verify"][0]["executed_rows"] = 8
    with pytest.raises(ValueError, match="rows 2 ran 8 rows"):
        read_profile(write(tmp_path, content))


def test_eager_baseline_is_refused(tmp_path: Path) -> None:
    """Field case F10: plain steps without a graph flatter speculation."""
    content = document()
    content["plain"][0]["graph"] = False
    with pytest.raises(ValueError, match=r"batch \[1\] ran without a CUDA graph"):
        read_profile(write(tmp_path, content))


def test_collapsed_routing_is_refused(tmp_path: Path) -> None:
    """Field case F11: eight rows on sixteen experts mean dummy routing."""
    content = document()
    content["verify"][1]["distinct_experts"] = 16
    with pytest.raises(ValueError, match="16 distinct experts"):
        read_profile(write(tmp_path, content))
    content["verify"][1]["distinct_experts"] = 118
    read_profile(write(tmp_path, content))


def test_scaled_times_are_labelled_modelled(tmp_path: Path) -> None:
    assert read_profile(write(tmp_path, document())).label == "recorded"
    scaled = read_profile(write(tmp_path, document() | {"label": "modelled"}))
    assert scaled.label == "modelled"
    scaled.write(tmp_path / "again.json")
    assert read_profile(tmp_path / "again.json") == scaled
    with pytest.raises(ValueError, match="label is 'measured'"):
        read_profile(write(tmp_path, document() | {"label": "measured"}))


def test_profile_for_another_gpu(tmp_path: Path) -> None:
    """Field case F26: times of one GPU do not speak for another."""
    path = str(write(tmp_path, document()))
    assert load_profile(path, "h200").gpu == "NVIDIA H200"
    with pytest.raises(ValueError, match="is for NVIDIA H200, not B200"):
        load_profile(path, "B200")
    with pytest.raises(ValueError, match="not gb300"):
        load_profile("floor:k3-tp16-h200", "gb300")


def test_missing_and_broken_files(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="does not exist"):
        load_profile(str(tmp_path / "none.json"))
    broken = tmp_path / "broken.json"
    broken.write_text("{")
    with pytest.raises(ValueError, match="is not JSON"):
        load_profile(str(broken))
