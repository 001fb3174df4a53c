# SPDX-License-Identifier: Apache-2.0
"""Rounds of a running engine for `dspark-k3 calibrate`: what the confidence head said
of each draft, and how many the target accepted.

A worker extension: start vLLM with ``worker_extension_cls`` =
``dspark_k3.draft.recorder.RoundsRecorder`` and ``enforce_eager``, call
``record_rounds`` on its workers (``llm.collective_rpc``), generate, and fetch
``recorded_rounds`` (`experiments.rounds.of_engine` takes them). Eager, because a graph
may have been captured without the head. Counts come to the host in every step, so this
is slower than serving.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

#: Probabilities nearer to 0 or 1 have no logit that says more.
_EDGE = 1e-7

#: A round: the request's name, the head's logits, drafts accepted.
Round = tuple[str, list[float], int]


class Rounds:
    """Follows the steps of a speculator.

    Args:
        drafts: a whole block.
    """

    def __init__(self, drafts: int) -> None:
        self._drafts = drafts
        #: By request: confidences of the drafts that its next step verifies.
        self._said: dict[str, list[float]] = {}
        self._found: list[Round] = []

    def verified(
        self, names: Sequence[str], sampled: Sequence[int], rejected: Sequence[int]
    ) -> None:
        """A step has verified drafts: of a request ``sampled`` tokens came out, the
        last of them the target's own, and ``rejected`` drafts did not."""
        for name, out, lost in zip(names, sampled, rejected, strict=True):
            said = self._said.pop(name, None)
            # The last step of a request may verify fewer drafts than were made.
            if said is not None and out + lost - 1 == self._drafts:
                self._found.append((name, [_logit(p) for p in said], out - 1))

    def drafted(self, names: Sequence[str], confidences: Sequence[list[float]]) -> None:
        """New drafts were made with these confidences."""
        self._said.update(zip(names, confidences, strict=True))

    def take(self) -> list[Round]:
        """What was found since the last call."""
        found, self._found = self._found, []
        return found


class RoundsRecorder:
    """Methods that vLLM's workers get; see the module."""

    model_runner: Any

    def record_rounds(self) -> None:
        """Record from now on.

        Raises:
            ValueError: there is no confidence head, its confidences are calibrated
                already, or the drafter may run in a graph.
        """
        speculator = self.model_runner.speculator
        model: Any = getattr(speculator, "model", None)
        if getattr(getattr(model, "model", None), "confidence_head", None) is None:
            raise ValueError(
                "the drafter has no confidence head (enable_confidence_head in its "
                "config.json): there is nothing to record"
            )
        if "draft_temperatures" in dict(model.named_buffers()):
            raise ValueError(
                "the drafter's confidences are calibrated already; record with "
                '"calibration": false'
            )
        if not self.model_runner.vllm_config.model_config.enforce_eager:
            raise ValueError(
                "drafts may come from a graph that leaves the confidence head out; "
                "start the engine with enforce_eager"
            )
        speculator.use_confidence_head = True
        self._rounds = rounds = Rounds(speculator.num_speculative_steps)
        propose = speculator.propose

        @functools.wraps(propose)
        def recording(
            input_batch: Any,
            attn_metadata: Any,
            slot_mappings: Any,
            last_hidden_states: Any,
            aux_hidden_states: Any,
            num_sampled: Any,
            num_rejected: Any,
            *more: Any,
            **named: Any,
        ) -> Any:
            names = list(input_batch.req_ids[: input_batch.num_reqs])
            rounds.verified(names, num_sampled.tolist(), num_rejected.tolist())
            drafts = propose(
                input_batch,
                attn_metadata,
                slot_mappings,
                last_hidden_states,
                aux_hidden_states,
                num_sampled,
                num_rejected,
                *more,
                **named,
            )
            said = speculator.draft_token_confidence_probs[: len(names)]
            rounds.drafted(names, said.tolist())
            return drafts

        speculator.propose = recording

    def recorded_rounds(self) -> list[Round]:
        """The rounds since the last call."""
        return self._rounds.take()


def _logit(chance: float) -> float:
    chance = min(max(chance, _EDGE), 1 - _EDGE)
    return math.log(chance / (1 - chance))
