# SPDX-License-Identifier: Apache-2.0
"""Train tiny-k3 and its drafter from nothing, on one GPU.

    python -m experiments.train_tiny_k3 --out experiments/tiny --device cuda

Writes ``k3-target`` and ``k3-dspark`` (directories that vLLM 0.33 loads) and train.json
with what was measured. Seeds are fixed, and no operation is used whose result depends
on the order of atomic additions. On a GPU both trainings replay whole steps as CUDA
graphs; where that cannot be, they say why and go on without. ``--quick`` is a few steps
on short windows, for a test of the whole script.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from drafters.backbone import DSparkDrafter
from drafters.captured import WARM_UP
from drafters.checkpoint import load_drafter, save_checkpoint
from drafters.config import read_config
from drafters.training import Schedule, initialise, train_drafter
from experiments.corpora import KINDS, training_bytes
from experiments.tiny_k3.evaluate import bits_per_byte, expert_use, report
from experiments.tiny_k3.target import TARGET, TOKENS, drafter_config, load_target
from experiments.tiny_k3.train import Masters, batches, train_target
from experiments.train_tiny import write_tokenizer
from verify_kernels.model.checkpoint import save


@dataclass(frozen=True)
class Plan:
    """Steps, windows a batch and bytes a window of both trainings, and the evaluation:
    prompts of each kind, tokens after each; windows for the bits a byte."""

    target_steps: int = 1800
    target_rows: int = 64
    draft_steps: int = 4400
    draft_rows: int = 32
    anchors: int = 48
    length: int = 512
    prompts: int = 10
    tokens: int = 64
    windows: int = 64


FULL = Plan()
QUICK = Plan(
    target_steps=WARM_UP + 2,
    target_rows=2,
    draft_steps=WARM_UP + 2,
    draft_rows=2,
    anchors=4,
    length=48,
    prompts=1,
    tokens=12,
    windows=2,
)


class _Clock:
    """Seconds by phase, and progress lines."""

    def __init__(self) -> None:
        self.begin = self.mark = time.time()
        self.phases: dict[str, float] = {}

    def end(self, phase: str) -> None:
        now = time.time()
        self.phases[phase] = round(now - self.mark, 1)
        self.mark = now
        self.say(f"{phase} took {self.phases[phase]} s")

    def say(self, message: str) -> None:
        seconds = time.time() - self.begin
        print(f"{seconds:6.1f} s  {message}", file=sys.stderr, flush=True)

    def progress(self, name: str, steps: int) -> Any:
        begin = time.time()

        def step(number: int, message: str) -> None:
            left = (time.time() - begin) / (number + 1) * (steps - number - 1)
            self.say(f"{name} step {number}: {message}, {left:.0f} s left")

        return step


def train(out: Path, device: str, plan: Plan, *, keep_target: bool = False) -> None:
    """Both trainings and the report, into ``out``."""
    clock = _Clock()
    autocast = torch.bfloat16 if device.startswith("cuda") else None
    target_at, drafter_at = out / "k3-target", out / "k3-dspark"
    captured = {}
    if not keep_target:
        masters = Masters(TARGET, seed=0, device=device)
        captured["target"] = train_target(
            masters,
            batches(plan.target_rows, plan.length, seed=1, device=device),
            Schedule(plan.target_steps, 1.5e-3, weight_decay=0.05),
            clock.progress("target", plan.target_steps),
            autocast,
        )
        save(target_at, TARGET, masters.shipped(), **TOKENS)
        write_tokenizer(target_at)
        del masters
        clock.end("target")
    # The drafter learns from what ships: rounded and packed.
    target = load_target(target_at, device)
    config = drafter_config()
    torch.manual_seed(1)
    drafter = DSparkDrafter(read_config(config))
    initialise(drafter, target)
    drafter.to(device)
    captured["drafter"] = train_drafter(
        drafter,
        target,
        batches(plan.draft_rows, plan.length, seed=2, device=device),
        Schedule(plan.draft_steps, 1e-3),
        clock.progress("drafter", plan.draft_steps),
        anchors_per_sequence=plan.anchors,
        generator=torch.Generator().manual_seed(3),
        autocast=autocast,
    )
    save_checkpoint(drafter_at, config, drafter)
    clock.end("drafter")

    sample = next(batches(plan.target_rows, plan.length, seed=4, device=device))
    here = load_target(target_at)
    shipped = load_drafter(drafter_at, here)
    # Products of eight rows gain nothing from more threads.
    threads = torch.get_num_threads()
    torch.set_num_threads(min(threads, 4))
    record: dict[str, Any] = {
        "held_out": {
            kind: {
                "bits_per_byte": bits_per_byte(
                    target,
                    kind,  # type: ignore[arg-type]
                    plan.windows,
                    plan.length,
                )
            }
            | report(
                here,
                shipped,
                kind,  # type: ignore[arg-type]
                prompts=plan.prompts,
                tokens=plan.tokens,
            )
            for kind in KINDS
        },
        "expert_use": expert_use(target, sample[:, :-1]),
        "bytes": {
            path.relative_to(out).as_posix(): path.stat().st_size
            for directory in (target_at, drafter_at)
            for path in sorted(directory.iterdir())
        },
    }
    torch.set_num_threads(threads)
    clock.end("evaluation")
    record |= {
        "seconds": clock.phases,
        "plan": vars(plan),
        "captured": captured,
        "device": torch.cuda.get_device_name() if autocast else platform.processor(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "text_sha256": {
            kind: hashlib.sha256(training_bytes(kind)).hexdigest()  # type: ignore[arg-type]
            for kind in KINDS
        },
    }
    (out / "train.json").write_text(json.dumps(record, indent=2) + "\n")
    clock.say(json.dumps(record, indent=2))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("experiments/tiny"))
    parser.add_argument(
        "--device", default="cuda" if torch.cuda.is_available() else "cpu"
    )
    parser.add_argument("--target-steps", type=int)
    parser.add_argument("--draft-steps", type=int)
    parser.add_argument(
        "--keep-target", action="store_true", help="train the drafter of OUT/k3-target"
    )
    parser.add_argument("--quick", action="store_true", help="a few steps, for a test")
    arguments = parser.parse_args()
    plan = QUICK if arguments.quick else FULL
    changes = {
        name: value
        for name in ("target_steps", "draft_steps")
        if (value := getattr(arguments, name)) is not None
    }
    plan = Plan(**(vars(plan) | changes))
    # cuBLAS gives the same bits every time only with a workspace of its own.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        # The fused attention kernels add up key gradients in no fixed order.
        with sdpa_kernel(SDPBackend.MATH):
            train(
                arguments.out, arguments.device, plan, keep_target=arguments.keep_target
            )
    finally:
        torch.set_float32_matmul_precision(before)


if __name__ == "__main__":
    main()
