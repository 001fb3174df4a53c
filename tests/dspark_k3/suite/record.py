# SPDX-License-Identifier: Apache-2.0
"""Result lines (`experiments.results`) of a suite that has run.

``python -m tests.dspark_k3.suite.record DIR --commit SHA --out FILE.jsonl`` reads what
`run` left in DIR: ``verdicts.json`` and each engine's answer and spec. The answers
name neither the GPU nor versions, so both are options, as is the command that was
typed. A line's date is that of ``verdicts.json``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from dspark_k3 import settings
from experiments import results
from tests.dspark_k3.suite import verdict

COMMAND = "python -m tests.dspark_k3.suite.run"
GPU = "NVIDIA H200"
LENGTH = ("acceptance_length", "tokens per verify step")
#: The engines whose acceptance at temperature 1 `run` takes, by name in its verdict.
SAMPLED = {"fixed": "fixed-graph-k7", "adaptive": "adaptive-graph-k7"}

#: Settings that a line's shape has where they are not the defaults.
_MANNERS = ("kda_layout", "draft_sampler", "draft_attention")

Add = Callable[..., None]


class Folder:
    """What a suite left in ``path``; every reader raises ValueError for a bad file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.verdicts = self._load("verdicts.json")
        self.failed: dict[str, str] = self.verdicts["failed"]

    def _load(self, name: str) -> Any:
        path = self.path / name
        if not path.is_file():
            raise ValueError(
                f"{path} does not exist; give the folder that {COMMAND} --out wrote"
            )
        try:
            return json.loads(path.read_text())
        except ValueError as error:
            raise ValueError(f"{path} is not JSON: {error}; copy it again") from error

    def answer(self, name: str) -> Any:
        """The result of an engine's job."""
        found = self._load(f"{name}.json")
        if "result" not in found:
            raise ValueError(
                f"{self.path / name}.json holds no result, but verdicts.json has a "
                "verdict on it; run the suite again without --add"
            )
        return found["result"]

    def options(self, name: str) -> Any:
        """Of the engine's job."""
        return self._load(f"{name}.spec.json")["options"]

    def shape(self, name: str) -> dict[str, Any]:
        """Drafts and manner of an engine: k, mode, adaptive, and the layout of KDA's
        states, what the drafter has of ours and the ops that are stock if they are not
        the defaults; not all ops."""
        engine = self._load(f"{name}.spec.json")["engine"]
        speculative = engine.get("speculative_config", {})
        ours = engine.get("additional_config", {}).get(settings.KEY, {})
        asked = {k: v for k, v in ours.items() if k in _MANNERS}
        stock = [op for op, side in ours.get("ops", {}).items() if side == "stock"]
        if stock and set(stock) != set(settings.OPS):
            asked["stock"] = ", ".join(stock)
        return {
            "k": speculative.get("num_speculative_tokens", 0),
            "mode": "eager" if engine["enforce_eager"] else "graph",
            "adaptive": speculative.get("enable_adaptive_verification", False),
            **asked,
        }

    def sampling(self, name: str, group: str, temperature: float) -> dict[str, Any]:
        """The shape of an acceptance length."""
        how = self.shape(name)
        return {"k": how.pop("k"), "group": group, "temperature": temperature, **how}

    def ran(self, *names: str) -> bool:
        """Whether none of the engines failed the last time."""
        return not self.failed.keys() & set(names)


def lines(
    path: Path,
    *,
    commit: str,
    gpu: str = GPU,
    command: str = COMMAND,
    versions: Mapping[str, str] | None = None,
    note: str = "",
    failed: bool = False,
) -> list[results.Line]:
    """The lines of the suite in ``path``.

    Args:
        path: folder of the suite.
        commit, gpu, command, versions: of the run.
        note: added to every line's own.
        failed: engines that failed become lines; otherwise they are refused.

    Raises:
        ValueError: a missing or bad file, a failed engine without ``failed``, an answer
            from another run than its verdict, or nothing to record.
    """
    folder = Folder(path)
    if folder.failed and not failed:
        raise ValueError(
            f"{path}: engines failed: {', '.join(folder.failed)}; run the suite again, "
            "or give --failed to record them as failed"
        )
    recorder = results.Recorder(command=command, commit=commit)

    def add(metric: str, value: float, *, own: str = "", **rest: Any) -> None:
        joined = "; ".join(filter(None, (own, note)))
        recorder.add(metric, value, label="measured", gpu=gpu, note=joined, **rest)

    judged = {
        name: case
        for name, case in folder.verdicts["cases"].items()
        if folder.ran(name)
    }
    for name, case in judged.items():
        greedy(folder, name, case, add)
    sampled(folder, add)
    logits(folder, add)
    for name, case in judged.items():
        if not case["equal"]:
            differences(folder, name, case, add)
    unasked(folder, add)
    for name, error in folder.failed.items():
        add(
            "failed_engine",
            1,
            variant=f"tiny-k3 {name}",
            shape=folder.shape(name),
            unit="engines",
            gates={"ran": False},
            own=error.strip().split("\n")[0],
        )
    if not recorder.lines:
        raise ValueError(f"{path / 'verdicts.json'} has no verdict; run the suite")
    written = (path / "verdicts.json").stat().st_mtime
    # The recorder would name this machine's versions and this moment.
    run = {
        "commit": commit,
        "versions": dict(versions or {}),
        "date": datetime.fromtimestamp(written, UTC).isoformat(timespec="seconds"),
    }
    return [{**line, **run} for line in recorder.lines]


