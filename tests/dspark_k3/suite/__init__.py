# SPDX-License-Identifier: Apache-2.0
"""tiny-k3 through vLLM on a GPU, case by case, and what the server tests share.

``python -m tests.dspark_k3.suite.run --out DIR`` runs every case, several engines at a
time, and writes ``verdicts.json``; `test_tiny_k3_gpu` reads it, and `record` turns it
into result lines.
"""
