# SPDX-License-Identifier: Apache-2.0
"""Running vLLM engines on a GPU and reading times, traces and routing out of them.

``fleet`` starts engines in processes of their own and gives them turns on the GPU,
``child`` is such a process, ``worker`` is mixed into vLLM's worker and owns a
``recorder``, ``spread`` fills dummy weights, ``measure`` is the job that the profiles
are made of, ``segment`` cuts kernel traces into steps and layers.
"""
