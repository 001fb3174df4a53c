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
    wave = Wave(
        specs,
        out,
        parallel=parallel,
        exclusive=exclusive,
        start_limit_s=start_limit_s,
        job_limit_s=job_limit_s,
        progress=progress,
        start=start,
    )
    run_waves([[wave]])
    return wave.outcomes()


def run_waves(
    lines: Sequence[Sequence[Wave]],
    *,
    deadline_s: float | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> bool:
    """Run waves side by side; those of one line follow each other.

    Names are unique over all of them if they share a folder. Returns False, with every
    engine stopped, if ``deadline_s`` seconds were not enough.
    """
    waiting = [list(line) for line in lines]
    until = None if deadline_s is None else clock() + deadline_s
    try:
        while waiting:
            for line in waiting:
                if not line[0].step():
                    line.pop(0)
            waiting = [line for line in waiting if line]
            if waiting and until is not None and clock() > until:
                return False
            time.sleep(POLL_S)
    finally:
        for wave in (wave for line in lines for wave in line):
            wave.stop()
    return True


class Turns:
    """The GPUs, for waves that share them: one of their engines at most has its turn.

    Attributes:
        starting: engines of all waves that have not started yet.
    """

    def __init__(self) -> None:
        self.starting = 0
        self._holder: object | None = None
        self._next: object | None = None

    def take(self, engine: object, *, quiet: bool) -> bool:
        """Give ``engine`` the turn if it is free.

        For ``quiet`` no engine may be starting meanwhile; one that waits only for the
        turn comes before all that are not quiet.
        """
        if quiet and self.starting:
            return False
        if quiet and self._next is None:
            self._next = engine
        if self._holder is not None or self._next not in (None, engine):
            return False
        self._holder, self._next = engine, None
        return True

    def leave(self, engine: object) -> None:
        """Give the turn back, if ``engine`` has it, and claim none."""
        if self._holder is engine:
            self._holder = None
        if self._next is engine:
            self._next = None


class Wave:
    """Engines that start together; see `run` for the arguments.

    Args:
        turns: shared with other exclusive waves; each engine waits for its turn there.
        quiet: with ``turns``: a turn begins only when no engine of any wave starts.
        ended: called with each outcome as it comes.
    """

    def __init__(
        self,
        specs: Sequence[EngineSpec],
        out: Path,
        *,
        parallel: int,
        exclusive: bool,
        start_limit_s: float = 420.0,
        job_limit_s: float = 240.0,
        progress: Callable[[str], None] = print,
        start: Launch = launch,
        turns: Turns | None = None,
        quiet: bool = False,
        ended: Callable[[Outcome], None] = lambda outcome: None,
    ) -> None:
        if parallel < 1:
            raise ValueError(f"parallel={parallel}: must be 1 or more")
        self._names = [spec.name for spec in specs]
        if len(set(self._names)) != len(self._names):
            listed = ", ".join(sorted(self._names))
            raise ValueError(f"engine names are not unique: {listed}")
        out.mkdir(parents=True, exist_ok=True)
        for name in self._names:
            for end in ("ready", "go", "json"):
                (out / f"{name}.{end}").unlink(missing_ok=True)
        self._out = out
        self._parallel = parallel
        self._exclusive = exclusive
        self._limits = (start_limit_s, job_limit_s)
        self._progress = progress
        self._start = start
        self._turns = turns or Turns()
        self._quiet = quiet
        self._ended = ended
        self._waiting = list(specs)
        self._running: list[_Running] = []
        self._starting: set[str] = set()
        self._outcomes: dict[str, Outcome] = {}

    def outcomes(self) -> dict[str, Outcome]:
        """Of the engines that have ended, in the order of their turns."""
        found = self._outcomes
        return {name: found[name] for name in self._names if name in found}

    def step(self) -> bool:
        """Do what there is to do now; False once every engine has ended."""
        if not self._exclusive or not self._running:
            while self._waiting and len(self._running) < self._parallel:
                spec = self._waiting.pop(0)
                self._progress(f"{spec.name}: starting")
                process = self._start(spec, self._out)
                self._running.append(_Running(spec, self._out, process, self._limits))
                self._starting.add(spec.name)
                self._turns.starting += 1
        for engine in list(self._running):
            outcome = engine.poll()
            if outcome is not None or engine.ready:
                self._has_started(engine)
            if outcome is not None:
                self._running.remove(engine)
                self._turns.leave(engine)
                self._outcomes[outcome.name] = outcome
                self._progress(_say(outcome))
                self._ended(outcome)
        self._give_turns()
        return bool(self._running or self._waiting)

    def stop(self) -> None:
        """End every engine that still runs; none starts any more."""
        self._waiting.clear()
        for engine in self._running:
            engine.stop()
            self._has_started(engine)
            self._turns.leave(engine)
        self._running.clear()

    def _has_started(self, engine: _Running) -> None:
        if engine.spec.name in self._starting:
            self._starting.remove(engine.spec.name)
            self._turns.starting -= 1

    def _give_turns(self) -> None:
        if self._exclusive and not all(engine.ready for engine in self._running):
            return
        for engine in self._running:
            if engine.ready and not engine.going and self._may_go(engine):
                engine.go()
                seconds = f"{engine.start_s:.0f} s"
                self._progress(f"{engine.spec.name}: started in {seconds}, its turn")
            if self._exclusive:
                return

    def _may_go(self, engine: _Running) -> bool:
        return not self._exclusive or self._turns.take(engine, quiet=self._quiet)


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
