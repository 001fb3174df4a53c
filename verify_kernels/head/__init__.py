# SPDX-License-Identifier: Apache-2.0
"""LM head, argmax and the sequential Markov sampler; the reference so far."""
