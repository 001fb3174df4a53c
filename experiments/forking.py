# SPDX-License-Identifier: Apache-2.0
"""Run programs in forks of a process that has vLLM imported, one after the other.

Importing vLLM takes 18 s of a CPU (two cores of an AMD EPYC, 2026-12-01), as long as
all else that starts a small engine; a fork of a process that has done it takes none.

    with Forker(environment) as forker:
        log, code = forker.run("package.module", ["argument"])

A program is a module, run as ``python -m`` would, in a process group of its own. What
vLLM reads from the environment when it is imported is the forker's; the rest is the
program's own.
"""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType

VLLM = "vllm.entrypoints.llm"
"""What brings all in that an engine needs; `vllm` alone imports half of it later."""

_READY = "dspark-k3 forker: ready"
_DONE = "dspark-k3 forker: done "
_BEGUN = "dspark-k3 forker: begun "


class Forker:
    """A process with vLLM imported, started when the first program is run. Programs run
    one at a time: a thread that asks for another waits.

    Args:
        environment: added to this process's for the import and every program.
        module: what is imported.
    """

    def __init__(self, environment: Mapping[str, str], module: str = VLLM) -> None:
        self._environment = dict(environment)
        self._module = module
        self._host: subprocess.Popen[str] | None = None
        self._turn = threading.Lock()

    def run(
        self,
        module: str,
        arguments: Sequence[str],
        *,
        progress: Callable[[str], None] | None = None,
    ) -> tuple[list[str], int]:
        """Run a module as a program; its output lines and exit code.

        ``progress`` gets each line as it comes. Where the import itself fails, the
        lines and the code are the import's. A program is killed, with its process
        group, when this raises, on ctrl-C for instance.
        """
        with self._turn:
            return self._run(module, arguments, progress)

    def _run(
        self,
        module: str,
        arguments: Sequence[str],
        progress: Callable[[str], None] | None,
    ) -> tuple[list[str], int]:
        log: list[str] = []
        host = self._host or self._start()
        assert host.stdin is not None and host.stdout is not None
        request = {
            "module": module,
            "arguments": list(arguments),
            "environment": {**os.environ, **self._environment},
        }
        program = 0
        # Where the import has failed its lines say why.
        with contextlib.suppress(BrokenPipeError):
            host.stdin.write(json.dumps(request) + "\n")
            host.stdin.flush()
        try:
            for line in host.stdout:
                line = line.rstrip("\n")
                if line.startswith(_BEGUN):
                    # What stands before it is the import's.
                    log, program = [], int(line.removeprefix(_BEGUN))
                elif line.startswith(_DONE):
                    program = 0
                    # The line before is ended whatever the program's last one was.
                    del log[len(log) - (log[-1:] == [""]) :]
                    return log, int(line.removeprefix(_DONE))
                elif line != _READY:
                    log.append(line)
                    if progress is not None:
                        progress(line)
            self._host = None
            return log, host.wait() or 1
        except BaseException:
            # Also before the program has begun: the next run would take its lines.
            if program:
                _kill_group(program)
            self.close()
            raise

    def close(self) -> None:
        """End the process; a later run starts another."""
        if self._host is not None:
            self._host.kill()
            self._host.wait()
            self._host = None

    def __enter__(self) -> Forker:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _start(self) -> subprocess.Popen[str]:
        self._host = subprocess.Popen(
            [sys.executable, "-m", "experiments.forking", self._module],
            env={**os.environ, **self._environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            # Its programs are ended by the one who asked for them.
            start_new_session=True,
        )
        return self._host


def _kill_group(leader: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


def _serve() -> None:
    print(_READY, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        program = os.fork()
        if program == 0:
            _run(request)
        _, status = os.waitpid(program, 0)
        _kill_group(program)
        print(f"\n{_DONE}{os.waitstatus_to_exitcode(status)}", flush=True)


def _run(request: dict[str, object]) -> None:
    """In the fork; does not return."""
    code = 1
    try:
        os.setpgid(0, 0)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        print(f"{_BEGUN}{os.getpid()}", flush=True)
        os.environ.clear()
        os.environ.update(request["environment"])  # type: ignore[call-overload]
        module, arguments = str(request["module"]), request["arguments"]
        sys.argv = [module, *arguments]  # type: ignore[misc]
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(bool(error.code))
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    __import__(sys.argv[1])
    _serve()
