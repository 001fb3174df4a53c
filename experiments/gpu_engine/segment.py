# SPDX-License-Identifier: Apache-2.0
"""A kernel trace of decode steps, cut into steps and layers.

Steps are told apart by the spin kernel that runs before each (``recorder``), layers by
their AttnRes mixes: a K3 forward of L layers launches 2 L + 1 of them, two a layer and
one at the end, stock (`_attn_res_kernel`) and ours (`AttnResKernel`) alike, in a graph
replay as in eager mode. A kernel belongs to the layer in which it starts.

Times of a layer, in microseconds:

* span: from the start of its first mix to the start of the next layer's;
* mlp: from the end of its second mix, which makes the MLP's normed input, to the end of
  its last kernel; if the next mix adds the MLP's parts, without that;
* busy: the union of its kernels' intervals. A kernel that starts early as a
  programmatic dependent counts from that start, so layers may share time: spans add up
  exactly, busy times need not.

Of a kernel, its duration and what it adds: the time from the latest end of the kernels
that started before it to its own. A programmatic dependent that waits for most of its
duration adds little, and so does what runs beside something longer. What the kernels of
a layer add is its length, gaps included.
"""

from __future__ import annotations

import itertools
import json
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

SPIN = re.compile(r"spin_kernel")
MIX = re.compile(r"_attn_res_kernel|AttnResKernel")
#: What `ranks.aligner` launches after the spin.
ALIGN = re.compile(r"AllReduce_Sum_f64")
#: vLLM's all-reduce over peer memory, NCCL's kernels, FlashInfer's.
COLLECTIVE = re.compile(r"cross_device_reduce|nccl|all_?(reduce|gather)", re.I)
_KINDS = {"kernel": False, "gpu_memcpy": True, "gpu_memset": True}


@dataclass(frozen=True)
class Kernel:
    """One activity of the GPU; times in microseconds. ``copy``: a copy or a fill."""

    name: str
    start: float
    end: float
    stream: int = 0
    copy: bool = False


@dataclass(frozen=True)
class Step:
    """A step's kernels: before the first mix, by layer, and from the last mix on."""

    before: list[Kernel]
    layers: list[list[Kernel]]
    after: list[Kernel]

    @property
    def kernels(self) -> list[Kernel]:
        """All of them, in order of their start."""
        return [*self.before, *(k for layer in self.layers for k in layer), *self.after]

    def layer_span(self, index: int) -> float:
        """Microseconds from the layer's first mix to the next layer's."""
        follows = [*self.layers[index + 1 :], self.after][0]
        return follows[0].start - self.layers[index][0].start

    def mlp_us(self, index: int) -> float:
        """Microseconds from the end of the layer's second mix to that of its last
        kernel."""
        layer = self.layers[index]
        mix = [i for i, kernel in enumerate(layer) if MIX.search(kernel.name)][1]
        end = layer[mix].end
        return max([kernel.end for kernel in layer[mix + 1 :]], default=end) - end

    @property
    def forward_span(self) -> float:
        """Microseconds from the first mix to the end of the last."""
        return self.after[0].end - self.layers[0][0].start


class Share(NamedTuple):
    """A kernel's launches, duration and what it adds, in microseconds, a layer."""

    launches: float
    us: float
    added_us: float


@dataclass(frozen=True)
class LayerTime:
    """A kind of layer: medians over layers and steps, microseconds.

    ``kernels`` counts kernels without copies and fills; ``names`` gives each kernel's
    share of a layer, the one that adds most first.
    """

    layers: int
    span_us: float
    mlp_us: float
    busy_us: float
    kernels: float
    copies: float
    names: dict[str, Share]

    @property
    def collective_us(self) -> float:
        """Microseconds that collectives add to a layer, waiting for others included."""
        return sum(
            share.added_us
            for name, share in self.names.items()
            if COLLECTIVE.search(name)
        )


