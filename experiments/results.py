# SPDX-License-Identifier: Apache-2.0
"""Recorded figures: one JSON line a figure, checked when written and when read.

Keys of a line (all required unless marked):

* ``op`` (a kernel; then ``us``, microseconds) or ``metric`` (anything else; then
  ``value``), never both;
* ``label``: "measured" (this run), "recorded" (somebody's run) or "modelled";
* ``variant``, ``shape`` {}, ``gpu`` ("none" on a CPU), ``command``, ``commit``,
  ``versions`` {}, ``date`` (ISO 8601);
* ``gates`` {name: bool}: what was checked. What was not tested has no gate and is
  said in ``note``;
* ``spread`` (number or null), ``peers`` {name: number}, ``floor_us`` and
  ``bandwidth_share`` (number or null), ``kernels`` [names];
* ``unit``, ``note`` (optional strings), ``peer_kernels`` (optional, {name: [names]}).

A line that claims speed from speculation (``op``, or a metric in SPEED_METRICS with
k >= 1) is refused when a gate is red; a measured one must also carry the gates
``lossless`` and ``drafts_proposed``, because a drafter that proposed nothing or
changed the text has no speed-up to report.
"""

from __future__ import annotations

import json
import math
import platform
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from experiments.acceptance import LABELS

SPEED_METRICS = frozenset(
    {
        "speedup",
        "speedup_at_length",
        "tokens_per_second_per_user",
        "best_draft_length",
        "scheduled_speedup",
    }
)
SPEED_GATES = ("lossless", "drafts_proposed")
FILE_NAME = "results.jsonl"

_TEXT = ("variant", "gpu", "command", "commit", "date", "label")
_OBJECTS = ("shape", "peers", "gates", "versions")
_OPTIONAL_NUMBERS = ("spread", "floor_us", "bandwidth_share")
_KNOWN = frozenset(
    {*_TEXT, *_OBJECTS, *_OPTIONAL_NUMBERS}
    | {"op", "metric", "us", "value", "kernels", "peer_kernels", "unit", "note"}
)

Line = dict[str, Any]


def _is_number(value: object) -> bool:
    return (
        isinstance(value, (int, float))
        and not isinstance(value, bool)
        and math.isfinite(value)
    )


