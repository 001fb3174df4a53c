# SPDX-License-Identifier: Apache-2.0
"""The opt-in that lets vLLM's Triton code run on a CPU engine.

vLLM's ``method="dspark"`` lives in Model Runner V2, whose glue is written in Triton.
Triton can run kernels in its interpreter, but vLLM's CPU build switches Triton off
when no "cpu" backend is listed. With ``DSPARK_K3_CPU=1`` (and ``TRITON_INTERPRET=1``,
set before Python starts) the platform plug-in applies the patches listed in
`dspark_k3.cpu.patches`; without it nothing is touched.

Importing this package loads neither vLLM, torch nor Triton.
"""

from __future__ import annotations

import os

from dspark_k3 import seams

OPT_IN = "DSPARK_K3_CPU"
INTERPRET = "TRITON_INTERPRET"
PLUGIN_NAME = "dspark_k3_cpu"

_TRUE = ("1", "true", "yes", "on")
_FALSE = ("", "0", "false", "no", "off")


def requested() -> bool:
    """Whether the environment asks for Triton on CPU.

    Raises ValueError for a value that is neither true nor false.
    """
    value = os.environ.get(OPT_IN, "").strip().lower()
    if value in _TRUE:
        return True
    if value in _FALSE:
        return False
    raise ValueError(f"{OPT_IN}={value!r}: use 1 to opt in or 0 (or unset) not to")


def check() -> None:
    """Raise unless engine, Triton and environment are ones the patches were tested on.

    Raises seams.UnsupportedEngine for versions, RuntimeError for the environment.
    """
    seams.require_cpu_engine(seams.installed_engine())
    triton = seams.distribution_version("triton")
    window = seams.TRITON_FOR_CPU
    if triton is None or not window.admits(triton):
        raise seams.UnsupportedEngine(
            f"{OPT_IN} is set, but it supports {window} and "
            f"{'none' if triton is None else triton} is installed. "
            f"Run `{window.install}`."
        )
    if os.environ.get(INTERPRET) != "1":
        raise RuntimeError(
            f"{OPT_IN} is set, but {INTERPRET}=1 is not: Triton must know before "
            f"Python starts that its kernels run in the interpreter. "
            f"Start with `{INTERPRET}=1 {OPT_IN}=1 vllm serve ...`."
        )


def require_active() -> None:
    """Raise RuntimeError unless the patches are in place in this process.

    vLLM swallows whatever a platform plug-in raises, so `dspark_k3.plugin.register`
    calls this where an error reaches the user.
    """
    check()
    # Reading the attribute makes vLLM choose its platform, and so run ours, now.
    from vllm.platforms import current_platform  # noqa: F401

    from dspark_k3.cpu import patches

    if patches.applied():
        return
    if os.environ.get("VLLM_TARGET_DEVICE") == "cpu":
        reason = "VLLM_TARGET_DEVICE=cpu makes vLLM skip platform plug-ins; unset it"
    elif PLUGIN_NAME not in os.environ.get("VLLM_PLUGINS", PLUGIN_NAME).split(","):
        reason = f"VLLM_PLUGINS leaves {PLUGIN_NAME} out; add it"
    else:
        reason = (
            "vLLM did not run the platform plug-in; is dspark-k3 installed in this "
            "environment (`dspark-k3 doctor` shows the entry points)?"
        )
    raise RuntimeError(f"{OPT_IN} is set, but Triton on CPU is not active: {reason}.")