def read_trace(path: Path) -> list[Kernel]:
    """The GPU's activities in a chrome trace of torch.profiler, in order of start.

    Raises ValueError for a file that is none, or that has no kernels.
    """
    try:
        events = json.loads(path.read_text())["traceEvents"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not a chrome trace: {error}") from error
    kernels = [
        Kernel(
            str(event["name"]),
            float(event["ts"]),
            float(event["ts"]) + float(event["dur"]),
            int(event.get("args", {}).get("stream", 0)),
            _KINDS[event["cat"]],
        )
        for event in events
        if event.get("ph") == "X" and event.get("cat") in _KINDS
    ]
    if not kernels:
        raise ValueError(
            f"{path} has no GPU kernels: the profiler saw no device, or nothing ran"
        )
    return sorted(kernels, key=lambda kernel: kernel.start)


def split_steps(kernels: Sequence[Kernel]) -> list[list[Kernel]]:
    """Kernels in order of start, cut at each spin kernel, which is left out, as is
    what makes ranks wait for each other after it.

    What comes before the first spin belongs to no step and is left out too. Empty steps
    are dropped.
    """
    steps: list[list[Kernel]] = []
    for kernel in kernels:
        if SPIN.search(kernel.name):
            steps.append([])
        elif steps and not ALIGN.search(kernel.name):
            steps[-1].append(kernel)
    return [step for step in steps if step]


def split_layers(kernels: Sequence[Kernel], layers: int) -> Step:
    """One step's kernels by layer.

    Raises:
        ValueError: the step has not 2 ``layers`` + 1 mixes.
    """
    mixes = [i for i, kernel in enumerate(kernels) if MIX.search(kernel.name)]
    if len(mixes) != 2 * layers + 1:
        raise ValueError(
            f"{len(mixes)} AttnRes mixes in a step of {len(kernels)} kernels: a model "
            f"of {layers} layers has {2 * layers + 1}; the trace holds another model, "
            "or more or less than one forward between two spins"
        )
    starts = mixes[::2]
    return Step(
        list(kernels[: starts[0]]),
        [list(kernels[a:b]) for a, b in itertools.pairwise(starts)],
        list(kernels[starts[-1] :]),
    )


def busy_us(kernels: Sequence[Kernel]) -> float:
    """Microseconds in which at least one of the kernels ran."""
    total, reach = 0.0, float("-inf")
    for kernel in sorted(kernels, key=lambda kernel: kernel.start):
        if kernel.end > reach:
            total += kernel.end - max(kernel.start, reach)
            reach = kernel.end
    return total


def layer_times(steps: Sequence[Step], kinds: Sequence[str]) -> dict[str, LayerTime]:
    """Times by kind of layer.

    Args:
        steps: from :func:`split_layers`.
        kinds: the kind of each layer, by index.

    Raises:
        ValueError: no steps, or steps of another number of layers.
    """
    if not steps or any(len(step.layers) != len(kinds) for step in steps):
        raise ValueError(
            f"{len(steps)} steps, kinds for {len(kinds)} layers: need at least one "
            "step, all with as many layers as there are kinds"
        )
    found = {}
    for kind in dict.fromkeys(kinds):
        members = [i for i, other in enumerate(kinds) if other == kind]
        groups = [step.layers[i] for step in steps for i in members]
        spans = [step.layer_span(i) for step in steps for i in members]
        found[kind] = LayerTime(
            layers=len(members),
            span_us=statistics.median(spans),
            mlp_us=statistics.median(step.mlp_us(i) for step in steps for i in members),
            busy_us=statistics.median(map(busy_us, groups)),
            kernels=statistics.mean(
                sum(not kernel.copy for kernel in group) for group in groups
            ),
            copies=statistics.mean(
                sum(kernel.copy for kernel in group) for group in groups
            ),
            names=by_name(groups),
        )
    return found


def by_name(groups: Sequence[Sequence[Kernel]]) -> dict[str, Share]:
    """The share of each kernel in a group (kernels in order of their start), the one
    that adds most first."""
    shares: dict[str, Share] = {}
    for group in groups:
        reach = group[0].start if group else 0.0
        for kernel in group:
            added = max(0.0, kernel.end - reach)
            reach = max(reach, kernel.end)
            of = shares.get(kernel.name, Share(0.0, 0.0, 0.0))
            shares[kernel.name] = Share(
                of.launches + 1,
                of.us + kernel.end - kernel.start,
                of.added_us + added,
            )
    mean = {
        name: Share(*(value / len(groups) for value in share))
        for name, share in shares.items()
    }
    return dict(sorted(mean.items(), key=lambda item: -item[1].added_us))


def depth_us(
    steps: Sequence[Step], kinds: Sequence[str], wanted: Mapping[str, int]
) -> tuple[float, float]:
    """Microseconds of the traced layers, and of ``wanted`` layers by kind.

    The second is the sum over kinds of the median span times the wanted count.

    Raises:
        ValueError: a kind is wanted that the trace does not have.
    """
    times = layer_times(steps, kinds)
    missing = [kind for kind, n in wanted.items() if n and kind not in times]
    if missing:
        raise ValueError(f"the trace has no layer of kind {missing[0]!r} to scale")
    traced = statistics.median(
        sum(step.layer_span(i) for i in range(len(kinds))) for step in steps
    )
    return traced, sum(n * times[kind].span_us for kind, n in wanted.items() if n)
