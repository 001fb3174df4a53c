# SPDX-License-Identifier: Apache-2.0
"""Latent mixture of experts with MXFP4 weights; the reference so far."""
