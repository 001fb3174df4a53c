# SPDX-License-Identifier: Apache-2.0
"""Kimi delta attention for the rows of a verify step; the reference so far."""
