# SPDX-License-Identifier: Apache-2.0
"""A Triton backend entry that answers questions and compiles nothing.

In interpreter mode no kernel reaches a backend; vLLM and Triton's helpers only ask
which one there is. Whatever would compile or launch raises instead.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any, NoReturn

from triton.backends.compiler import BaseBackend, GPUTarget
from triton.backends.driver import DriverBase

_TARGET = GPUTarget("cpu", 0, 1)


def _no_compiler(action: str) -> NoReturn:
    raise RuntimeError(
        f"asked to {action} a Triton kernel for the CPU, but DSPARK_K3_CPU only "
        "interprets kernels; was TRITON_INTERPRET=1 set before Python started?"
    )


class CompilerAnswers(BaseBackend):
    """The compiler half: knows its target, refuses to compile."""

    @staticmethod
    def supports_target(target: GPUTarget) -> bool:
        """True for the CPU target only."""
        return bool(target.backend == "cpu")

    def hash(self) -> str:
        """Identity for cache keys."""
        return "dspark-k3-cpu-interpreter"

    def parse_options(self, options: dict[str, Any]) -> NoReturn:
        """Raise: nothing is compiled here."""
        _no_compiler("compile")

    def add_stages(
        self, stages: dict[str, Any], options: object, language: Any
    ) -> None:
        """Raise: nothing is compiled here."""
        _no_compiler("compile")

    def load_dialects(self, context: Any) -> None:
        """No dialects to load."""

    def get_module_map(self) -> dict[str, ModuleType]:
        """No device-specific modules."""
        return {}


class DriverAnswers(DriverBase):
    """The driver half: one CPU, always there, never launching anything."""

    @classmethod
    def is_active(cls) -> bool:
        """True, so that Triton's driver selection finds exactly one driver."""
        return True

    def map_python_to_cpp_type(self, ty: str) -> str:
        """Raise: nothing is launched here."""
        _no_compiler("launch")

    def get_current_target(self) -> GPUTarget:
        """The CPU target."""
        return _TARGET

    def get_current_device(self) -> int:
        """Device 0."""
        return 0

    def get_active_torch_device(self) -> Any:
        """``torch.device("cpu")``."""
        import torch

        return torch.device("cpu")

    def get_benchmarker(self) -> NoReturn:
        """Raise: interpreted kernels are not worth timing."""
        _no_compiler("benchmark")
