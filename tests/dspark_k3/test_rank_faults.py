# SPDX-License-Identifier: Apache-2.0
"""A rank that stalls or dies ends the engine in bounded time: vLLM's multiprocess
executor with two CPU workers."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dspark_k3 import seams
from tests.dspark_k3.faulty_engine import ENVIRONMENT, STEP_LIMIT_S
from tests.dspark_k3.tensor_parallel import verdict

pytestmark = pytest.mark.engine

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(("kind", "most"), [("kill", 12), ("stop", STEP_LIMIT_S + 12)])
def test_the_client_gets_an_error_and_no_process_is_left(
    tiny_target: Path, kind: str, most: float
) -> None:
    engine = seams.installed_engine()
    if engine is None or engine.distribution != seams.CPU_ENGINE.distribution:
        pytest.skip("two CPU workers need the CPU engine")
    command = [sys.executable, "-m", "tests.dspark_k3.faulty_engine", kind]
    ran = subprocess.run(
        [*command, str(tiny_target)],
        cwd=ROOT,
        env={**os.environ, **ENVIRONMENT, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    answers = [line for line in ran.stdout.splitlines() if line.startswith('{"kind"')]
    found = json.loads(answers[-1])
    assert all(verdict.fault(found)["gates"].values()), found
    assert "EngineDeadError" in found["error"] and found["seconds"] < most
