# SPDX-License-Identifier: Apache-2.0
"""Result lines of a run, on disk as soon as they are measured."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path

import torch

from experiments import results
from experiments.bench.candidate import OURS, Point, spell
from experiments.bench.report import share
from experiments.bench.timing import floor_us

_PACKAGES = (
    "torch", "triton", "nvidia-cutlass-dsl", "quack-kernels", "vllm", "fla-core",
    "humming-kernels",
)  # fmt: skip
_QUERY = "driver_version,clocks.sm,clocks.mem,clocks.max.sm,temperature.gpu,power.draw"


def versions() -> dict[str, str]:
    """Of the packages that make or launch kernels, those installed; and CUDA's."""
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    return found


def gpu_state() -> str:
    """Driver, clocks in MHz, temperature and power, as nvidia-smi says; else "".

    Read while the device is at work: an idle one shows idle clocks.
    """
    command = ["nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    if found.returncode:
        return ""
    values = found.stdout.splitlines()[0].split(", ")
    return ", ".join(f"{k} {v}" for k, v in zip(_QUERY.split(","), values, strict=True))


class Sheet:
    """Writes a run's lines: each at once, and all again when kernel names are known.

    Args:
        path: results file to append to, or None to keep the lines in memory.
        recorder: the run's provenance.
        gpu: name of the device.
        state: :func:`gpu_state` under load, for the notes.
    """

    def __init__(
        self, path: Path | None, recorder: results.Recorder, gpu: str, state: str = ""
    ) -> None:
        self._path = path
        self._recorder = recorder
        self._gpu = gpu
        self._state = state
        self._start = path.stat().st_size if path and path.is_file() else 0

    def rates(self, rates: Mapping[str, float]) -> None:
        """Record measured bandwidths, in bytes a second."""
        first = len(self._recorder.lines)
        for name, rate in rates.items():
            self._recorder.add(
                "bandwidth",
                rate / 1e12,
                label="measured",
                variant=name,
                shape={"bytes": 2**31},
                gpu=self._gpu,
                unit="TB/s",
                note=self._state,
            )
        self._append(first)

    def add(self, point: Point) -> None:
        """Record a point: a line for each launch mode of ours, timed or red."""
        first = len(self._recorder.lines)
        self._lines(point)
        self._append(first)

    def rewrite(self, points: Sequence[Point]) -> None:
        """Write the points' lines again, in place of those written so far."""
        kept = [line for line in self._recorder.lines if "metric" in line]
        kept = [line for line in kept if line["metric"] == "bandwidth"]
        self._recorder.lines[:] = kept
        for point in points:
            self._lines(point)
        if self._path is None or not self._path.is_file():
            return
        earlier = self._path.read_bytes()[: self._start]
        fresh = self._path.with_name(self._path.name + ".part")
        fresh.write_bytes(earlier)
        results.append(fresh, self._recorder.lines)
        os.replace(fresh, self._path)

    def _append(self, first: int) -> None:
        if self._path is not None and len(self._recorder.lines) > first:
            results.append(self._path, self._recorder.lines[first:])

    def _note(self, point: Point) -> str:
        parts = [f"{name}: {note}" for name, note in point.notes.items()]
        parts += [f"{name} not available: {why}" for name, why in point.missing.items()]
        parts += [f"{name}: rows differ in bits from M=1" for name in point.moved]
        return "; ".join([*parts, self._state] if self._state else parts)

    def _lines(self, point: Point) -> None:
        peers = {spell(key): timing.us for key, timing in point.peers().items()}
        red = point.red()
        for key, gates in point.gates.items():
            mode = key[1]
            if key in red:
                self._recorder.add(
                    "red_gates",
                    len(red[key]),
                    label="measured",
                    variant=f"{point.op}:{mode}",
                    shape=point.shape,
                    gpu=self._gpu,
                    gates=gates,
                    note="not timed",
                )
            elif key in point.timings:
                self._recorder.add_op(
                    point.op,
                    point.timings[key].us,
                    label="measured",
                    variant=mode,
                    shape=point.shape,
                    gpu=self._gpu,
                    gates=gates,
                    spread=point.timings[key].spread,
                    peers=peers,
                    floor_us=floor_us(point.bytes),
                    bandwidth_share=share(point, mode),
                    kernels=point.kernels.get(key, []),
                    peer_kernels={
                        spell(k): names
                        for k, names in point.kernels.items()
                        if k[0] != OURS
                    },
                    note=self._note(point),
                )
