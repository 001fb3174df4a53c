# SPDX-License-Identifier: Apache-2.0
"""The sequential head on the GPU: its forms, the checks, the launches."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from verify_kernels.common.checks import Argument, check_all
from verify_kernels.common.variant import Variant, cached, device_arch, fake

#: R that kernels are compiled for: that of published drafters and of the tiny ones.
RANKS = (256, 64, 32)
#: Requests of a step, and drafts of a request, at most.
MAX_REQUESTS = 64
MAX_DRAFTS = 15
#: CTAs of a launch at most.
MAX_CTAS = 192
_PARTS = (2, MAX_REQUESTS, MAX_CTAS, 2)
_DTYPES = {torch.bfloat16: False, torch.float32: True}


def variants() -> list[Variant]:
    """Every form: for each rank, bf16 or fp32 logits, without noise and with it."""
    return [
        _variant(rank, wide, noised)
        for rank in RANKS
        for wide in (False, True)
        for noised in (False, True)
    ]


def variant_name(rank: int, wide: bool, noised: bool) -> str:
    """The form's name within the op."""
    return f"r{rank}_{'fp32' if wide else 'bf16'}_{'noise' if noised else 'greedy'}"


@dataclass(frozen=True)
class MarkovSpace:
    """What a launch leaves for the next; one for all steps of one stream. 196 KB.

    Attributes:
        parts: int32 [2, 64, 192, 2], of odd and even steps each request's best of every
            CTA.
    """

    parts: Tensor

    @classmethod
    def allocate(cls, device: torch.device | str) -> MarkovSpace:
        """For 64 requests; full of what is above every logit, so a wrong read shows."""
        return cls(torch.full(_PARTS, 2**31 - 1, dtype=torch.int32, device=device))


@dataclass(frozen=True)
class Noise:
    """What draws the tokens, as vLLM's ``gumbel_sample`` takes it for drafts.

    Attributes:
        temperature: fp32 [states]; 0: greedy.
        seeds: int64 [states].
        states: int64 [B, N], the request's place in the above; below 0: none, greedy.
            Rows may lie apart.
        positions: int64 [B, N], of the token before the drawn one. Rows may lie apart.
        logits: as ``base``, [states, at least N, at least V], where the logits of a
            draft are left before temperature; None to keep none. With it the seed of
            draft i is ``seeds ^ (i << 32)``, as in vLLM 0.33.
    """

    temperature: Tensor
    seeds: Tensor
    states: Tensor
    positions: Tensor
    logits: Tensor | None = None


def markov_sample(
    base: Tensor,
    w1: Tensor,
    w2: Tensor,
    anchor: Tensor,
    tokens: Tensor,
    space: MarkovSpace,
    *,
    noise: Noise | None = None,
    pdl: bool = True,
) -> Tensor:
    """Draft N tokens a request, each from a bias by the one before; N + 1 launches.

    The equations are in `verify_kernels.markov.reference`. Products are summed in fp32;
    the bias is rounded to bf16, and its sum with a bf16 base too, as vLLM's loop does
    (with fp32 heads vLLM rounds neither, so a fp32 base is not vLLM's).
    The bits of a request depend on its own logits, anchor and noise alone. Among equal
    logits the lowest id is taken, and a NaN before all numbers.

    Args:
        base: bf16 or fp32 [B, N, V], B = 0 .. 64, N = 1 .. 15, V even; requests and
            drafts may lie apart.
        w1: bf16 [V1, R], R one of `RANKS`.
        w2: bf16 [V, R]; static, read before earlier kernels end.
        anchor: int32 [B], the last accepted tokens; one that is no row of ``w1`` is
            taken for its last.
        tokens: int64 [B, N], replaced; rows may lie apart.
        space: replaced.
        noise: None: greedy.
        pdl: launch without waiting for earlier kernels to end; the kernels wait.

    Returns:
        ``tokens``.

    Raises:
        ValueError: for a shape, dtype, layout or device that does not fit. Nothing is
            written then.
    """
    requests, drafts, vocab = _sizes(base)
    rank = _rank(w1)
    arguments: list[Argument] = [
        ("base", base, base.dtype, (requests, drafts, vocab), 2, 2 * base.itemsize),
        ("w1", w1, torch.bfloat16, (w1.shape[0], rank), 0, 16),
        ("w2", w2, torch.bfloat16, (vocab, rank), 0, 16),
        ("anchor", anchor, torch.int32, (requests,), 0, 4),
        ("tokens", tokens, torch.int64, (requests, drafts), 1, 8),
        ("space.parts", space.parts, torch.int32, _PARTS, 0, 16),
    ]
    drawn: tuple[Any, ...] = (None,) * 5
    if noise is not None:
        arguments += _noise(noise, base)
        # Without a wish for it no logit of what stands for it is written.
        kept = base if noise.logits is None else noise.logits
        drawn = (noise.temperature, noise.seeds, noise.states, noise.positions, kept)
    check_all(arguments, base.device, "base")
    if not requests:
        return tokens
    if base.device.type != "cuda":
        raise ValueError(
            f"base is on {base.device}; the kernels need a CUDA device: move the "
            "tensors there or use verify_kernels.markov.reference"
        )
    device = base.device.index
    name = variant_name(rank, _DTYPES[base.dtype], noise is not None)
    launch, ctas = _compiled(device, name), ctas_of(vocab, _processors(device))
    keeps = int(noise is not None and noise.logits is not None)
    for step in range(drafts + 1):
        launch(
            base,
            w1,
            w2,
            anchor,
            space.parts,
            tokens,
            *drawn,
            keeps,
            step,
            ctas if step else 0,
            ctas,
            int(pdl),
        )
    return tokens


