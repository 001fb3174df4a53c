# SPDX-License-Identifier: Apache-2.0
"""wgmma with A in registers gives the bits of a chain of mma.sync, so one op may mix
both and no row depends on which of them multiplied it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.verify_kernels.machine import GlobalMemory, launch, tensor_argument
from verify_kernels.audit.opcodes import known
from verify_kernels.audit.ptx import parse
from verify_kernels.audit.sass import NoDisassembler, disassemble
from verify_kernels.audit.slots import check_slots

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

TILES = (1, 2, 3, 8)
KINDS = ("random", "outliers", "cancelling", "wide")
K, ROWS = 256, 64


def inputs(kind: str, tokens: int, seed: int, device: str) -> tuple[Tensor, Tensor]:
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device)

    x, w = normal(tokens, K), normal(ROWS, K)
    if kind == "outliers":
        x, w = x * torch.exp(3 * normal(tokens, K)), w * torch.exp(3 * normal(ROWS, K))
    elif kind == "cancelling":
        # The second half undoes the first but for one part in 100.
        x[:, K // 2 :] = -x[:, : K // 2]
        w[:, K // 2 :] = w[:, : K // 2] * (1 + 1e-2 * normal(ROWS, K // 2))
    elif kind == "wide":
        x = x * torch.exp2((10 * normal(tokens, K)).round())
    return x.bfloat16(), w.bfloat16()


def check(x: Tensor, w: Tensor, by_wgmma: Tensor, by_mma: Tensor) -> None:
    exact, size = x.double() @ w.double().T, x.double().abs() @ w.double().abs().T
    # Products are exact; 16 steps of 17 addends, each cut somewhere below 2^-24.
    assert bool(((by_mma - exact).abs() <= 2.0**-16 * size).all())
    assert torch.equal(by_wgmma.view(torch.int32), by_mma.view(torch.int32))


@pytest.mark.gpu
@pytest.mark.parametrize("tiles", TILES)
def test_wgmma_gives_the_bits_of_a_chain_of_mma_sync(tiles: int) -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("wgmma is an instruction of sm_90a")
    from tests.verify_kernels.wgmma_kernel import compiled

    kernel = compiled(tiles)
    for kind in KINDS:
        for seed in range(50):
            x, w = inputs(kind, 8 * tiles, seed, "cuda")
            sums = x.new_full((2, 8 * tiles, ROWS), torch.nan, dtype=torch.float32)
            kernel(x, w, *sums)
            check(x, w, *sums)


@pytest.mark.parametrize("tiles", TILES)
def test_the_compiled_chains_agree_on_the_machine_and_pass_the_audit(
    tiles: int, tmp_path: Path
) -> None:
    from tests.verify_kernels import wgmma_kernel

    assert (wgmma_kernel.K, wgmma_kernel.ROWS) == (K, ROWS)
    wgmma_kernel.compiled(tiles, tmp_path)
    (path,) = tmp_path.glob("*.ptx")
    ptx = path.read_text()
    (entry,) = parse(ptx)
    assert all(map(known, entry.instructions))
    (cubin,) = tmp_path.glob("*.cubin")
    try:
        code = disassemble(cubin.read_bytes())
    except NoDisassembler:
        code = None
    if code is not None:
        assert any(ins.head == "HGMMA" for ins in code.instructions)
        assert check_slots(code) == []
    for seed, kind in enumerate(KINDS):
        x, w = inputs(kind, 8 * tiles, seed, "cpu")
        sums = torch.full((2, 8 * tiles, ROWS), torch.nan)
        memory = GlobalMemory()
        named = {"x": x, "w": w, "by_wgmma": sums[0], "by_mma": sums[1]}
        parameters = [
            tensor_argument(memory.add(t, name, writable=name.startswith("by")))
            for name, t in named.items()
        ]
        launch(
            ptx,
            memory,
            parameters,
            grid=(1, 1, 1),
            block=(wgmma_kernel.THREADS, 1, 1),
            shared_bytes=8 * tiles * K * 2,
            pdl=False,
            seed=seed,
            races=True,
        )
        check(x, w, *sums)
