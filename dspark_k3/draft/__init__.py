# SPDX-License-Identifier: Apache-2.0
"""Draft-model overrides: thin mix-ins over vLLM's own DSpark classes."""
