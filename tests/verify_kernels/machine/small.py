# SPDX-License-Identifier: Apache-2.0
"""Small kernels, written as PTX around a body."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tests.verify_kernels.machine import GlobalMemory, launch, tensor_argument

#: The parameters of every kernel here are addresses, p0, p1, ..
HEAD = """
.version 8.6
.target sm_90a
.address_size 64
.extern .shared .align 128 .b8 smem[];
.visible .entry kernel({parameters})
{{
.reg .pred %p<8>;
.reg .b16 %h<8>;
.reg .b32 %r<40>;
.reg .b64 %d<24>;
mov.u32 %r0, %tid.x;
mul.wide.u32 %d8, %r0, 8;
"""
WAIT = """
{{
WAIT:
mbarrier.try_wait.parity.shared.b64 %p7, [{at}], {parity};
@%p7 bra DONE;
bra WAIT;
DONE:
}}
"""


def wait(at: str, parity: int) -> str:
    return WAIT.format(at=at, parity=parity)


def run(
    body: str,
    tensors: Sequence[Tensor],
    *,
    threads: int = 32,
    cluster: int = 1,
    seed: int = 0,
    pdl: bool = False,
    races: bool = False,
    shared_bytes: int = 1024,
) -> None:
    """One cluster on ``tensors``, all of them written by earlier kernels; tensor i is
    in %d<i> and, plus 8 bytes a thread, in %d<10+i>."""
    parameters = ", ".join(f".param .b64 p{i}" for i in range(len(tensors)))
    loads = "".join(
        f"ld.param.b64 %d{i}, [p{i}]; add.s64 %d{10 + i}, %d{i}, %d8;\n"
        for i in range(len(tensors))
    )
    memory = GlobalMemory()
    addresses = [
        tensor_argument(memory.add(t, f"t{i}", dynamic=True, writable=True))
        for i, t in enumerate(tensors)
    ]
    launch(
        HEAD.format(parameters=parameters) + loads + body + "\nret;\n}\n",
        memory,
        addresses,
        grid=(cluster, 1, 1),
        block=(threads, 1, 1),
        cluster=(cluster, 1, 1),
        shared_bytes=shared_bytes,
        seed=seed,
        pdl=pdl,
        races=races,
    )


def words(count: int = 32) -> Tensor:
    """Results, a 64-bit word a thread."""
    return torch.full((count,), -1, dtype=torch.int64)
