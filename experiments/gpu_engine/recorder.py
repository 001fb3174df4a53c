# SPDX-License-Identifier: Apache-2.0
"""What each step of vLLM's V2 model runner costs the GPU, whatever the host does.

A step is `execute_model` (input preparation, target forward) and `sample_tokens` (LM
head, sampling or rejection, drafting). The GPU is made to spin before the step, long
enough for the host to enqueue all of it, so that between the events

    step      after the spin          .. end of sample_tokens
    forward   before the target graph .. after it
    draft     before the drafter      .. after it

no time passes in which the GPU waits for Python. Whether that worked is known for each
step: the first event must not have happened when the last is recorded (``queued``).

Modes: "gpu" measures as above; "wall" only notes when the host begins each step,
without a spin, in the engine as it is; "trace" is "gpu" under the CUDA profiler for a
few decode steps; "experts" runs the target eagerly and counts the distinct experts of
each layer.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, Protocol, get_args

from experiments.gpu_engine import ranks, spread

Mode = Literal["gpu", "wall", "trace", "experts"]
MODES: tuple[str, ...] = get_args(Mode)

#: Decode steps that run before a trace begins.
TRACE_SKIP = 4


class Event(Protocol):
    """A CUDA event with timing."""

    def record(self) -> object: ...

    def query(self) -> bool: ...

    def elapsed_time(self, end: Any) -> float: ...


class Device(Protocol):
    """What the recorder needs of the GPU."""

    def event(self) -> Event: ...

    def spin(self, microseconds: float) -> None: ...

    def synchronize(self) -> None: ...

    def start_trace(self) -> None: ...

    def stop_trace(self, path: Path) -> None: ...


class Cuda:
    """:class:`Device` of the current CUDA device.

    Args:
        align: makes the GPUs of a group wait for each other; called after each spin,
            because their hosts begin a step at different times.
    """

    def __init__(self, align: Callable[[], None] | None = None) -> None:
        self._profiler: Any = None
        self._cycles_per_us = 0.0
        self._align = align

    def event(self) -> Event:
        import torch

        return torch.cuda.Event(enable_timing=True)

    def spin(self, microseconds: float) -> None:
        import torch

        if not self._cycles_per_us:
            self._cycles_per_us = self._calibrate()
        torch.cuda._sleep(int(microseconds * self._cycles_per_us))
        if self._align is not None:
            self._align()

    def _calibrate(self) -> float:
        """Clock cycles a microsecond that ``torch.cuda._sleep`` counts."""
        cycles = 4_000_000
        for _ in range(2):
            begin, end = self.event(), self.event()
            begin.record()
            self._sleep(cycles)
            end.record()
            self.synchronize()
        return cycles / (begin.elapsed_time(end) * 1e3)

    def _sleep(self, cycles: int) -> None:
        import torch

        torch.cuda._sleep(cycles)

    def synchronize(self) -> None:
        import torch

        torch.cuda.synchronize()

    def start_trace(self) -> None:
        from torch.profiler import ProfilerActivity, profile

        self._profiler = profile(activities=[ProfilerActivity.CUDA])
        self._profiler.start()

    def stop_trace(self, path: Path) -> None:
        self._profiler.stop()
        self._profiler.export_chrome_trace(str(path))
        self._profiler = None


class Recorder:
    """Wraps a runner's methods; does nothing between :meth:`take` and :meth:`start`.

    Args:
        runner: vLLM's V2 GPU model runner.
        device: the GPU.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        runner: Any,
        device: Device,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._runner = runner
        self._device = device
        self._clock = clock
        self._mode: Mode | None = None
        self._spin_us = 0.0
        self._rows = 0
        self._trace_steps = 0
        self._trace_path = Path()
        self._trace_left: int | None = None
        self._steps: list[dict[str, Any]] = []
        self._current: dict[str, Any] | None = None
        self._experts: dict[int, list[int]] = {}
        self._execute = runner.execute_model
        self._sample = runner.sample_tokens
        runner.execute_model = self._execute_model
        runner.sample_tokens = self._sample_tokens
        manager = runner.cudagraph_manager
        if manager is not None:
            self._replay = manager.run_fullgraph
            self._dispatch = manager.dispatch
            manager.run_fullgraph = self._run_fullgraph
            manager.dispatch = self._dispatch_graph
        speculator = getattr(runner, "speculator", None)
        if speculator is not None:
            self._propose = speculator.propose
            speculator.propose = self._propose_drafts

    def start(
        self,
        mode: str,
        *,
        spin_us: float = 0.0,
        rows: int = 0,
        trace_steps: int = 0,
        trace_path: str = "",
    ) -> None:
        """Record the steps from here to :meth:`take`.

        Args:
            mode: see the module docstring.
            spin_us: how long the GPU spins before a step, in microseconds.
            rows: for "trace", only steps of that many rows are traced.
            trace_steps, trace_path: how many, and the chrome trace to write.

        Raises:
            ValueError: unknown mode, or a trace without steps and a path.
        """
        if mode not in MODES:
            raise ValueError(f"mode={mode!r}: must be one of {', '.join(MODES)}")
        if mode == "trace" and not (rows and trace_steps and trace_path):
            raise ValueError('mode "trace" needs rows, trace_steps and trace_path')
        self._steps, self._current = [], None
        self._spin_us, self._rows = spin_us, rows
        self._trace_steps, self._trace_path = trace_steps, Path(trace_path)
        self._trace_left = None
        self._mode = mode  # type: ignore[assignment]
        if mode == "experts":
            self._listen(True)

    def take(self) -> list[dict[str, Any]]:
        """Stop, and the steps since :meth:`start`, times in microseconds.

        Keys: rows, batch, new (requests that began), executed_rows (rows of the graph),
        graph, host_s; with events also queued, traced, step_us, forward_us and draft_us
        (None where there is none); for "experts" distinct, a list by MoE layer.
        """
        mode, self._mode = self._mode, None
        if mode == "experts":
            self._listen(False)
        self._device.synchronize()
        if self._trace_left:
            self._device.stop_trace(self._trace_path)
        self._trace_left = None
        taken = []
        for step in self._steps:
            events = step.pop("events")
            if "end" in events:
                step["step_us"] = _microseconds(events, "start", "end")
                step["forward_us"] = _microseconds(events, "forward", "forward_end")
                step["draft_us"] = _microseconds(events, "draft", "draft_end")
            taken.append(step)
        self._steps = []
        return taken

    def _execute_model(self, scheduled: Any, *args: Any, **kwargs: Any) -> Any:
        rows = getattr(scheduled, "total_num_scheduled_tokens", 0)
        dummy = kwargs.get("dummy_run", False)
        if self._mode is None or dummy or not rows:
            return self._execute(scheduled, *args, **kwargs)
        step = {
            "rows": int(rows),
            "batch": len(scheduled.num_scheduled_tokens),
            "new": len(scheduled.scheduled_new_reqs),
            "executed_rows": int(rows),
            "graph": False,
            "traced": False,
            "host_s": self._clock(),
            "events": {},
        }
        if self._mode in ("gpu", "trace"):
            self._advance_trace(step)
            self._device.spin(self._spin_us)
            self._mark(step, "start")
        self._experts = {}
        self._current = step
        return self._execute(scheduled, *args, **kwargs)

    def _sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        output = self._sample(*args, **kwargs)
        step, self._current = self._current, None
        if step is None:
            return output
        if "start" in step["events"]:
            self._mark(step, "end")
            step["queued"] = not step["events"]["start"].query()
        if self._experts:
            step["distinct"] = [self._experts[i][0] for i in sorted(self._experts)]
        self._steps.append(step)
        if step["traced"] and self._trace_left == 0:
            self._device.synchronize()
            self._device.stop_trace(self._trace_path)
        return output

    def _advance_trace(self, step: dict[str, Any]) -> None:
        if self._mode != "trace" or step["rows"] != self._rows or step["new"]:
            return
        if self._trace_left is None:
            before = [s for s in self._steps if s["rows"] == self._rows]
            if len(before) < TRACE_SKIP:
                return
            self._device.synchronize()
            self._device.start_trace()
            self._trace_left = self._trace_steps
        if self._trace_left > 0:
            self._trace_left -= 1
            step["traced"] = True

    def _run_fullgraph(self, descriptor: Any) -> Any:
        step = self._current
        if step is None:
            return self._replay(descriptor)
        step["graph"] = True
        step["executed_rows"] = int(descriptor.num_tokens)
        return self._between(step, "forward", lambda: self._replay(descriptor))

    def _propose_drafts(self, *args: Any, **kwargs: Any) -> Any:
        step = self._current
        if step is None:
            return self._propose(*args, **kwargs)
        return self._between(step, "draft", lambda: self._propose(*args, **kwargs))

    def _between(
        self, step: dict[str, Any], name: str, action: Callable[[], Any]
    ) -> Any:
        if "start" not in step["events"]:
            return action()
        self._mark(step, name)
        result = action()
        self._mark(step, f"{name}_end")
        return result

    def _mark(self, step: dict[str, Any], name: str) -> None:
        event = self._device.event()
        event.record()
        step["events"][name] = event

    def _dispatch_graph(self, *args: Any, **kwargs: Any) -> Any:
        """vLLM's choice of a graph, or none of them while experts are counted."""
        found = self._dispatch(*args, **kwargs)
        if self._mode != "experts":
            return found
        given = dict(zip(("num_reqs", "num_tokens"), args, strict=False))
        given.update(kwargs)
        return dataclasses.replace(
            found,
            cg_mode=type(found.cg_mode).NONE,
            num_tokens=given["num_tokens"],
            num_reqs=given["num_reqs"],
            uniform_token_count=None,
            max_query_len=None,
        )

    def _listen(self, on: bool) -> None:
        """Have every router of the target report the experts it chose, or stop it."""
        routers = [
            module.router
            for module in self._runner.model.modules()
            if hasattr(getattr(module, "router", None), "set_capture_fn")
        ]
        if not routers:
            raise ValueError(
                "no router of the model reports its choice (vLLM's BaseRouter "
                "does): experts cannot be counted with this MoE backend"
            )
        for index, router in enumerate(routers):
            router.set_capture_fn(self._listener(index) if on else None)

    def _listener(self, index: int) -> Callable[[Any], None]:
        def hear(ids: Any) -> None:
            self._experts.setdefault(index, []).append(spread.distinct(ids))

        return hear


