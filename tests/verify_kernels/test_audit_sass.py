# SPDX-License-Identifier: Apache-2.0
"""Slots handed back while their data is under way are found in machine code."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path
from typing import Any

import pytest

from verify_kernels.audit import sass
from verify_kernels.audit.address import shared_addresses
from verify_kernels.audit.sass import Code, NoDisassembler, find_nvdisasm, parse
from verify_kernels.audit.slots import check_slots, count_arrivals
from verify_kernels.common.variant import ARCHITECTURES

ARRIVE = "SYNCS.ARRIVE.TRANS64.A1T0 RZ, [R2+URZ], RZ"
ARRIVE_REMOTE = "SYNCS.ARRIVE.TRANS64.RED.A1T0 RZ, [R2+URZ], RZ"
ANNOUNCE = "SYNCS.ARRIVE.TRANS64 RZ, [R2+URZ], R3"
TRY = "SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R2+URZ], R3"
LOAD = "LDS.128 R8, [R4]"
MATRICES = "LDSM.16.M88.4 R8, [R4]"


def listing(*program: str) -> Code:
    """Code from lines like ``LDS.128 R8, [R4] <2 ?03``: releases scoreboard 2, waits
    for 0 and 3. A line that ends in a colon is a label."""
    lines = ["\t.section\t.text.kernel"]
    address = 0
    for line in program:
        if line.endswith(":"):
            lines.append(line)
            continue
        words = line.split(" ")
        text = " ".join(w for w in words if w[0] not in "<?")
        scoreboard = next((int(w[1]) for w in words if w[0] == "<"), 7)
        waits = sum(1 << int(c) for w in words if w[0] == "?" for c in w[1:])
        # Read scoreboard 7 is none; the low bits are the opcode's own.
        upper = (waits << 11 | 7 << 8 | scoreboard << 5 | 1) << 41 | 0x1FFFF
        lines.append(f"        /*{address:04x}*/   {text} ;   /* 0x{7:016x} */")
        lines.append(f"{'':40}/* 0x{upper:016x} */")
        address += 16
    return parse("\n".join(lines))


def early(code: Code, **options: Any) -> list[str]:
    """Addresses of the loads that the findings name, in order."""
    return [
        finding.split(" at ")[-1].split(" ")[0]
        for finding in check_slots(code, **options)
        if "is under way" in finding
    ]


def test_control_bits_are_decoded() -> None:
    (first, guarded) = listing(
        "LDS.128 R8, [R4+0x40] <4 ?035", "@!UP1 MOV R3, R2.reuse ?1"
    ).instructions
    assert first.scoreboard == 4 and first.waits == {0, 3, 5}
    assert (first.opcode, first.operands) == ("LDS.128", ("R8", "[R4+0x40]"))
    assert (first.guard, first.address, first.head) == ("", 0, "LDS")
    assert guarded.guard == "!UP1" and guarded.operands == ("R3", "R2")
    assert guarded.scoreboard is None and guarded.address == 16


@pytest.mark.parametrize("load", [LOAD, MATRICES])
@pytest.mark.parametrize("arrive", [ARRIVE, ARRIVE_REMOTE, ANNOUNCE])
def test_a_load_under_way_at_an_arrival_is_found(arrive: str, load: str) -> None:
    assert early(listing(f"{load} <2", arrive, "EXIT")) == ["0x0"]
    assert early(listing(f"{load} <2", f"{arrive} ?2", "EXIT")) == []
    assert early(listing(f"{load} <2", "MOV R3, R8 ?2", arrive, "EXIT")) == []
    # Another scoreboard, or the right one too late.
    assert early(listing(f"{load} <2", f"{arrive} ?013", "EXIT")) == ["0x0"]
    assert early(listing(f"{load} <2", arrive, "MOV R3, R8 ?2", "EXIT")) == ["0x0"]
    # A wait from before the load says nothing of it.
    assert early(listing("MOV R3, R4 ?2", f"{load} <2", arrive, "EXIT")) == ["0x10"]


def test_a_load_that_never_runs_is_none() -> None:
    """ptxas puts such beside asynchronous copies; under another guard one may run."""
    never = LOAD.replace("LDS", "@!PT LDS")
    assert early(listing(never, ARRIVE, "EXIT")) == []
    assert early(listing(never.replace("!PT", "!P0"), ARRIVE, "EXIT")) == ["0x0"]


@pytest.mark.parametrize("first", [LOAD, MATRICES])
@pytest.mark.parametrize("last", [LOAD, MATRICES])
def test_loads_return_in_order_so_the_last_ones_scoreboard_is_enough(
    first: str, last: str
) -> None:
    assert early(listing(first, f"{last} <1", f"{ARRIVE} ?1", "EXIT")) == []
    # But not for a load after it, nor through one that may not have been issued, nor
    # for loads of other kinds.
    assert early(listing(f"{first} <1", last, f"{ARRIVE} ?1", "EXIT")) == ["0x10"]
    assert early(listing(first, f"@P1 {last} <1", f"{ARRIVE} ?1", "EXIT")) == ["0x0"]
    other = "ATOMS.ADD R8, [R4], R3"
    assert early(listing(other, f"{last} <1", f"{ARRIVE} ?1")) == ["0x0"]
    assert early(listing(first, f"{other} <1", f"{ARRIVE} ?1")) == ["0x0"]
    assert early(listing(f"{other} <1", f"{ARRIVE} ?1")) == []


def test_every_path_to_an_arrival_counts() -> None:
    skipped = ["@P1 BRA `(.L_x_1)", "MOV R3, R8 ?2", ".L_x_1:", ARRIVE, "EXIT"]
    assert early(listing(f"{LOAD} <2", *skipped)) == ["0x0"]
    covered = ["@P1 BRA `(.L_x_1) ?2", "NOP", ".L_x_1:", ARRIVE, "EXIT"]
    assert early(listing(f"{LOAD} <2", *covered)) == []
    # Shown by scoreboard 2 on one path, by 1 on the other: neither is enough.
    forks = [LOAD, "@P1 BRA `(.L_x_1)", f"{LOAD} <2", "BRA `(.L_x_2)", ".L_x_1:"]
    forks += [f"{LOAD} <1", ".L_x_2:"]
    assert early(listing(*forks, f"{ARRIVE} ?2", "EXIT")) == ["0x0", "0x40"]
    assert early(listing(*forks, f"{ARRIVE} ?1", "EXIT")) == ["0x0", "0x20"]
    same = [line.replace("<1", "<2") for line in forks]
    assert early(listing(*same, f"{ARRIVE} ?2", "EXIT")) == []


def test_a_load_of_the_round_before_counts() -> None:
    loop = [".L_x_0:", ARRIVE, TRY, f"{LOAD} <2", "@P1 BRA `(.L_x_0)", "EXIT"]
    assert early(listing(*loop)) == ["0x20"]
    loop[4] += " ?2"
    assert early(listing(*loop)) == []


def test_reconvergence_calls_and_uniform_branches_are_followed() -> None:
    # Threads that meet at BSYNC go on where their BSSY says.
    away = ["BSSY B0, `(.L_x_1)", f"{LOAD} <2", "BSYNC B0", "EXIT", ".L_x_1:", ARRIVE]
    assert early(listing(*away, "EXIT")) == ["0x10"]
    here = ["BSSY B0, `(.L_x_1)", f"{LOAD} <2", "BSYNC B0 ?2", ".L_x_1:", ARRIVE]
    assert early(listing(*here, "EXIT")) == []
    call = ["CALL.REL.NOINC `(.L_x_1)", ARRIVE, "EXIT", ".L_x_1:", f"{LOAD} <2"]
    assert early(listing(*call, "RET.REL.NODEC R4 `(kernel)", "kernel:")) == ["0x30"]
    uniform = [f"{LOAD} <2", "BRA.U UP0, `(.L_x_1)", "EXIT ?2", ".L_x_1:", ARRIVE]
    assert early(listing(*uniform, "EXIT")) == ["0x0"]
    onward = [f"{LOAD} <2", "BRA.U UP0, `(.L_x_1)", ARRIVE, "EXIT", ".L_x_1:"]
    assert early(listing(*onward, "EXIT")) == ["0x0"]
    sure = [f"{LOAD} <2", "BRA `(.L_x_1)", ARRIVE, ".L_x_1:", "EXIT"]
    assert early(listing(*sure)) == []


def test_a_load_after_an_arrival_needs_a_wait_between() -> None:
    for load in (LOAD, MATRICES):
        (finding,) = check_slots(listing(ARRIVE, f"{load} <2", "EXIT"))
        assert finding.startswith(f"{load} at 0x10 may follow an arrival with no wait")
    assert check_slots(listing(ARRIVE, TRY, f"{LOAD} <2", "EXIT")) == []
    # A wait that may be skipped is none; who announces bytes may read another slot.
    assert len(check_slots(listing(ARRIVE, f"@P1 {TRY}", f"{LOAD} <2", "EXIT"))) == 1
    assert check_slots(listing(ANNOUNCE, f"{LOAD} <2", "EXIT")) == []


@pytest.mark.parametrize(
    "reader",
    ["UTCHMMA gdesc[UR4], gdesc[UR6], tmem[UR8]", "UBLKCP.G.S [UR4], [UR6], UR8"],
)
def test_asynchronous_readers_are_refused(reader: str) -> None:
    (finding,) = check_slots(listing(reader, "EXIT"))
    assert "reads shared memory asynchronously" in finding
    assert check_slots(listing("UBLKCP.S.G [UR4], [UR6], UR8", "EXIT")) == []


PRODUCT = "HGMMA.64x8x16.F32.BF16 R24, R72, gdesc[UR8], R24"
LAST = f"{PRODUCT}, gsb0"
GROUPS = "WARPGROUP.DEPBAR.LE gsb0, 0x0"


def test_a_wgmma_is_under_way_until_its_group_has_been_waited_for() -> None:
    chain = ["WARPGROUP.ARRIVE", PRODUCT, LAST]
    assert check_slots(listing(*chain, GROUPS, ARRIVE, "EXIT")) == []
    for wait in ("NOP ?012345", f"@P1 {GROUPS}", GROUPS.replace("0x0", "0x1")):
        assert early(listing(*chain, wait, ARRIVE, "EXIT")) == ["0x10", "0x20"]
    # Closed by the next one of its warp or by none.
    for last in (PRODUCT, f"@P1 {LAST}"):
        assert early(listing(PRODUCT, last, GROUPS, ARRIVE)) == ["0x0", "0x10"]
    assert early(listing(LAST, PRODUCT, GROUPS, ARRIVE)) == ["0x10"]
    # Loads have their scoreboards, whatever groups are closed.
    assert early(listing(f"{LOAD} <2", LAST, GROUPS, ARRIVE)) == ["0x0"]
    assert early(listing(LAST, f"{LOAD} <2", f"{ARRIVE} ?2", "EXIT")) == ["0x0"]
    (finding,) = check_slots(listing(ARRIVE, LAST, GROUPS, "EXIT"))
    assert "HGMMA" in finding and "may follow an arrival with no wait" in finding
    assert check_slots(listing(ARRIVE, TRY, LAST, GROUPS, "EXIT")) == []


#: Lane / 4 rows of 0x100 bytes from 0x2000 on, in memory that is kept.
RESIDENT = (
    "S2R R3, SR_CgaCtaId <0",
    "MOV R0, 0x400",
    "S2R R6, SR_LANEID <1",
    "LEA R3, R3, R0, 0x18 ?0",
    "SHF.R.U32.HI R6, RZ, 0x2, R6 ?1",
    "IMAD R4, R6, 0x100, R3",
)


@pytest.mark.parametrize(
    ("between", "region"),
    [
        ((), (0x2000, 0x2710)),
        (("VIADDMNMX R4, R4, 0x10, RZ, PT",), None),
        (("IADD3 R4, PT, PT, R4, -0x10, RZ",), (0x1FF0, 0x2700)),
        (("MOV R7, 0x300", "@P1 IADD3 R4, R7, R4, RZ"), (0x2000, 0x2A10)),
        (("SHFL.IDX PT, R4, R4, R7, 0x1f",), None),
        (("LDG.E.128 R4, desc[UR4][R2.64]",), None),
        # R4 is the last of the four registers written.
        (("LDG.E.128 R1, desc[UR4][R2.64]",), None),
        # Grows in a loop.
        ((".L_x_0:", "VIADD R4, R4, 0x10", "@P1 BRA `(.L_x_0)"), None),
        # The compare holds on the side that goes on: R6 <= 2.
        (
            (
                "ISETP.GT.AND P0, PT, R6, 0x2, PT",
                "PLOP3.LUT P2, PT, PT, PT, P0, 0x80, 0x0",
                "@P2 EXIT",
                "@P2 BRA `(.L_x_9)",
                "IMAD R4, R6, 0x100, R3",
            ),
            (0x2000, 0x2210),
        ),
        # ... but not if the predicate may have kept another meaning,
        (
            (
                "ISETP.GT.AND P0, PT, R5, 0x2, PT",
                "@P1 ISETP.GT.AND P0, PT, R6, 0x2, PT",
                "@P0 BRA `(.L_x_9)",
                "IMAD R4, R6, 0x100, R3",
            ),
            (0x2000, 0x2710),
        ),
        # nor of a register that was written since.
        (
            (
                "ISETP.GT.AND P0, PT, R6, 0x2, PT",
                "S2R R6, SR_LANEID",
                "@P0 BRA `(.L_x_9)",
                "IMAD R4, R6, 0x100, R3",
            ),
            (0x2000, 0x3F10),
        ),
    ],
)
def test_where_a_load_reads_is_known_or_said_not_to_be(
    between: tuple[str, ...], region: tuple[int, int] | None
) -> None:
    load = "LDS.128 R8, [R4+URZ+0x2000] <2"
    code = listing(*RESIDENT, *between, load, ARRIVE, ".L_x_9:", "EXIT")
    (index,) = (i for i, ins in enumerate(code.instructions) if ins.head == "LDS")
    found = shared_addresses(code).get(index)
    if region is None:
        # Unknown, or so wide that it lies in no kernel's memory.
        assert found is None or found[1] - found[0] > 2**16
        assert len(early(code, kept=[(0, 2**17)])) == 1
        return
    assert found == region
    low, high = region
    assert early(code, kept=[region]) == []
    assert len(early(code, kept=[(low + 1, high)])) == 1
    assert len(early(code, kept=[(low, high - 1), (0, 64)])) == 1
    assert len(early(code)) == 1


@pytest.mark.parametrize(
    ("load", "size"),
    [("LDS", 4), ("LDS.U8", 4), ("LDS.64", 8), ("LDS.128", 16), ("LDSM.16.M88.4", 16),
     ("LDSM.16.M88.2", 16), ("LDSM.16.MT88.4", 16), ("LDSM.U4TO8.M816.2", 0)],
)  # fmt: skip
def test_how_many_bytes_a_load_reads(load: str, size: int) -> None:
    """Of matrices every lane's row; in a form that nobody has looked up, no bytes are
    known."""
    code = listing(*RESIDENT, f"{load} R8, [R4+URZ+0x2000] <2", ARRIVE, "EXIT")
    region = (0x2000, 0x2700 + size)
    assert list(shared_addresses(code).values()) == ([region] if size else [])
    assert early(code, kept=[region]) == ([] if size else ["0x60"])
    assert early(code, kept=[(0x2000, 0x2700 + size - 1)]) == ["0x60"]


def test_matrices_take_four_registers() -> None:
    load = "LDS.128 R8, [R4+URZ+0x2000] <2"
    for first, known in (("R0", True), ("R1", False), ("R4", False), ("R5", True)):
        matrices = f"LDSM.16.M88.4 {first}, [R4]"
        code = listing(*RESIDENT, matrices, load)
        index = len(RESIDENT) + 1
        assert (index in shared_addresses(code)) == known


@pytest.mark.parametrize(
    ("product", "known"),
    [("64x8x16.F32 R5", True), ("64x8x16.F32 R1", False), ("64x16x16.F32 R252", True),
     ("64x16x16.F32 R0", False), ("SP R0", False)],
)  # fmt: skip
def test_a_wgmma_writes_half_a_register_a_column(product: str, known: bool) -> None:
    load = "LDS.128 R8, [R4+URZ+0x2000] <2"
    code = listing(*RESIDENT, f"HGMMA.{product}, R72, gdesc[UR8], RZ, !UPT", load)
    assert bool(shared_addresses(code)) == known


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no instructions"),
        ("\t.section\t.text.a\n\t.section\t.text.b", "more than one kernel"),
        ("  /*0000*/  NOP ;  /* 0x0000000000007918 */", "half an instruction"),
    ],
)
def test_text_that_is_not_a_kernel_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse(text)


@pytest.mark.parametrize(
    ("jump", "message"),
    [("BRX R4 -0x40", "not known where"), ("BRA `(.L_x_7)", "a label that is not")],
)
def test_unknown_control_flow_is_refused(jump: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        listing(jump, "EXIT")


def without_tools(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setenv("CUDA_HOME", "/nonexistent")
    monkeypatch.delenv("CUDA_PATH", raising=False)


def test_nvdisasm_is_looked_for_in_the_toolkit_and_in_triton(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    without_tools(monkeypatch)
    if Path("/usr/local/cuda/bin/nvdisasm").is_file():
        pytest.skip("this machine has nvdisasm in /usr/local/cuda")
    with pytest.raises(NoDisassembler, match="install the CUDA toolkit"):
        find_nvdisasm()
    tool = tmp_path / "bin" / "nvdisasm"
    tool.parent.mkdir()
    tool.touch()
    monkeypatch.setenv("CUDA_PATH", str(tmp_path))
    assert find_nvdisasm() == tool


def test_a_cubin_that_nvdisasm_refuses_is_not_checked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sass, "find_nvdisasm", lambda: Path("/bin/false"))
    with pytest.raises(NoDisassembler, match="/bin/false refuses the cubin"):
        sass.disassemble(b"\x7fELF")


@pytest.fixture(scope="module")
def compiler() -> None:
    pytest.importorskip("cutlass", reason="CuTe DSL is not installed")


@pytest.fixture(scope="module")
def tools(compiler: None) -> None:
    try:
        find_nvdisasm()
    except NoDisassembler as error:
        pytest.skip(str(error))


def ring(after: str, arch: str, matrices: bool = False) -> Any:
    from tests.verify_kernels.planted.base import planted
    from tests.verify_kernels.planted.slots import Ring
    from verify_kernels.audit import audit

    return audit(planted(Ring(after, matrices)), arch)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_ring_that_hands_back_after_its_sums_passes(arch: str, tools: None) -> None:
    report = ring("sums", arch)
    assert report.findings == ()
    assert report.arrivals == 2


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_ring_that_hands_back_after_one_loaded_word_is_caught(
    arch: str, tools: None
) -> None:
    """The word depends on the load that ptxas put first, and the others are under way:
    wrong rows that no comparison of large sums shows."""
    findings = ring("word", arch).findings
    assert findings and all(" is under way" in f and "LDS.128" in f for f in findings)


def test_rings_that_hand_back_by_order_or_before_reading_are_caught(
    tools: None,
) -> None:
    assert any(" is under way" in f for f in ring("order", "sm_90a").findings)
    findings = ring("early", "sm_90a").findings
    assert len([f for f in findings if "may follow an arrival" in f]) == 8


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_ring_that_is_read_with_ldmatrix_is_audited_alike(
    arch: str, tools: None
) -> None:
    report = ring("sums", arch, matrices=True)
    assert report.findings == () and report.arrivals == 2
    order = ring("order", arch, matrices=True).findings
    assert order and all(" is under way" in f and "LDSM.16" in f for f in order)
    findings = ring("early", arch, matrices=True).findings
    assert len([f for f in findings if "may follow an arrival" in f]) == 8


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_reads_of_resident_tokens_are_told_apart_by_their_address(
    arch: str, tmp_path: Path, tools: None
) -> None:
    """Half the tokens lie in shared memory for good; reads of them are under way when
    the skinny GEMM hands a slot back, and that is no fault."""
    from experiments.bench.space import RING
    from verify_kernels.skinny_gemm import host

    variant = host.variant(RING[2112][32], ("bf16",))
    compiled = variant.compile(arch, dump=tmp_path)
    code = sass.disassemble(compiled.artifacts.CUBIN)
    kept = variant.kernel.kept_shared
    assert check_slots(code, kept) == []
    assert count_arrivals(code) > 2
    ((start, end),) = kept
    assert early(code) and early(code, kept=[(start, end - 128)])
    reads = shared_addresses(code).values()
    inside = [r for r in reads if start <= r[0] and r[1] <= end]
    tiling = variant.kernel.t
    assert len(inside) == (tiling.token_tiles - tiling.held_tiles) * tiling.chunks
    assert min(r[0] for r in inside) == start
    # All but the padding of the last row.
    last = tiling.token_pitch - 2 * tiling.local_k
    assert max(r[1] for r in inside) == end - last


def test_without_nvdisasm_the_audit_says_that_slots_were_not_checked(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    compiler: None,
) -> None:
    from tests.verify_kernels.planted.base import planted
    from tests.verify_kernels.planted.slots import Ring
    from verify_kernels.audit import __main__ as command

    def nowhere() -> Path:
        raise NoDisassembler("no nvdisasm on PATH")

    monkeypatch.setattr(sass, "find_nvdisasm", nowhere)
    wanted = [(planted(Ring("word")), "sm_90a")]
    monkeypatch.setattr(command, "plan", lambda ops, archs: wanted)
    assert command.main([]) == 0
    out = capsys.readouterr().out
    assert "Slots handed back: not checked, no nvdisasm on PATH" in out
    assert "arrivals of" not in out


def test_kernels_without_barriers_are_not_disassembled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They hand nothing back; it is a third of an audit's time."""
    import verify_kernels.audit as package
    from verify_kernels.common.variant import variants

    def looked_at(cubin: bytes) -> Code:
        raise ValueError("looked at")

    found = {
        name: next(v for v in variants((op,)) if v.name.startswith(name))
        for op, name in (("prefetch", ""), ("skinny_gemm", "k384_"))
    }
    monkeypatch.setattr(package, "disassemble", looked_at)
    without, ring = (package.audit(each, "sm_90a") for each in found.values())
    assert without.findings == () and without.arrivals in (0, None)
    assert ring.arrivals is None and "looked at" in ring.findings[-1]
