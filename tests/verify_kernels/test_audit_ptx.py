# SPDX-License-Identifier: Apache-2.0
"""The PTX reader and the proofs, on PTX written by hand; no compiler needed."""

from __future__ import annotations

import re

import pytest

from verify_kernels.audit import opcodes
from verify_kernels.audit.checks import AddressSlice, Promise, check
from verify_kernels.audit.ptx import Entry, parse, parse_fragment, reach
from verify_kernels.audit.source import check_ir

HEAD = """
.version 9.0
.target sm_90a
.address_size 64
.extern .shared .align 128 .b8 shmem[];
.global .align 8 .b8 table[64];
.visible .entry k(
  .param .align 8 .b8 k_param_0[16],
  .param .u32 k_param_1,
  .param .align 8 .b8 k_param_2[24],
  .param .align 64 .b8 k_param_3[128]
)
.reqntid 64, 1, 1
{
  .reg .pred %p<4>;
  .reg .b32 %r<16>;
  .reg .b64 %rd<16>;
  ld.param.b64 %rd1, [k_param_0];
  ld.param.b32 %r1, [k_param_0+8];
  ld.param.b32 %r2, [k_param_1];
  ld.param.b64 %rd2, [k_param_2];
  ld.param.b64 %rd3, [k_param_2+8];
  mov.b64 %rd4, k_param_3;
  setp.ne.b32 %p1, %r2, 0;
"""
WAIT = "griddepcontrol.wait;\n"
LOAD_W = "ld.global.b32 %r5, [%rd1];\n"
LOAD_X = "ld.global.b32 %r6, [%rd2];\n"
PROMISE = Promise(("w", "x", "map"), ("w",), "", True)


def entry(body: str) -> Entry:
    (found,) = parse(HEAD + body + "\n}\n")
    return found


def findings(body: str, promise: Promise = PROMISE) -> list[str]:
    return check(entry(body), promise)[0]


def early(body: str) -> list[str]:
    return check(entry(body), PROMISE)[1]


def test_a_listed_load_may_be_early_and_another_may_not() -> None:
    assert findings(LOAD_W + WAIT + LOAD_X + "ret;") == []
    assert early(LOAD_W + WAIT + LOAD_X + "ret;") == ["w"]
    (finding,) = findings(LOAD_X + WAIT + "ret;")
    assert "a load of x" in finding and "line 25" in finding


def test_a_wait_under_a_predicate_is_no_wait() -> None:
    found = findings("@%p1 " + WAIT + LOAD_X + WAIT + "ret;")
    assert len(found) == 1 and "a load of x" in found[0]


def test_a_branch_around_the_wait_is_found_and_its_jump_named() -> None:
    body = f"@%p1 bra SKIP;\n{WAIT}SKIP:\n{LOAD_X}{WAIT}ret;"
    (finding,) = findings(body)
    assert "jumps taken at lines 25" in finding


def test_a_load_in_a_loop_before_the_wait_is_found_through_the_back_edge() -> None:
    """The load stands below a wait in the text, and a jump reaches it without one."""
    body = f"@%p1 bra LATER;\n{WAIT}ret;\nLATER:\n{LOAD_X}bra BACK;\nBACK:\n{WAIT}ret;"
    assert len(findings(body)) == 1


def test_loads_of_a_loop_after_the_wait_are_fine() -> None:
    body = f"{WAIT}TOP:\n{LOAD_X}@%p1 bra TOP;\nret;"
    assert findings(body) == []


def test_every_end_needs_the_wait() -> None:
    assert findings(f"@%p1 ret;\n{WAIT}ret;")[0].count("without griddepcontrol") == 1
    assert findings(f"@%p1 bra OUT;\n{WAIT}OUT:\n")[0].count("without griddepcontrol")
    # A trap ends the whole grid: nothing depends on it any more.
    assert findings(f"@!%p1 bra GO;\ntrap;\nGO:\n{WAIT}ret;") == []


