# SPDX-License-Identifier: Apache-2.0
"""Training of tiny-k3's target: fp32 masters, experts fake-quantised to MXFP4.

The forward pass sees each expert weight as the checkpoint will store it (`quantise`,
then `dequantise`) and the gradient passes straight through to the master, so the packed
weights that ship are the ones trained with. The router's correction bias is balanced
without an auxiliary loss (arXiv 2408.15664): after each step the bias of an expert that
got more than the mean load falls by a small amount, that of one with less rises.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drafters.captured import Step
from drafters.training import Batches, Report, Schedule, optimise
from experiments.corpora import KINDS, training_bytes
from verify_kernels.model.checkpoint import assemble, named_tensors
from verify_kernels.model.parallel import Experts, forward
from verify_kernels.model.weights import K3Config, K3Weights, random_weights
from verify_kernels.moe.mxfp4 import GROUP, Mxfp4, dequantise, quantise
from verify_kernels.moe.reference import MoeWeights

#: Change of a correction bias a step, before the learning rate's decay.
BIAS_RATE = 1e-3


def batches(rows: int, length: int, seed: int, device: str) -> Iterator[Tensor]:
    """Random windows [rows, length + 1] on ``device``, half from each kind of text."""
    texts = [
        torch.frombuffer(bytearray(training_bytes(kind)), dtype=torch.uint8).to(device)  # type: ignore[arg-type]
        for kind in KINDS
    ]
    generator = torch.Generator().manual_seed(seed)
    offsets = torch.arange(length + 1, device=device)
    share = rows // len(texts)
    while True:
        windows = []
        for text in texts:
            starts = torch.randint(
                len(text) - length - 1, (share, 1), generator=generator
            )
            windows.append(text[starts.to(device) + offsets])
        yield torch.cat(windows).long()


def map_tensors(
    node: Any, change: Callable[[str, Tensor], Tensor], at: str = ""
) -> Any:
    """``node`` (nested dataclasses and tuples) with every float tensor changed.

    ``change`` gets its path, such as ``layers.2.mixer.core.conv_q``. MXFP4 weights
    stay as they are.
    """
    if isinstance(node, Tensor):
        return change(at, node)
    if isinstance(node, tuple):
        return tuple(map_tensors(x, change, f"{at}.{i}") for i, x in enumerate(node))
    if dataclasses.is_dataclass(node) and not isinstance(node, Mxfp4 | type):
        parts = {
            f.name: map_tensors(getattr(node, f.name), change, f"{at}.{f.name}")
            for f in dataclasses.fields(node)
        }
        return dataclasses.replace(node, **parts)
    return node


def as_stored(groups: Tensor) -> Tensor:
    """``dequantise(quantise(groups))`` of fp32 [N, 32], to the bit, for what training
    can meet: finite numbers, no group's largest below 2^-124 but for zeros.

    Arithmetic alone, without the tables, the checks and the fp64 of those two, so that
    it can be part of a CUDA graph; a NaN gives NaNs here and an error in `quantise`.
    """
    largest = groups.abs().amax(-1, keepdim=True)
    # The exponent's bits are 2^floor(log2 largest); E2M1 ends at 1.5 * 2^2.
    power = (largest.view(torch.int32) & 0x7F800000).view(torch.float32) / 4
    power = power.clamp(min=2.0**-126)
    scaled = groups / power
    size = scaled.abs()
    # E2M1's numbers are even multiples of a step where their codes are even, and
    # rounding goes to the even multiple: ties end where the format wants them.
    step = 0.5 * (1 + (size >= 2).float() + 2 * (size >= 4).float())
    nearest = ((size / step).round() * step).clamp(max=6)
    return torch.copysign(nearest * power, groups)


class Masters:
    """fp32 parameters of a K3 on ``device``, from a seed.

    ``parameters`` by path; ``experts`` [w1, w3, w2] by layer; ``bias``, by layer, are
    no parameters.
    """

    def __init__(self, config: K3Config, seed: int, device: str) -> None:
        self.config = config
        self.parameters: dict[str, nn.Parameter] = {}
        self.experts: dict[int, list[nn.Parameter]] = {}
        self.bias: dict[int, Tensor] = {}
        start = random_weights(config, seed, torch.float32)

        def own(at: str, tensor: Tensor) -> Tensor:
            if at.endswith((".norm", "_norm")):
                tensor = torch.ones_like(tensor)
            elif at.endswith((".query", ".a_log", ".mlp.bias")):
                # Even mixes, decays set by dt_bias alone, no expert preferred.
                tensor = torch.zeros_like(tensor)
            tensor = tensor.to(device)
            if at.endswith(".mlp.bias"):
                return tensor
            self.parameters[at] = nn.Parameter(tensor)
            return self.parameters[at]

        self._weights: K3Weights = map_tensors(start, own)
        for i, layer in enumerate(self._weights.layers):
            if isinstance(layer.mlp, MoeWeights):
                m = layer.mlp
                self.bias[i] = m.bias
                self.experts[i] = [
                    nn.Parameter(dequantise(w, torch.float32).to(device))
                    for w in (m.w1, m.w3, m.w2)
                ]

    def weights(self) -> K3Weights:
        """The live parameters; the experts in it are not (see `banks`)."""
        return self._weights

    def banks(self) -> Experts:
        """Experts as the checkpoint will store them, differentiable."""
        masters = [w for layer in self.experts.values() for w in layer]
        with torch.no_grad():
            # One call: a group is 32 neighbours along K wherever the matrix lies.
            groups = torch.cat([w.reshape(-1, GROUP) for w in masters])
            stored = as_stored(groups)
            parts = stored.split([w.numel() // GROUP for w in masters])
        through = iter(
            # w - w is 0 with gradient 1: the value is the stored one to the bit.
            part.view_as(w) + (w - w.detach())
            for part, w in zip(parts, masters, strict=True)
        )
        return {i: (next(through), next(through), next(through)) for i in self.experts}

    def groups(self, weight_decay: float) -> list[dict[str, Any]]:
        """Parameter groups for AdamW: matrices decay, vectors and taps do not."""
        every = [*self.parameters.items()]
        every += [("expert", w) for layer in self.experts.values() for w in layer]
        kept = (".embedding", ".dt_bias", ".conv_q", ".conv_k", ".conv_v")
        matrices: list[nn.Parameter] = []
        others: list[nn.Parameter] = []
        for at, w in every:
            (others if w.ndim < 2 or at.endswith(kept) else matrices).append(w)
        return [
            {"params": matrices, "weight_decay": weight_decay},
            {"params": others, "weight_decay": 0.0},
        ]

    @torch.no_grad()
    def shipped(self) -> K3Weights:
        """What a reader of the checkpoint gets: rounded and packed, fp32, CPU.

        The KDA norm, fp32 in the format, is rounded to bf16 as well: vLLM keeps it so.
        """

        def rounded(at: str, tensor: Tensor) -> Tensor:
            if at.endswith(".mixer.core.norm"):
                return tensor.bfloat16().float()
            return tensor

        layers = []
        for i, layer in enumerate(self._weights.layers):
            mlp = layer.mlp
            if isinstance(mlp, MoeWeights):
                w1, w3, w2 = (quantise(w) for w in self.experts[i])
                mlp = dataclasses.replace(mlp, w1=w1, w3=w3, w2=w2)
            layers.append(dataclasses.replace(layer, mlp=mlp))
        whole = dataclasses.replace(self._weights, layers=tuple(layers))
        whole = map_tensors(whole, rounded)
        return assemble(self.config, named_tensors(self.config, whole))


def target_step(
    masters: Masters, schedule: Schedule, autocast: torch.dtype | None = None
) -> Step:
    """The step of `train_target`, on tokens [B, T + 1]; balances the experts."""
    loads: dict[int, Tensor] = {}

    def count(layer: int, ids: Tensor) -> None:
        loads[layer] = expert_load(ids, masters.config.experts)

    def loss_of(tokens: Tensor) -> Tensor:
        # No cached casts: they would outlive a step.
        with torch.autocast(
            tokens.device.type,
            autocast,
            enabled=autocast is not None,
            cache_enabled=False,
        ):
            logits = forward(
                masters.config,
                masters.weights(),
                tokens[:, :-1],
                experts=masters.banks(),
                on_route=count,
            ).logits
            return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    def balance(rate: float | Tensor) -> None:
        change = BIAS_RATE * rate / schedule.learning_rate
        for layer, load in loads.items():
            masters.bias[layer] += change * torch.sign(load.mean() - load)

    return Step(
        masters.groups(schedule.weight_decay),
        loss_of,
        clip=schedule.clip,
        after=balance,
    )


def train_target(
    masters: Masters,
    data: Batches,
    schedule: Schedule,
    report: Report,
    autocast: torch.dtype | None = None,
) -> bool:
    """Next-token cross-entropy (nats a byte) of windows [B, T + 1]. Whether the steps
    ended as replays of a CUDA graph."""
    step = target_step(masters, schedule, autocast)
    return optimise(step, schedule, ((tokens,) for tokens in data), report)


def expert_load(ids: Tensor, experts: int) -> Tensor:
    """How many of expert ids [N, k] are each expert: fp32 [E]."""
    names = torch.arange(experts, device=ids.device)
    return (ids[..., None] == names).sum((0, 1)).float()
