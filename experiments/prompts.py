# SPDX-License-Identifier: Apache-2.0
"""Held-out prompts for acceptance measurements."""

from experiments.corpora import KINDS, Kind, held_out_prompts

__all__ = ["KINDS", "Kind", "held_out_prompts"]
