# SPDX-License-Identifier: Apache-2.0
"""Programs forked off a process that has imported something."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import pytest

from experiments import engine
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
    elif kind == "partial":
        print("whole"), print("partial", end="")
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
    # The import's are told too, and an empty one, but are no part of a program's log.
    assert [line for line in lines if line not in ("imported", "")] == log


def test_threads_take_turns(forker: Forker) -> None:
    """Each has its own program's lines and code."""
    asked = [("tell", str(i)) if i % 2 else ("code", str(i)) for i in range(8)]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda one: forker.run("program", one), asked))
    for (kind, which), (log, code) in zip(asked, found, strict=True):
        assert code == (int(which) if kind == "code" else 0)
        if kind == "tell":
            assert json.loads(log[0])[3][1:] == ["tell", which]


def test_engines_at_the_same_time_have_a_process_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A sweep runs as many as there is room for; later ones use what is there."""
    at_once = threading.Barrier(2, timeout=10)

    class Recorded:
        made: ClassVar[list[Recorded]] = []

        def __init__(self, environment: dict[str, str]) -> None:
            self.made.append(self)

        def run(self, module: str, arguments: list[str], **_: Any) -> Any:
            if arguments == ["both"]:
                at_once.wait()
            return [], 0

        def close(self) -> None: ...

    monkeypatch.setattr(engine, "Forker", Recorded)
    monkeypatch.setattr(engine, "_idle", [])
    with ThreadPoolExecutor(2) as pool:
        for _ in range(2):
            list(pool.map(lambda _: engine._run_child(["both"], None), range(2)))
    engine._run_child(["one"], None)
    assert len(Recorded.made) == 2


def test_a_last_line_may_lack_its_end(forker: Forker) -> None:
    assert forker.run("program", ["partial"])[0] == ["whole", "partial"]
    assert forker.run("program", ["code", "0"])[0] == []


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


def test_one_interrupted_during_the_import_leaves_nothing_to_the_next(
    forker: Forker,
) -> None:
    def interrupt(line: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        forker.run("program", ["code", "3"], progress=interrupt)
    assert told(forker)[3][1:] == ["tell", "a b"]


def test_a_failed_import_says_why() -> None:
    with Forker({}, "no_such_module") as forker:
        log, code = forker.run("program", [])
    assert code == 1 and "No module named 'no_such_module'" in log[-1]
