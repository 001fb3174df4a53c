# SPDX-License-Identifier: Apache-2.0
"""The command; see the package."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from experiments.gpu_engine import fleet, lines, ranks
from tests.dspark_k3.suite.cases import TARGET
from tests.dspark_k3.tensor_parallel import cases, run


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.dspark_k3.tensor_parallel",
        description="Tensor parallelism on the first N GPUs of this host.",
    )
    add = parser.add_argument
    add("--tp", type=int, required=True, help="ranks: 2, 4, 8")
    add("--out", type=Path, required=True, help="folder for lines, verdicts and logs")
    add("--parts", type=lines.names, default=run.PARTS, help="small,wide (default)")
    add("--only", default="", help="small cases whose names contain this")
    add("--layers", type=int, default=4, help="of K3, for the wide part (default 4)")
    add("--steps", type=int, default=cases.STEPS, help="steps compared (default 2000)")
    add("--minutes", type=float, default=9.0, help="stop after this (default 9)")
    add("--nccl", action="store_true", help="no all-reduce over peer memory")
    add("--no-fork", action="store_true", help="start engines anew, not off this one")
    add("--commit", help="commit to record where git cannot tell")
    options = parser.parse_args(arguments)
    unknown = sorted(set(options.parts) - set(run.PARTS))
    if unknown:
        parser.error(f"--parts {unknown[0]}: must be among {', '.join(run.PARTS)}")
    if options.tp < 2 or options.tp % 2:
        parser.error(f"--tp {options.tp}: must be an even number of GPUs")
    if not (TARGET / "config.json").is_file():
        parser.error(f"{TARGET} is not there: make train-tiny-k3 writes it")
    try:
        ranks.check_environment(os.environ)
    except ValueError as error:
        parser.error(str(error))
    report = run.run(
        options.out,
        options.tp,
        parts=options.parts,
        only=options.only,
        layers=options.layers,
        steps=options.steps,
        minutes=options.minutes,
        nccl=options.nccl,
        commit=options.commit,
        start=fleet.launcher(not options.no_fork),
    )
    for name, error in report.verdicts["failed"].items():
        lines.say(f"FAILED {name}: {error}")
    lines.say("every gate holds" if report.ok else "NOT every gate holds")
    return 0 if report.ok else 1


if __name__ == "__main__":
    sys.exit(main())
