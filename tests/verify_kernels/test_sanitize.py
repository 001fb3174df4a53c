# SPDX-License-Identifier: Apache-2.0
"""Verdicts of scripts/sanitize.sh on reports of known content, from a tool that is not
there."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NAME = "kernel_cutlass_kernel_{}_object_at__tensorptrbf16gmem_0"
GEMM = NAME.format("verify_kernelsskinny_gemmkernelSkinnyGemmKernel")
ATTN = NAME.format("verify_kernelsattn_reskernelAttnResKernel")
PAST, RACE, HALF = (
    NAME.format(f"testsverify_kernelsplantedmemory{fault}")
    for fault in ("PastTheEnd", "NoBarrier", "HalfAtTheBarrier")
)


def invalid(kernel: str) -> str:
    return f"""========= Invalid __global__ write of size 4 bytes
=========     at {kernel}+0x1a0
=========     by thread (5,0,0) in block (0,0,0)
=========     Access at 0x7f0 is out of bounds
=========     and is 225 bytes after the nearest allocation at 0x7d0 of size 2048 bytes
=========
"""


def race(kernel: str) -> str:
    return f"""========= Error: Race reported between Write access at {kernel}+0x430
=========     and Read access at {kernel}+0x770 [248 hazards]
=========     and Read access at {kernel}+0x7a0 [248 hazards]
=========
"""


def barrier(kernel: str) -> str:
    return f"""========= Barrier error detected. Divergent thread(s) in block.
=========     at {kernel}+0x90
=========     by thread (0,0,0) in block (3,0,0)
=========
"""


HEAD = "========= COMPUTE-SANITIZER\n"
DONE = "sanitize: results are right\n"
CRASH = "========= Error: process didn't terminate successfully\n"
TAIL = "========= ERROR SUMMARY: 3 errors\n"
GOOD = {
    "memcheck": HEAD + DONE + invalid(PAST) * 2 + TAIL,
    "racecheck": HEAD + DONE + race(RACE) + "========= RACECHECK SUMMARY: 1 hazard\n",
    "racecheck-bulk": HEAD + race(GEMM) * 2 + DONE + race(RACE) + TAIL,
    "synccheck": HEAD + DONE + barrier(HALF) + TAIL,
}


def verdicts(logs: dict[str, str], folder: Path) -> tuple[int, dict[str, str], str]:
    """Exit status, run -> verdict line, and all output of the script."""
    for run, text in logs.items():
        (folder / f"{run}.txt").write_text(text)
    tool = folder / "tool"
    tool.write_text(
        "#!/bin/sh\n"
        'run=$2; [ "$2 $4" = "racecheck yes" ] && run=racecheck-bulk\n'
        f"exec cat {folder}/$run.txt\n"
    )
    tool.chmod(0o755)
    done = subprocess.run(
        [ROOT / "scripts" / "sanitize.sh"],
        env={**os.environ, "SANITIZER": str(tool), "LOGS": str(folder / "logs")},
        capture_output=True,
        text=True,
        timeout=60,
    )
    lines = [line.split(": ", 1) for line in done.stdout.splitlines()]
    found = {line[0]: line[1] for line in lines if line[0] in GOOD}
    return done.returncode, found, done.stdout + done.stderr


def test_planted_faults_and_listed_false_positives_pass(tmp_path: Path) -> None:
    status, found, output = verdicts(GOOD, tmp_path)
    assert (status, set(found)) == (0, set(GOOD)), output
    assert all(line.startswith("PASS, planted fault rep") for line in found.values())
    assert "2 known false positives" in found["racecheck-bulk"]
    assert "0 known false positives" in found["racecheck"]
    # Shown, not only counted.
    assert output.count("known: SkinnyGemmKernel | Error: Race reported between") == 2
    assert output.count("and Read access at SkinnyGemmKernel+0x7a0 [248 hazards]") == 2


@pytest.mark.parametrize(
    ("run", "log", "verdict", "shown"),
    [
        ("memcheck", GOOD["memcheck"] + invalid(GEMM), "FAIL", "SkinnyGemmKernel | "),
        ("memcheck", GOOD["memcheck"] + CRASH, "FAIL", "? | Error: process didn't"),
        ("memcheck", HEAD + DONE + TAIL, "UNPROVED", ""),
        ("racecheck", GOOD["racecheck"] + race(GEMM), "FAIL", "SkinnyGemmKernel | "),
        ("racecheck", HEAD + DONE + race(GEMM), "FAIL", "SkinnyGemmKernel | "),
        ("racecheck-bulk", GOOD["racecheck-bulk"] + race(ATTN), "FAIL", "AttnRes"),
        ("synccheck", GOOD["synccheck"] + barrier(ATTN), "FAIL", "AttnResKernel | "),
        ("synccheck", HEAD + "sanitize: K 768 is off by 1\n", "FAIL", "is off by 1"),
    ],
    ids=[
        "address",
        "crash",
        "silent",
        "race",
        "only-race",
        "other",
        "barrier",
        "wrong",
    ],
)
def test_anything_else_does_not(
    run: str, log: str, verdict: str, shown: str, tmp_path: Path
) -> None:
    status, found, output = verdicts(GOOD | {run: log}, tmp_path)
    assert status == 1
    for name, line in found.items():
        assert line.startswith(verdict if name == run else "PASS"), output
    assert shown in output


def test_a_missing_tool_is_named(tmp_path: Path) -> None:
    done = subprocess.run(
        [ROOT / "scripts" / "sanitize.sh"],
        env={**os.environ, "SANITIZER": str(tmp_path / "none")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert f"{tmp_path}/none is missing; set SANITIZER" in done.stderr
