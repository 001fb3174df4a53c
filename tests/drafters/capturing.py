# SPDX-License-Identifier: Apache-2.0
"""What a CUDA graph cannot hold, found without a GPU: a step run on the meta device."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from drafters.captured import Step

#: Ops whose result's shape, or whose Python value, has to come back from the device.
WAITS = (
    "_local_scalar_dense",
    "bincount",
    "equal",
    "masked_select",
    "nonzero",
    "repeat_interleave.Tensor",
    "unique",
)


class Hazards(TorchDispatchMode):
    """Counts ``ops``; ``found`` are those that wait for the device or touch the host.

    On the meta device the former raise NotImplementedError or RuntimeError as well.
    """

    def __init__(self) -> None:
        super().__init__()
        self.ops: Counter[str] = Counter()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = str(func).removeprefix("aten.")
        self.ops[name] += 1
        waits = name.startswith(WAITS) or _boolean_index(name, args)
        try:
            out = func(*args, **(kwargs or {}))
        finally:
            self.found[name] += waits
        leaves = tree_leaves((args, kwargs, out))
        if any(isinstance(x, Tensor) and not x.is_meta for x in leaves):
            self.found[name] += 1
        return out


def _boolean_index(name: str, args: Any) -> bool:
    return name.startswith(("index.", "index_put")) and any(
        x is not None and x.dtype in (torch.bool, torch.uint8) for x in args[1]
    )


def hazards(
    step: Step, inputs: tuple[Tensor, ...], monkeypatch: pytest.MonkeyPatch
) -> Hazards:
    """``step``, on meta parameters and inputs, forward to clipping and what follows.

    Left out are autocast, which knows no meta device and only casts, and AdamW, which
    torch makes for capture with ``capturable=True`` on a CUDA device alone.
    """
    monkeypatch.setattr(torch, "autocast", lambda *args, **kwargs: nullcontext())
    monkeypatch.setattr(torch.optim.AdamW, "step", lambda self: None)
    with Hazards() as record:
        step.run(*inputs)
    record.found = +record.found
    return record


def on_meta(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, device="meta")
