# SPDX-License-Identifier: Apache-2.0
"""Engines in processes of their own, started side by side, measured one at a time.

Starting a vLLM engine takes one to two minutes of host work and little GPU time, so a
wave of engines starts together. With ``exclusive`` none runs its job until all of the
wave have started, and then one after the other, so that nothing else is on the GPU.

A process is told what to do by files in the output folder, NAME being the engine's:
``NAME.spec.json`` what it is, ``NAME.ready`` it has started, ``NAME.go`` its turn,
``NAME.json`` what came out, ``NAME.log`` everything it printed.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

POLL_S = 0.1

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
}
"""What an engine process on a GPU without a network needs."""


@dataclass(frozen=True)
class EngineSpec:
    """An engine and its job.

    Attributes:
        name: letters, digits, ".", "_" and "-"; names the files.
        engine: keyword arguments of ``vllm.LLM``.
        job: ``"package.module:function"``, called with the LLM and ``options``; its
            result is JSON.
        options: for the job.
        env: environment variables on top of :data:`ENVIRONMENT`; an empty value is set
            as such.
    """

    name: str
    engine: dict[str, Any]
    job: str
    options: dict[str, Any] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """What became of an engine: ``result``, or ``error``, the log's telling line."""

    name: str
    result: Any = None
    error: str = ""
    start_s: float = 0.0
    job_s: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether the job returned."""
        return not self.error


class Process(Protocol):
    """What a launcher returns; a `subprocess.Popen` is one."""

    pid: int

    def poll(self) -> int | None:
        """The exit code, or None while it runs."""
        ...

    def wait(self, timeout: float | None = None) -> int:
        """The exit code; raises subprocess.TimeoutExpired."""
        ...


Launch = Callable[[EngineSpec, Path], Process]


def launch(spec: EngineSpec, out: Path) -> subprocess.Popen[bytes]:
    """Start the process of ``spec``; its output goes to ``out/NAME.log``."""
    write_spec(spec, out)
    with (out / f"{spec.name}.log").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "experiments.gpu_engine.child", spec.name, str(out)],
            env={**os.environ, **ENVIRONMENT, **spec.env},
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def launcher(forked: bool) -> Launch:
    """`fork` or `launch`."""
    return fork if forked else launch


class Forked:
    """A child made by `fork`, with what `run` asks of a process."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._code: int | None = None

    def poll(self) -> int | None:
        """The exit code, or None while it runs."""
        if self._code is None:
            done, status = os.waitpid(self.pid, os.WNOHANG)
            if done:
                self._code = os.waitstatus_to_exitcode(status)
        return self._code

    def wait(self, timeout: float | None = None) -> int:
        """The exit code; raises subprocess.TimeoutExpired."""
        until = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if until is not None and time.monotonic() > until:
                raise subprocess.TimeoutExpired("a forked engine", timeout or 0.0)
            time.sleep(POLL_S / 10)
        return code


PRELOADED = ("vllm", "vllm.v1.engine.llm_engine", "vllm.v1.worker.gpu.model_runner")


def fork(spec: EngineSpec, out: Path) -> Forked:
    """As `launch`, by forking this process after it has imported vLLM.

    Saves the imports, which cost an engine 26 of its 90 s of start where eight start
    at once (16 cores, H200, 2026-11-30). This process must not have touched CUDA.
    """
    from experiments.gpu_engine import child

    os.environ.update(ENVIRONMENT)
    for module in PRELOADED:
        importlib.import_module(module)
    write_spec(spec, out)
    sys.stdout.flush()
    sys.stderr.flush()
    if pid := os.fork():
        return Forked(pid)
    code = 1
    try:
        os.setsid()
        with (out / f"{spec.name}.log").open("wb") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        os.environ.update(spec.env)
        code = child.serve(spec.name, out)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def run(
    specs: Sequence[EngineSpec],
    out: Path,
    *,
    parallel: int,
    exclusive: bool,
    start_limit_s: float = 420.0,
    job_limit_s: float = 240.0,
    progress: Callable[[str], None] = print,
    start: Launch = launch,
) -> dict[str, Outcome]:
    """Run every engine's job; one outcome a name. A failed engine stops no other.

    Args:
        specs: engines, in the order of their turns.
        out: folder for the files, made if it is missing.
        parallel: engines that live at a time.
        exclusive: see the module docstring; else each job begins when its engine has
            started, and a new engine starts when one ends.
        start_limit_s, job_limit_s: an engine that takes longer is stopped.
        progress: gets short lines.
        start: starts a process.

    Raises:
        ValueError: ``parallel`` below 1, or a name that is used twice.
    """
    if parallel < 1:
        raise ValueError(f"parallel={parallel}: must be 1 or more")
    names = [spec.name for spec in specs]
    if len(set(names)) != len(names):
        raise ValueError(f"engine names are not unique: {', '.join(sorted(names))}")
    out.mkdir(parents=True, exist_ok=True)
    for name in names:
        for end in ("ready", "go", "json"):
            (out / f"{name}.{end}").unlink(missing_ok=True)
    limits = (start_limit_s, job_limit_s)
    waiting, outcomes = list(specs), {}
    running: list[_Running] = []
    try:
        while waiting or running:
            if not exclusive or not running:
                while waiting and len(running) < parallel:
                    spec = waiting.pop(0)
                    progress(f"{spec.name}: starting")
                    running.append(_Running(spec, out, start(spec, out), limits))
            for engine in list(running):
                outcome = engine.poll()
                if outcome is not None:
                    running.remove(engine)
                    outcomes[outcome.name] = outcome
                    progress(_say(outcome))
            _give_turns(running, exclusive, progress)
            time.sleep(POLL_S)
    finally:
        for engine in running:
            engine.stop()
    return {name: outcomes[name] for name in names}


