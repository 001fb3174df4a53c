# SPDX-License-Identifier: Apache-2.0
"""Multi-head latent attention for the rows of a verify step; the reference so far."""
