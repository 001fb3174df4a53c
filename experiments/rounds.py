# SPDX-License-Identifier: Apache-2.0
"""Recorded rounds of speculation: what the confidence head said, what was accepted.

A JSON line a round, ``{"prompt": 3, "logits": [1.7, 0.2], "accepted": 1}``: the number
of the prompt it belongs to, the head's logits before any calibration, one a draft, and
how many drafts the target accepted of a block that was verified whole. `dspark-k3
calibrate --record` writes them; `of_engine` makes them of what
`dspark_k3.draft.recorder` recorded in vLLM.
"""

from __future__ import annotations

import json
import lzma
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


@dataclass(frozen=True)
class RecordedRounds:
    """Rounds in the order of the file.

    Attributes:
        prompt: int64 [N].
        logits: fp64 [N, k].
        accepted: int64 [N], 0 .. k.
    """

    prompt: NDArray[np.int64]
    logits: Array
    accepted: NDArray[np.int64]

    def survival(
        self, temperatures: Sequence[float] = (), shifts: Sequence[float] = ()
    ) -> Array:
        """[N, k], the product of the confidences up to each draft.

        Args:
            temperatures: of a calibration, one a draft at least; none for none.
            shifts: as many, or none.

        Raises:
            ValueError: fewer temperatures than drafts.
        """
        scaled, drafts = self.logits, self.logits.shape[1]
        if temperatures:
            if len(temperatures) < drafts:
                raise ValueError(
                    f"the calibration has {len(temperatures)} temperatures and the "
                    f"rounds {drafts} drafts: fit it to these rounds"
                )
            scaled = scaled / np.array(temperatures[:drafts], dtype=np.float64)
        if shifts:
            scaled = scaled + np.array(shifts[:drafts], dtype=np.float64)
        # exp of a negative number only: no overflow.
        grown = np.exp(-np.abs(scaled))
        confidence = np.where(scaled >= 0, 1.0, grown) / (1.0 + grown)
        return np.asarray(np.cumprod(confidence, axis=1))


def of_engine(found: Iterable[tuple[str, Sequence[float], int]]) -> RecordedRounds:
    """The rounds of an engine, requests numbered as they first come up.

    Args:
        found: (request, logits, accepted), as ``recorded_rounds`` returns them.

    Raises:
        ValueError: there are none.
    """
    names, logits, accepted = list(zip(*found, strict=True)) or ((), (), ())
    if not names:
        raise ValueError(
            "no round was recorded: call record_rounds before generating, and generate "
            "more tokens than one block of drafts"
        )
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    return RecordedRounds(
        np.array([numbers[name] for name in names], dtype=np.int64),
        np.array(logits, dtype=np.float64),
        np.array(accepted, dtype=np.int64),
    )


def write(path: Path, rounds: RecordedRounds) -> None:
    """One line a round."""
    lines = [
        json.dumps(
            {"prompt": int(p), "logits": list(map(float, row)), "accepted": int(a)}
        )
        for p, row, a in zip(rounds.prompt, rounds.logits, rounds.accepted, strict=True)
    ]
    path.write_text("".join(f"{line}\n" for line in lines))


def read(path: Path) -> RecordedRounds:
    """The rounds of a file, which may be packed (``.xz``).

    Raises:
        ValueError: no such file, no rounds, or a line that is none, with its number.
    """
    if not path.is_file():
        raise ValueError(
            f"{path} is no file; `dspark-k3 calibrate --record {path}` writes one"
        )
    found: list[tuple[int, list[float], int]] = []
    try:
        packed = path.suffix == ".xz"
        content = path.read_bytes()
        text = (lzma.decompress(content) if packed else content).decode()
    except (lzma.LZMAError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} holds no text: {error}") from error
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            given = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{where}: not JSON: {error}") from error
        found.append(_round(given, where))
        drafts = len(found[0][1])
        if len(found[-1][1]) != drafts:
            raise ValueError(
                f"{where}: {len(found[-1][1])} logits, and {drafts} on the first line; "
                "all rounds must have verified as many drafts"
            )
    if not found:
        raise ValueError(f"{path} has no rounds")
    prompts, logits, accepted = zip(*found, strict=True)
    return RecordedRounds(
        np.array(prompts, dtype=np.int64),
        np.array(logits, dtype=np.float64),
        np.array(accepted, dtype=np.int64),
    )


def _round(given: Any, where: str) -> tuple[int, list[float], int]:
    if not isinstance(given, dict):
        raise ValueError(f"{where}: is {type(given).__name__}; give one JSON object")
    prompt, logits = given.get("prompt"), given.get("logits")
    accepted = given.get("accepted")
    if not isinstance(prompt, int) or not _is_count(prompt):
        raise ValueError(f"{where}: prompt is {prompt!r}; it must be its number")
    if (
        not isinstance(logits, list)
        or not logits
        or not all(isinstance(x, int | float) and math.isfinite(x) for x in logits)
    ):
        raise ValueError(
            f"{where}: logits is {logits!r}; it must be a list of numbers, one a draft"
        )
    if (
        not isinstance(accepted, int)
        or not _is_count(accepted)
        or accepted > len(logits)
    ):
        raise ValueError(
            f"{where}: accepted is {accepted!r}; of {len(logits)} drafts it must be 0 "
            f"to {len(logits)}"
        )
    return prompt, [float(x) for x in logits], accepted


def _is_count(value: int) -> bool:
    return not isinstance(value, bool) and value >= 0