def _is_names(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _check_number(line: Mapping[str, Any], key: str, positive: bool = False) -> None:
    value = line.get(key)
    if not _is_number(value) or (positive and not value > 0):  # type: ignore[operator]
        kind = "a positive number" if positive else "a finite number"
        raise ValueError(f"key {key!r} is {value!r}; it must be {kind}")


def _check_types(line: Mapping[str, Any]) -> None:
    unknown = sorted(set(line) - _KNOWN)
    if unknown:
        raise ValueError(f"key {unknown[0]!r} is unknown; see experiments/results.py")
    for key in _TEXT:
        if not isinstance(line.get(key), str) or not line[key]:
            raise ValueError(f"key {key!r} must be a non-empty string")
    if line["label"] not in LABELS:
        raise ValueError(f"key 'label' is {line['label']!r}; use one of {LABELS}")
    for key in _OBJECTS:
        if not isinstance(line.get(key), dict):
            raise ValueError(f"key {key!r} must be an object")
    for name, passed in line["gates"].items():
        if not isinstance(passed, bool):
            raise ValueError(f"key 'gates': {name!r} is {passed!r}, not true or false")
    for name, value in line["peers"].items():
        if not _is_number(value):
            raise ValueError(f"key 'peers': {name!r} is {value!r}, not a number")
    for key in _OPTIONAL_NUMBERS:
        if key not in line:
            raise ValueError(f"key {key!r} is missing; write null when it is unknown")
        if line[key] is not None:
            _check_number(line, key)
    if not _is_names(line.get("kernels")):
        raise ValueError("key 'kernels' must be a list of names")
    of_peers = line.get("peer_kernels", {})
    if not isinstance(of_peers, dict) or not all(map(_is_names, of_peers.values())):
        raise ValueError("key 'peer_kernels' must give each peer a list of names")


def validate(line: Mapping[str, Any]) -> None:
    """Check one line against the rules of this module.

    Raises:
        ValueError: naming the key that is wrong, or the red gate.
    """
    _check_types(line)
    if ("op" in line) == ("metric" in line):
        raise ValueError("key 'op' or 'metric': exactly one of the two is needed")
    if "op" in line:
        _check_number(line, "us", positive=True)
    else:
        _check_number(line, "value")
    drafts = line["shape"].get("k", 1)
    if "op" not in line and (line["metric"] not in SPEED_METRICS or drafts == 0):
        return
    if "op" not in line and line["label"] == "measured":
        for gate in SPEED_GATES:
            if gate not in line["gates"]:
                raise ValueError(
                    f"key 'gates' lacks {gate!r}: a measured speed-up needs it"
                )
    red = sorted(name for name, passed in line["gates"].items() if not passed)
    if red:
        raise ValueError(
            f"key 'gates': {red[0]!r} is red, so {line.get('metric', 'the time')} "
            "means nothing; fix the run, then measure again"
        )


def _command() -> str:
    """What was typed: a module by its name, else the program's."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    if spec is None:
        return " ".join([Path(sys.argv[0]).name, *sys.argv[1:]])
    return " ".join(["python -m", spec.name.removesuffix(".__main__"), *sys.argv[1:]])


def _commit() -> str:
    try:
        found = subprocess.run(
            ["git", "rev-parse", "HEAD"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            timeout=10,
        )
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return found.stdout.strip() if found.returncode == 0 else "unknown"


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for package in ("dspark-k3", "numpy"):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return versions


class Recorder:
    """Collects lines that share one run's provenance and checks each.

    Args:
        command: what was typed; default the process's own command line.
        versions: further versions to note, such as vllm's.
        commit: of this package; default what git says of the source folder.
    """

    def __init__(
        self,
        command: str | None = None,
        versions: Mapping[str, str] | None = None,
        commit: str | None = None,
    ) -> None:
        self.lines: list[Line] = []
        self._common: Line = {
            "commit": commit or _commit(),
            "versions": {**_versions(), **(versions or {})},
            "command": command or _command(),
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
        }

    @property
    def provenance(self) -> Line:
        """Commit, versions, command and date of this run."""
        return dict(self._common)

    def add(
        self,
        metric: str,
        value: float,
        *,
        label: str,
        variant: str,
        shape: Mapping[str, Any],
        gpu: str,
        unit: str = "",
        gates: Mapping[str, bool] | None = None,
        spread: float | None = None,
        note: str = "",
    ) -> None:
        """Add one figure; raises ValueError under the rules of :func:`validate`."""
        line: Line = {
            "metric": metric,
            "label": label,
            "variant": variant,
            "shape": dict(shape),
            "gpu": gpu,
            "value": float(value),
            "unit": unit,
            "spread": spread,
            "peers": {},
            "floor_us": None,
            "bandwidth_share": None,
            "gates": dict(gates or {}),
            "kernels": [],
            "note": note,
            **self._common,
        }
        validate(line)
        self.lines.append(line)

    def add_op(
        self,
        op: str,
        us: float,
        *,
        label: str,
        variant: str,
        shape: Mapping[str, Any],
        gpu: str,
        gates: Mapping[str, bool],
        spread: float | None = None,
        peers: Mapping[str, float] | None = None,
        floor_us: float | None = None,
        bandwidth_share: float | None = None,
        kernels: Sequence[str] = (),
        peer_kernels: Mapping[str, Sequence[str]] | None = None,
        note: str = "",
    ) -> None:
        """Add a kernel's time in microseconds; raises as :func:`validate` does."""
        line: Line = {
            "op": op,
            "label": label,
            "variant": variant,
            "shape": dict(shape),
            "gpu": gpu,
            "us": float(us),
            "spread": spread,
            "peers": dict(peers or {}),
            "floor_us": floor_us,
            "bandwidth_share": bandwidth_share,
            "gates": dict(gates),
            "kernels": list(kernels),
            "peer_kernels": {k: list(v) for k, v in (peer_kernels or {}).items()},
            "note": note,
            **self._common,
        }
        validate(line)
        self.lines.append(line)


def append(path: Path, lines: Iterable[Mapping[str, Any]]) -> int:
    """Append lines to a file; all are checked before the first is written.

    Returns:
        Number of lines written.
    """
    checked = [dict(line) for line in lines]
    for number, line in enumerate(checked, start=1):
        try:
            validate(line)
        except ValueError as error:
            raise ValueError(f"line {number}: {error}") from error
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as out:
        out.writelines(json.dumps(line, allow_nan=False) + "\n" for line in checked)
    return len(checked)


def read(path: Path) -> list[Line]:
    """Read a results file, or the ``results.jsonl`` of a directory.

    Raises:
        ValueError: missing file, or a bad line; the message has the line's number
            and the key.
    """
    source = path / FILE_NAME if path.is_dir() else path
    if not source.is_file():
        raise ValueError(
            f"{source} does not exist; run 'dspark-k3 sweep --out DIR' first and "
            "give that DIR"
        )
    lines: list[Line] = []
    for number, text in enumerate(source.read_text().splitlines(), start=1):
        if not text.strip():
            continue
        try:
            line = json.loads(text)
            if not isinstance(line, dict):
                raise ValueError("a line must be one JSON object")
            validate(line)
        except ValueError as error:
            raise ValueError(f"{source} line {number}: {error}") from error
        lines.append(line)
    if not lines:
        raise ValueError(f"{source} is empty; run 'dspark-k3 sweep' again")
    return lines
