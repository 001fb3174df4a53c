# SPDX-License-Identifier: Apache-2.0
"""``python -m verify_kernels.audit [OP ...] [--arch sm_90a ...] [--keep DIR]``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

import verify_kernels
from verify_kernels.audit import Report, audit, check_sources
from verify_kernels.common.build import plan
from verify_kernels.common.variant import OPS


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0 nothing found, 1 findings, 2 a bad argument."""
    parser = argparse.ArgumentParser(
        prog="python -m verify_kernels.audit",
        description="Prove what compiled kernels read before the wait, and their size.",
    )
    parser.add_argument("ops", metavar="OP", nargs="*", help=f"of {', '.join(OPS)}")
    parser.add_argument("--arch", nargs="+", default=[])
    parser.add_argument("--keep", type=Path, help="keep PTX, cubin and IR here")
    given = parser.parse_args(arguments)
    try:
        wanted = plan(given.ops, given.arch)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    found = [("sources", f) for f in check_sources(Path(verify_kernels.__path__[0]))]
    reports = [audit(variant, arch, given.keep) for variant, arch in wanted]
    found += [(f"{r.op}/{r.name} {r.arch}", f) for r in reports for f in r.findings]
    console = Console()
    console = console if console.is_terminal else Console(width=130)
    console.print(_table(reports))
    for where, finding in found:
        console.print(f"{where}: {finding}", markup=False, highlight=False)
    for line in _slots(reports):
        console.print(line, markup=False, highlight=False)
    console.print(f"{len(reports)} kernels audited, {len(found)} findings.")
    return 1 if found else 0


def _slots(reports: Sequence[Report]) -> Iterator[str]:
    """Whether it was checked that no slot is handed back early."""
    checked = [r.arrivals for r in reports if r.arrivals is not None]
    if checked:
        yield (
            f"Slots handed back: {sum(checked)} arrivals of {len(checked)} kernels "
            "checked."
        )
    for why in dict.fromkeys(r.unchecked for r in reports if r.arrivals is None):
        yield f"Slots handed back: not checked, {why}"


def _table(reports: Sequence[Report]) -> Table:
    table = Table(title="Read before the wait; resources of a thread and of a CTA")
    for name in ("op", "variant", "arch"):
        table.add_column(name)
    for name in ("registers", "stack B", "shared B"):
        table.add_column(name, justify="right")
    table.add_column("early loads")
    table.add_column("findings", justify="right")
    by_variant: dict[tuple[str, str], list[Report]] = {}
    for report in reports:
        by_variant.setdefault((report.op, report.name), []).append(report)
    for (op, name), group in by_variant.items():
        used = [r.resources for r in group]
        shared = group[0].shared_bytes + max(u.static_shared_bytes for u in used)
        early = sorted({parameter for r in group for parameter in r.early})
        table.add_row(
            op,
            name,
            " ".join(r.arch.removeprefix("sm_") for r in group),
            " ".join(str(u.registers) for u in used),
            str(max(max(u.frame_bytes, u.stack_bytes) for u in used)),
            str(shared),
            " ".join(early) or "none",
            str(sum(len(r.findings) for r in group)),
        )
    return table


if __name__ == "__main__":
    sys.exit(main())