def test_code_goes_on_after_a_guarded_end_and_not_after_a_plain_jump() -> None:
    assert any("load of x" in f for f in findings(f"@%p1 ret;\n{LOAD_X}{WAIT}ret;"))
    assert findings(f"bra OVER;\n{LOAD_X}OVER:\n{WAIT}ret;") == []


def test_a_jump_table_reaches_all_its_targets() -> None:
    body = (
        f"T: .branchtargets A, B;\nbrx.idx %r2, T;\nA:\n{WAIT}ret;\n"
        f"B:\n{LOAD_X}{WAIT}ret;"
    )
    assert len(findings(body)) == 1


def test_labels_and_registers_of_two_asm_blocks_with_equal_names() -> None:
    block = (
        "{\n.reg .pred P1;\n.reg .b64 t;\nmov.b64 t, %s;\nAGAIN:\n"
        "ld.global.b32 %%r7, [t];\nsetp.ne.b32 P1, %%r7, 0;\n@P1 bra AGAIN;\n}\n"
    )
    body = block % "%rd1" + WAIT + block % "%rd2" + "ret;"
    # Were the two t one register, the first block would read x as well.
    assert early(body) == ["w"] and findings(body) == []
    graph = entry(body)
    jumps = [i for i, ins in enumerate(graph.instructions) if ins.opcode == "bra"]
    assert [jumps[0] - graph.successors[jumps[0]][0]] * 2 == [
        jump - graph.successors[jump][0] for jump in jumps
    ]


def test_an_asm_loop_inside_its_block_keeps_code_after_it_reachable() -> None:
    body = (
        "{.reg .pred P1; LAB: mbarrier.try_wait.parity.shared.b64 P1, [shmem], 0, 10;"
        f"@P1 bra.uni DONE; bra.uni LAB; DONE: }}\n{LOAD_X}{WAIT}ret;"
    )
    assert len(findings(body)) == 1


@pytest.mark.parametrize(
    ("address", "names"),
    [
        ("add.s64 %rd9, %rd1, 64;", {0}),
        ("mad.lo.s64 %rd9, %rd3, 2, %rd2;", {1}),
        ("selp.b64 %rd9, %rd1, %rd2, %p1;", {0, 1}),
        ("cvta.param.u64 %rd9, %rd4;", {2}),
        ("mov.b64 %rd9, %rd3;", set()),
        ("shfl.sync.idx.b32 %rd9, %rd2, 0, 31, -1;", {1}),
        ("mov.b64 %rd8, k_param_2; ld.param.b64 %rd9, [%rd8];", {1}),
        ("mov.b64 {%r3, %r4}, %rd2; mov.b64 %rd9, {%r3, %r4};", {1}),
    ],
)
def test_slices_follow_an_address_to_its_parameters(
    address: str, names: set[int]
) -> None:
    slices = AddressSlice(entry(address + "\nret;"))
    assert slices.origins("[%rd9+16]").parameters == names


def test_a_loaded_index_does_not_make_its_table_the_origin() -> None:
    body = "ld.global.b64 %rd8, [%rd2];\nadd.s64 %rd9, %rd8, %rd1;\nret;"
    found = AddressSlice(entry(body)).origins("[%rd9]")
    assert found.parameters == {0} and found.loaded


def test_no_address_flows_through_a_wgmma() -> None:
    """Its descriptor may be one of shared memory, its A may have been anything."""
    body = (
        "mov.b64 {%r7, %r8}, %rd2; mov.b64 %rd8, shmem;\n"
        "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%r3,%r4,%r5,%r6}, "
        "{%r7,%r8,%r7,%r8}, %rd8, %p1, 1, 1, 0;\nmov.b64 %rd9, {%r3, %r4};\nret;"
    )
    found = AddressSlice(entry(body)).origins("[%rd9]")
    assert found.parameters == found.spaces == frozenset() and found.loaded


