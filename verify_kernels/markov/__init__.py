# SPDX-License-Identifier: Apache-2.0
"""The sequential steps of a DSpark head, drafts drawn one behind the other.

`markov_sample` gives the tokens of vLLM's loop over its own noise. Read top to bottom:
reference.py (equations) -> noise.py, kernel.py (device code) -> host.py (compiled
forms, checks, launches).
"""

from verify_kernels.markov.host import MarkovSpace, Noise, markov_sample

__all__ = ["MarkovSpace", "Noise", "markov_sample"]
