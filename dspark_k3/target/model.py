# SPDX-License-Identifier: Apache-2.0
"""vLLM's K3 text model, whose decode steps our executor runs if the settings ask.

Registered under the in-tree name ``KimiLinearForCausalLM``, through which vLLM also
builds the text model of the multimodal wrapper. Not asked for, it is the in-tree class
of the platform: the rest of `dspark_k3.target` is not even imported.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from vllm.config import VllmConfig
from vllm.models.kimi_k3 import KimiLinearForCausalLM

from dspark_k3 import settings

if TYPE_CHECKING:
    from dspark_k3.target.executor import Executor

logger = logging.getLogger("vllm.dspark_k3")


class K3ForCausalLM(KimiLinearForCausalLM):
    """The in-tree model, or the in-tree model under our executor.

    Raises:
        ValueError: the settings are wrong, or they ask for our executor and the
            deployment is outside its scope, or for an op that has no kernel; every
            failed condition is named.
    """

    specialized_decode: Executor | None

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        asked = settings.read(vllm_config.additional_config)
        if asked.target:
            from dspark_k3.target import scope

            asked = scope.require(vllm_config, asked)
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self._settings = asked
        if asked.target:
            from dspark_k3.target import agreement, attention, graphs, slots

            attention.use_ragged_mla(self)
            layout = asked.kda_layout
            # Without speculation vLLM's own way is one slot a request.
            if layout == "fold" and vllm_config.num_speculative_tokens:
                from dspark_k3.target import fold

                fold.use_fold(self)
            logger.info("dspark-k3: %s", slots.describe(vllm_config, layout))
            graphs.capture_ragged_decode()
            agreement.agree_on_lengths()
            # What tells vLLM's model state to build the executor.
            self.specialized_decode_config = asked

    def get_model_state_cls(self) -> Any:
        """The state class that the runner makes of this model."""
        if not self._settings.target:
            return super().get_model_state_cls()
        from dspark_k3.target.state import CountedK3State

        return CountedK3State

    def build_specialized_decode(self) -> None:
        """Called by the model state when the weights are loaded and the taps set."""
        if not self._settings.target:
            super().build_specialized_decode()
            return
        from dspark_k3.target import left
        from dspark_k3.target.executor import Executor, active

        self._settings = left.settle(self.model.layers, self._settings)
        if self._settings.left:
            logger.warning("dspark-k3: %s", left.notice(self._settings))
        self.specialized_decode = Executor(self, self._settings)
        logger.info(
            "dspark-k3: K3 executor active in this worker: decode steps of up to 64 "
            "rows; %s; programmatic launches %s",
            active(self._settings),
            "on" if self._settings.pdl else "off",
        )

    def dspark_k3_counters(self) -> dict[str, int]:
        """Steps of this worker by who ran them; empty if the executor is not used."""
        if not self._settings.target or self.specialized_decode is None:
            return {}
        return self.specialized_decode.counters.read()

    def dspark_k3_ops(self) -> dict[str, str]:
        """Sides of the ops as this worker runs them, with the reason where one was left
        to vLLM; empty if the executor is not used."""
        if not self._settings.target or self.specialized_decode is None:
            return {}
        left = self._settings.left
        return {
            op: f"{side}: {left[op]}" if op in left else side
            for op, side in self._settings.ops.items()
        }
