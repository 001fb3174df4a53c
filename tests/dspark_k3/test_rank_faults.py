# SPDX-License-Identifier: Apache-2.0
"""A rank that stalls or dies ends the engine in bounded time: vLLM's multiprocess
executor with two CPU workers."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from dspark_k3 import seams
from experiments.forking import Forker
from tests.dspark_k3.faulty_engine import ENVIRONMENT, STEP_LIMIT_S
from tests.dspark_k3.tensor_parallel import verdict

pytestmark = pytest.mark.engine

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def forker() -> Iterator[Forker]:
    with Forker({**ENVIRONMENT, "PYTHONPATH": str(ROOT)}) as forker:
        yield forker


@pytest.mark.parametrize(("kind", "most"), [("kill", 12), ("stop", STEP_LIMIT_S + 12)])
def test_the_client_gets_an_error_and_no_process_is_left(
    forker: Forker, tiny_target: Path, kind: str, most: float
) -> None:
    engine = seams.installed_engine()
    if engine is None or engine.distribution != seams.CPU_ENGINE.distribution:
        pytest.skip("two CPU workers need the CPU engine")
    log, code = forker.run("tests.dspark_k3.faulty_engine", [kind, str(tiny_target)])
    assert code == 0, log[-20:]
    found = json.loads([line for line in log if line.startswith('{"kind"')][-1])
    assert all(verdict.fault(found)["gates"].values()), found
    assert "EngineDeadError" in found["error"] and found["seconds"] < most