def _give_turns(
    running: Sequence[_Running], exclusive: bool, progress: Callable[[str], None]
) -> None:
    if exclusive and not all(engine.ready for engine in running):
        return
    for engine in running:
        if engine.ready and not engine.going:
            engine.go()
            progress(f"{engine.spec.name}: started in {engine.start_s:.0f} s, its turn")
        if exclusive:
            return


class _Running:
    def __init__(
        self,
        spec: EngineSpec,
        out: Path,
        process: Process,
        limits: tuple[float, float],
    ) -> None:
        self.spec = spec
        self.going = False
        self.start_s = 0.0
        self._out = out
        self._process = process
        self._limits = limits
        self._since = time.monotonic()

    @property
    def ready(self) -> bool:
        found = (self._out / f"{self.spec.name}.ready").is_file()
        if found and not self.start_s:
            self.start_s = time.monotonic() - self._since
        return found

    def go(self) -> None:
        self.going = True
        self._since = time.monotonic()
        (self._out / f"{self.spec.name}.go").touch()

    def poll(self) -> Outcome | None:
        """The outcome once the process has ended or outrun its limit."""
        seconds = time.monotonic() - self._since
        code = self._process.poll()
        if code is None:
            waits = self.ready and not self.going
            if waits or seconds <= self._limits[self.going]:
                return None
            self.stop()
            doing = "its job" if self.going else "its start"
            return self._failed(f"stopped: {doing} took more than {seconds:.0f} s")
        self.stop()
        path = self._out / f"{self.spec.name}.json"
        if not path.is_file():
            return self._failed(f"exit code {code}: {self._log_line()}")
        found = json.loads(path.read_text())
        if error := found.get("error"):
            # The front end only knows that the engine's process did not start.
            hidden = "Engine core initialization failed" in error
            return self._failed(self._log_line() if hidden else error)
        return Outcome(
            self.spec.name, found["result"], start_s=self.start_s, job_s=seconds
        )

    def stop(self) -> None:
        """End the process and what it started: it leads a session of its own."""
        for sign in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, sign)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(5)
                if sign == signal.SIGTERM:
                    continue
                return

    def _failed(self, why: str) -> Outcome:
        return Outcome(self.spec.name, error=why, start_s=self.start_s)

    def _log_line(self) -> str:
        from experiments.engine import error_line

        path = self._out / f"{self.spec.name}.log"
        text = path.read_text(errors="replace") if path.is_file() else ""
        return error_line(text.splitlines())


def _say(outcome: Outcome) -> str:
    if outcome.error:
        return f"{outcome.name}: FAILED: {outcome.error}"
    return f"{outcome.name}: done in {outcome.job_s:.0f} s"


def write_spec(spec: EngineSpec, out: Path) -> None:
    """Leave ``spec`` for the engine's process."""
    (out / f"{spec.name}.spec.json").write_text(json.dumps(asdict(spec), indent=1))


def read_spec(name: str, out: Path) -> EngineSpec:
    """The spec that :func:`launch` wrote."""
    fields: Mapping[str, Any] = json.loads((out / f"{name}.spec.json").read_text())
    return EngineSpec(**fields)