def _sizes(base: Tensor) -> tuple[int, int, int]:
    """B, N and V, or ValueError."""
    if base.dtype not in _DTYPES:
        raise ValueError(f"base is {base.dtype}; it must be bfloat16 or float32")
    if (
        base.ndim != 3
        or base.shape[0] > MAX_REQUESTS
        or not 1 <= base.shape[1] <= MAX_DRAFTS
        or base.shape[2] % 2
        or not base.shape[2]
    ):
        raise ValueError(
            f"base is {tuple(base.shape)}; it must be [B, N, V], B at most "
            f"{MAX_REQUESTS}, N 1 to {MAX_DRAFTS}, V even"
        )
    return base.shape[0], base.shape[1], base.shape[2]


def _rank(w1: Tensor) -> int:
    if w1.ndim != 2 or w1.shape[1] not in RANKS or not w1.shape[0]:
        raise ValueError(
            f"w1 is {tuple(w1.shape)}; it must be [tokens, R] and kernels are compiled "
            f"for R {', '.join(map(str, RANKS))}"
        )
    return w1.shape[1]


def _noise(noise: Noise, base: Tensor) -> list[Argument]:
    """As `check_all` takes it; ValueError for what that does not see."""
    requests, drafts, vocab = base.shape
    states = noise.temperature.shape[:1]
    found: list[Argument] = [
        ("noise.temperature", noise.temperature, torch.float32, states, 0, 4),
        ("noise.seeds", noise.seeds, torch.int64, states, 0, 8),
        ("noise.states", noise.states, torch.int64, (requests, drafts), 1, 8),
        ("noise.positions", noise.positions, torch.int64, (requests, drafts), 1, 8),
    ]
    logits = noise.logits
    if logits is not None:
        if logits.ndim != 3 or logits.shape[1] < drafts or logits.shape[2] < vocab:
            raise ValueError(
                f"noise.logits is {tuple(logits.shape)}; it must be [states, {drafts} "
                f"or more, {vocab} or more]"
            )
        shape, align = (*states, *logits.shape[1:]), 2 * base.itemsize
        found.append(("noise.logits", logits, base.dtype, shape, 2, align))
    return found


def _variant(rank: int, wide: bool, noised: bool) -> Variant:
    from verify_kernels.markov.kernel import MarkovKernel

    return Variant(
        op="markov",
        name=variant_name(rank, wide, noised),
        kernel=MarkovKernel(rank, wide, noised),
        arguments=functools.partial(_arguments, rank, wide, noised),
        # Two CTAs an SM.
        max_registers=168 if noised else 128,
        max_shared_bytes=113 * 1024,
    )


def _arguments(rank: int, wide: bool, noised: bool) -> Sequence[Any]:
    import cutlass
    import cutlass.cute as cute
    import cutlass.cute.runtime as rt

    requests, drafts, vocab = (cute.sym_int() for _ in range(3))
    bf16, f32 = cutlass.BFloat16, cutlass.Float32
    i32, i64 = cutlass.Int32, cutlass.Int64
    kind, align = (f32, 8) if wide else (bf16, 4)
    states = cute.sym_int()
    drawn: tuple[Any, ...] = (None,) * 5
    if noised:
        drawn = (
            fake(f32, (states,), 0, 4),
            fake(i64, (states,), 0, 8),
            fake(i64, (requests, drafts), 1, 8),
            fake(i64, (requests, drafts), 1, 8),
            fake(kind, tuple(cute.sym_int() for _ in range(3)), 2, align),
        )
    return (
        fake(kind, (requests, drafts, vocab), 2, align),
        fake(bf16, (cute.sym_int(), rank), 0, 16),
        fake(bf16, (vocab, rank), 0, 16),
        fake(i32, (requests,), 0, 4),
        fake(i32, _PARTS, 0, 16),
        fake(i64, (requests, drafts), 1, 8),
        *drawn,
        *[cutlass.Int32(0)] * 5,
        rt.make_fake_stream(use_tvm_ffi_env_stream=True),
    )


@functools.cache
def _compiled(device: int, name: str) -> Callable[..., None]:
    variant = next(v for v in variants() if v.name == name)
    launch: Callable[..., None] = cached(variant, device_arch(device))
    return launch


def ctas_of(vocab: int, processors: int) -> int:
    """CTAs of a launch: one an SM, each with a tile of 16 rows of W2 at least."""
    return min(processors, MAX_CTAS, -(-vocab // 16))


@functools.cache
def _processors(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
