# SPDX-License-Identifier: Apache-2.0
"""Programs forked off a process that has imported something."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from experiments.forking import Forker

SLOW = "import os\nBORN = os.getpid()\nprint('imported', flush=True)\n"
PROGRAM = """
import json, os, subprocess, sys
import slow

if __name__ == "__main__":
    kind = sys.argv[1]
    if kind == "tell":
        print(json.dumps([slow.BORN, os.getpid(), os.environ.get("ASKED"), sys.argv]))
        print(repr(sys.stdin.read()))
    elif kind == "code":
        sys.exit(int(sys.argv[2]))
    elif kind == "raise":
        raise ValueError("of the program")
    elif kind == "leave":
        print(subprocess.Popen(["sleep", "60"], stdout=subprocess.DEVNULL).pid)
    elif kind == "die":
        os.kill(os.getpid(), 9)
"""


@pytest.fixture
def forker(tmp_path: Path) -> Iterator[Forker]:
    (tmp_path / "slow.py").write_text(SLOW)
    (tmp_path / "program.py").write_text(PROGRAM)
    root = Path(__file__).resolve().parents[2]
    with Forker({"PYTHONPATH": f"{tmp_path}:{root}"}, "slow") as forker:
        yield forker


def told(forker: Forker) -> list[Any]:
    log, code = forker.run("program", ["tell", "a b"])
    assert code == 0 and log[1] == "''"
    return list(json.loads(log[0]))


def test_one_import_serves_all(forker: Forker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has its own process, the environment of its time, and no input."""
    first = told(forker)
    monkeypatch.setenv("ASKED", "later")
    second = told(forker)
    assert first[0] == second[0] and len({*first[:2], *second[:2]}) == 3
    assert (first[2], second[2]) == (None, "later")
    assert first[3][1:] == ["tell", "a b"]


@pytest.mark.parametrize(
    ("arguments", "code"),
    [(["code", "0"], 0), (["code", "3"], 3), (["raise"], 1), (["die"], -9)],
)
def test_codes_are_the_programs(
    forker: Forker, arguments: list[str], code: int
) -> None:
    log, found = forker.run("program", arguments)
    assert found == code
    assert ("ValueError: of the program" in log) == (arguments == ["raise"])
    assert told(forker)


def test_lines_are_told_as_they_come(forker: Forker) -> None:
    lines: list[str] = []
    log, _ = forker.run("program", ["tell"], progress=lines.append)
    # The import's are told too, but are no part of a program's log.
    assert [line for line in lines if line != "imported"] == log


def gone(process: int) -> bool:
    for _ in range(100):
        try:
            os.kill(process, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False


def test_what_a_program_leaves_is_ended(forker: Forker) -> None:
    log, code = forker.run("program", ["leave"])
    assert code == 0 and gone(int(log[0]))


def test_an_interrupted_program_is_ended_and_another_can_be_run(
    forker: Forker,
) -> None:
    def interrupt(line: str) -> None:
        if line.startswith("["):
            seen.append(json.loads(line)[1])
            raise KeyboardInterrupt

    seen: list[int] = []
    with pytest.raises(KeyboardInterrupt):
        forker.run("program", ["tell"], progress=interrupt)
    assert gone(seen[0])
    assert told(forker)


def test_a_failed_import_says_why() -> None:
    with Forker({}, "no_such_module") as forker:
        log, code = forker.run("program", [])
    assert code == 1 and "No module named 'no_such_module'" in log[-1]
