# SPDX-License-Identifier: Apache-2.0
"""What the ranks of a tensor-parallel group must decide alike.

At start, which ops the loaded layers leave to vLLM (`of_all_ranks`, once); while
serving, adaptive verification: every rank trims by rank 0's numbers.

vLLM 0.33 decides a step's draft lengths on every rank by itself: the budget on the host
from confidences of earlier steps, who gets it on the device from the last ones. Only
the cost tables are sent from rank 0. Logits are gathered, so ranks that disagree in a
bit still draw the same tokens; a confidence is computed on each rank from its own copy
of the drafter's hidden rows and is the one input that may differ. Ranks then take
graphs of different row counts, and their collectives no longer fit, or verify the
drafts of different requests in one row, which nothing notices.

Here rank 0's confidences are broadcast where vLLM hands them on, once a step, before
they are ranked and before they are copied to the host, so both decisions follow from
the same bits everywhere. One rank alone sends nothing.
"""

from __future__ import annotations

import inspect
from typing import Any, TypeVar

import torch
from torch import Tensor
from vllm.distributed.parallel_state import get_tp_group
from vllm.v1.worker.gpu.spec_decode import adaptive_verification

from dspark_k3.seams import UnsupportedEngine

_ARGUMENTS = ("self", "confidence_probs", "input_batch")
Found = TypeVar("Found")


class AgreedVerificationManager(adaptive_verification.AdaptiveVerificationManager):
    """vLLM's manager over rank 0's confidences.

    ``agree`` false is vLLM's own behaviour, to measure what it does.
    """

    agree = True

    def record_confidences(self, confidence_probs: Tensor, input_batch: Any) -> None:
        """vLLM's, after rank 0's rows replaced this rank's, in place."""
        if self.agree:
            from_rank_0(confidence_probs[: input_batch.num_reqs])
        super().record_confidences(confidence_probs, input_batch)


def from_rank_0(rows: Tensor) -> None:
    """Overwrite contiguous ``rows`` with those of tensor-parallel rank 0.

    On the current stream, by the communicator that vLLM has made at start: the first
    use of torch's would make another one in the middle of serving.
    """
    group = get_tp_group()
    if group.world_size == 1:
        return
    communicator = getattr(group.device_communicator, "pynccl_comm", None)
    if communicator is None or communicator.disabled:
        group.broadcast(rows, src=0)
    else:
        communicator.broadcast(rows, src=0)


def of_all_ranks(own: Found) -> list[Found]:
    """What each tensor-parallel rank passes, in their order, on every rank.

    Through the host, by the group that vLLM has made for it (gloo), pickled: for the
    start, not for steps. Every rank must call it.
    """
    group = get_tp_group()
    found = [own] * group.world_size
    if group.world_size > 1:
        torch.distributed.all_gather_object(found, own, group=group.cpu_group)
    return found


def agree_on_lengths() -> None:
    """Let this process's model runner build `AgreedVerificationManager`.

    Call it in a worker before the KV cache is initialised; calling it again does
    nothing. Raises seams.UnsupportedEngine, with nothing changed, when the manager is
    not the one this was written for.
    """
    found = adaptive_verification.AdaptiveVerificationManager
    if found is AgreedVerificationManager:
        return
    check_verification_manager(found)
    adaptive_verification.AdaptiveVerificationManager = AgreedVerificationManager


def check_verification_manager(found: Any) -> None:
    """Raise seams.UnsupportedEngine unless ``found`` is what this module extends."""
    wrong = None
    if found is not AgreedVerificationManager.__base__:
        wrong = f"adaptive verification uses {found!r}"
    else:
        signature = inspect.signature(found.record_confidences)
        if (got := tuple(signature.parameters)) != _ARGUMENTS:
            wrong = f"record_confidences takes {', '.join(got)}"
    if wrong is not None:
        raise UnsupportedEngine(
            f"cannot make ranks agree on draft lengths: {wrong}, which is not vLLM "
            "0.33. Install vllm==0.33.*, or take out a plug-in that replaces the "
            "manager"
        )
