# SPDX-License-Identifier: Apache-2.0
"""What else goes on on a GPU, and what has gone on before: no bit may depend on it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

#: Words that earlier kernels may have left in shared memory. To bf16 and fp32 all are
#: NaN; to integers they are -1, the largest (the NaN that tensor cores make, which lies
#: there after a product with rows that do not exist), and another below 0.
STALE = (0xFFFFFFFF, 0x7FFFFFFF, 0xFF8FFFC5)
_NOISE = 4096


@contextmanager
def neighbours(
    device: torch.device | str = "cuda",
) -> Iterator[Callable[[], object]]:
    """A function to call between launches; it does nothing on a CPU.

    Each call queues a matrix product on another stream, which takes SMs for 0.2 ms, and
    fills the shared memory of every SM with the next word of `STALE` on this one.
    """
    device = torch.device(device)
    if device.type != "cuda":
        yield lambda: None
        return
    from experiments.bench import stale_kernel
    from verify_kernels.common.variant import device_arch

    index = torch.cuda.current_device() if device.index is None else device.index
    ctas = torch.cuda.get_device_properties(index).multi_processor_count
    leave = stale_kernel.compiled(device_arch(index))
    stream = torch.cuda.Stream(device)
    noise = torch.randn(_NOISE, _NOISE, device=device, dtype=torch.bfloat16)
    sink = torch.empty_like(noise)
    # As the signed numbers that they are to a kernel.
    signed = [word - (word >> 31 << 32) for word in STALE]
    words = itertools.cycle(torch.tensor(signed, dtype=torch.int32).to(device).split(1))
    torch.cuda.synchronize(device)

    def disturb() -> None:
        with torch.cuda.stream(stream):
            torch.mm(noise, noise, out=sink)
        leave(next(words), ctas)

    yield disturb
    torch.cuda.synchronize(device)
