# SPDX-License-Identifier: Apache-2.0
"""A chain of K3's KDA layers with MoE from this package's kernels alone, no engine.

``python -m experiments.layer_chain [--tp 16] [--rows 1,2,4,8] [--timeline]
[--out FILE.jsonl]`` captures layers of one rank's share, one after the other, in a CUDA
graph, with weights, states and experts' choices that are not in the L2, and prints the
time of a layer for both orders of its MoE (`verify_kernels.layer.LatentMoe`): "front",
one launch for all that reads its input, and "apart", the two streams. Both must give
the same bits. ``--timeline`` prints when each launch of a layer starts and ends.

What it lacks of an engine's layer: collectives, and the shared expert's SiTU, for which
an elementwise product stands. Within that it takes an engine's time: 82.2 us where
`experiments.step_times` had 82.2 (TP 16, one row, two streams; H200, 2026-12-01).
Exit code 1 if the bits of the orders differ.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from experiments import results
from experiments.bench import kda_ways, timing
from experiments.bench.candidate import OURS, Key, Timing
from experiments.bench.experts_data import (
    INDEPENDENT,
    ExpertsShape,
    Step,
    Weights,
)
from experiments.bench.kda_data import SNAPSHOT, KdaData, KdaShape
from experiments.bench.record import gpu_state, versions
from experiments.bench.shapes import integers, projections
from experiments.byte_model import EXPERTS, HIDDEN, LATENT, TOP_K
from verify_kernels.attn_res import attn_res
from verify_kernels.batch import MAX_ROWS, MAX_WIDTH
from verify_kernels.layer import LatentMoe, MoeWeights, Product, Side
from verify_kernels.moe import (
    ExpertBank,
    ExpertPlan,
    ExpertWorkspace,
    moe_experts,
    moe_route,
)

#: Layers with weights of their own, and choices of experts a layer.
LAYERS, CHOICES = 4, 3
#: Saved blocks that a mix reads; K3 has 0 to 7.
BLOCKS = 4
#: M up to which an order of the MoE has one front launch.
ORDERS = {"apart": 0, "front": MAX_ROWS}
FRONT = ("router", "latent_down", "shared_gate_up")
_PARTS = ("in_proj", "o_proj", *FRONT, "shared_down", "latent_up")
NOTE = "no engine, no collectives, a product in place of SiTU"


@dataclass(frozen=True)
class Bound:
    """Products with each layer's weights; ``moes`` by order."""

    in_proj: list[Product]
    o_proj: list[Product]
    moes: dict[str, list[LatentMoe]]


