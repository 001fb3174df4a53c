# SPDX-License-Identifier: Apache-2.0
"""DSpark's sequential head against vLLM's loop, at the sizes of K3's drafter.

A point is a step of so many requests, greedy or with noise that half of them have a
temperature for. Every launch has tables and logits of its own, rotated past the L2. The
floor counts, for each draft, W2 and base once and the kept logits.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from experiments.bench import gates, peers, timing
from experiments.bench.candidate import OURS, Mode, Point, reason, spell
from experiments.bench.core import Settings
from experiments.bench.neighbours import neighbours
from experiments.bench.ways import Run, Way, Ways, trace_ways
from experiments.byte_model import MARKOV_RANK, VOCAB
from verify_kernels.markov import MarkovSpace, Noise, markov_sample, reference

OP = "markov"
DRAFTS = 7
GREEDY, SAMPLED = "greedy", "sampled"
STOCK = "vllm"
_GUMBEL = "vllm.v1.worker.gpu.sample.gumbel"
#: Logits of up to 16 in bf16, of which a bias and a sum may round one unit otherwise
#: than in fp64.
CLOSE = 2 * 2.0**-4


@dataclass(frozen=True)
class MarkovShape:
    """A step: how its tokens are drawn, of how many requests, from what tables."""

    kind: str
    requests: int
    vocab: int = VOCAB
    rank: int = MARKOV_RANK
    drafts: int = DRAFTS

    @property
    def label(self) -> str:
        """For tables."""
        return f"{self.kind} B={self.requests}"

    @property
    def moved_bytes(self) -> int:
        """What a step must move."""
        logits = 2 * self.requests * self.vocab * (2 if self.kind == SAMPLED else 1)
        return self.drafts * (2 * self.vocab * self.rank + logits)


@dataclass(frozen=True)
class MarkovData:
    """A step's tensors; of ``base``, ``w1`` and ``w2`` a copy for each turn."""

    shape: MarkovShape
    base: list[Tensor]
    w1: list[Tensor]
    w2: list[Tensor]
    anchor: Tensor
    noise: Noise | None

    @classmethod
    def draw(cls, shape: MarkovShape, copies: int, device: torch.device) -> MarkovData:
        """Biases as large as base is."""
        g = torch.Generator(device).manual_seed(shape.requests)
        requests, drafts, vocab = shape.requests, shape.drafts, shape.vocab

        def normal(*size: int, scale: float = 1.0) -> list[Tensor]:
            empty = torch.empty(*size, dtype=torch.bfloat16, device=device)
            first = empty.normal_(std=scale, generator=g)
            return [first, *(first.clone() for _ in range(copies - 1))]

        heat = torch.full((requests,), 0.8, device=device)
        heat[1::2] = 0.0
        one = torch.arange(requests, device=device)[:, None]
        kept = torch.zeros(requests, drafts, vocab, dtype=torch.bfloat16, device=device)
        noise = Noise(
            heat,
            torch.arange(7, 7 + requests, device=device),
            one.expand(-1, drafts).contiguous(),
            one * 100 + torch.arange(drafts, device=device),
            kept,
        )
        return cls(
            shape,
            normal(requests, drafts, vocab, scale=2.0),
            normal(vocab, shape.rank),
            normal(vocab, shape.rank, scale=2.0 * shape.rank**-0.5),
            torch.randint(
                vocab, (requests,), generator=g, device=device, dtype=torch.int32
            ),
            noise if shape.kind == SAMPLED else None,
        )

    def alone(self, request: int) -> MarkovData:
        """One request, with the state that it has here."""
        one = slice(request, request + 1)
        noise = self.noise and dataclasses.replace(
            self.noise,
            states=self.noise.states[one],
            positions=self.noise.positions[one],
        )
        shape = dataclasses.replace(self.shape, requests=1)
        base = [x[one] for x in self.base]
        return MarkovData(shape, base, self.w1, self.w2, self.anchor[one], noise)

    def tokens(self) -> Tensor:
        """A buffer for the result, of ids that are none."""
        size = self.shape.requests, self.shape.drafts
        return torch.full(size, -1, dtype=torch.int64, device=self.anchor.device)

    def right(self, tokens: Tensor) -> bool:
        """Whether each token's score, behind the tokens before it, is the best or as
        good as rounding lets it be."""
        previous = self.anchor.long()
        tables = self.base[0], self.w1[0], self.w2[0]
        for number in range(self.shape.drafts):
            _, values = reference.step(*tables, previous, number, self.noise)
            own = tokens[:, number]
            if not ((own >= 0) & (own < self.shape.vocab)).all():
                return False
            if not reference.close(values, own, CLOSE / 0.8).all():
                return False
            previous = own
        return True


def ours(modes: Sequence[Mode]) -> Ways[MarkovData]:
    """`markov_sample`, in each launch mode."""

    def way(mode: Mode) -> Way[MarkovData]:
        def make(data: MarkovData) -> Run:
            space, tokens = MarkovSpace.allocate(data.anchor.device), data.tokens()

            def run(copy: int) -> Tensor:
                return markov_sample(
                    data.base[copy],
                    data.w1[copy],
                    data.w2[copy],
                    data.anchor,
                    tokens,
                    space,
                    noise=data.noise,
                    pdl=mode == "pdl",
                )

            return run

        return Way(OURS, mode, make)

    return Ways([way(mode) for mode in modes])


