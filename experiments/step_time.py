# SPDX-License-Identifier: Apache-2.0
"""Step-time profiles: what a decode, draft or verify step costs on one machine.

A profile answers three questions in milliseconds: ``plain_ms(batch)``,
``draft_ms(k, batch)`` and ``verify_ms(rows, batch)``. Recorded profiles are JSON
files made on a GPU; modelled ones come from :mod:`experiments.byte_model`.

File format (``schema`` 1)::

    {"schema": 1, "name": ..., "gpu": "NVIDIA H200", "source": ...,
     "interpolation": "staircase" | "linear", "label": "recorded" | "modelled",
     "plain":  [{"batch": 1, "ms": 8.5, "graph": true}, ...],
     "draft":  [{"k": 7, "batch": 1, "ms": 0.9}, ...],
     "verify": [{"rows": 8, "executed_rows": 8, "ms": 11.0, "graph": true,
                 "distinct_experts": 118.0}, ...]}

``label`` (default "recorded") is "modelled" where times were computed from recorded
ones, such as those of a model cut in depth scaled to the whole; ``source`` then says
how. Further keys are provenance and are not read.

``graph`` (default true) and ``distinct_experts`` (optional) are evidence: a profile
whose plain steps ran without a CUDA graph while its verify steps ran with one, whose
executed rows are not the requested ones, or whose router sent every row to the same
experts, is refused, because its speed-ups would be artefacts.

Interpolation between recorded sizes: "staircase" takes the next recorded size, as an
engine that pads to captured CUDA graphs does; "linear" joins neighbours. Nothing is
extrapolated: a size outside the recorded range raises ValueError. Draft times are
joined linearly in k, and k = 0 costs nothing.
"""

from __future__ import annotations

import bisect
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, cast, runtime_checkable

from experiments.acceptance import Label

Interpolation = Literal["staircase", "linear"]
_TOP_K = 16


@runtime_checkable
class StepTimeProfile(Protocol):
    """Cost of one step; all times in milliseconds."""

    @property
    def name(self) -> str:
        """Short name for tables."""

    @property
    def gpu(self) -> str:
        """GPU that the times hold for."""

    @property
    def label(self) -> Label:
        """ "recorded" or "modelled"."""

    @property
    def note(self) -> str:
        """What the figures include, in one sentence."""

    def plain_ms(self, batch: int) -> float:
        """Decode step without speculation for ``batch`` requests."""

    def draft_ms(self, k: int, batch: int) -> float:
        """Drafting k tokens for each of ``batch`` requests; 0 for k = 0."""

    def verify_ms(self, rows: int, batch: int) -> float:
        """Verify step of ``rows`` rows in all (anchors included)."""


def _interpolate(
    table: Mapping[int, float], x: int, rule: Interpolation, what: str
) -> float:
    sizes = sorted(table)
    # A staircase pads a smaller step up to the first captured size.
    low = 1 if rule == "staircase" else sizes[0]
    if not low <= x <= sizes[-1]:
        raise ValueError(
            f"{what} = {x} lies outside the recorded range {sizes[0]}..{sizes[-1]}; "
            "record a profile that covers it, or use a smaller batch or draft length"
        )
    at = bisect.bisect_left(sizes, x)
    if rule == "staircase" or sizes[at] == x:
        return table[sizes[at]]
    left, right = sizes[at - 1], sizes[at]
    share = (x - left) / (right - left)
    return table[left] * (1 - share) + table[right] * share


@dataclass(frozen=True)
class RecordedProfile:
    """Step times recorded on one GPU; see the module docstring for the rules.

    Attributes:
        plain: batch -> ms.
        draft: k -> batch -> ms.
        verify: rows -> ms. Like vLLM's own table it depends on total rows only.
    """

    name: str
    gpu: str
    source: str
    interpolation: Interpolation
    plain: Mapping[int, float]
    draft: Mapping[int, Mapping[int, float]]
    verify: Mapping[int, float]
    label: Label = "recorded"

    def __post_init__(self) -> None:
        if self.interpolation not in ("staircase", "linear"):
            raise ValueError(
                f"interpolation is {self.interpolation!r}; use staircase or linear"
            )
        if self.label not in ("recorded", "modelled"):
            raise ValueError(f"label is {self.label!r}; use recorded or modelled")
        _check_table("plain", self.plain)
        _check_table("verify", self.verify)
        if not self.draft:
            raise ValueError("draft is empty; record at least one draft length")
        for k, by_batch in self.draft.items():
            if k < 1:
                raise ValueError(f"draft k is {k}; draft lengths start at 1")
            _check_table(f"draft (k = {k})", by_batch)

    @property
    def note(self) -> str:
        """Provenance sentence."""
        return f"{self.source}; {self.interpolation} between recorded sizes"

    def plain_ms(self, batch: int) -> float:
        """Plain decode step, ms."""
        return _interpolate(self.plain, batch, self.interpolation, "batch")

    def draft_ms(self, k: int, batch: int) -> float:
        """Draft step, ms; linear in k between recorded draft lengths."""
        if k == 0:
            return 0.0
        at_batch = {
            length: _interpolate(by_batch, batch, self.interpolation, "batch")
            for length, by_batch in self.draft.items()
        }
        return _interpolate(at_batch, k, "linear", "draft length k")

    def verify_ms(self, rows: int, batch: int) -> float:
        """Verify step, ms."""
        return _interpolate(self.verify, rows, self.interpolation, "verify rows")

    def write(self, path: Path) -> None:
        """Write the JSON file described in the module docstring."""
        document = {
            "schema": 1,
            "name": self.name,
            "gpu": self.gpu,
            "source": self.source,
            "interpolation": self.interpolation,
            "label": self.label,
            "plain": [{"batch": b, "ms": t} for b, t in sorted(self.plain.items())],
            "draft": [
                {"k": k, "batch": b, "ms": t}
                for k, by_batch in sorted(self.draft.items())
                for b, t in sorted(by_batch.items())
            ],
            "verify": [
                {"rows": r, "executed_rows": r, "ms": t}
                for r, t in sorted(self.verify.items())
            ],
        }
        path.write_text(json.dumps(document, indent=1) + "\n")