def test_an_address_from_memory_or_from_nowhere_is_a_finding() -> None:
    through = "ld.global.b64 %rd8, [%rd1];\nld.global.b32 %r7, [%rd8];\n"
    assert "a value read from memory" in findings(through + WAIT + "ret;")[0]
    nowhere = "mov.b64 %rd8, 4096;\nld.global.b32 %r7, [%rd8];\n"
    assert "derives from no tensor" in findings(nowhere + WAIT + "ret;")[0]


def test_a_generic_access_is_global_unless_its_address_is_shared() -> None:
    shared = "mov.b64 %rd8, shmem;\nld.b32 %r7, [%rd8];\nst.b32 [%rd8], %r7;\n"
    assert findings(shared + WAIT + "ret;") == []
    assert "a load of x" in findings("ld.b32 %r7, [%rd2];\n" + WAIT + "ret;")[0]
    both = (
        "mov.b64 %rd8, shmem;\nselp.b64 %rd9, %rd8, %rd2, %p1;\nld.b32 %r7, [%rd9];\n"
    )
    assert "a load of x" in findings(both + WAIT + "ret;")[0]
    table = "mov.b64 %rd8, table;\nld.b32 %r7, [%rd8];\n"
    assert "derives from no tensor" in findings(table + WAIT + "ret;")[0]


@pytest.mark.parametrize(
    ("instruction", "kind", "address"),
    [
        ("ld.global.nc.L1::no_allocate.v4.b32 {%r1,%r2,%r3,%r4}, [%rd1+8]", "load", 0),
        ("ld.volatile.global.b32 %r1, [%rd1]", "load", 0),
        ("cp.async.cg.shared.global [%r1], [%rd1], 16", "load", 1),
        (
            "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
            "[%r1], [%rd1], %r2, [%r3]",
            "load",
            1,
        ),
        (
            "cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::"
            "bytes [%r1], [%rd1, {%r2, %r3}], [%r4]",
            "load",
            1,
        ),
        ("cp.async.bulk.prefetch.L2.global [%rd1], %r2", "prefetch", 0),
        ("prefetch.global.L2 [%rd1]", "prefetch", 0),
        ("cp.async.bulk.global.shared::cta.bulk_group [%rd1], [%r1], 64", "store", 0),
        (
            "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 "
            "[%rd1], [%r1], 64",
            "store",
            0,
        ),
        ("atom.global.add.u32 %r1, [%rd1], 1", "store", 0),
        ("red.global.add.f32 [%rd1], %r1", "store", 0),
        ("st.global.v4.b32 [%rd1], {%r1,%r2,%r3,%r4}", "store", 0),
        ("multimem.ld_reduce.global.add.f32 %r1, [%rd1]", "load", 0),
        ("discard.global.L2 [%rd1], 128", "store", 0),
    ],
)
def test_kind_and_address_of_global_accesses(
    instruction: str, kind: str, address: int
) -> None:
    (parsed,) = parse_fragment(instruction + ";")
    found = opcodes.access(parsed)
    brackets = re.findall(r"\[[^\]]*\]", instruction)
    assert found == opcodes.Access(kind, brackets[address])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "instruction",
    [
        "ld.shared.b32 %r1, [%r2]",
        "ld.param.b64 %rd1, [k_param_0]",
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%r1], %r2, [%r3]",
        "red.shared::cluster.add.u32 [%r1], 1",
        "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes "
        "[%r1], [%r2], 16, [%r3]",
        "cp.async.bulk.commit_group",
        "cp.async.wait_group 0",
        "cp.async.mbarrier.arrive.shared.b64 [%r1]",
        "prefetch.tensormap [%rd1]",
        "mbarrier.init.shared.b64 [%r1], 1",
        "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r1,%r2,%r3,%r4}, [%r5]",
        "wgmma.fence.sync.aligned",
        "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%r1,%r2,%r3,%r4}, "
        "{%r5,%r6,%r7,%r8}, %rd1, %p1, 1, 1, 0",
        "wgmma.commit_group.sync.aligned",
        "wgmma.wait_group.sync.aligned 0",
        "fence.proxy.async",
        "fence.proxy.async.shared::cta",
        "setmaxnreg.inc.sync.aligned.u32 240",
    ],
)
def test_what_never_leaves_the_sm(instruction: str) -> None:
    (parsed,) = parse_fragment(instruction + ";")
    assert opcodes.known(parsed) and opcodes.access(parsed) is None


