# SPDX-License-Identifier: Apache-2.0
"""Proofs and budgets of compiled kernels; needs no GPU.

The command is ``python -m verify_kernels.audit``.

Of each variant, for each architecture, from its PTX, its cubin and its IR:

- before ``griddepcontrol.wait`` no path reads global memory but the parameters that the
  kernel lists in ``early_loads``, and none writes any;
- a kernel launched with the programmatic attribute waits on every path to its end;
- no global store follows ``griddepcontrol.launch_dependents``, unless the kernel gives
  its reason in ``early_release``;
- inline asm that touches memory is declared to have effects, so nothing may move it;
- no stack, no spills; registers and shared memory within the variant's budgets;
- a barrier is arrived on only after all loads from shared memory have returned, so no
  slot is handed back too early (`verify_kernels.audit.slots`). This is read from
  machine code and needs nvdisasm; without one the report says that it was not checked.

And of the sources: inline asm is written in one place.

Architectures often have the same code: sm_103a's PTX is sm_100a's but for its target
line, and half of the kernels have the same machine code there. What was read of one is
used again for the next, so ask for the architectures of a variant one after the other.
"""

from __future__ import annotations

import functools
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from verify_kernels.audit import sass
from verify_kernels.audit.address import Region
from verify_kernels.audit.checks import Promise, check
from verify_kernels.audit.cubin import Resources, resources, sections
from verify_kernels.audit.launch import Launch, read_launch
from verify_kernels.audit.ptx import Entry, parse
from verify_kernels.audit.sass import NoDisassembler, disassemble
from verify_kernels.audit.slots import check_slots, count_arrivals
from verify_kernels.audit.source import check_ir, check_sources
from verify_kernels.common.variant import Kernel, Variant

__all__ = ["Report", "audit", "check_sources"]

_TARGET = re.compile(r"^\.target .*", re.M)


@dataclass(frozen=True)
class Report:
    """What was found of one variant on one architecture.

    Attributes:
        op: the op.
        name: the variant.
        arch: the architecture.
        resources: registers, stack and static shared memory.
        shared_bytes: dynamic shared memory of a CTA.
        early: parameters that are read before the wait.
        arrivals: arrivals on barriers, each proved to come after the loads before it or
            in ``findings``; None if not checked.
        unchecked: why not, "" if checked.
        findings: what is wrong, one sentence each; empty if nothing is.
    """

    op: str
    name: str
    arch: str
    resources: Resources
    shared_bytes: int
    early: tuple[str, ...]
    arrivals: int | None
    unchecked: str
    findings: tuple[str, ...]


def audit(variant: Variant, arch: str, keep: Path | None = None) -> Report:
    """Compile one variant for one architecture and check it.

    Args:
        variant: what to compile.
        arch: for instance ``sm_90a``.
        keep: directory for its PTX, cubin and IR; default none are kept.
    """
    with tempfile.TemporaryDirectory() as scratch:
        directory = keep / arch / variant.op / variant.name if keep else Path(scratch)
        directory.mkdir(parents=True, exist_ok=True)
        with _files_only(directory):
            artifacts = variant.compile(arch, dump=directory).artifacts
    kernel = variant.kernel
    promise = Promise(
        tuple(kernel.parameters),
        tuple(kernel.early_loads),
        kernel.early_release,
        bool(kernel.pdl),
    )
    entries, cubins = _entries(artifacts.PTX), resources(artifacts.CUBIN)
    if len(entries) != 1 or set(cubins) != {entries[0].name}:
        raise ValueError(
            f"{variant.op}/{variant.name} compiles to {len(entries)} kernels; the "
            "audit takes one kernel a variant: make each a variant of its own"
        )
    used = cubins[entries[0].name]
    launch = read_launch(artifacts.MLIR)
    findings, early = check(entries[0], promise)
    findings += check_ir(artifacts.MLIR)
    findings += _check_launch(launch, kernel.shared_bytes, promise)
    findings += _check_budgets(used, kernel.shared_bytes, variant)
    barriers = "mbarrier" in artifacts.PTX
    arrivals, unchecked, early_slots = _check_slots(
        artifacts.CUBIN, arch, kernel, used, barriers
    )
    findings += early_slots
    return Report(
        variant.op,
        variant.name,
        arch,
        used,
        kernel.shared_bytes,
        tuple(early),
        arrivals,
        unchecked,
        tuple(findings),
    )


