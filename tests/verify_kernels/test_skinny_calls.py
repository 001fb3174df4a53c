# SPDX-License-Identifier: Apache-2.0
"""Calls of the skinny GEMM: what it refuses, and what is bound to weights."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.verify_kernels.test_skinny_gemm import (
    MOE_OUTPUTS,
    bits,
    captured,
    inputs,
    launch,
    padded,
    run,
)
from verify_kernels.skinny_gemm import SkinnyGemm, serves
from verify_kernels.skinny_gemm.tiling import SUM_ORDER


@pytest.mark.gpu
@pytest.mark.parametrize(
    "change",
    [
        {"x": torch.zeros(3, 128)},
        {"x": torch.zeros(3, 136, dtype=torch.bfloat16)},
        {"x": torch.zeros(128, 3, dtype=torch.bfloat16).t()},
        {"x": torch.zeros(3, 129, dtype=torch.bfloat16)[:, :128]},
        {"x": torch.zeros(1, 3, 128, dtype=torch.bfloat16)[0, :, :, None]},
        {"w": torch.zeros(17, 128)},
        {"w": torch.zeros(17, 136, dtype=torch.bfloat16)[:, :128]},
        {"w": torch.zeros(16, 128, dtype=torch.bfloat16)},
        {"out": torch.zeros(3, 17)},
        {"out": torch.zeros(2, 17, dtype=torch.bfloat16)},
        {"out": torch.zeros(17, 3, dtype=torch.bfloat16).t()},
    ],
    ids=lambda change: "-".join(
        f"{name}-{t.dtype}-{tuple(t.shape)}-{t.stride()}" for name, t in change.items()
    ),
)
def test_bad_tensors_are_refused(change: dict[str, Tensor]) -> None:
    """Nothing is written: the kernel is not launched."""
    x, w = inputs(17, 128, rows=3)
    out = torch.full((3, 17), torch.nan, dtype=torch.bfloat16, device="cuda")
    call = {"x": x, "w": w, "out": out}
    for name, tensor in change.items():
        moved = torch.empty_strided(
            tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cuda"
        )
        call[name] = moved.fill_(torch.nan)
    with pytest.raises(ValueError, match=r"when calling|out has 2 rows and x 3"):
        SkinnyGemm(128)(**call)
    torch.cuda.synchronize()
    assert torch.isnan(call["out"]).all()


def cpu(rows: int = 3) -> dict[str, Any]:
    x, w = inputs(17, 128, rows=rows, device="cpu")
    return {"x": x, "w": w, "out": x.new_zeros(rows, 17)}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"k": 1024}, "k=1024: the skinny GEMM is compiled for K = 64, 128, 192, 256"),
        (
            {"k": 128, "out_dtype": torch.float32},
            r"outputs \('fp32',\) of K 128 are not compiled; there are \('bf16',\)",
        ),
        (
            {"k": 7168, "out_dtype": torch.float16},
            r"outputs \('torch.float16',\) of K 7168 .* \('bf16',\), \('fp32',\)",
        ),
        ({"k": 7168, "groups": 3}, r"outputs \('bf16', 'bf16', 'bf16'\) of K 7168"),
        ({"k": 7168, "groups": 0}, r"outputs \(\) of K 7168 are not compiled"),
    ],
)
def test_what_is_not_compiled_is_refused(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        SkinnyGemm(**arguments)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({}, "x is on cpu; the kernel needs a CUDA device.*skinny_gemm.reference"),
        (cpu(65), "x has 65 rows; at most 64: split the step or use another GEMM"),
        ({"out": cpu(2)["out"]}, "out has 2 rows and x 3; give it 3"),
        ({"w": []}, "w has 0 matrices and out 1; this SkinnyGemm was made for 1"),
        ({"w": [cpu()["w"]] * 2}, "w has 2 matrices and out 1; .* made for 1"),
        ({"out": [cpu()["out"]] * 3}, "w has 1 matrices and out 3; .* made for 1"),
    ],
)
def test_bad_calls_are_refused(change: dict[str, Any], words: str) -> None:
    call = cpu() | change
    with pytest.raises(ValueError, match=words):
        SkinnyGemm(128)(**call)
    outs = call["out"] if isinstance(call["out"], list) else [call["out"]]
    assert not any(out.any() for out in outs)


def test_three_outputs_need_three_matrices() -> None:
    call = cpu()
    with pytest.raises(ValueError, match=r"w has 1 matrices and out 1; .* made for 3"):
        SkinnyGemm(7168, out_dtype=MOE_OUTPUTS)(**call)


@pytest.mark.parametrize("k", SUM_ORDER)
def test_what_is_served_can_be_made(k: int) -> None:
    """And nothing else; by types, by names, one or several."""
    kinds: list[Any] = [torch.bfloat16, torch.float32, torch.float16, MOE_OUTPUTS]
    served = [serves(k, outputs) for outputs in kinds]
    for outputs, expected in zip(kinds, served, strict=True):
        if expected:
            SkinnyGemm(k, out_dtype=outputs)
        else:
            with pytest.raises(ValueError, match="are not compiled"):
                SkinnyGemm(k, out_dtype=outputs)
    hidden = k in (512, 7168)
    assert served == [True, hidden, False, hidden]
    assert serves(k) and serves(k, "bf16") and serves(k, ["bf16"])
    assert serves(k, "fp32") == serves(k, (torch.float32,)) == served[1]


def test_what_has_no_order_of_sums_is_not_served() -> None:
    assert not serves(1024) and not serves(0)


def bindings() -> dict[str, Any]:
    w = torch.zeros(17, 128, dtype=torch.bfloat16)
    return {
        r"w is on cpu; the kernel needs a CUDA device": w,
        r"w is torch.float32 \(17, 128\); it must be torch.bfloat16 \[N, 128\]": (
            w.float()
        ),
        r"w is torch.bfloat16 \(17, 64\)": w[:, :64],
        r"w is torch.bfloat16 \(2176,\)": w.flatten(),
        r"w has strides \(136, 1\).*bind a contiguous copy": w.new_zeros(17, 136)[
            :, :128
        ],
        r"w has strides \(128, 1\) and address .*2;": w.new_zeros(17 * 128 + 1)[
            1:
        ].view(17, 128),
        r"w has 2 matrices; this SkinnyGemm was made for 1": [w, w],
        r"w\[0\] is torch.float32": [w.float()],
    }


@pytest.mark.parametrize("words", bindings())
def test_weights_that_do_not_fit_are_not_bound(words: str) -> None:
    with pytest.raises(ValueError, match=words):
        SkinnyGemm(128).bind(bindings()[words])


def test_weights_of_two_devices_are_not_bound() -> None:
    w = torch.zeros(17, 7168, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"w\[2\] is on meta and the first on cpu"):
        SkinnyGemm(7168, out_dtype=MOE_OUTPUTS).bind([w, w, w.to("meta")])


@pytest.mark.gpu
@pytest.mark.parametrize("pdl", [True, False])
@pytest.mark.parametrize(
    ("n", "k", "dtype"),
    [
        (3216, 7168, torch.bfloat16),
        (56, 7168, torch.float32),
        (16, 512, torch.float32),
        (7168, 33792, torch.bfloat16),
        (7168, 16896, torch.bfloat16),
    ],
)
def test_what_is_bound_gives_the_bits_of_a_call(
    n: int, k: int, dtype: torch.dtype, pdl: bool
) -> None:
    """At every M, those included that are cut into launches, from x in rows apart into
    rows of NaN apart; and with other values in the same memory."""
    x, w = inputs(n, k)
    parameter = torch.nn.Parameter(w)
    bound = SkinnyGemm(k, out_dtype=dtype, pdl=pdl).bind(parameter)
    for _ in range(2):
        wanted = run(k, x, w, dtype, pdl)
        for m in range(65):
            buffer = torch.full((m + 1, n + 3), torch.nan, dtype=dtype, device="cuda")
            bound(padded(x)[:m], buffer[:m, :n])
            assert torch.equal(bits(buffer[:m, :n]), bits(wanted[:m])), m
            assert torch.isnan(buffer[m:]).all() and torch.isnan(buffer[:, n:]).all()
        w.mul_(-0.5)


@pytest.mark.gpu
def test_matrices_bound_together_and_captured() -> None:
    ws = [inputs(n, 7168)[1] for n in (56, 224, 768)]
    gemm = SkinnyGemm(7168, out_dtype=MOE_OUTPUTS)
    bound = gemm.bind(ws)
    for m in (1, 8, 64):
        x, _ = inputs(1, 7168, rows=m)
        wanted = launch(gemm, x, ws, MOE_OUTPUTS)
        outs = [torch.full_like(y, torch.nan) for y in wanted]
        graph = captured(lambda x=x, outs=outs: bound(x, outs))
        assert all(torch.isnan(out).all() for out in outs)
        graph.replay()
        for out, right in zip(outs, wanted, strict=True):
            assert torch.equal(bits(out), bits(right))


@pytest.mark.gpu
@pytest.mark.parametrize("k", [128, 33792])
@pytest.mark.parametrize(
    "change",
    [
        lambda x, out: (x, out[:-1]),
        lambda x, out: (x[:-1], out),
        lambda x, out: (x.float(), out),
        lambda x, out: (x, out.float()),
        lambda x, out: (x[:, :-8], out),
        lambda x, out: (x, out[:, :-1]),
        lambda x, out: (x.cpu(), out),
        lambda x, out: (torch.cat([x, x[:1]]), torch.cat([out, out[:1]])),
    ],
)
def test_what_does_not_fit_a_bound_weight_is_refused(
    change: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]], k: int
) -> None:
    """By the compiled function, and before rows are cut into launches; 64 rows are one
    launch at K = 128, and several at 33792. Nothing is written."""
    x, w = inputs(17, k)
    out = torch.full((64, 17), torch.nan, dtype=torch.bfloat16, device="cuda")
    x, out = change(x, out)
    with pytest.raises(ValueError, match=r"when calling|rows"):
        SkinnyGemm(k).bind(w)(x, out)
    torch.cuda.synchronize()
    assert torch.isnan(out).all()


def test_import_needs_no_kernel_compiler() -> None:
    """Without CuTe DSL the package, its checks and its reference still load."""
    code = (
        "import sys; sys.modules['cutlass'] = None\n"
        "from verify_kernels.skinny_gemm import SkinnyGemm, reference, tiling\n"
        "SkinnyGemm(7168)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
