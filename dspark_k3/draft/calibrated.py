# SPDX-License-Identifier: Apache-2.0
"""A drafter's confidence through the calibration that stands beside its checkpoint.

vLLM's adaptive verification multiplies the confidences of `compute_confidence` as they
come. `dspark-k3 calibrate` writes temperatures, one a draft position, next to the
drafter's config.json, and perhaps shifts; with them confidence_i is
sigmoid(logit_i / T_i + s_i).
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from drafters.calibration import FILE_NAME, read_calibration

logger = logging.getLogger("vllm.dspark_k3")

#: fp32 [drafts], where there is a calibration.
_BUFFER, _SHIFTS = "draft_temperatures", "draft_shifts"


class CalibratedConfidence(nn.Module):
    """Goes before a DSpark drafter class of vLLM's; without `calibrate`, or without a
    file, that class's own confidence."""

    model: Any

    def calibrate(self, directory: str, draft_length: int) -> None:
        """Read the temperatures beside ``directory``'s config.json, if they are there.

        Call it once the modules are made, with the device that they are made on as the
        default.

        Raises:
            ValueError: the file cannot be used, or was fitted to fewer drafts.
        """
        scaling = read_calibration(directory)
        if scaling is None:
            return
        found = scaling.temperatures
        path = Path(directory) / FILE_NAME
        if len(found) < draft_length:
            raise ValueError(
                f"{path} has {len(found)} temperatures for "
                f"num_speculative_tokens={draft_length}: fit it at the longer draft "
                "(`dspark-k3 calibrate`), or take it away"
            )
        # Not parameters: checkpoints have none.
        shifts = scaling.shifts or (0.0,) * draft_length
        for name, values in ((_BUFFER, found), (_SHIFTS, shifts)):
            tensor = torch.tensor(values[:draft_length], dtype=torch.float32)
            self.register_buffer(name, tensor, persistent=False)
        said = ", ".join(
            f"{value:.2f} {shift:+.2f}"
            for value, shift in zip(found[:draft_length], shifts, strict=False)
        )
        logger.info(
            "dspark-k3: confidence by %s: temperatures and shifts %s", path, said
        )

    def compute_confidence(self, head_hidden: Tensor, markov_embed: Tensor) -> Tensor:
        """Probability that each draft is accepted, [requests x drafts], a request's
        drafts side by side as vLLM's speculator asks for them."""
        temperatures = self._buffers.get(_BUFFER)
        if temperatures is None:
            confidence: Tensor = super().compute_confidence(  # type: ignore[misc]
                head_hidden, markov_embed
            )
            return confidence
        logits: Tensor = self.model.confidence_head(head_hidden, markov_embed)
        scaled = logits.view(-1, len(temperatures)) / temperatures
        return torch.sigmoid(scaled + self._buffers[_SHIFTS]).view_as(logits)