@contextmanager
def _files_only(directory: Path) -> Iterator[None]:
    """Have the compiler keep its first IR in ``directory``: no option does.

    Nor build the host's part, which nothing runs here: for the architecture that this
    machine has, or is taken to have, it takes half as long again.
    """
    from cutlass.cutlass_dsl import CuTeDSL

    settings = CuTeDSL._get_dsl().envar
    before = settings.keep_ir, settings.dump_dir, settings.arch
    settings.keep_ir, settings.dump_dir, settings.arch = True, str(directory), ""
    try:
        yield
    finally:
        settings.keep_ir, settings.dump_dir, settings.arch = before


def _entries(ptx: str) -> tuple[Entry, ...]:
    """The kernels of a PTX module, whose target does not matter."""
    return _parsed(_TARGET.sub(".target", ptx))


@functools.lru_cache(maxsize=4)
def _parsed(ptx: str) -> tuple[Entry, ...]:
    return parse(ptx)


@dataclass(frozen=True)
class _Machine:
    """A cubin, as good as any other of its generation with the same machine code."""

    generation: str
    code: tuple[tuple[str, bytes], ...]
    cubin: bytes = field(compare=False)


@functools.lru_cache(maxsize=4)
def _read_slots(
    machine: _Machine, kept: tuple[Region, ...]
) -> tuple[int, tuple[str, ...]]:
    """Number of arrivals, and what was found."""
    code = disassemble(machine.cubin)
    return count_arrivals(code), tuple(check_slots(code, kept))


def _check_slots(
    cubin: bytes, arch: str, kernel: Kernel, used: Resources, barriers: bool
) -> tuple[int | None, str, list[str]]:
    """Number of arrivals checked, why none were, and what was found.

    Without ``barriers`` there can be none: the machine code, which takes a third of
    an audit's time, is not looked at.
    """
    # Ranges count from the start of dynamic shared memory, which static would move.
    kept = () if used.static_shared_bytes else getattr(kernel, "kept_shared", ())
    code = tuple((s.name, s.data) for s in sections(cubin) if ".text" in s.name)
    try:
        sass.find_nvdisasm()
        if not barriers:
            return 0, "", []
        # sm_100a and sm_103a are of one generation: the last digit is not the ISA's.
        machine = _Machine(arch.rstrip("a")[:-1], code, cubin)
        arrivals, found = _read_slots(machine, tuple(kept))
    except NoDisassembler as error:
        return None, str(error), []
    except ValueError as error:
        return None, str(error), [f"slots handed back were not checked: {error}"]
    return arrivals, "", list(found)


def _check_launch(launch: Launch, shared_bytes: int, promise: Promise) -> Iterator[str]:
    if launch.count != 1:
        yield f"the host part has {launch.count} launches; make each its own variant"
    if launch.programmatic != promise.pdl:
        yield (
            f"`pdl` is {promise.pdl}, but the launch "
            f"{'sets' if launch.programmatic else 'does not set'} the programmatic "
            "attribute"
        )
    if launch.shared_bytes not in (None, shared_bytes):
        yield (
            f"`shared_bytes` is {shared_bytes}, but the launch asks for "
            f"{launch.shared_bytes} bytes of shared memory"
        )


def _check_budgets(
    used: Resources, shared_bytes: int, variant: Variant
) -> Iterator[str]:
    if used.frame_bytes or used.stack_bytes:
        yield (
            f"{max(used.frame_bytes, used.stack_bytes)} bytes of stack a thread: "
            "registers spill, or a register array has a run-time index"
        )
    if used.registers > variant.max_registers:
        yield f"{used.registers} registers a thread; {variant.max_registers} allowed"
    shared = shared_bytes + used.static_shared_bytes
    if shared > variant.max_shared_bytes:
        yield (
            f"{shared} bytes of shared memory a CTA; {variant.max_shared_bytes} allowed"
        )
