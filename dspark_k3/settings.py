# SPDX-License-Identifier: Apache-2.0
"""What users set through vLLM's ``--additional-config '{"dspark_k3": {...}}'``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

KEY = "dspark_k3"


@dataclass(frozen=True)
class Settings:
    """Our settings.

    ``check_draft``: refuse a Qwen3 DSpark checkpoint that does not fit the target or
    the speculative settings. Set it to false to load it unchecked, as vLLM does.
    """

    check_draft: bool = True


def read(additional_config: Any) -> Settings:
    """Settings from a vLLM ``additional_config`` (a mapping; others carry none).

    Raises ValueError for an unknown key or a value of the wrong type.
    """
    if not isinstance(additional_config, Mapping):
        return Settings()
    given = additional_config.get(KEY, {})
    known = [field.name for field in fields(Settings)]
    if not isinstance(given, Mapping):
        raise ValueError(
            f"additional_config[{KEY!r}]={given!r}: must be an object with keys among "
            f"{', '.join(known)}"
        )
    for name, value in given.items():
        if name not in known:
            raise ValueError(
                f"additional_config[{KEY!r}] has unknown key {name!r}; known keys: "
                f"{', '.join(known)}"
            )
        if not isinstance(value, bool):
            raise ValueError(
                f"additional_config[{KEY!r}][{name!r}]={value!r}: must be true or false"
            )
    return Settings(**given)
