# SPDX-License-Identifier: Apache-2.0
from typing import Any

import pytest

from dspark_k3 import settings


@pytest.mark.parametrize("config", [{}, {"other": 1}, {"dspark_k3": {}}, None, "x"])
def test_defaults(config: Any) -> None:
    assert settings.read(config) == settings.Settings(check_draft=True)


def test_a_setting_is_read() -> None:
    given = {"dspark_k3": {"check_draft": False}}
    assert settings.read(given).check_draft is False


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"chek_draft": True}, "unknown key 'chek_draft'; known keys: check_draft"),
        ({"check_draft": "no"}, r"\['check_draft'\]='no': must be true or false"),
        ([1], r"\[1\]: must be an object"),
    ],
)
def test_bad_settings_are_named(given: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        settings.read({"dspark_k3": given})