@pytest.mark.parametrize("statement", ["frobnicate.b32 %r7, %r1;", "call f;"])
def test_an_unknown_opcode_and_a_call_are_findings(statement: str) -> None:
    (finding,) = findings(f"{statement}\n{WAIT}ret;")
    assert "is in no list" in finding


def test_texture_reads_have_no_address_to_follow_and_are_findings() -> None:
    body = f"tex.1d.v4.f32.s32 {{%r3,%r4,%r5,%r6}}, [%rd1, {{%r2}}];\n{WAIT}ret;"
    assert "not understood" in findings(body)[0]


def test_stores_after_the_release_on_any_path_need_a_reason() -> None:
    release = "griddepcontrol.launch_dependents;\n"
    store = "st.global.b32 [%rd2], %r1;\n"
    assert findings(WAIT + store + release + "ret;") == []
    looped = f"{WAIT}TOP:\n{store}{release}@%p1 bra TOP;\nret;"
    (finding,) = findings(looped)
    assert "may follow griddepcontrol.launch_dependents" in finding
    guarded = f"{WAIT}@%p1 {release}{store}ret;"
    assert len(findings(guarded)) == 1
    for reason, count in (("they wait", 0), ("  ", 1)):
        promise = Promise(PROMISE.parameters, ("w",), reason, True)
        assert len(findings(looped, promise)) == count


def test_a_store_to_shared_memory_may_follow_the_release() -> None:
    body = f"{WAIT}griddepcontrol.launch_dependents;\nst.shared.b32 [shmem], %r1;\nret;"
    assert findings(body) == []


def test_promises_must_fit_the_kernel() -> None:
    two = Promise(("w", "x"), ("w",), "", True)
    assert "takes 3 tensors" in findings(WAIT + "ret;", two)[0]
    typo = Promise(("w", "x", "map"), ("W",), "", True)
    assert "not in `parameters`" in findings(WAIT + "ret;", typo)[0]


def test_reach_is_a_shortest_path() -> None:
    graph = entry(f"@%p1 bra B;\nmov.b32 %r3, 1;\nmov.b32 %r4, 1;\nB:\n{WAIT}ret;")
    wait = next(
        i
        for i, ins in enumerate(graph.instructions)
        if ins.opcode == "griddepcontrol.wait"
    )
    jump = graph.instructions[reach(graph, [0])[wait]]
    assert jump.opcode == "bra" and jump.guard == "%p1"


def test_a_file_cut_off_is_refused() -> None:
    with pytest.raises(ValueError, match="not complete"):
        parse(HEAD + WAIT)
    with pytest.raises(ValueError, match="no label in reach"):
        entry("bra NOWHERE;")


def test_ir_with_a_pure_load_is_a_finding_and_pure_arithmetic_is_not() -> None:
    line = '%1 = llvm.inline_asm {}asm_dialect = att "{}", "=r,l" %0 : (i64) -> i32\n'
    load = "{.reg .pred p;\\0A @p ld.global.b32 $0, [$1];}"
    assert len(check_ir(line.format("", load))) == 1
    assert check_ir(line.format("has_side_effects ", load)) == []
    assert check_ir(line.format("", "mul.rn.bf16x2 $0, $1, $2;")) == []
    assert len(check_ir(line.format("", "newop.b32 $0, $1;"))) == 1
