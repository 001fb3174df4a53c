# SPDX-License-Identifier: Apache-2.0
"""A search for GEMM kernels in the chain of a layer, where they are used.

``python -m experiments.layer_tune [--tp 16] [--rows 1] [--order front]`` takes the
projections of a KDA layer one after the other, tries for each the kernels of the table
that serve its K and outputs at a similar N, in the layer of `experiments.layer_chain`,
and keeps what makes the layer shorter. ``experiments.bench.tune`` times a kernel behind
itself, where the next launch's weights come while this one ends; behind a short kernel
one that is slow to its first result loses what it wins there (o_proj of one row at TP
16: 3.4 us of 82, H200, 2026-12-01). It prints what it found; `choices.json` is changed
by hand.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import torch

from experiments.bench import timing
from experiments.bench.candidate import Key, Timing
from experiments.bench.experts_data import ExpertsShape, Weights
from experiments.bench.record import gpu_state
from experiments.bench.shapes import integers
from experiments.layer_chain import CHOICES, LAYERS, ORDERS, Bound, Chain, step_of
from verify_kernels.skinny_gemm import choice
from verify_kernels.skinny_gemm.choice import Choice, Outputs
from verify_kernels.skinny_gemm.direct_tiling import DirectTiling

#: Launches of a layer by order, the longest first.
SLOTS = {
    "front": ("front", "latent_up", "in_proj", "o_proj", "shared_down"),
    "apart": (
        "latent_down", "latent_up", "in_proj", "router", "o_proj", "shared_gate_up",
        "shared_down",
    ),
}  # fmt: skip
#: N of the table that stands for another, at most this much more or less.
_NEAR = 2.3
#: Candidates that are replayed in turn.
_AT_ONCE = 8
#: Of a layer's time; less is noise.
_WORTH = 0.004

#: (k, n, outputs) of a launch.
Launch = tuple[int, int, Outputs]


def outputs_of(slot: str) -> Outputs:
    """Output types of a slot's matrices."""
    kinds = {"router": ("fp32",), "front": ("fp32", "bf16", "bf16")}
    return kinds.get(slot, ("bf16",))


def candidates(launch: Launch, rows: int) -> list[Choice]:
    """Kernels of the table that may serve a launch at M = ``rows``, each once, with the
    grids that suit it."""
    k, n, outputs = launch
    found: dict[Choice, None] = {}
    for entry in choice.table():
        cut = entry.choice.cut
        if (
            (entry.k, entry.outputs) != (k, outputs)
            or choice.most_rows(cut) < rows
            or not rows <= entry.rows <= max(4, 2 * rows)
            or not n / _NEAR <= entry.n <= n * _NEAR
        ):
            continue
        runs = {entry.choice.run}
        if isinstance(cut, DirectTiling):
            # One, two or four CTAs an SM of an H200, or as few as hold it.
            even = {-(-n // (132 * share)) for share in (1, 2, 4)}
            runs = {r for r in runs | even | {cut.rows} if 0 < r <= cut.rows}
        found |= dict.fromkeys(Choice(cut, run) for run in sorted(runs))
    return list(found)


@contextlib.contextmanager
def served(changes: Mapping[Launch, Choice]) -> Iterator[None]:
    """The table with other choices for some launches, in both launch modes."""
    shipped = choice.choices

    def found(k: int, n: int, outputs: Outputs, pdl: bool) -> dict[int, Choice]:
        own = changes.get((k, n, outputs))
        if own is None:
            return shipped(k, n, outputs, pdl)
        return {choice.most_rows(own.cut): own}

    with mock.patch.object(choice, "choices", found):
        yield


def launch_of(chain: Chain, slot: str) -> Launch:
    """What `served` calls the launch of a slot."""
    parts = chain.parts(slot)
    return parts[0].shape[1], sum(len(part) for part in parts), outputs_of(slot)


def times(
    chain: Chain,
    order: str,
    tried: Mapping[str, Bound],
    timer: timing.CudaTimer,
    floor_us: float,
) -> dict[str, float]:
    """Microseconds of a layer with each; what cannot be captured is left out."""

    def launch(bound: Bound) -> Callable[[int], Any]:
        return lambda turn: chain.layer(order, turn, bound)

    launches: dict[Key, Callable[[int], Any]] = {
        (name, "pdl"): launch(bound) for name, bound in tried.items()
    }
    found = timer.measure(launches, LAYERS * CHOICES, floor_us)
    return {
        name: taken.us
        for (name, _), taken in found.items()
        if isinstance(taken, Timing)
    }


def search(
    chain: Chain, order: str, rows: int, timer: timing.CudaTimer, floor_us: float
) -> dict[Launch, Choice]:
    """What to serve otherwise; each slot with what was kept of those before it."""
    kept: dict[Launch, Choice] = {}
    for slot in SLOTS[order]:
        launch = launch_of(chain, slot)
        listed = candidates(launch, rows)
        gains: list[tuple[float, float, Choice]] = []
        for first in range(0, len(listed), _AT_ONCE):
            part = listed[first : first + _AT_ONCE]
            tried: dict[str, Bound] = {}
            for name, change in [("", {}), *((c.name, {launch: c}) for c in part)]:
                with served(kept | change):
                    tried[name] = chain.bind()
            found = times(chain, order, tried, timer, floor_us)
            now = found.pop("", None)
            gains += [
                (found[c.name] / now - 1, found[c.name], c)
                for c in part
                if now is not None and c.name in found
            ]
        gains.sort(key=lambda gain: gain[0])
        said = "; ".join(f"{g:+.1%} {us:.1f} {c.name}" for g, us, c in gains[:3])
        if gains and gains[0][0] < -_WORTH:
            kept[launch] = gains[0][2]
            said += "  <- kept"
        print(f"  {slot} {launch[1]} x {launch[0]}: {len(listed)} tried: {said}")
    return kept


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.layer_tune",
        description="Search for GEMM kernels in the chain of a KDA layer with MoE.",
    )
    add = parser.add_argument
    add("--tp", type=integers, default=(16,), help="shares of TP (default 16)")
    add("--rows", type=integers, default=(1,), help="M (default 1)")
    add("--order", choices=[*ORDERS], default="front", help="of the MoE's launches")
    add("--rounds", type=int, default=7, help="replays a time is the median of")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """The command; see the module docstring."""
    parser = _parser()
    options = parser.parse_args(argv)
    try:
        steps = [(rows, step_of(rows)) for rows in options.rows]
    except ValueError as error:
        parser.error(str(error))
    if not torch.cuda.is_available():
        parser.error("there is no CUDA device; this times kernels on one")
    device = torch.device("cuda", torch.cuda.current_device())
    timer = timing.CudaTimer(options.rounds)
    print(f"{torch.cuda.get_device_name(device)}; {gpu_state()}")
    for tp in options.tp:
        bank = Weights.draw(ExpertsShape.of(tp), device).bank
        for rows, (requests, width) in steps:
            chain = Chain(tp, requests, width, bank, device)
            floor = timing.floor_us(chain.bytes)
            print(f"TP {tp}, {rows} rows, {options.order}:", flush=True)
            kept = search(chain, options.order, rows, timer, floor)
            both = {"before": chain.bind()}
            with served(kept):
                both["tuned"] = chain.bind()
            found = times(chain, options.order, both, timer, floor)
            print(f"  layer: {found.get('before')} us before, {found.get('tuned')} now")
    return 0


if __name__ == "__main__":
    sys.exit(main())
