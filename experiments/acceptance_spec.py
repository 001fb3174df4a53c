# SPDX-License-Identifier: Apache-2.0
"""What ``--acceptance`` understands.

==============================  ==================================================
``k3-golden``                   a published curve by name
``results.jsonl``, ``DIR``      measured curves of a sweep; ``PATH#NAME`` picks one
``0.9,0.8,0.5``                 survival rates: P(first k accepted), never rising
``conditional:0.9,0.9``         conditional rates
``length:2..6:geometric``       a range of acceptance lengths, constant rate
``length:3.5:minvar``           one length, vLLM's minimum-variance schedule
==============================  ==================================================
"""

from __future__ import annotations

from pathlib import Path

from experiments import published, results
from experiments.acceptance import AcceptanceCurve, Label

GRAMMAR = (
    "give a results file or directory, a published name such as k3-golden, survival "
    'rates "0.9,0.8,0.5", "conditional:0.9,0.9" or "length:2..6:geometric|minvar"'
)


def _numbers(text: str, spec: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(
            f"acceptance {spec!r}: not a list of numbers; {GRAMMAR}"
        ) from None


def _from_lengths(spec: str, drafts: int) -> list[AcceptanceCurve]:
    parts = spec.split(":")
    if len(parts) != 3 or parts[2] not in ("geometric", "minvar"):
        raise ValueError(f"acceptance {spec!r} is not understood; {GRAMMAR}")
    ends = _numbers(parts[1].replace("..", ","), spec)
    if len(ends) > 2 or ends != sorted(ends):
        raise ValueError(f"acceptance {spec!r}: write the lengths as LOW..HIGH")
    low, high = ends[0], ends[-1]
    steps = int((high - low) / 0.5 + 1e-9)
    lengths = [low + 0.5 * i for i in range(steps + 1)]
    if high - lengths[-1] > 1e-9:
        lengths.append(high)
    build = (
        AcceptanceCurve.geometric
        if parts[2] == "geometric"
        else AcceptanceCurve.minimum_variance
    )
    return [build(length, drafts) for length in lengths]


def curves_from_results(path: Path) -> list[AcceptanceCurve]:
    """Curves from the lines of a results file or directory.

    ``survival`` lines give the rates, ``acceptance_length`` lines the runs' own AL(k).

    A measured file's curves keep the label they were written with.

    Raises:
        ValueError: unreadable file, no survival lines, or a gap in the positions.
    """
    found: dict[str, dict[int, float]] = {}
    own: dict[str, dict[int, float]] = {}
    labels: dict[str, Label] = {}
    for line in results.read(path):
        metric = line["metric" if "metric" in line else "op"]
        if metric == "acceptance_length" and line["shape"]["k"] > 0:
            lengths = own.setdefault(line["variant"], {})
            lengths[line["shape"]["k"]] = line["value"]
        if metric != "survival":
            continue
        if line["gates"] and not all(line["gates"].values()):
            raise ValueError(
                f"{path}: curve {line['variant']!r} comes from a run whose checks "
                "failed; its acceptance is not usable"
            )
        position = line["shape"].get("position")
        found.setdefault(line["variant"], {})[position] = line["value"]
        labels[line["variant"]] = line["label"]
    if not found:
        raise ValueError(f"{path} holds no survival lines; run 'dspark-k3 sweep'")
    curves = []
    for name, points in found.items():
        if sorted(points) != list(range(1, len(points) + 1)):
            raise ValueError(f"{path}: curve {name!r} lacks some positions")
        rates = [points[j] for j in range(1, len(points) + 1)]
        curves.append(
            AcceptanceCurve(
                name, tuple(rates), labels[name], str(path), own.get(name, {})
            )
        )
    return curves


def parse_acceptance(spec: str, drafts: int = 7) -> list[AcceptanceCurve]:
    """Curves for an ``--acceptance`` value; several for a file or a range.

    Args:
        spec: see the module docstring.
        drafts: positions of a curve built from a length.

    Raises:
        ValueError: not understood, or rates against the rules.
    """
    text = spec.strip()
    if text.startswith("length:"):
        return _from_lengths(text, drafts)
    if text.startswith("conditional:"):
        rates = _numbers(text.removeprefix("conditional:"), spec)
        return [AcceptanceCurve.from_conditional("given", rates, "modelled", spec)]
    if text and all(c in "0123456789.,-+e " for c in text):
        rates = _numbers(text, spec)
        return [AcceptanceCurve.from_survival("given", rates, "modelled", spec)]
    file_name, _, chosen = text.partition("#")
    path = Path(file_name)
    if text and path.exists():
        curves = curves_from_results(path)
        picked = [c for c in curves if not chosen or c.name == chosen]
        if not picked:
            raise ValueError(
                f"{path} has no curve {chosen!r}; it has "
                f"{', '.join(c.name for c in curves)}"
            )
        return picked
    if "/" in text or text.endswith((".json", ".jsonl")):
        raise ValueError(f"acceptance file {text} does not exist; {GRAMMAR}")
    return [published.curve(text)]