def _microseconds(events: dict[str, Any], begin: str, end: str) -> float | None:
    if begin not in events or end not in events:
        return None
    return float(events[begin].elapsed_time(events[end]) * 1e3)


class StepRecorder:
    """Mixed into vLLM's worker by ``worker_extension_cls``.

    `init_worker_extension` is vLLM's hook between a worker's start and its loading of
    weights. Answers cross processes as JSON text.
    """

    def init_worker_extension(self) -> None:
        """Fill dummy weights as ``spread`` says; no NVLink multicast."""
        worker: Any = self
        if worker.parallel_config.tensor_parallel_size > 1:
            ranks.forbid_multicast()
        spread.register_loader()

    def k3_start(self, arguments: str) -> None:
        """:meth:`Recorder.start` with keyword arguments as JSON; the trace of a rank
        above 0 goes beside rank 0's."""
        worker: Any = self
        if not hasattr(worker, "k3_recorder"):
            device = Cuda(ranks.aligner())
            worker.k3_recorder = Recorder(worker.model_runner, device)
        given = json.loads(arguments)
        if worker.rank and given.get("trace_path"):
            given["trace_path"] += f".rank{worker.rank}"
        worker.k3_recorder.start(**given)

    def k3_take(self) -> str:
        """:meth:`Recorder.take` as JSON."""
        worker: Any = self
        return json.dumps(worker.k3_recorder.take())

    def k3_accept(self, rates: str) -> None:
        """Have vLLM's synthetic rejection accept draft i, if those before it were,
        with probability ``rates[i]``; JSON, one a draft."""
        worker: Any = self
        sampler = worker.model_runner.rejection_sampler
        held = getattr(sampler, "synthetic_conditional_rates", None)
        given = json.loads(rates)
        if held is None or len(held) != len(given):
            found = "no synthetic rejection" if held is None else f"{len(held)} drafts"
            raise ValueError(
                f"{len(given)} acceptance rates for an engine with {found}: start it "
                "with rejection_sample_method synthetic and as many drafts"
            )
        held.copy_(held.new_tensor(given))

    def k3_gpu(self) -> str:
        """Name of the worker's GPU."""
        import torch

        return str(torch.cuda.get_device_name())

    def k3_counters(self) -> dict[str, int]:
        """Steps by who ran them; empty where our executor is not asked for."""
        worker: Any = self
        read = getattr(worker.model_runner.model, "dspark_k3_counters", None)
        return dict(read()) if read is not None else {}