def _check_table(what: str, table: Mapping[int, float]) -> None:
    if not table:
        raise ValueError(f"{what} is empty; record at least one point")
    previous = (0, 0.0)
    for size, ms in sorted(table.items()):
        if size < 1:
            raise ValueError(f"{what} has size {size}; sizes start at 1")
        if not (math.isfinite(ms) and ms > 0):
            raise ValueError(f"{what} at {size} is {ms} ms; times must be positive")
        if ms < previous[1]:
            raise ValueError(
                f"{what} falls from {previous[1]:g} ms at {previous[0]} to {ms:g} ms "
                f"at {size}; a larger step cannot be cheaper: record again with more "
                "repeats, or pad the smaller size up"
            )
        previous = (size, ms)


def _points(
    document: Mapping[str, Any], key: str, fields: Sequence[str]
) -> list[dict[str, Any]]:
    points = document.get(key)
    if not isinstance(points, list):
        raise ValueError(f"key {key!r} must be a list of points")
    for index, point in enumerate(points):
        for field in fields:
            number = point.get(field) if isinstance(point, dict) else None
            if isinstance(number, bool) or not isinstance(number, (int, float)):
                raise ValueError(f"{key}[{index}] needs a number {field!r}")
            if field != "ms" and number != int(number):
                raise ValueError(f"{key}[{index}] {field!r} is {number}, not whole")
    return points


def _unique(what: str, pairs: Sequence[tuple[int, float]]) -> dict[int, float]:
    table: dict[int, float] = {}
    for size, ms in pairs:
        if size in table:
            raise ValueError(f"{what} lists size {size} twice; keep one point")
        table[size] = ms
    return table


def _parse(document: Mapping[str, Any]) -> RecordedProfile:
    if document.get("schema") != 1:
        raise ValueError(f"key 'schema' is {document.get('schema')!r}; expected 1")
    for key in ("name", "gpu", "source", "interpolation"):
        if not isinstance(document.get(key), str) or not document[key]:
            raise ValueError(f"key {key!r} must be a non-empty string")
    plain = _points(document, "plain", ("batch", "ms"))
    draft = _points(document, "draft", ("k", "batch", "ms"))
    verify = _points(document, "verify", ("rows", "executed_rows", "ms"))
    for point in verify:
        if point["executed_rows"] != point["rows"]:
            raise ValueError(
                f"verify rows {point['rows']} ran {point['executed_rows']} rows; the "
                "profiled step is not the one asked for: record it again"
            )
        distinct = point.get("distinct_experts")
        if distinct is not None and point["rows"] > 1 and distinct <= _TOP_K:
            raise ValueError(
                f"verify rows {point['rows']} touched {distinct:g} distinct experts, "
                "so every row was routed alike (dummy weights?): record it again "
                "with real or balanced routing"
            )
    eager = [p["batch"] for p in plain if not p.get("graph", True)]
    if eager and any(p.get("graph", True) for p in verify):
        raise ValueError(
            f"plain steps at batch {eager} ran without a CUDA graph and verify steps "
            "with one; record the plain baseline under a graph"
        )
    by_k: dict[int, list[tuple[int, float]]] = {}
    for point in draft:
        by_k.setdefault(int(point["k"]), []).append(
            (int(point["batch"]), float(point["ms"]))
        )
    return RecordedProfile(
        name=document["name"],
        gpu=document["gpu"],
        source=document["source"],
        interpolation=cast(Interpolation, document["interpolation"]),
        plain=_unique("plain", [(int(p["batch"]), float(p["ms"])) for p in plain]),
        draft={k: _unique(f"draft (k = {k})", pairs) for k, pairs in by_k.items()},
        verify=_unique("verify", [(int(p["rows"]), float(p["ms"])) for p in verify]),
        label=document.get("label", "recorded"),
    )


def read_profile(path: Path) -> RecordedProfile:
    """Read a recorded profile.

    Raises:
        ValueError: missing file, broken JSON or a value against the rules; the
            message names the file and the key.
    """
    if not path.is_file():
        raise ValueError(
            f"profile {path} does not exist; give a recorded JSON file or a model "
            "such as floor:k3-tp16-h200"
        )
    try:
        document = json.loads(path.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"profile {path} is not JSON: {error}") from error
    if not isinstance(document, dict):
        raise ValueError(f"profile {path} must hold one JSON object")
    try:
        return _parse(document)
    except ValueError as error:
        raise ValueError(f"profile {path}: {error}") from error


def load_profile(spec: str, gpu: str | None = None) -> StepTimeProfile:
    """Profile from a file path or a "floor:..." model.

    Args:
        spec: path of a recorded JSON file, or "floor:k3-tp16-h200" and the like.
        gpu: the GPU you mean; a profile for another one is refused.

    Raises:
        ValueError: unreadable profile, or one for another GPU.
    """
    if spec.startswith("floor:"):
        from experiments.byte_model import parse_floor

        profile: StepTimeProfile = parse_floor(spec)
    else:
        profile = read_profile(Path(spec))
    if gpu is not None and _squash(gpu) not in _squash(profile.gpu):
        raise ValueError(
            f"profile {profile.name!r} is for {profile.gpu}, not {gpu}; record one on "
            f"that GPU or drop --gpu"
        )
    return profile


def _squash(name: str) -> str:
    return "".join(c for c in name.lower() if c.isalnum())