class Chain:
    """Layers of one rank's share and a step's rows.

    Args:
        tp: tensor-parallel size.
        requests, width: of the step; M is their product.
        bank: the routed experts, of all layers.
        device: a CUDA device.
    """

    def __init__(
        self, tp: int, requests: int, width: int, bank: ExpertBank, device: torch.device
    ) -> None:
        self._device = device
        self._generator = torch.Generator(device).manual_seed(tp)
        rows = requests * width
        sizes = {p.name: (p.n, p.k) for p in projections(tp)}
        # Replicated in vLLM.
        sizes |= {
            "router": (EXPERTS, HIDDEN),
            "latent_down": (LATENT, HIDDEN),
            "latent_up": (HIDDEN, LATENT),
        }
        self._weights = [
            {name: self._normal(n, k) * 0.02 for name, (n, k) in sizes.items()
             if name in _PARTS}
            for _ in range(LAYERS)
        ]  # fmt: skip
        self.bytes = sum(w.numel() * 2 for w in self._weights[0].values())
        self._mixes = [
            [[self._normal(HIDDEN) for _ in range(3)] for _ in range(2)]
            for _ in range(LAYERS)
        ]
        kda = KdaData(KdaShape.of(tp, requests, width), LAYERS, device)
        kda.reset(0.0)
        kda.packed.copy_(kda.new_rows().nan_to_num())
        self._kda = kda_ways.ours(SNAPSHOT, ("pdl",)).ways[0].make(kda)
        self._core = self._normal(rows, sizes["o_proj"][1])
        self._prefix, self._mixed = (self._normal(rows, HIDDEN) for _ in range(2))
        self._blocks = self._normal(rows, BLOCKS, HIDDEN)
        self._routed = (self._normal(rows, HIDDEN), self._normal(rows, HIDDEN))
        shape = ExpertsShape.of(tp)
        self._step = Step.draw(shape, INDEPENDENT, rows, LAYERS * CHOICES, device)
        self.distinct = self._step.distinct()
        self.bytes += shape.live_bytes(self.distinct)
        self._bank = bank
        self._space = ExpertWorkspace.allocate(LATENT, bank.inner, TOP_K, device)
        self._plan = ExpertPlan.allocate(EXPERTS, TOP_K, device)
        self._shares = torch.empty_like(self._step.shares[0])
        self._ids = torch.empty_like(self._step.ids[0])
        self._norm = self._normal(LATENT)
        self._turn = 0
        self._side = torch.cuda.Stream(device)
        self._bound = self.bind()

    def bind(self) -> Bound:
        """The products by the kernels that the table has now."""
        return Bound(
            [Product(w["in_proj"], pdl=True) for w in self._weights],
            [Product(w["o_proj"], pdl=True) for w in self._weights],
            {
                name: [self._moe(w, front) for w in self._weights]
                for name, front in ORDERS.items()
            },
        )

    def parts(self, name: str) -> list[Tensor]:
        """The weights of the first layer that one launch reads: those of a projection,
        or of the "front"."""
        names = FRONT if name == "front" else (name,)
        return [self._weights[0][each] for each in names]

    def _normal(self, *size: int) -> Tensor:
        empty = torch.empty(*size, dtype=torch.bfloat16, device=self._device)
        return empty.normal_(generator=self._generator)

    def _moe(self, w: dict[str, Tensor], front: int) -> LatentMoe:
        weights = MoeWeights(
            router=w["router"],
            down=w["latent_down"],
            gate_up=w["shared_gate_up"],
            shared_down=w["shared_down"],
            up=w["latent_up"],
        )
        return LatentMoe(
            weights,
            activation=halves,
            routed=self._experts,
            side=Side(self._side),
            pdl=True,
            front_rows=front,
        )

    def _experts(
        self, latent: Tensor, logits: Tensor, ready: Callable[[], None]
    ) -> Tensor:
        """Routed by the step's own logits: a choice of experts for every turn."""
        step = self._step
        moe_route(
            step.logits[self._turn], step.bias, TOP_K, self._plan, self._shares,
            self._ids,
        )  # fmt: skip
        ready()
        return moe_experts(
            latent, self._shares, self._plan, self._bank, self._space,
            norm_weight=self._norm,
        )  # fmt: skip

    def _mix(self, layer: int, number: int, delta: Tensor, extra: Any) -> Tensor:
        return attn_res(
            self._prefix, delta, self._blocks, *self._mixes[layer][number],
            extra=extra, num_blocks=BLOCKS,
        )  # fmt: skip

    def layer(
        self, order: str, turn: int, bound: Bound | None = None
    ) -> tuple[Tensor, Tensor]:
        """Launch a layer: the weights and experts of turn ``turn``, on the rows that
        the layer before left; with the products of ``bound`` or its own."""
        bound = bound or self._bound
        layer, self._turn = turn % LAYERS, turn
        hidden = self._mix(layer, 0, *self._routed)
        bound.in_proj[layer](hidden)
        # On rows of its own: those of random layers would not stay finite.
        self._kda(layer)
        hidden = self._mix(layer, 1, bound.o_proj[layer](self._core), None)
        self._routed = bound.moes[order][layer](hidden)
        return self._routed

    def fresh(self, order: str) -> Tensor:
        """Routed and shared rows of the first layer's MoE from fixed rows."""
        self._turn = 0
        return torch.cat(self._bound.moes[order][0](self._mixed)).clone()


def halves(gate_up: Tensor) -> Tensor:
    """Stands for SiTU: as many bytes, one launch."""
    gate, up = gate_up.chunk(2, dim=-1)
    return gate * up


def timeline(chain: Chain, order: str) -> str:
    """Start, end and what it adds of every launch of a layer in the middle, in
    microseconds from the layer's first."""
    from torch.profiler import ProfilerActivity, profile

    from experiments.gpu_engine.segment import MIX, read_trace

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for turn in range(LAYERS):
            chain.layer(order, turn)
    graph.replay()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        graph.replay()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        kernels = read_trace(path)
    mixes = [i for i, kernel in enumerate(kernels) if MIX.search(kernel.name)]
    first, last = mixes[2], mixes[4]
    begin = reach = kernels[first].start
    lines = []
    for kernel in kernels[first : last + 1]:
        added, reach = max(0.0, kernel.end - reach), max(reach, kernel.end)
        name = kernel.name.removeprefix("kernel_cutlass_kernel_verify_kernels")
        lines.append(
            f"  {kernel.start - begin:8.2f} {kernel.end - begin:8.2f} "
            f"{added:6.2f}  {name.split('_object_at')[0][-40:]}"
        )
    return "\n".join(lines)


