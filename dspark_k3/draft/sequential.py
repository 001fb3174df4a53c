# SPDX-License-Identifier: Apache-2.0
"""The sequential steps of a DSpark drafter by `verify_kernels.markov`.

vLLM 0.33's speculator asks a drafter that has ``sample_sequential`` to draw a step's
drafts, and runs its own loop where it says no. It is there only with
``"draft_sampler": "ours"``.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor

from verify_kernels.markov import MarkovSpace, Noise, markov_sample
from verify_kernels.markov.host import MAX_DRAFTS, MAX_REQUESTS, RANKS

logger = logging.getLogger("vllm.dspark_k3")


class SequentialHead:
    """A drafter's ``sample_sequential``.

    Args:
        model: the drafter, of a class whose Markov head is vLLM's ``DSparkMarkovHead``.
        device: where it runs.

    Raises:
        ValueError: for a device that the kernels do not run on.
    """

    def __init__(self, model: Any, device: torch.device) -> None:
        if device.type != "cuda":
            raise ValueError(
                f"draft_sampler is 'ours' on {device}; its kernels need a CUDA device: "
                "take draft_sampler out"
            )
        self._model = model
        self._space = MarkovSpace.allocate(device)
        self._said: set[str] = set()

    def __call__(self, speculator: Any, requests: int, head_hidden: Tensor) -> bool:
        """Draw the drafts of a step, as ``DSparkSpeculator._sample_sequential`` does.

        Args:
            speculator: vLLM's, with the step's buffers.
            requests: of the step.
            head_hidden: rows of the backbone, of which ``sample_indices`` are drafts'.

        Returns:
            False, with nothing done and why in the log once, where it is left to vLLM.
        """
        why = self._why_not(speculator, requests)
        if why:
            if why not in self._said:
                self._said.add(why)
                logger.info("dspark-k3: drafts are drawn by vLLM: %s", why)
            return False
        model, drafts = self._model, speculator.num_speculative_steps
        count = requests * drafts
        hidden = head_hidden[speculator.sample_indices[:count]]
        base = model.compute_draft_logits(hidden)
        base = base.view(requests, drafts, base.shape[-1])
        anchor = speculator.input_buffers.input_ids[speculator._anchor_idx[:requests]]
        tokens = speculator.draft_tokens[:requests]
        noise = None
        if speculator.draft_logits is not None:
            noise = Noise(
                speculator.temperature,
                speculator.seeds,
                speculator.sample_idx_mapping[:count].view(requests, drafts),
                # Of the token before the drawn one.
                speculator.sample_pos[:count].view(requests, drafts) - 1,
                speculator.draft_logits,
            )
        head = model.model.markov_head
        markov_sample(
            base,
            head.markov_w1.weight,
            # Behind the vocabulary there may be rows that pad it.
            head.markov_w2.weight[: base.shape[-1]],
            anchor.int(),
            tokens,
            self._space,
            noise=noise,
        )
        if speculator.use_confidence_head:
            previous = torch.cat((anchor[:, None].long(), tokens[:, :-1]), 1)
            confidence = model.compute_confidence(
                hidden, model.markov_embed(previous.flatten())
            )
            probs = speculator.draft_token_confidence_probs
            probs[:requests] = confidence.view(requests, drafts)
        return True

    def _why_not(self, speculator: Any, requests: int) -> str:
        """Why a step is not for the kernels, "" if it is."""
        model, head = self._model, self._model.model.markov_head
        processor, kept = model.logits_processor, speculator.draft_logits
        w1, w2 = head.markov_w1.weight, getattr(head.markov_w2, "weight", None)
        drafts = speculator.num_speculative_steps
        for no, why in (
            (requests > MAX_REQUESTS, f"more than {MAX_REQUESTS} requests"),
            (drafts > MAX_DRAFTS, f"more than {MAX_DRAFTS} drafts"),
            (model.draft_id_to_target_id is not None, "a reduced draft vocabulary"),
            (hasattr(model, "apply_output_logit_transform"), "logits are transformed"),
            (processor.scale != 1.0, f"a logit scale of {processor.scale}"),
            (processor.soft_cap is not None, f"a soft cap of {processor.soft_cap}"),
            (
                processor.head_dtype not in (None, torch.bfloat16),
                f"heads of {processor.head_dtype}",
            ),
            (
                w2 is None or {w1.dtype, w2.dtype} != {torch.bfloat16},
                "the Markov head is not bf16",
            ),
            (w1.shape[1] not in RANKS, f"a Markov head of rank {w1.shape[1]}"),
            (w1.shape[0] % 2 == 1, f"an odd vocabulary of {w1.shape[0]}"),
            (speculator.draft_watermarker is not None, "drafts are watermarked"),
            (
                speculator.acceptance_estimator is not None,
                "acceptance is estimated from each step's logits",
            ),
            (
                kept is not None and bool(speculator.use_fp64_gumbel),
                "noise of 64 bits",
            ),
            (
                kept is not None and kept.dtype != torch.bfloat16,
                f"logits are kept in {getattr(kept, 'dtype', '')}",
            ),
        ):
            if no:
                return why
        return ""
