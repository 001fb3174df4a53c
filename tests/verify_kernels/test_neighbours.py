# SPDX-License-Identifier: Apache-2.0
"""What tests and benches leave in shared memory before they launch a kernel."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from experiments.bench.neighbours import STALE, neighbours

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

#: To find a word before another process's turn.
ATTEMPTS = 50


def test_words_are_nan_and_one_is_the_largest_integer() -> None:
    words = np.array(STALE, np.uint32)
    halves = torch.from_numpy(words.view(np.int16)).view(torch.bfloat16)
    assert torch.isnan(halves).all() and np.isnan(words.view(np.float32)).all()
    assert words.view(np.int32).max() == 2**31 - 1


def test_nothing_is_disturbed_on_a_cpu() -> None:
    with neighbours("cpu") as disturb:
        assert disturb() is None


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a", "sm_103a"])
def test_stores_that_nothing_reads_are_kept(arch: str) -> None:
    """And all of them lie in the CTA's shared memory."""
    import cutlass.cute.runtime as rt
    from cutlass import Int32

    from experiments.bench import stale_kernel
    from tests.verify_kernels.machine import (
        GlobalMemory,
        kernels,
        launch,
        tensor_argument,
    )
    from verify_kernels.common.variant import Variant

    word = rt.make_fake_compact_tensor(Int32, (1,), assumed_align=4)
    stream = rt.make_fake_stream(use_tvm_ffi_env_stream=True)
    call = (word, Int32(1), stream)
    variant = Variant("bench", "stale", stale_kernel.StaleKernel(), lambda: call)
    ptx = kernels.ptx_of(variant, arch)
    assert ptx.count("st.shared.v4.b32") == 1
    memory = GlobalMemory()
    told = memory.add(torch.tensor([5], dtype=torch.int32), "word", dynamic=False)
    launch(
        ptx,
        memory,
        [tensor_argument(told)],
        grid=(1, 1, 1),
        block=(stale_kernel.THREADS, 1, 1),
        shared_bytes=stale_kernel.BYTES,
    )


@pytest.mark.gpu
def test_kernels_find_the_word_in_all_of_shared_memory() -> None:
    from experiments.bench import stale_kernel
    from tests.verify_kernels import shared_kernel
    from verify_kernels.common.variant import device_arch

    arch = device_arch(torch.cuda.current_device())
    leave, tell = stale_kernel.compiled(arch), shared_kernel.compiled(arch)
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    found = torch.zeros(sms, shared_kernel.BYTES // 4, dtype=torch.int32, device="cuda")

    def all_found(word: int) -> bool:
        leave(torch.tensor([word], dtype=torch.int32, device="cuda"), sms)
        tell(found)
        return bool((found == word).all())

    # Another process's turn between the two launches seems to clear shared memory: in
    # one of two runs beside other processes every word was 0 (H200, 2026-11-30).
    for word in (5, 2**31 - 1, -1):
        assert any(all_found(word) for _ in range(ATTEMPTS)), word