def check_length(
    where: str, counts: Mapping[str, int], length: float
) -> Mapping[str, int]:
    """``counts`` of an answer, if they give the verdict's acceptance length.

    Raises ValueError if they do not.
    """
    steps = counts["verify_steps"]
    found = 1 + counts["accepted_tokens"] / steps if steps else 1.0
    if found != length:
        raise ValueError(
            f"{where}: the answer gives acceptance length {found}, verdicts.json "
            f"{length}; they are of different runs, copy the folder again"
        )
    return counts


def greedy(folder: Folder, name: str, case: Mapping[str, Any], add: Add) -> None:
    """Acceptance length by group."""
    answer = folder.answer(name)
    for group, length in case["acceptance_length"].items():
        counts = answer["groups"][group]["speculation"]
        check_length(f"{name}, {group}", counts, length)
        add(
            LENGTH[0],
            length,
            variant=f"tiny-k3 {name} greedy {group}",
            shape=folder.sampling(name, group, 0.0),
            unit=LENGTH[1],
            gates=gates_of(case),
            own="" if case["equal"] else where_it_differs(case),
        )


def gates_of(case: Mapping[str, Any]) -> dict[str, bool]:
    """Of a case's lines; logits only where every op was ours and some were compared."""
    gates = {"text_equal": case["equal"], "executor_ran": case["executor_ran"]}
    logits = case.get("logits", {})
    if case.get("exact_wanted") and logits["prompts"]:
        gates["logits_equal"] = not logits["differ"]
    return gates


def where_it_differs(case: Mapping[str, Any]) -> str:
    """The differences of a case, and how many stock ops have."""
    ours = [
        (d["group"], d["prompt"], d["position"], d["gap"]) for d in case["differences"]
    ]
    if "stock" not in case:
        return f"differs at {ours}; not run with all ops stock"
    gaps = [d["gap"] for d in case["stock"]["differences"]]
    return (
        f"differs at {ours}; all ops stock: {len(gaps)} requests differ from stock's "
        f"own plain run, gaps {gaps}"
    )


def sampled(folder: Folder, add: Add) -> None:
    """Acceptance lengths at temperature 1 by text, and what trimming loses of them."""
    found = folder.verdicts.get("acceptance")
    if found is None or not folder.ran(*SAMPLED.values()):
        return
    for kind, name in SAMPLED.items():
        answer, asked = folder.answer(name), folder.options(name)["sampled"]
        for text, length in found["lengths"][kind].items():
            counts = check_length(f"{name}, {text}", answer["sampled"][text], length)
            add(
                LENGTH[0],
                length,
                variant=f"tiny-k3 {name} T=1 {text}",
                shape=folder.sampling(name, text, 1.0),
                unit=LENGTH[1],
                own=f"{len(asked[text]['prompts'])} held-out prompts, "
                f"{asked[text]['max_tokens']} tokens each; "
                f"{counts['verify_steps']} verify steps",
            )
    means = found["means"]
    add(
        "acceptance_length_lost",
        found["loss"],
        variant=f"tiny-k3 {SAMPLED['adaptive']} T=1 against {SAMPLED['fixed']}",
        shape=folder.sampling(SAMPLED["adaptive"], "mean of texts", 1.0),
        unit="share of the acceptance length",
        gates={gate: found[gate] for gate in ("little_lost", "long_enough")},
        own=f"means over the texts: fixed {means['fixed']:.3f}, adaptive "
        f"{means['adaptive']:.3f}",
    )


def logits(folder: Folder, add: Add) -> None:
    """Divergence from the engine-free model."""
    found = folder.verdicts.get("logits")
    if found is None or not folder.ran("plain-graph"):
        return
    same, positions = found["same_token"], found["positions"]
    for which in ("mean", "max"):
        add(
            f"logits_{which}_kl",
            found[f"{which}_kl"],
            variant="tiny-k3 vLLM through our executor against the engine-free model",
            shape={"positions": positions},
            unit="nats",
            gates={"close": found["close"], "same_token": same == positions},
            own="largest difference of a top logprob "
            f"{found['max_difference_at_the_top']:.3f}; same token at {same} positions",
        )


