# SPDX-License-Identifier: Apache-2.0
"""Run a few lines of Python in a fresh interpreter with a chosen environment."""

import os
import subprocess
import sys

OURS = ("DSPARK_K3_CPU", "TRITON_INTERPRET", "VLLM_PLUGINS", "VLLM_TARGET_DEVICE")


def python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if name not in OURS}
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**clean, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )
