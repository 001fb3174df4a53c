# SPDX-License-Identifier: Apache-2.0
"""Fixtures shared by all rooms, and what the `engine` and `gpu` marks need."""

from pathlib import Path

import pytest

from dspark_k3 import seams

TINY = Path(__file__).resolve().parent.parent / "experiments" / "tiny"


@pytest.fixture(scope="session")
def tiny_target() -> Path:
    return TINY / "target"


@pytest.fixture(scope="session")
def tiny_draft() -> Path:
    return TINY / "dspark-vanilla"


def pytest_configure(config: pytest.Config) -> None:
    # Where pytest-xdist writes an item's group.
    if config.getoption("dist", "no") == "loadgroup" and not hasattr(
        pytest.Item, "_nodeid"
    ):
        raise pytest.UsageError(
            f"--dist loadgroup keeps no groups together under pytest "
            f"{pytest.__version__}: every worker would make every fixture of a file. "
            "Install the versions that pyproject.toml asks for."
        )


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # `--dist loadgroup`: a file is one process's unless its tests say otherwise.
    for item in items:
        if item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(item.nodeid.partition("::")[0]))


def pytest_runtest_setup(item: pytest.Item) -> None:
    # A vLLM that is installed but broken must fail these tests, not skip them.
    if item.get_closest_marker("engine") and seams.installed_engine() is None:
        pytest.skip(f"vLLM is not installed: {seams.CPU_ENGINE.install}")
    if item.get_closest_marker("gpu") and not _has_gpu():
        pytest.skip("no CUDA device")


def _has_gpu() -> bool:
    try:
        import torch
    except ModuleNotFoundError:
        return False
    return bool(torch.cuda.is_available())
