# SPDX-License-Identifier: Apache-2.0
"""One engine's process; see ``fleet``. Run as ``python -m ...child NAME FOLDER``."""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from experiments.gpu_engine.fleet import POLL_S, EngineSpec, read_spec


def make_engine(spec: EngineSpec) -> Any:
    """The ``vllm.LLM`` of a spec."""
    from vllm import LLM

    return LLM(**spec.engine)


def serve(name: str, out: Path) -> int:
    """Start the engine, wait for the turn, run the job; exit code 0 if it returned."""
    spec = read_spec(name, out)
    module, _, function = spec.job.partition(":")
    answer = out / f"{name}.json"
    try:
        job = getattr(importlib.import_module(module), function)
        engine = make_engine(spec)
        (out / f"{name}.ready").touch()
        while not (out / f"{name}.go").is_file():
            if os.getppid() == 1:
                return 1  # Nobody is left to give a turn.
            time.sleep(POLL_S)
        answer.write_text(json.dumps({"result": job(engine, spec.options)}))
        return 0
    except Exception as error:
        traceback.print_exc()
        answer.write_text(json.dumps({"error": f"{type(error).__name__}: {error}"}))
        return 1


if __name__ == "__main__":
    code = serve(sys.argv[1], Path(sys.argv[2]))
    sys.stdout.flush()
    sys.stderr.flush()
    # An engine's own threads may keep an interpreter from ending.
    os._exit(code)
