# SPDX-License-Identifier: Apache-2.0
"""Tensor parallelism on two GPUs: text, lengths, faults, steps.

The engines run once (`tests.dspark_k3.tensor_parallel`); ``K3_TP_OUT`` names a folder
where they have run already.
"""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.dspark_k3.suite.cases import TARGET
from tests.dspark_k3.tensor_parallel import cases, run

pytestmark = [pytest.mark.engine, pytest.mark.gpu, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    if folder := os.environ.get("K3_TP_OUT"):
        found: dict[str, Any] = json.loads(Path(folder, "verdicts.json").read_text())
        return found
    import torch

    if torch.cuda.device_count() < 2:
        pytest.skip("one CUDA device; two are needed")
    if not (TARGET / "config.json").is_file():
        pytest.skip(f"{TARGET} is not there: make train-tiny-k3 writes it")
    return run.run(tmp_path_factory.mktemp("tp2"), 2, minutes=12).verdicts


def test_every_engine_ran(verdicts: dict[str, Any]) -> None:
    assert not verdicts["failed"]


@pytest.mark.parametrize("name", cases.JUDGED)
def test_every_gate_holds(verdicts: dict[str, Any], name: str) -> None:
    judged = verdicts["cases"][name]
    assert all(judged["gates"].values()), json.dumps(judged)[:2000]
