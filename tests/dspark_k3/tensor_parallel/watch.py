# SPDX-License-Identifier: Apache-2.0
"""What each rank decides in each step, read inside vLLM's workers."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from typing import Any

from experiments.gpu_engine.recorder import StepRecorder

WATCH = "tests.dspark_k3.tensor_parallel.watch.RankWatch"

#: One step of one rank: requests, rows as scheduled, the graph, rows by request.
Record = tuple[int, int, str, list[int]]


class Watch:
    """Wraps a runner's methods; records between :meth:`start` and :meth:`take`.

    Rows by request are the ones that the device has, after trimming. They are copied on
    the device and read at the end, so that recording changes no timing much.
    """

    def __init__(self, runner: Any) -> None:
        self._on = False
        self._steps: list[dict[str, Any]] = []
        self._current: dict[str, Any] | None = None
        self._execute = runner.execute_model
        runner.execute_model = self._execute_model
        if runner.cudagraph_manager is not None:
            self._dispatch = runner.cudagraph_manager.dispatch
            runner.cudagraph_manager.dispatch = self._dispatch_graph
        manager = getattr(runner, "adaptive_verification", None)
        if manager is not None:
            self._reallocate = manager.reallocate_drafts
            manager.reallocate_drafts = self._reallocate_drafts

    def start(self) -> None:
        """Forget what was recorded and record."""
        self._steps, self._on = [], True

    def take(self) -> list[Record]:
        """Stop; the steps since :meth:`start`."""
        self._on = False
        found: list[Record] = []
        for step in self._steps:
            starts = step["starts"]
            rows = [] if starts is None else starts.diff().tolist()
            found.append((step["requests"], step["rows"], step["graph"], rows))
        self._steps = []
        return found

    def _execute_model(self, scheduled: Any, *args: Any, **keywords: Any) -> Any:
        rows = getattr(scheduled, "total_num_scheduled_tokens", 0)
        if not self._on or not rows or keywords.get("dummy_run", False):
            return self._execute(scheduled, *args, **keywords)
        self._current = {
            "requests": len(scheduled.num_scheduled_tokens),
            "rows": int(rows),
            "graph": "",
            "starts": None,
        }
        self._steps.append(self._current)
        try:
            return self._execute(scheduled, *args, **keywords)
        finally:
            self._current = None

    def _dispatch_graph(self, *args: Any, **keywords: Any) -> Any:
        found = self._dispatch(*args, **keywords)
        if self._current is not None:
            self._current["graph"] = (
                f"{found.cg_mode.name} {found.num_tokens} rows, {found.num_reqs} "
                f"requests, uniform {found.uniform_token_count}, "
                f"longest {found.max_query_len}"
            )
        return found

    def _reallocate_drafts(self, req_ids: Any, idx_mapping: Any) -> Any:
        found = self._reallocate(req_ids, idx_mapping)
        if self._current is not None:
            self._current["starts"] = found[1][: len(req_ids) + 1].clone()
        return found


class Drift:
    """Disturbs the confidences of one rank where vLLM hands them on.

    Args:
        manager: vLLM's adaptive verification.
        size: each is multiplied by 1 + size * u, u uniform in (-1, 1).
    """

    def __init__(self, manager: Any, size: float) -> None:
        self.disturbed = 0
        self._size = size
        self._record = manager.record_confidences
        manager.record_confidences = self._record_confidences

    def _record_confidences(self, confidence_probs: Any, input_batch: Any) -> None:
        import torch

        rows = confidence_probs[: input_batch.num_reqs]
        rows.mul_(1 + self._size * (2 * torch.rand_like(rows) - 1)).clamp_(0, 1)
        self.disturbed += rows.numel()
        self._record(confidence_probs, input_batch)


class RankWatch(StepRecorder):
    """Mixed into vLLM's worker by ``worker_extension_cls``."""

    def tp_watch_start(self) -> None:
        """Record the steps from here on."""
        worker: Any = self
        if not hasattr(worker, "k3_watch"):
            worker.k3_watch = Watch(worker.model_runner)
        worker.k3_watch.start()

    def tp_watch_take(self) -> str:
        """The steps since `tp_watch_start` as JSON."""
        worker: Any = self
        return json.dumps(worker.k3_watch.take())

    def tp_drift(self, size: float, rank: int) -> None:
        """Disturb the confidences of ``rank`` from here on."""
        worker: Any = self
        if worker.rank == rank:
            manager = worker.model_runner.adaptive_verification
            worker.k3_drift = Drift(manager, size)

    def tp_disturbed(self) -> int:
        """Confidences that were disturbed on this rank."""
        drift = getattr(self, "k3_drift", None)
        return 0 if drift is None else int(drift.disturbed)

    def tp_agree(self, agree: bool) -> bool:
        """Whether ranks take rank 0's confidences from here on; False if this engine's
        ranks cannot be told."""
        worker: Any = self
        manager = worker.model_runner.adaptive_verification
        if not hasattr(manager, "agree"):
            return False
        manager.agree = agree
        return True

    def tp_process(self) -> int:
        """The worker's process id."""
        return os.getpid()


def digest(steps: Sequence[Any]) -> str:
    """A hash of what a rank decided."""
    return hashlib.sha256(json.dumps(steps).encode()).hexdigest()[:16]


def compare(ranks: Sequence[Sequence[Any]]) -> dict[str, Any]:
    """Whether every rank decided the same in every step.

    Args:
        ranks: `Watch.take` of each rank.

    Returns:
        steps (the shortest rank's), agree, digests by rank, first (the first step in
        which ranks differ, and what each did), trimmed (steps that ran fewer rows than
        were scheduled), uneven (those of them whose requests differ in rows) and graphs
        (different ones).
    """
    lengths = [len(steps) for steps in ranks]
    digests = [digest(steps) for steps in ranks]
    first = None
    for index, of_ranks in enumerate(zip(*ranks, strict=False)):
        if any(list(step) != list(of_ranks[0]) for step in of_ranks):
            first = {"step": index, "ranks": [list(step) for step in of_ranks]}
            break
    agree = first is None and len(set(lengths)) == 1
    trimmed = [s for s in ranks[0] if s[3] and sum(s[3]) < s[1]]
    return {
        "steps": min(lengths),
        "agree": agree,
        "digests": digests,
        "first": first,
        "trimmed": len(trimmed),
        "uneven": sum(len(set(s[3])) > 1 for s in trimmed),
        "graphs": len({s[2] for s in ranks[0]}),
    }
