# SPDX-License-Identifier: Apache-2.0
"""Engines of several GPUs of one host: a real tensor-parallel group, through NCCL.

NVLink multicast stays off. On a shared host a program that uses it can put everybody's
GPUs out of service, and vLLM 0.33 would: on Hopper its all-reduce tries FlashInfer's
multicast workspace first. `ENVIRONMENT` and `forbid_multicast` leave vLLM's own
all-reduce over peer memory, and NCCL.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from experiments.gpu_engine.fleet import EngineSpec

MULTICAST_OFF = {
    "NCCL_NVLS_ENABLE": "0",
    "NVSHMEM_DISABLE_NVLS": "1",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
}
ENVIRONMENT = {
    **MULTICAST_OFF,
    "VLLM_ALLREDUCE_USE_FLASHINFER": "0",
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
}
"""What an engine of several GPUs needs on top of ``fleet.ENVIRONMENT``."""

#: Ports of an engine, from here: below those that the kernel gives out by itself.
FIRST_PORT, PORTS_EACH = 21000, 100


def check_environment(environment: Mapping[str, str]) -> None:
    """Raises ValueError where NVLink multicast is switched on in ``environment``."""
    wrong = [
        f"{name}={environment[name]}"
        for name, off in MULTICAST_OFF.items()
        if environment.get(name, off) != off
    ]
    if wrong:
        wanted = ", ".join(f"{name}={off}" for name, off in MULTICAST_OFF.items())
        raise ValueError(
            f"{', '.join(wrong)}: NVLink multicast must stay off on a shared host; "
            f"leave {wanted}"
        )


def engine_arguments(tp: int) -> dict[str, Any]:
    """Arguments of ``vllm.LLM`` for a group of ``tp`` GPUs, one worker process each;
    none for one GPU."""
    if tp == 1:
        return {}
    return {"tensor_parallel_size": tp, "distributed_executor_backend": "mp"}


def by_nccl(spec: EngineSpec) -> EngineSpec:
    """The engine without vLLM's all-reduce over peer memory."""
    return replace(spec, engine={**spec.engine, "disable_custom_all_reduce": True})


def with_ports(
    specs: Sequence[EngineSpec], first: int = FIRST_PORT
) -> list[EngineSpec]:
    """The specs, each with ports of its own for whatever vLLM opens."""
    return [
        replace(spec, env={**spec.env, "VLLM_PORT": str(first + PORTS_EACH * index)})
        for index, spec in enumerate(specs)
    ]


def forbid_multicast() -> None:
    """In a worker, before its first collective: no multicast object is ever made.

    FlashInfer's workspace counts as failed, which vLLM answers with its other
    all-reduce, and the driver's call raises.

    Raises:
        RuntimeError: vLLM has no such mark, so setting one would do nothing.
    """
    from vllm.distributed.device_communicators import flashinfer_all_reduce

    for mark in ("_fi_ar_workspace_failed", "_fi_ar_quant_workspace_failed"):
        if not hasattr(flashinfer_all_reduce, mark):
            raise RuntimeError(
                f"{flashinfer_all_reduce.__name__} has no {mark}: this vLLM is not the "
                "one whose multicast `forbid_multicast` knows how to turn off"
            )
        setattr(flashinfer_all_reduce, mark, True)
    try:
        driver: Any = importlib.import_module("cuda.bindings.driver")
    except ImportError:
        return
    driver.cuMulticastCreate = _refuse


def _refuse(*arguments: Any, **keywords: Any) -> None:
    raise RuntimeError("NVLink multicast is off on this host")


def aligner() -> Callable[[], None] | None:
    """In a worker: what makes the GPUs of its group wait for each other on the current
    stream, or None for one GPU.

    Raises:
        RuntimeError: vLLM's NCCL communicator is off.
    """
    import torch
    from vllm.distributed.parallel_state import get_tp_group

    group = get_tp_group()
    if group.world_size == 1:
        return None
    communicator = getattr(group.device_communicator, "pynccl_comm", None)
    if communicator is None or communicator.disabled:
        raise RuntimeError(
            f"vLLM's NCCL communicator of {group.world_size} GPUs is off; steps cannot "
            "begin together"
        )
    # float64, by which a trace tells it from the model's (`segment.ALIGN`).
    word = torch.zeros(1, dtype=torch.float64, device=group.device)

    def align() -> None:
        communicator.all_reduce(word, word)

    return align
