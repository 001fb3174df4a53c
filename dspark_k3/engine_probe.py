# SPDX-License-Identifier: Apache-2.0
"""What vLLM says once it is imported with our plug-in: run as a child of the doctor.

``python -m dspark_k3.engine_probe`` imports vLLM as a server would and prints one JSON
line. A child process, because a broken engine can take the whole interpreter down and
because Triton decides at import whether it interprets.
"""

from __future__ import annotations

import json

MARK = "dspark-k3 probe: "


def _main() -> None:
    import vllm
    from vllm import LLM  # noqa: F401  (pulls in what a server pulls in)
    from vllm.model_executor.models.registry import ModelRegistry
    from vllm.platforms import current_platform
    from vllm.plugins import load_general_plugins
    from vllm.triton_utils import HAS_TRITON

    from dspark_k3.plugin import DRAFT_OVERRIDES

    load_general_plugins()
    models = {
        name: ":".join(
            str(getattr(ModelRegistry.models.get(name), part, None))
            for part in ("module_name", "class_name")
        )
        for name in DRAFT_OVERRIDES
    }
    facts = {
        "vllm": vllm.__version__,
        "platform": type(current_platform).__name__,
        "triton": bool(HAS_TRITON),
        "models": models,
        "active": models == DRAFT_OVERRIDES,
    }
    print(f"{MARK}{json.dumps(facts)}", flush=True)


if __name__ == "__main__":
    _main()
