# SPDX-License-Identifier: Apache-2.0
"""Acceptance sweeps, step-time profiles, plots, the tiny models and their training."""
