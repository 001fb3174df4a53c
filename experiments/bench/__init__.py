# SPDX-License-Identifier: Apache-2.0
"""Kernel benchmarks: correctness gates first, then times beside peers of the same run.

``python -m experiments.bench OP [OP ...]`` on a machine with a GPU; ``--help`` lists
the options. Every figure becomes one line of :mod:`experiments.results`.
``python -m experiments.bench.tune`` searches for the fastest kernels of skinny_gemm and
writes the table of which serves what.
"""
