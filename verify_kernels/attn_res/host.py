# SPDX-License-Identifier: Apache-2.0
"""Attention residuals on the GPU: the compiled forms, the checks, the launch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from verify_kernels.batch import MAX_ROWS
from verify_kernels.common.variant import Variant, cached, device_arch

MAX_BLOCKS = 8
#: H200: 4 CTAs of 128 threads on an SM hold a step of 64 rows at once, so 128 each.
MAX_REGISTERS = 128

#: (num_blocks, update, write, norm).
Form = tuple[int, str, bool, bool]
#: Every mix of Kimi K3 and of models with fewer of its layers: before attention and
#: before the MLP inside a block of layers; before attention where a block starts (the
#: embedding is block 0 and nothing was added to it); before the MLP there; the last,
#: whose norm vLLM applies on its own or not.
_MIXES: tuple[Form, ...] = (
    *((n, "add", False, True) for n in range(1, MAX_BLOCKS + 1)),
    *((n, "add", True, True) for n in range(1, MAX_BLOCKS)),
    (0, "keep", True, True),
    *((n, "restart", False, True) for n in range(1, MAX_BLOCKS + 1)),
    *((n, "add", False, False) for n in range(1, MAX_BLOCKS + 1)),
)
#: Hidden size -> its mixes: Kimi K3's, and those of a tiny model of at most two blocks.
FORMS: dict[int, tuple[Form, ...]] = {
    7168: _MIXES,
    512: tuple(form for form in _MIXES if form[0] <= 2),
}


def variant_name(
    hidden: int, num_blocks: int, update: str, write: bool, norm: bool
) -> str:
    """Name of a form; says all that its kernel is made from."""
    return (
        f"h{hidden}_n{num_blocks}_{update}"
        f"_{'write' if write else 'nowrite'}_{'norm' if norm else 'nonorm'}"
    )


def _arguments(hidden: int, update: str, norm: bool) -> Sequence[Any]:
    """Fake arguments: M, the row strides and the saved blocks are open."""
    import cutlass
    import cutlass.cute as cute
    import cutlass.cute.runtime as rt

    rows = cute.sym_int()

    def fake(*shape: Any) -> Any:
        stride: tuple[Any, ...] = (*(cute.sym_int64() for _ in shape[1:]), 1)
        return rt.make_fake_tensor(cutlass.BFloat16, shape, stride, assumed_align=16)

    def matrix() -> Any:
        return fake(rows, hidden)

    return (
        matrix(),
        None if update == "keep" else matrix(),
        matrix() if update == "add" else None,
        fake(rows, cute.sym_int(), hidden),
        fake(hidden),
        fake(hidden),
        fake(hidden) if norm else None,
        matrix(),
        cutlass.Float32(0.0),
        cutlass.Float32(0.0),
        cutlass.Int32(0),
        cutlass.Int32(0),
        rt.make_fake_stream(use_tvm_ffi_env_stream=True),
    )


def variants() -> list[Variant]:
    """The forms in `FORMS`. Programmatic launch is an argument, not a form."""
    from verify_kernels.attn_res.kernel import AttnResKernel

    return [
        Variant(
            op="attn_res",
            name=variant_name(hidden, *form),
            kernel=AttnResKernel(hidden, *form),
            arguments=functools.partial(_arguments, hidden, form[1], form[3]),
            max_registers=MAX_REGISTERS,
            max_shared_bytes=2048,
        )
        for hidden, forms in FORMS.items()
        for form in forms
    ]


@functools.cache
def _compiled(device: int, hidden: int, *form: Any) -> Callable[..., None]:
    name = variant_name(hidden, *form)
    variant = next(v for v in variants() if v.name == name)
    return cached(variant, device_arch(device))


def _check_rows(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    """Raise ValueError unless ``tensor`` is bf16 of ``shape`` in rows of 16 bytes."""
    if tensor.dtype != torch.bfloat16 or tuple(tensor.shape) != shape:
        raise ValueError(
            f"{name} is {tensor.dtype} {tuple(tensor.shape)}; it must be "
            f"torch.bfloat16 {shape}"
        )
    strides = tensor.stride()
    steps = [s for s, n in zip(strides[:-1], shape, strict=False) if n > 1]
    if strides[-1] != 1 or any(s % 8 for s in steps) or tensor.data_ptr() % 16:
        raise ValueError(
            f"{name} has strides {strides} and address {tensor.data_ptr():#x}; its "
            "last dimension must be contiguous and every row start at a multiple of "
            "16 bytes: pass a contiguous copy"
        )


def _form(
    hidden: int,
    delta: Tensor | None,
    num_blocks: int,
    write_block: int | None,
    restart: bool,
    norm: bool,
) -> Form:
    """The compiled form that a call asks for, or ValueError."""
    if not 0 <= num_blocks <= MAX_BLOCKS:
        raise ValueError(f"num_blocks is {num_blocks}; it must be 0 to {MAX_BLOCKS}")
    if write_block not in (None, num_blocks):
        raise ValueError(
            f"write_block is {write_block} with num_blocks {num_blocks}; blocks are "
            "saved in order, so it must be num_blocks or None"
        )
    if restart and delta is None:
        raise ValueError("restart is True without delta; give the new prefix as delta")
    update = "keep" if delta is None else "restart" if restart else "add"
    form = (num_blocks, update, write_block is not None, norm)
    if form not in FORMS[hidden]:
        raise ValueError(
            f"num_blocks {num_blocks}, update '{update}', write_block {write_block}, "
            f"output norm {'on' if norm else 'off'}: no model of hidden size {hidden} "
            "has such a mix and no kernel is compiled for it; "
            "verify_kernels.attn_res.reference computes it"
        )
    return form


def attn_res(
    prefix: Tensor,
    delta: Tensor | None,
    blocks: Tensor,
    norm_weight: Tensor,
    query_weight: Tensor,
    output_norm_weight: Tensor | None,
    out: Tensor | None = None,
    *,
    extra: Tensor | None = None,
    num_blocks: int,
    write_block: int | None = None,
    restart: bool = False,
    eps: float = 1e-5,
    output_norm_eps: float = 1e-5,
    pdl: bool = True,
) -> Tensor:
    """Update the prefix, save it as a block if asked, mix, and norm; one launch.

    The equations are in `verify_kernels.attn_res.reference`. The new prefix is rounded
    to bf16 before it is used, the rest is fp32 and rounded once. A row's bits depend
    on its own data only.

    Args:
        prefix: bf16 [M, H], M = 0 .. 64, H 7168 or 512; replaced by the new prefix in
            place.
        delta: bf16 [M, H], the sublayer's output before, or None to add nothing.
        blocks: bf16 [M, B, H], B >= num_blocks, and more to write; blocks
            0 .. num_blocks - 1 are read.
        norm_weight, query_weight: bf16 [H]; static, read before earlier kernels end.
        output_norm_weight: bf16 [H] of the RMSNorm that follows, static, or None to
            skip it.
        out: bf16 [M, H], or None to allocate it; on a decode path pass it. It may
            not share memory with another argument.
        extra: bf16 [M, H]: delta + extra, rounded to bf16, is what is added; or None.
        num_blocks: N, the saved blocks that are mixed.
        write_block: N to save the new prefix as block N, or None.
        restart: the new prefix is ``delta`` and not prefix + delta.
        eps, output_norm_eps: added to the mean squares.
        pdl: launch without waiting for earlier kernels to end; the kernel waits itself.

    Returns:
        ``out``, the hidden rows.

    Raises:
        ValueError: for a dtype, shape, stride or device that does not fit, more than 64
            rows, a hidden size that is not compiled, or a combination that a model of
            this size does not have (see `FORMS`). Nothing is written then.
    """
    norm = output_norm_weight is not None
    if prefix.dim() != 2 or prefix.shape[1] not in FORMS:
        raise ValueError(
            f"prefix is {tuple(prefix.shape)}; it must be [M, H] with H one of "
            f"{', '.join(map(str, FORMS))}, for which kernels are compiled"
        )
    rows, hidden = prefix.shape
    form = _form(hidden, delta, num_blocks, write_block, restart, norm)
    if rows > MAX_ROWS:
        raise ValueError(
            f"prefix has {rows} rows; at most {MAX_ROWS}: split the step or use "
            "another kernel for prefill"
        )
    matrix = (rows, hidden)
    _check_rows("prefix", prefix, matrix)
    if delta is not None:
        _check_rows("delta", delta, matrix)
    if extra is not None:
        if form[1] != "add":
            raise ValueError(
                f"extra is given with update '{form[1]}'; only where delta is added to "
                "the prefix may there be more: add it to delta yourself"
            )
        _check_rows("extra", extra, matrix)
    needed = num_blocks + form[2]
    if blocks.dim() != 3 or blocks.shape[1] < needed:
        raise ValueError(
            f"blocks is {tuple(blocks.shape)}; it must be [{rows}, B, {hidden}] with B "
            f"at least {needed}"
        )
    _check_rows("blocks", blocks, (rows, blocks.shape[1], hidden))
    _check_rows("norm_weight", norm_weight, (hidden,))
    _check_rows("query_weight", query_weight, (hidden,))
    if output_norm_weight is not None:
        _check_rows("output_norm_weight", output_norm_weight, (hidden,))
    if out is not None:
        _check_rows("out", out, matrix)
    device = prefix.device
    for name, tensor in (
        ("delta", delta),
        ("extra", extra),
        ("blocks", blocks),
        ("norm_weight", norm_weight),
        ("query_weight", query_weight),
        ("output_norm_weight", output_norm_weight),
        ("out", out),
    ):
        if tensor is not None and tensor.device != device:
            raise ValueError(
                f"{name} is on {tensor.device} and prefix on {device}; all tensors "
                "must be on one device"
            )
    if out is None:
        out = torch.empty_like(prefix, memory_format=torch.contiguous_format)
    if rows == 0:
        return out
    if device.type != "cuda":
        raise ValueError(
            f"prefix is on {device}; the kernel needs a CUDA device: move the tensors "
            "there or use verify_kernels.attn_res.reference"
        )
    more = extra
    if extra is None and form[1] == "add":
        more = delta  # Not read.
    _compiled(device.index, hidden, *form)(
        prefix,
        delta,
        more,
        blocks,
        norm_weight,
        query_weight,
        output_norm_weight,
        out,
        eps,
        output_norm_eps,
        int(extra is not None),
        int(pdl),
    )
    return out
