# SPDX-License-Identifier: Apache-2.0
"""An optimisation step as one CUDA graph, for models so small that launches cost more
than arithmetic."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch import Tensor, nn

#: Steps before the capture: they make cuBLAS handles, workspaces and AdamW's state.
WARM_UP = 3
#: Graphs of failed captures, for the life of the process: the caching allocator may go
#: on asking them which stream they were for.
_BROKEN: list[torch.cuda.CUDAGraph] = []


class Step:
    """Loss, gradients, clipping and AdamW, run once a call.

    On a CUDA device the first three calls run eagerly, on a stream of their own; the
    fourth captures the same work, and from then on a call copies its inputs into place
    and replays it. Elsewhere every call is eager. A ``loss_of`` that waits for the
    device or copies from the host cannot be captured: its steps stay eager and
    ``obstacle`` says why.

    Args:
        groups: parameters or parameter groups, as `torch.optim.AdamW` takes them; all
            on one device.
        loss_of: from inputs, tensors whose shapes never change, to the loss (scalar).
            It may read other tensors only if they stay where they are.
        clip: largest norm of the gradient of all parameters together.
        after: called at the end of a step with its learning rate, a 0-dimensional
            tensor on a CUDA device and a float elsewhere.
    """

    def __init__(
        self,
        groups: Iterable[nn.Parameter] | Iterable[dict[str, Any]],
        loss_of: Callable[..., Tensor],
        *,
        clip: float,
        weight_decay: float = 0.0,
        after: Callable[[float | Tensor], None] | None = None,
    ) -> None:
        given = cast(Any, list(groups))
        first = given[0]["params"][0] if isinstance(given[0], dict) else given[0]
        on_gpu = first.device.type == "cuda"
        self._optimiser = torch.optim.AdamW(
            given,
            betas=(0.9, 0.95),
            weight_decay=weight_decay,
            fused=on_gpu,
            capturable=on_gpu,
        )
        self._parameters: list[nn.Parameter] = [
            w for group in self._optimiser.param_groups for w in group["params"]
        ]
        # A graph reads the learning rate where it read it when it was captured.
        self._rate: float | Tensor = 0.0
        if on_gpu:
            self._rate = torch.zeros((), device=first.device)
        self._loss_of, self._clip, self._after = loss_of, clip, after
        self._warm = WARM_UP
        self._may_capture = on_gpu
        self._inputs: tuple[Tensor, ...] = ()
        self._side: torch.cuda.Stream | None = None
        self._graph: torch.cuda.CUDAGraph | None = None
        self._loss: Tensor | None = None
        #: Why steps are not captured, one line; None if they are or never will be.
        self.obstacle: str | None = None

    @property
    def captured(self) -> bool:
        """Whether the next step is a replay."""
        return self._graph is not None

    def __call__(self, rate: float, *inputs: Tensor) -> Tensor:
        """One step at this learning rate. The loss before it (scalar, detached; the
        next step overwrites it).

        Raises:
            ValueError: if the inputs' shapes or dtypes change on a CUDA device.
        """
        self._set(rate)
        if not self._may_capture:
            return self.run(*inputs)
        self._place(inputs)
        if self._warm:
            self._warm -= 1
            return self._run_aside()
        if self._graph is None:
            self._capture()
        if self._graph is None:
            return self.run(*inputs)
        self._graph.replay()
        assert self._loss is not None
        return self._loss

    def run(self, *inputs: Tensor) -> Tensor:
        """One eager step on the current stream, at the last learning rate."""
        loss = self._loss_of(*inputs)
        self._optimiser.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(self._parameters, self._clip)
        self._optimiser.step()
        if self._after is not None:
            self._after(self._rate)
        return loss.detach()

    def _set(self, rate: float) -> None:
        if isinstance(self._rate, Tensor):
            self._rate.fill_(rate)
        else:
            self._rate = rate
        for group in self._optimiser.param_groups:
            group["lr"] = self._rate

    def _place(self, inputs: tuple[Tensor, ...]) -> None:
        if not self._inputs:
            self._inputs = tuple(x.clone() for x in inputs)
            return
        have, given = (
            [(tuple(x.shape), x.dtype) for x in tensors]
            for tensors in (self._inputs, inputs)
        )
        if have != given:
            raise ValueError(
                f"inputs of this step are {given}, those of the first were {have}; "
                "every batch must have the same shapes and dtypes"
            )
        for own, new in zip(self._inputs, inputs, strict=True):
            own.copy_(new)

    def _run_aside(self) -> Tensor:
        main = torch.cuda.current_stream()
        side = self._side = self._side or torch.cuda.Stream()
        side.wait_stream(main)
        with torch.cuda.stream(side):
            loss = self.run(*self._inputs)
        main.wait_stream(side)
        # Its memory belongs to the side stream and is read on this one.
        loss.record_stream(main)
        return loss

    def _capture(self) -> None:
        main = torch.cuda.current_stream()
        self._optimiser.zero_grad(set_to_none=True)
        # Nodes of a dead autograd graph would keep to the stream they were made on.
        gc.collect()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                self._loss = self.run(*self._inputs)
            self._graph = graph
        except RuntimeError as error:
            # The end of a broken capture raises as well and leaves its stream current.
            torch.cuda.set_stream(main)
            _BROKEN.append(graph)
            self._optimiser.zero_grad(set_to_none=True)
            self._may_capture, self._loss = False, None
            self._inputs = ()
            self.obstacle = _first_cause(error)


def _first_cause(error: BaseException) -> str:
    while error.__context__ is not None:
        error = error.__context__
    text = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {text[0]}"
