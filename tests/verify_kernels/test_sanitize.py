# SPDX-License-Identifier: Apache-2.0
"""Verdicts of scripts/sanitize.sh on reports of known content, from a tool that is not
there."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NAME = "kernel_cutlass_kernel_{}_object_at__tensorptrbf16gmem_0"
GEMM = NAME.format("verify_kernelsskinny_gemmkernelSkinnyGemmKernel")
ATTN = NAME.format("verify_kernelsattn_reskernelAttnResKernel")
DIRECT = NAME.format("verify_kernelsskinny_gemmdirectDirectGemmKernel")
PAST, RACE, LANE, HALF = (
    NAME.format(f"testsverify_kernelsplantedmemory{fault}")
    for fault in (
        "PastTheEnd",
        "NoBarrier",
        "LaneNotInTheMask",
        "HalfAWarpAtTheBarrier",
    )
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


def warning(kernel: str) -> str:
    """A hazard within a warp, as the tool grades it."""
    return f"""========= Warning: Race reported between Write access at {kernel}+0x810
=========     and Read access at {kernel}+0x840 [128 hazards]
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
    "synccheck": HEAD + DONE + barrier(LANE) + TAIL,
}


def verdicts(
    logs: dict[str, str], folder: Path, *arguments: str
) -> tuple[int, dict[str, str], str]:
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
        [ROOT / "scripts" / "sanitize.sh", *arguments],
        env={**os.environ, "SANITIZER": str(tool), "LOGS": str(folder / "logs")},
        capture_output=True,
        text=True,
        timeout=60,
    )
    lines = [line.split(": ", 1) for line in done.stdout.splitlines()]
    found = {line[0]: line[1] for line in lines if line[0].split()[0] in GOOD}
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
        ("racecheck", GOOD["racecheck"] + warning(ATTN), "FAIL", "AttnResKernel | "),
        ("racecheck", GOOD["racecheck"] + warning(GEMM), "FAIL", "SkinnyGemmKernel | "),
        ("memcheck", GOOD["memcheck"] + invalid(GEMM), "FAIL", "SkinnyGemmKernel | "),
        ("memcheck", GOOD["memcheck"] + CRASH, "FAIL", "? | Error: process didn't"),
        ("memcheck", HEAD + DONE + TAIL, "UNPROVED", ""),
        ("racecheck", GOOD["racecheck"] + race(GEMM), "FAIL", "SkinnyGemmKernel | "),
        ("racecheck", HEAD + DONE + race(GEMM), "FAIL", "SkinnyGemmKernel | "),
        ("racecheck-bulk", GOOD["racecheck-bulk"] + race(ATTN), "FAIL", "AttnRes"),
        ("synccheck", GOOD["synccheck"] + barrier(ATTN), "FAIL", "AttnResKernel | "),
        ("racecheck", GOOD["racecheck"] + race(DIRECT), "FAIL", "DirectGemmKernel | "),
        ("synccheck", HEAD + DONE + barrier(HALF), "FAIL", "HalfAWarpAtTheBarrier | "),
        ("synccheck", HEAD + "sanitize: K 768 is off by 1\n", "FAIL", "is off by 1"),
    ],
    ids=[
        "warning",
        "warning-of-the-ring",
        "address",
        "crash",
        "silent",
        "race",
        "only-race",
        "other",
        "barrier",
        "another-module",
        "another-fault",
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


def test_planted_faults_are_tried_one_by_one(tmp_path: Path) -> None:
    status, found, output = verdicts(GOOD, tmp_path, "faults")
    reported = {name: line.startswith("reported: ") for name, line in found.items()}
    assert reported == {
        "memcheck PastTheEnd": True,
        "racecheck NoBarrier": True,
        "synccheck LaneNotInTheMask": True,
        "synccheck HalfAWarpAtTheBarrier": False,
        "synccheck BarrierNotWaitedFor": False,
        "synccheck BarrierNotMade": False,
    }, output
    assert "Divergent thread(s) in block" in found["synccheck LaneNotInTheMask"]
    assert status == 0
    # The one that counts is the first of a tool.
    other = {"synccheck": HEAD + barrier(HALF)}
    status, found, output = verdicts(GOOD | other, tmp_path, "faults")
    assert found["synccheck HalfAWarpAtTheBarrier"].startswith("reported: "), output
    assert found["synccheck LaneNotInTheMask"].startswith("not reported"), output
    assert status == 1


@pytest.mark.parametrize(
    ("fault", "wanted"),
    [
        ("LaneNotInTheMask", r"WARPSYNC R\d+"),
        ("HalfAWarpAtTheBarrier", r"@!?P\d EXIT .*BAR\.SYNC"),
        ("BarrierNotWaitedFor", r"SYNCS\.EXCH.*SYNCS\.ARRIVE.*BRA"),
        ("BarrierNotMade", r"^(?!.*SYNCS\.EXCH).*SYNCS\.ARRIVE"),
    ],
)
def test_planted_faults_are_still_there_in_machine_code(
    fault: str, wanted: str, tmp_path: Path
) -> None:
    """ptxas drops a sync under a mask where it sees that it orders nothing."""
    pytest.importorskip("cutlass", reason="CuTe DSL is not installed")
    from tests.verify_kernels.planted import memory
    from tests.verify_kernels.planted.base import planted
    from verify_kernels.audit.sass import NoDisassembler, disassemble

    compiled = planted(getattr(memory, fault)()).compile("sm_90a", dump=tmp_path)
    try:
        code = disassemble(compiled.artifacts.CUBIN)
    except NoDisassembler as error:
        pytest.skip(str(error))
    text = " ".join(ins.text for ins in code.instructions)
    assert re.search(wanted, text), text


def test_every_design_of_the_skinny_gemm_is_launched_small() -> None:
    pytest.importorskip("cutlass", reason="CuTe DSL is not installed")
    from tests.verify_kernels.sanitize import GEMMS, designs
    from verify_kernels.skinny_gemm import host

    launched = set()
    for k, _, sizes, numbers in GEMMS:
        for m in numbers:
            found = designs(k, sizes, m)
            assert found, (k, m)
            launched |= set(found)
    assert launched == {type(v.kernel).__name__ for v in host.variants()}


def test_a_missing_tool_is_named(tmp_path: Path) -> None:
    done = subprocess.run(
        [ROOT / "scripts" / "sanitize.sh"],
        env={**os.environ, "SANITIZER": str(tmp_path / "none")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert f"{tmp_path}/none is missing; set SANITIZER" in done.stderr
