# SPDX-License-Identifier: Apache-2.0
"""Tensor parallelism on real GPUs, in one command.

``python -m tests.dspark_k3.tensor_parallel --tp 2 --out /tmp/tp2`` starts every engine
side by side on the first N GPUs of this host and gives them turns:

* small: tiny-k3 with and without speculation at TP N, in graphs and eagerly, and plain
  at TP 1, with vLLM's multiprocess executor as one serves. Where N does not divide its
  heads, a model of tiny-k3's shape with N heads and dummy weights, without TP 1.
* lengths: adaptive verification, step by step on every rank (`watch`): the rows of
  each request and the graph must be the same, with and without drift in one rank's
  confidences; at last with drift and vLLM's own way of deciding.
* faults: a rank that stops (SIGSTOP) and one that dies (SIGKILL) under load.
* wide: K3's widths cut in depth with dummy weights, stock and ours, plain and k = 7,
  batch 1 and 8: step times and layer traces (``experiments.gpu_engine``).

``--out`` gets ``results.jsonl``, a line as soon as it is known, ``verdicts.json`` and
each engine's log and answer. Exit code 1 unless every gate holds.
"""
