# SPDX-License-Identifier: Apache-2.0
"""Kimi delta attention for the rows of a verify step: references, no kernel yet."""
