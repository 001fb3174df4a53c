# SPDX-License-Identifier: Apache-2.0
"""The audit on compiled kernels: planted faults are found, clean kernels pass."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import verify_kernels
from verify_kernels.audit import Report, audit, check_sources
from verify_kernels.audit.__main__ import main
from verify_kernels.audit.cubin import resources
from verify_kernels.common.variant import ARCHITECTURES

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from tests.verify_kernels.planted import order, size
from tests.verify_kernels.planted.base import index_arguments, planted

PLANTED = Path(order.__file__).parent
X_EARLY = "a load of x, which `early_loads` does not list"
NO_WAIT = "a path ends without griddepcontrol.wait"
PURE = "declared pure"

#: Kernel, and a part of each finding expected, in order.
FAULTS: list[tuple[Any, list[str]]] = [
    (order.HoistedRead(), [X_EARLY]),
    (order.HoistedInOneRole(), [X_EARLY]),
    (order.HoistedIndex(), [X_EARLY]),
    (order.HoistedCopy(), [X_EARLY]),
    (order.EitherAddress(), ["a load of w, x, which"]),
    (order.UnknownAddress(), ["derives from a value read from memory"]),
    (order.EarlyStore(), ["a store, may run before"]),
    (order.RoleWithoutWait(), [NO_WAIT]),
    (order.BarrierInsteadOfWait(), [X_EARLY, "a store, may run before", NO_WAIT]),
    (order.ReleaseBeforeStore(), ["may follow griddepcontrol.launch_dependents"]),
    (order.PdlNotStated(), ["`pdl` is False, but the launch sets"]),
    (order.PureLoad(), [PURE, PURE]),
    (order.PureLoad(hoisted=True), [X_EARLY, PURE, PURE, PURE]),
    (size.RuntimeIndex(), ["bytes of stack a thread"]),
    (size.SharedNotStated(), ["`shared_bytes` is 0, but the launch asks for 4096"]),
]
CLEAN: list[tuple[Any, tuple[str, ...]]] = [
    (order.Clean(), ("w",)),
    (order.CleanBulk(), ("w",)),
    (order.CleanWithoutPdl(), ()),
    (order.ReleaseBeforeStore("dependents wait before they read y"), ()),
]


def run(kernel: Any, arch: str, **budgets: int) -> Report:
    if isinstance(kernel, order.HoistedIndex):
        return audit(planted(kernel, index_arguments, **budgets), arch)
    return audit(planted(kernel, **budgets), arch)


def named(cases: list[tuple[Any, Any]]) -> list[Any]:
    return [pytest.param(k, expected, id=type(k).__name__) for k, expected in cases]


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize(("kernel", "expected"), named(FAULTS))
def test_planted_faults_are_found(kernel: Any, expected: list[str], arch: str) -> None:
    """Field case F08: reads before the wait in any role, lengths and indices too."""
    found = run(kernel, arch).findings
    assert len(found) == len(expected), found
    for finding, part in zip(found, expected, strict=True):
        assert part in finding


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize(("kernel", "early"), named(CLEAN))
def test_clean_kernels_pass(kernel: Any, early: tuple[str, ...], arch: str) -> None:
    report = run(kernel, arch)
    assert report.findings == ()
    assert report.early == early


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_budgets_are_enforced_at_their_edge(arch: str) -> None:
    used = run(size.ManyRegisters(), arch).resources
    assert used.registers > 64 and used.frame_bytes == used.stack_bytes == 0
    fits = run(size.ManyRegisters(), arch, max_registers=used.registers)
    assert fits.findings == ()
    (finding,) = run(
        size.ManyRegisters(), arch, max_registers=used.registers - 1
    ).findings
    assert f"{used.registers} registers a thread" in finding
    (finding,) = run(order.CleanBulk(), arch, max_shared_bytes=1023).findings
    assert "1024 bytes of shared memory a CTA" in finding
    assert run(order.CleanBulk(), arch, max_shared_bytes=1024).findings == ()


def test_listing_a_parameter_is_what_lets_it_be_early() -> None:
    kernel = order.Clean()
    kernel.early_loads = ()
    (finding,) = run(kernel, "sm_90a").findings
    assert "a load of w" in finding


def test_artifacts_are_kept_and_registers_are_those_ptxas_reports(
    tmp_path: Path,
) -> None:
    report = audit(planted(size.ManyRegisters()), "sm_90a", keep=tmp_path)
    directory = tmp_path / "sm_90a" / "planted" / "ManyRegisters"
    assert {p.suffix for p in directory.iterdir()} == {".ptx", ".cubin", ".mlir"}
    (cubin,) = directory.glob("*.cubin")
    assert list(resources(cubin.read_bytes()).values()) == [report.resources]
    with pytest.raises(ValueError, match="not a 64-bit"):
        resources(b"PK" + cubin.read_bytes())


def test_raw_asm_in_the_sources_is_found_and_our_sources_have_none() -> None:
    (finding,) = check_sources(PLANTED)
    assert finding.startswith("order.py:") and "inline_asm is called here" in finding
    assert check_sources(Path(verify_kernels.__path__[0])) == []


@pytest.mark.parametrize(
    ("call", "count"),
    [
        ("asm(r, o, 'ld.global.b32 $0, [$1];', '=r,l', effects=False)", 1),
        ("ptx.asm(r, o, f'st.shared.b32 [$0+{n}], $1;', 'r,r', effects=flag)", 1),
        ("asm(r, o, 'ld' + '.global.b32 $0, [$1];', '=r,l')", 1),
        ("asm(r, o, code, '=r,l', effects=False)", 1),
        ("asm(r, o, code, '=r,l', effects=True)", 0),
        ("asm(r, o, f'mov.b32 $0, {n};', '=r', effects=False)", 0),
        ("cute.arch.inline_ptx('mov.b32 {$w0}, 1;')", 1),
        ("llvm.inline_asm(r, o, 'mov.b32 $0, 1;', '=r')", 1),
    ],
)
def test_source_check_on_single_calls(call: str, count: int, tmp_path: Path) -> None:
    (tmp_path / "kernel.py").write_text(f"{call}\n")
    assert len(check_sources(tmp_path)) == count


def test_the_wrapper_refuses_a_pure_load() -> None:
    from verify_kernels.common import ptx

    for code in (
        "ld.global.b32 $0, [$1];",
        "{.reg .pred p; @p st.shared.b32 [$0], 1;}",
    ):
        with pytest.raises(ValueError, match="declared pure"):
            ptx.asm(None, [], code, "", effects=False, loc=None, ip=None)


def test_command_line_refuses_unknown_names(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["no_such_op"]) == 2
    assert main(["--arch", "sm_80"]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 2 and all(line.startswith("error: ") for line in errors)


def test_command_line_exits_1_on_a_finding(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def wanted(ops: Any, archs: Any) -> list[tuple[Any, str]]:
        return [(planted(kernel), "sm_90a") for kernel in kernels]

    monkeypatch.setattr("verify_kernels.audit.__main__.plan", wanted)
    kernels: list[Any] = [order.Clean()]
    assert main([]) == 0
    assert "1 kernels audited, 0 findings." in capsys.readouterr().out
    kernels.append(order.HoistedRead())
    assert main([]) == 1
    out = capsys.readouterr().out
    assert "planted/HoistedRead sm_90a: line" in out
    assert "2 kernels audited, 1 findings." in out