def stock_draw(
    logits: Tensor,
    noise: Noise,
    number: int,
    column: Tensor,
    sample: Callable[..., Tensor],
) -> Tensor:
    """Draft ``number`` by vLLM 0.33's ``gumbel_sample``, asked as its drafter does;
    ``column`` is the number on the device."""
    return sample(
        logits,
        noise.states[:, number],
        noise.temperature,
        noise.seeds,
        noise.positions[:, number],
        apply_temperature=True,
        is_drafting=True,
        logits_cache=noise.logits,
        logits_cache_col=column,
    )


def stock_loop(data: MarkovData, sample: Callable[..., Tensor] | None) -> Run:
    """vLLM 0.33's ``_sample_sequential`` from the logits on; ``sample`` its
    ``gumbel_sample``, None where nothing has a temperature."""
    tokens, noise = data.tokens(), data.noise
    columns = torch.arange(data.shape.drafts, device=tokens.device)

    def run(copy: int) -> Tensor:
        previous = data.anchor
        for number in range(data.shape.drafts):
            bias = F.linear(F.embedding(previous, data.w1[copy]), data.w2[copy])
            logits = data.base[copy][:, number] + bias
            if noise is None or sample is None:
                previous = logits.argmax(dim=-1)
            else:
                column = columns[number]
                previous = stock_draw(logits, noise, number, column, sample)
            tokens[:, number] = previous
        return tokens

    return run


def stock(shape: MarkovShape) -> Ways[MarkovData]:
    """vLLM's loop; with noise where vLLM can be had."""
    sample = None
    if shape.kind == SAMPLED:
        module: Any = peers.load(_GUMBEL)
        if isinstance(module, str):
            return Ways(missing={STOCK: module})
        sample = module.gumbel_sample
    return Ways([Way(STOCK, "plain", lambda data: stock_loop(data, sample))])


def preload() -> None:
    """Import vLLM's sampler; before a ``CudaTimer`` is made."""
    peers.load(_GUMBEL)


def shapes(rows: Sequence[int]) -> list[MarkovShape]:
    """Steps of so many requests, greedy and sampled."""
    return [MarkovShape(kind, b) for b in rows for kind in (GREEDY, SAMPLED)]


class MarkovBench:
    """See :class:`experiments.bench.core.Bench`: one step, one point.

    Args:
        shape: the step.
        settings: of the run; its rows are not read.
        our_ways, peer_ways: where the candidates come from.
    """

    def __init__(
        self,
        shape: MarkovShape,
        settings: Settings,
        our_ways: Callable[[Sequence[Mode]], Ways[MarkovData]] = ours,
        peer_ways: Callable[[MarkovShape], Ways[MarkovData]] = stock,
    ) -> None:
        self.label = shape.label
        self._shape = shape
        self._settings = settings
        self._our_ways = our_ways
        self._peer_ways = peer_ways

    def _gate(
        self, ways: Sequence[Way[MarkovData]], data: MarkovData, point: Point
    ) -> None:
        """Enter the gates of our ways, and why one did not run."""
        runs: list[Run] = []
        plain: Tensor | None = None
        for way in ways:
            try:
                run = way.make(data)
                found = run(0).clone()
                last = self._shape.requests - 1
                own = way.make(data.alone(last))(0).clone()
            except Exception as error:
                point.missing[spell(way.key)] = reason(error)
                continue
            point.gates[way.key] = {
                "accurate": data.right(found),
                "row_invariant": gates.same_bits(found[last:], own),
            }
            if way.mode == "plain":
                plain = found
            elif plain is not None:
                same = gates.same_bits(found, plain)
                point.gates[way.key]["pdl_equals_plain"] = same
            runs.append(run)
        if not runs:
            return
        wanted = runs[0](0).clone()
        wrong = torch.zeros((), dtype=torch.int64, device=wanted.device)
        with neighbours(self._settings.device) as disturb:
            for number in range(self._settings.repeats):
                if number % 8 == 0:
                    disturb()
                found = runs[number % len(runs)](0)
                wrong += (found != wanted).sum()
                found.fill_(-1)
        for verdicts in point.gates.values():
            verdicts[f"repeatable_{self._settings.repeats}"] = int(wrong) == 0

    def _admit(
        self, ways: Sequence[Way[MarkovData]], data: MarkovData, point: Point
    ) -> list[Way[MarkovData]]:
        """Peers that run and are right; the others, with why, are missing."""
        admitted = []
        for way in ways:
            try:
                right = data.right(way.make(data)(0))
            except Exception as error:
                point.missing[spell(way.key)] = reason(error)
                continue
            if right:
                admitted.append(way)
            else:
                point.missing[spell(way.key)] = "its tokens are wrong; not timed"
        return admitted

    def measure(self) -> Iterator[Point]:
        """The point."""
        shape, settings = self._shape, self._settings
        size = shape.moved_bytes
        tables = 4 * shape.vocab * shape.rank
        data = MarkovData.draw(shape, timing.copies_for(tables), settings.device)
        point = Point(OP, self.label, dataclasses.asdict(shape), shape.requests, size)
        own, others = self._our_ways(settings.modes), self._peer_ways(shape)
        point.missing.update({**own.missing, **others.missing})
        self._gate(own.ways, data, point)
        red = point.red()
        timed = [way for way in own.ways if way.key in point.gates.keys() - red.keys()]
        timed += self._admit(others.ways, data, point)
        runs = {way.key: way.make(data) for way in timed}
        times = settings.timer.measure(runs, len(data.base), timing.floor_us(size))
        point.enter(times)
        yield point

    def trace(self, points: Sequence[Point]) -> None:
        """See :class:`experiments.bench.core.Bench`."""
        every = self._our_ways(self._settings.modes) + self._peer_ways(self._shape)
        data = MarkovData.draw(self._shape, 1, self._settings.device)
        trace_ways(points, every, data, self._settings)
