# SPDX-License-Identifier: Apache-2.0
"""An engine of two CPU workers, one of which is stopped or killed while it serves.

``python -m tests.dspark_k3.faulty_engine KIND TARGET`` prints what
`tests.dspark_k3.tensor_parallel.jobs.break_a_rank` found.
"""

from __future__ import annotations

import json
import os
import sys

STEP_LIMIT_S = 15
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": str(STEP_LIMIT_S),
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS": "3",
}


def main(kind: str, target: str) -> None:
    """Start, serve, break a rank, say what came of it."""
    from vllm import LLM

    from tests.dspark_k3.tensor_parallel import cases, jobs
    from tests.dspark_k3.tensor_parallel.watch import WATCH

    llm = LLM(
        model=target,
        tensor_parallel_size=2,
        distributed_executor_backend="mp",
        worker_extension_cls=WATCH,
        enforce_eager=True,
        max_model_len=512,
        max_num_seqs=4,
        dtype="float32",
        skip_tokenizer_init=True,
        disable_log_stats=False,
    )
    load = {"prompts": [[1, 2, 3]] * 2, "max_tokens": 200}
    print(json.dumps(jobs.break_a_rank(llm, kind, load, cases.FAULT_LIMIT_S)))
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
