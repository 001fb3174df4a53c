# SPDX-License-Identifier: Apache-2.0
"""The command line: results, one-line errors, exit codes."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from typer.testing import CliRunner, Result

import experiments
from dspark_k3.cli import app
from tests.experiments.fake_engine import FakeEngine, FakeJob
from tests.experiments.test_step_time import document


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def one_line_error(result: Result, words: str, code: int = 2) -> None:
    assert result.exit_code == code, result.output
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    assert words in result.stderr


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> FakeEngine:
    return install(monkeypatch, "")


def install(monkeypatch: pytest.MonkeyPatch, fault: str) -> FakeEngine:
    fake = FakeEngine(fault)
    module = ModuleType("experiments.engine")
    module.Job = FakeJob  # type: ignore[attr-defined]
    module.run_engine = fake.run_engine  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "experiments.engine", module)
    return fake


def test_base_import_needs_no_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = None; sys.modules['matplotlib'] = None\n"
        "from dspark_k3.cli import app\n"
        "from typer.testing import CliRunner\n"
        "done = CliRunner().invoke(app, ['advise', '--batch', '1'])\n"
        "assert done.exit_code == 0, done.output\n"
        "assert 'vllm' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_missing_matplotlib_names_the_extra(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['matplotlib'] = None\n"
        "from dspark_k3.cli import app\n"
        f"app(['sweep', '--skip-engine', '--out', {str(tmp_path)!r}])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2
    assert "dspark-k3[bench]" in done.stderr


def test_sweep_measures_and_projects(engine: FakeEngine, tmp_path: Path) -> None:
    result = invoke("sweep", "--quick", "--out", str(tmp_path))
    assert result.exit_code == 0, result.output
    assert engine.lengths == [0, 1, 3, 7]
    assert "tiny generated T=1" in result.output
    assert "[measured]" in result.output and "[modelled" in result.output
    closing = result.output[result.output.index("With k3-golden") :]
    assert "best fixed draft length is k = 4" in " ".join(closing.split())
    assert len(list(tmp_path.glob("*.png"))) == 4
    lines = (tmp_path / "results.jsonl").read_text().splitlines()
    assert json.loads(lines[0])["versions"]["vllm"] == "0.0-fake"
    again = invoke("advise", "--acceptance", str(tmp_path), "--batch", "1")
    assert again.exit_code == 0 and "tiny stdlib T=0 [measured]" in again.output


@pytest.mark.parametrize(
    ("fault", "words"),
    [("state", "failed their check"), ("silent", "proposed nothing")],
)
def test_sweep_refuses_speed_from_a_bad_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fault: str, words: str
) -> None:
    """Field case F25: no speed-up is printed for it, and the exit code is 1."""
    install(monkeypatch, fault)
    result = invoke("sweep", "--quick", "--out", str(tmp_path))
    one_line_error(result, words, code=1)
    speed = (tmp_path / "speedup.csv").read_text()
    assert "k3-golden" in speed and "tiny stdlib T=0" not in speed


def test_plot_draws_again(tmp_path: Path) -> None:
    out = str(tmp_path / "r")
    assert invoke("sweep", "--skip-engine", "--out", out).exit_code == 0
    result = invoke("plot", out, "--out", str(tmp_path / "p"))
    assert result.exit_code == 0
    assert len(list((tmp_path / "p").iterdir())) == 8


def test_advise_in_plain_words() -> None:
    result = invoke("advise", "--acceptance", "k3-golden", "--batch", "1,8")
    assert result.exit_code == 0
    words = " ".join(result.output.split())
    assert "batch 1: draft k = 4, 1.71x" in words
    assert "confidence scheduling adds" in words


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("sweep", "--target", "/nowhere"), "/nowhere is no model directory"),
        (("sweep", "--draft", "/nowhere"), "/nowhere is no model directory"),
        (("sweep", "--draft-lengths", "0"), "no k of 1"),
        (("sweep", "--draft-lengths", "9"), "k is 9; use 0..7"),
        (("sweep", "--temperatures", "hot"), "--temperatures"),
        (("sweep", "--temperatures=-1"), "--temperatures has -1"),
        (("sweep", "--prompts", "4"), "needs 11"),
        (("sweep", "--batch", "0"), "--batch has 0"),
        (("sweep", "--gpu", "b200"), "is for NVIDIA H200, not b200"),
        (("sweep", "--acceptance", "0.5,0.7"), "rises at position 2"),
        (("sweep", "--profile", "floor:k3"), "write floor:k3-tp"),
        (("advise", "--max-draft-length", "0"), "use 1..7"),
        (("advise", "--max-draft-length", "9"), "use 1..7"),
        (("advise", "--acceptance", "k3-silver"), "close matches"),
        (("advise", "--profile", "none.json"), "does not exist"),
        (("advise", "--difficulty", "hard"), "use one of"),
        (("advise", "--gpu", "gb300"), "not gb300"),
        (("plot", "/nowhere"), "run 'dspark-k3 sweep"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    arguments: tuple[str, ...], words: str, engine: FakeEngine
) -> None:
    one_line_error(invoke(*arguments), words)
    assert engine.lengths == []


def test_rows_beyond_a_recorded_profile(tmp_path: Path) -> None:
    """Field case F21: the refusal states the rows asked for and recorded."""
    path = tmp_path / "p.json"
    path.write_text(json.dumps(document()))
    result = invoke("advise", "--profile", str(path), "--batch", "16")
    one_line_error(result, "batch = 16 lies outside the recorded range 1..8")
    assert invoke("advise", "--profile", str(path), "--batch", "8").exit_code == 0


def test_wrong_block_size(
    engine: FakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A drafter trained with block 5 cannot draft 7: refused before any run."""
    import experiments

    shipped = Path(experiments.__file__).parent / "tiny" / "dspark-vanilla"
    config = json.loads((shipped / "config.json").read_text()) | {"block_size": 5}
    (tmp_path / "config.json").write_text(json.dumps(config))
    result = invoke("sweep", "--draft", str(tmp_path), "--draft-lengths", "7")
    assert result.exit_code == 2 and result.stderr.startswith("error: ")
    assert "5" in result.stderr and "7" in result.stderr
    assert engine.lengths == []


@pytest.mark.parametrize("code", [0, 1])
def test_doctor_passes_its_exit_code_on(
    monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    module = ModuleType("dspark_k3.doctor")
    module.run = lambda json: code + json  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "dspark_k3.doctor", module)
    assert invoke("doctor").exit_code == code
    assert invoke("doctor", "--json").exit_code == code + 1


def test_somebodys_own_pair_is_not_called_tiny(
    engine: FakeEngine, tmp_path: Path
) -> None:
    """Field case F25: a measured row says which model it comes from."""
    tiny = Path(experiments.__file__).parent / "tiny"
    mine = tmp_path / "mine"
    shutil.copytree(tiny / "target", mine)
    result = invoke(
        *("sweep", "--quick", "--target", str(mine), "--out", str(tmp_path / "out"))
    )
    assert result.exit_code == 0, result.output
    assert "mine+dspark-vanilla stdlib" in result.output
    assert "tiny stdlib" not in result.output
