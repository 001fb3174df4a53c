# SPDX-License-Identifier: Apache-2.0
"""What the settings add to a DSpark drafter of vLLM's: a calibration if one stands
beside its checkpoint (`calibrated`), and a sampler of ours if it is asked for
(`sequential`)."""

from __future__ import annotations

from typing import Any

from dspark_k3 import seams
from dspark_k3.draft.calibrated import CalibratedConfidence
from dspark_k3.settings import Settings

#: What vLLM's speculator asks a drafter for.
_HOOK = "draft hook sample_sequential (0.33)"


class Additions(CalibratedConfidence):
    """Goes before a DSpark drafter class of vLLM's; without `add` it is that class."""

    def add(self, vllm_config: Any, asked: Settings) -> None:
        """Call it once the modules are made, with the device that they are made on as
        the default.

        Raises:
            ValueError: the calibration cannot be used, or a sampler is asked for that
                this vLLM or device cannot have.
        """
        speculative = vllm_config.speculative_config
        if asked.calibration:
            self.calibrate(
                speculative.draft_model_config.model,
                speculative.num_speculative_tokens,
            )
        if asked.draft_sampler == "ours":
            if not seams.has(_HOOK):
                raise ValueError(
                    "draft_sampler is 'ours', and this vLLM does not ask drafters to "
                    f"sample: `{seams.GPU_ENGINE.install}`, or take draft_sampler out"
                )
            from dspark_k3.draft.sequential import SequentialHead

            self.sample_sequential = SequentialHead(
                self, vllm_config.device_config.device
            )
