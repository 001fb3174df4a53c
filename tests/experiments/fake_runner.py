# SPDX-License-Identifier: Apache-2.0
"""A made-up vLLM runner on a device whose time passes as the runner says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from experiments.gpu_engine import recorder


@dataclass
class FakeEvent:
    device: FakeDevice
    at: float = 0.0

    def record(self) -> None:
        self.at = self.device.now

    def query(self) -> bool:
        return self.device.late

    def elapsed_time(self, end: FakeEvent) -> float:
        return (end.at - self.at) / 1e3


@dataclass
class FakeDevice:
    now: float = 0.0
    late: bool = False
    log: list[str] = field(default_factory=list)

    def event(self) -> FakeEvent:
        return FakeEvent(self)

    def spin(self, microseconds: float) -> None:
        self.now += microseconds

    def synchronize(self) -> None:
        self.log.append("synchronize")

    def start_trace(self) -> None:
        self.log.append("start")

    def stop_trace(self, path: Path) -> None:
        self.log.append(f"stop {path}")


class Mode:
    """An enumeration's member, as vLLM's graph modes are."""

    NONE = "none"


@dataclass(frozen=True)
class Descriptor:
    cg_mode: Any
    num_tokens: int
    num_reqs: int | None
    uniform_token_count: int | None = 1
    max_query_len: int | None = 8


class FakeRunner:
    """execute_model 5 + 30 + 1 µs, sample_tokens 7 µs + drafting 20 µs."""

    def __init__(self, device: FakeDevice, drafts: bool = True) -> None:
        self.device = device
        self.cudagraph_manager = SimpleNamespace(
            run_fullgraph=lambda descriptor: self.spend(30.0),
            dispatch=lambda reqs, tokens, **_: Descriptor(Mode(), tokens + 3, reqs + 1),
        )
        self.speculator = (
            SimpleNamespace(propose=lambda *a, **k: self.spend(20.0))
            if drafts
            else None
        )
        self.routers = [Router(), Router()]
        self.model = SimpleNamespace(
            modules=lambda: [SimpleNamespace(), *map(holder, self.routers)]
        )
        self.dispatched: list[Descriptor] = []

    def spend(self, microseconds: float) -> None:
        self.device.now += microseconds

    def execute_model(self, scheduled: Any, **_: Any) -> None:
        rows = scheduled.total_num_scheduled_tokens
        self.spend(5.0)
        descriptor = self.cudagraph_manager.dispatch(1, rows, uniform=rows)
        self.dispatched.append(descriptor)
        if descriptor.cg_mode != "none":
            self.cudagraph_manager.run_fullgraph(descriptor)
        for router in self.routers:
            router.route(rows)
        self.spend(1.0)

    def sample_tokens(self, grammar: Any) -> str:
        self.spend(7.0)
        if self.speculator is not None:
            self.speculator.propose()
        return "tokens"


class Router:
    def __init__(self) -> None:
        self.hear: Callable[[Any], None] | None = None

    def set_capture_fn(self, hear: Callable[[Any], None] | None) -> None:
        self.hear = hear

    def route(self, rows: int) -> None:
        if self.hear is not None:
            self.hear(torch.tensor([[0, 1], [1, -1]] + [[5, 6]] * (rows - 2)))


def holder(router: Router) -> SimpleNamespace:
    return SimpleNamespace(router=router)


def scheduled(rows: int, batch: int = 1, new: int = 0) -> SimpleNamespace:
    return SimpleNamespace(
        total_num_scheduled_tokens=rows,
        num_scheduled_tokens=dict.fromkeys(range(batch)),
        scheduled_new_reqs=[None] * new,
    )


def steps(runner: FakeRunner, *sizes: int) -> None:
    for rows in sizes:
        runner.execute_model(scheduled(rows))
        assert runner.sample_tokens(None) == "tokens"


def made(**options: Any) -> tuple[FakeDevice, FakeRunner, recorder.Recorder]:
    device = FakeDevice()
    runner = FakeRunner(device, **options)
    return device, runner, recorder.Recorder(runner, device, lambda: device.now)
