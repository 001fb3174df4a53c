# SPDX-License-Identifier: Apache-2.0
"""What kernels work in is of their own types, whatever torch's default is: vLLM makes
its models with the model's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from verify_kernels.kda import KdaFoldState
from verify_kernels.markov import MarkovSpace
from verify_kernels.mla import MlaSpace
from verify_kernels.moe import ExpertPlan, ExpertWorkspace

MAKERS: dict[str, Callable[[], Any]] = {
    "mla": lambda: MlaSpace.allocate(2, "cpu"),
    "markov": lambda: MarkovSpace.allocate("cpu"),
    "experts": lambda: ExpertWorkspace.allocate(128, 64, 4, torch.device("cpu")),
    "plan": lambda: ExpertPlan.allocate(16, 4, "cpu"),
    "kda": lambda: KdaFoldState.allocate(3, 2, torch.device("cpu")),
}


@pytest.fixture
def bf16() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    yield
    torch.set_default_dtype(before)


def types(space: Any) -> dict[str, torch.dtype]:
    return {k: v.dtype for k, v in vars(space).items() if isinstance(v, Tensor)}


@pytest.mark.parametrize("name", MAKERS)
def test_types_do_not_follow_the_default(
    name: str, request: pytest.FixtureRequest
) -> None:
    wanted = types(MAKERS[name]())
    request.getfixturevalue("bf16")
    assert types(MAKERS[name]()) == wanted and wanted