def measure(
    chain: Chain, timer: timing.CudaTimer, floor_us: float
) -> dict[str, Timing]:
    """The time of a layer in each order.

    Raises:
        RuntimeError: an order cannot be captured.
    """

    def launch(order: str) -> Callable[[int], Any]:
        return lambda turn: chain.layer(order, turn)

    launches: dict[Key, Callable[[int], Any]] = {
        (order, "pdl"): launch(order) for order in ORDERS
    }
    times = {}
    found = timer.measure(launches, LAYERS * CHOICES, floor_us)
    for (order, _), taken in found.items():
        if isinstance(taken, str):
            raise RuntimeError(f"{order}: {taken}")
        times[order] = taken
    return times


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.layer_chain",
        description="Time K3's KDA layers with MoE, without an engine, on this GPU.",
    )
    add = parser.add_argument
    add("--tp", type=integers, default=(16,), help="shares of TP (default 16)")
    add("--rows", type=integers, default=(1, 2, 4, 8), help="M (default 1,2,4,8)")
    add("--timeline", action="store_true", help="print every launch of a layer")
    add("--rounds", type=int, default=9, help="replays a time is the median of")
    add("--out", type=Path, help="results file to append lines to")
    add("--commit", help="commit to record where git cannot tell")
    return parser


def step_of(rows: int) -> tuple[int, int]:
    """Requests and their width: one request up to `MAX_WIDTH` rows.

    Raises:
        ValueError: for rows that are no step.
    """
    if not 0 < rows <= MAX_ROWS or (rows > MAX_WIDTH and rows % MAX_WIDTH):
        raise ValueError(
            f"rows={rows}: use 1 to {MAX_WIDTH}, or a multiple of {MAX_WIDTH} up to "
            f"{MAX_ROWS}"
        )
    width = min(rows, MAX_WIDTH)
    return rows // width, width


def main(argv: Sequence[str] | None = None) -> int:
    """The command; see the module docstring."""
    parser = _parser()
    options = parser.parse_args(argv)
    try:
        steps = [step_of(rows) for rows in options.rows]
    except ValueError as error:
        parser.error(str(error))
    if not torch.cuda.is_available():
        parser.error("there is no CUDA device; this times kernels on one")
    device = torch.device("cuda", torch.cuda.current_device())
    recorder = results.Recorder(versions=versions(), commit=options.commit)
    timer = timing.CudaTimer(options.rounds)
    gpu = torch.cuda.get_device_name(device)
    print(f"{gpu}; {gpu_state()}\nKDA layer with MoE, us a layer, {BLOCKS} blocks")
    right = True
    for tp in options.tp:
        bank = Weights.draw(ExpertsShape.of(tp), device).bank
        for requests, width in steps:
            chain = Chain(tp, requests, width, bank, device)
            same = torch.equal(*(chain.fresh(order) for order in ORDERS))
            right &= same
            floor = timing.floor_us(chain.bytes)
            times = measure(chain, timer, floor)
            shape = {
                "kind": "kda",
                "tp": tp,
                "requests": requests,
                "rows": requests * width,
                "blocks": BLOCKS,
                "distinct": chain.distinct,
                "floor_us": round(floor, 2),
            }
            for order, taken in times.items():
                recorder.add(
                    "layer_gpu_us",
                    taken.us,
                    label="measured",
                    variant=f"{OURS} {order}",
                    shape=shape,
                    gpu=gpu,
                    unit="us",
                    spread=taken.spread,
                    gates={"orders_agree": same},
                    note=NOTE,
                )
            said = ", ".join(f"{order} {t.us:.1f}" for order, t in times.items())
            print(
                f"TP {tp:2d}, {requests} x {width} rows, {chain.distinct} experts: "
                f"{said}; floor {floor:.1f}" + ("" if same else "; BITS DIFFER"),
                flush=True,
            )
            if options.timeline:
                for order in ORDERS:
                    print(f" {order}: start, end, adds\n{timeline(chain, order)}")
    if options.out:
        results.append(options.out, recorder.lines)
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