def differences(folder: Folder, name: str, case: Mapping[str, Any], add: Add) -> None:
    """Texts that differ and the largest gap there, with our ops and with stock ones."""
    excused = {"excused": verdict.passes(case)}
    for ops, judged in (("ours", case), ("stock", case.get("stock"))):
        if judged is None:
            continue
        found = judged["differences"]
        engine = name if ops == "ours" else f"{name}-stock"
        variant = f"tiny-k3 {name} greedy" + ("" if ops == "ours" else " all ops stock")
        shape = {
            **folder.shape(engine),
            "temperature": 0.0,
            "ops": ops,
            "texts": texts(folder.answer(engine)),
        }
        gaps = [d["gap"] for d in found if d["gap"] is not None]
        add(
            "texts_that_differ",
            len(found),
            variant=variant,
            shape=shape,
            unit="texts",
            gates=excused if ops == "ours" else None,
            own=f"{len(found) - len(gaps)} without a recorded gap"
            if len(gaps) < len(found)
            else "",
        )
        if gaps:
            add(
                "largest_gap_where_texts_differ",
                max(gaps),
                variant=variant,
                shape=shape,
                unit="logits",
                own=f"between the plain run's two likeliest tokens; below {verdict.TIE}"
                " is a near tie",
            )


def texts(answer: Mapping[str, Any]) -> int:
    """How many texts of an answer are compared with plain decoding's."""
    count = sum(len(group["tokens"]) for group in answer["groups"].values())
    if "abort" in answer:
        count += len(answer["abort"]["survivors"]) + len(answer["abort"]["afterwards"])
    return count


def unasked(folder: Folder, add: Add) -> None:
    """Seconds of stock vLLM with our plug-in installed and without it."""
    for key, found in folder.verdicts.get("unasked", {}).items():
        names = {kind: f"{kind}-{key}" for kind in ("installed", "absent")}
        if not folder.ran(*names.values()):
            continue
        gates = {
            "text_equal": found["equal"],
            "as_fast": found["as_fast"],
            "untouched": found["untouched"],
        }
        for kind, name in names.items():
            seconds = found["seconds"][kind]
            add(
                "unasked_seconds",
                statistics.median(seconds),
                variant=f"tiny-k3 {name} stock vLLM, plug-in {kind}",
                shape={
                    **folder.shape(name),
                    "group": folder.options(name)["timed"],
                    "repeats": len(seconds),
                },
                unit="s",
                spread=max(seconds) - min(seconds),
                gates=gates if kind == "installed" else None,
                own="median; the spread is from fastest to slowest, and as_fast "
                "compares the fastest",
            )


def write(path: Path, found: Sequence[results.Line]) -> None:
    """Replace ``path`` by the lines; it stays as it was if one of them is refused."""
    fresh = path.with_name(f"{path.name}.new")
    fresh.unlink(missing_ok=True)
    results.append(fresh, found)
    fresh.replace(path)


def pairs(text: str) -> dict[str, str]:
    """``vllm=0.33.0,torch=2.11.0`` as a dictionary."""
    found = dict(item.strip().partition("=")[::2] for item in text.split(","))
    if not all(name and version for name, version in found.items()):
        raise argparse.ArgumentTypeError(
            f"{text!r}: give NAME=VERSION, several with commas between them"
        )
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.dspark_k3.suite.record", description=__doc__
    )
    add = parser.add_argument
    add("folder", type=Path, metavar="DIR", help="what the suite wrote")
    add("--commit", required=True, help="of the tree that ran")
    add("--out", type=Path, required=True, help="results file, replaced")
    add("--note", default="", help="added to every line")
    add("--gpu", default=GPU, help="that it ran on (default: %(default)s)")
    add("--versions", type=pairs, default={}, help="NAME=VERSION,... of that machine")
    add("--command", default=COMMAND, help="that was typed (default: %(default)s)")
    add("--failed", action="store_true", help="record engines that failed, too")
    options = parser.parse_args(arguments)
    try:
        found = lines(
            options.folder,
            commit=options.commit,
            gpu=options.gpu,
            command=options.command,
            versions=options.versions,
            note=options.note,
            failed=options.failed,
        )
        write(options.out, found)
    except ValueError as error:
        parser.error(str(error))
    print(f"{options.out}: {len(found)} lines")
    return 0


if __name__ == "__main__":
    sys.exit(main())
