# SPDX-License-Identifier: Apache-2.0
"""Drafts drawn twice in a running engine: by our sampler, and by vLLM's loop on the
same step's buffers. What is counted stays on the GPU, so graphs count it as well."""

from __future__ import annotations

from typing import Any

WORKER = "tests.dspark_k3.shadow.Shadow"
JOB = "tests.dspark_k3.shadow:job"
#: Values of `Shadow.shadow_counts`.
STEPS, DRAWN, DIFFERENT, AFTER, CONFIDENCE = range(5)


class Shadow:
    """Mixed into vLLM's worker by ``worker_extension_cls``."""

    def init_worker_extension(self) -> None:
        """Before the drafter is made, and long before its graphs are captured."""
        import torch
        from vllm.v1.worker.gpu.spec_decode.dspark import speculator

        worker: Any = self
        counts: dict[str, Any] = {}
        worker.shadow = counts
        draw = speculator.DSparkSpeculator._sample_sequential

        def drawn_twice(self: Any, requests: int, head_hidden: Any) -> None:
            if "all" not in counts:
                counts["all"] = torch.zeros(5, dtype=torch.int64, device=self.device)
            head = self.model.sample_sequential
            probs = (
                self.draft_token_confidence_probs if self.use_confidence_head else None
            )
            draw(self, requests, head_hidden)
            ours = self.draft_tokens[:requests].clone()
            told = None if probs is None else probs[:requests].clone()
            try:
                self.model.sample_sequential = lambda *_: False
                draw(self, requests, head_hidden)
            finally:
                self.model.sample_sequential = head
            stock = self.draft_tokens[:requests]
            other = ours != stock
            same = ~other.any(1, keepdim=True)
            found = counts["all"]
            found[STEPS] += 1
            found[DRAWN] += ours.numel()
            # Behind a first difference the rest of a request's drafts may differ.
            found[DIFFERENT] += (other & (other.cumsum(1) == 1)).sum()
            found[AFTER] += other.sum()
            if told is not None:
                found[CONFIDENCE] += ((probs[:requests] != told) & same).sum()
            stock.copy_(ours)

        speculator.DSparkSpeculator._sample_sequential = drawn_twice

    def shadow_counts(self) -> list[int]:
        """Steps; drafts drawn, those of requests that pad a graph among them; first
        differences of a request and step, and all; confidences that differ though the
        drafts do not."""
        worker: Any = self
        found: list[int] = worker.shadow["all"].tolist()
        return found


def job(llm: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Generate until ``drafts`` drafts of requests were drawn.

    Keys of ``options``: drafts; temperature; prompts, lists of ids; max_tokens.
    """
    from vllm import SamplingParams, TokensPrompt

    from tests.dspark_k3.suite.jobs import spec_counts

    before = llm.collective_rpc("shadow_counts")[0]
    live, turn = 0, 0
    while live < options["drafts"]:
        asked = [TokensPrompt(prompt_token_ids=ids) for ids in options["prompts"]]
        parameters = [
            SamplingParams(
                temperature=options["temperature"],
                seed=1000 * turn + i,
                max_tokens=options["max_tokens"],
                ignore_eos=True,
                detokenize=False,
            )
            for i in range(len(asked))
        ]
        llm.generate(asked, parameters, use_tqdm=False)
        turn += 1
        now = spec_counts(llm)["draft_tokens"][0]
        if now == live:
            raise ValueError("the engine proposes no drafts")
        live = now
    after = llm.collective_rpc("shadow_counts")[0]
    return {
        "live": live,
        "counts": [a - b for a, b in zip(after, before, strict=True)],
    }
