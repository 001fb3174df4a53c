# SPDX-License-Identifier: Apache-2.0
"""The sequential head's PTX on the CPU against vLLM's sampler in Triton's interpreter.

``python -m tests.verify_kernels.interpreted_sampler`` prints, for a greedy step and one
with noise, how many of its tokens differ. Needs `experiments.engine.ENVIRONMENT`.
"""

from __future__ import annotations

import inspect
import json
from typing import Any

import torch
from torch import Tensor
from vllm.v1.worker.gpu.sample import gumbel

from tests.verify_kernels.test_markov import against_the_loop, make, noise_of
from tests.verify_kernels.test_markov_machine import run


class Sampler:
    """vLLM's, whose kernel mixes the draft's number into the seed from 0.33 on."""

    mixes = "spec_step_seed" in inspect.getsource(gumbel)

    def gumbel_sample(
        self,
        logits: Tensor,
        states: Tensor,
        temperature: Tensor,
        seeds: Tensor,
        positions: Tensor,
        **options: Any,
    ) -> Tensor:
        step = 0 if self.mixes else int(options["logits_cache_col"])
        return gumbel.gumbel_sample(
            logits, states, temperature, seeds ^ (step << 32), positions, **options
        )


def main() -> None:
    """Both kinds of step, in bf16 and in fp32."""
    found = {}
    for dtype in (torch.bfloat16, torch.float32):
        for sampled in (False, True):
            case = make(5, 3, 512, 32, dtype, seed=1)
            noise = noise_of(case, 1)
            tokens = run(case, noise if sampled else None, processors=4)
            different = against_the_loop(case, noise, tokens, sampled, Sampler())
            found[f"{dtype} {'sampled' if sampled else 'greedy'}"] = different
    print(json.dumps(found))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
