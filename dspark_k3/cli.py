# SPDX-License-Identifier: Apache-2.0
"""The ``dspark-k3`` command. Heavy imports wait until a command needs them."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from experiments.acceptance import AcceptanceCurve
    from experiments.results import Recorder
    from experiments.step_time import StepTimeProfile
    from experiments.sweep import Measurement, Source

app = typer.Typer(
    help="Speculative decoding of Kimi K3-class models on vLLM: measure, plan, check.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

DEFAULT_PROFILE = "floor:k3-tp16-h200"
_FLOOR_BATCHES = "1,4,8"
_MAX_DRAFTS = 7
_QUICK_PROMPTS = 10

Acceptance = Annotated[
    str | None,
    typer.Option(
        help="Results file or directory, published name (k3-golden, dspark-math, ...), "
        'survival rates "0.9,0.8,...", "conditional:...", or '
        '"length:2..6:geometric|minvar".'
    ),
]
Profile = Annotated[
    str,
    typer.Option(help="Recorded JSON profile, or a byte model floor:k3-tp16-h200."),
]
Gpu = Annotated[
    str | None,
    typer.Option(help="Your GPU; a profile for another one is refused."),
]


@contextmanager
def _user_errors() -> Iterator[None]:
    """Bad input (ValueError) is one line on stderr and exit code 2."""
    try:
        yield
    except (typer.Exit, typer.Abort):
        # Both are RuntimeErrors in click and carry their own exit code.
        raise
    except ValueError as error:
        _fail(str(error), 2)
    except RuntimeError as error:
        _fail(str(error), 1)


def _fail(message: str, code: int) -> NoReturn:
    print(f"error: {' '.join(message.split())}", file=sys.stderr)
    raise typer.Exit(code)


def _console() -> Console:
    from rich.console import Console

    console = Console()
    # A table in a log file should not be squeezed into 80 columns.
    return console if console.is_terminal else Console(width=130)


@contextmanager
def _progress(console: Console, total: int) -> Iterator[Callable[[str, int], None]]:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    from rich.progress import TimeElapsedColumn as Elapsed

    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        Elapsed(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("starting", total=total)

        def update(text: str, advance: int) -> None:
            bar.update(task, description=text, advance=advance)
            if not console.is_terminal and advance:
                console.print(text)

        yield update


def _tiny(name: str) -> Path:
    import experiments

    return Path(experiments.__file__).parent / "tiny" / name


def _check_model(path: Path, option: str) -> None:
    if not (path / "config.json").is_file():
        raise ValueError(
            f"{option} {path} is no model directory (no config.json there); give a "
            "directory with config.json and model.safetensors"
        )


def _measure(
    target: Path,
    draft: Path,
    lengths: Sequence[int],
    temperatures: Sequence[float],
    prompts: int,
    max_tokens: int,
    console: Console,
) -> list[Measurement]:
    """Part 1 of the sweep; needs vLLM."""
    from drafters.config import load_config
    from experiments.engine import Job, run_engine
    from experiments.prompts import held_out_prompts
    from experiments.sweep import Plan, measure

    _check_model(target, "--target")
    _check_model(draft, "--draft")
    load_config(draft).check_draft_length(max(lengths))
    plan = Plan(
        {
            "stdlib": held_out_prompts("stdlib", prompts),
            "generated": held_out_prompts("generated", prompts),
        },
        temperatures,
        lengths,
        max_tokens,
        # An engine computes on one thread; more than two at once want memory.
        engines=min(2, os.cpu_count() or 1),
        # Rows of somebody's own pair must not read as the shipped one's.
        model="tiny"
        if (target, draft) == (_tiny("target"), _tiny("dspark-vanilla"))
        else f"{target.name}+{draft.name}",
    )
    with _progress(console, len(lengths)) as update:

        def run(k: int, jobs: Sequence[Any]) -> Sequence[Any]:
            def say(text: str) -> None:
                update(f"k = {k}: {text}", 0)

            done = run_engine(
                target,
                draft if k else None,
                k,
                jobs,
                batch_size=prompts,
                progress=say,
            )
            update(f"k = {k} done", 1)
            return done

        return measure(plan, run, Job)


def _sources(
    measured: Sequence[Measurement], acceptance: str | None, drafts: int
) -> list[Source]:
    from experiments import published
    from experiments.acceptance_spec import parse_acceptance
    from experiments.sweep import Source

    found = []
    for item in measured:
        curve = item.curve()
        if curve is not None:
            found.append(Source(curve, item.gates))
    if acceptance is not None:
        return found + [Source(c) for c in parse_acceptance(acceptance, drafts)]
    return found + [Source(published.curve(n)) for n in ("k3-golden", "dspark-math")]


def _batches(text: str | None, profile: StepTimeProfile) -> list[int]:
    from experiments.sweep import parse_list

    if text is None:
        text = _FLOOR_BATCHES if profile.label == "modelled" else "1"
    return [int(b) for b in parse_list(text, "--batch", 1, whole=True)]


def _write(recorder: Recorder, out: Path, console: Console) -> None:
    from experiments import plots, results
    from experiments.sweep import write_csv

    file = out / results.FILE_NAME
    out.mkdir(parents=True, exist_ok=True)
    # A directory holds one sweep: lines of an older one would mix into the plots.
    file.unlink(missing_ok=True)
    results.append(file, recorder.lines)
    tables = write_csv(recorder.lines, out)
    pictures = plots.render(out)
    console.print(
        f"Wrote {len(recorder.lines)} figures to {file}, {len(tables)} CSV files and "
        f"{len(pictures) // 2} plots (PNG and SVG) to {out}."
    )


@app.command()
def sweep(
    target: Annotated[
        Path | None, typer.Option(help="Target model; default the shipped tiny one.")
    ] = None,
    draft: Annotated[
        Path | None, typer.Option(help="DSpark drafter; default the shipped tiny one.")
    ] = None,
    draft_lengths: Annotated[
        str, typer.Option(help="Draft lengths, e.g. 0-7 or 1,3; 0 always runs.")
    ] = "0-7",
    temperatures: Annotated[str, typer.Option(help="Temperatures, e.g. 0,1.")] = "0,1",
    prompts: Annotated[
        int, typer.Option(help="Held-out prompts for each kind of text.")
    ] = 20,
    max_tokens: Annotated[int, typer.Option(help="New tokens a prompt.")] = 48,
    acceptance: Acceptance = None,
    profile: Profile = DEFAULT_PROFILE,
    gpu: Gpu = None,
    batch: Annotated[
        str | None, typer.Option(help="Batch sizes of the projection, e.g. 1,8.")
    ] = None,
    skip_engine: Annotated[
        bool, typer.Option("--skip-engine", help="Projection only; no vLLM needed.")
    ] = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="k = 0, 1, 3, 7 and short texts.")
    ] = False,
    out: Annotated[Path, typer.Option(help="Where results go.")] = Path(
        "sweep-results"
    ),
) -> None:
    """Measure the tiny pair through vLLM, then plan draft lengths for a machine."""
    with _user_errors():
        from experiments import report
        from experiments.results import Recorder
        from experiments.step_time import load_profile
        from experiments.sweep import (
            parse_draft_lengths,
            parse_list,
            project,
            prompts_needed,
            record_measurements,
        )

        lengths = parse_draft_lengths(draft_lengths, _MAX_DRAFTS)
        heats = parse_list(temperatures, "--temperatures", 0)
        if prompts < 1 or max_tokens < 2:
            raise ValueError(
                f"--prompts is {prompts} and --max-tokens {max_tokens}; use at least "
                "1 and 2"
            )
        machine = load_profile(profile, gpu)
        sizes = _batches(batch, machine)
        _sources([], acceptance, max(lengths))
        if out.exists() and not out.is_dir():
            raise ValueError(f"--out {out} is a file; give a directory")
        console = _console()
        measured: list[Measurement] = []
        if not skip_engine:
            runs = [k for k in lengths if not quick or k in (0, 1, 3, max(lengths))]
            count = min(prompts, _QUICK_PROMPTS) if quick else prompts
            needed = prompts_needed(len(runs) - 1)
            if count < needed and max(heats) > 0:
                raise ValueError(
                    f"--prompts is {count}; at a temperature above 0 the check that "
                    f"the text keeps its law needs {needed}: raise --prompts, or use "
                    "--temperatures 0"
                )
            measured = _measure(
                target or _tiny("target"),
                draft or _tiny("dspark-vanilla"),
                runs,
                heats,
                count,
                min(max_tokens, 24) if quick else max_tokens,
                console,
            )
        version = next(iter(measured[0].runs.values())).vllm_version if measured else ""
        recorder = Recorder(versions={"vllm": version} if version else {})
        record_measurements(measured, recorder)
        sources = _sources(measured, acceptance, max(lengths))
        refused = project(sources, machine, lengths, sizes, recorder)
        if measured:
            console.print(report.acceptance_table(measured, version))
        usable = [source.curve for source in sources if source.usable]
        if usable:
            console.print(report.speed_table(usable, machine, lengths, sizes[0]))
        for sentence in refused:
            console.print(f"REFUSED {sentence}.", markup=False)
        _write(recorder, out, console)
        _close(usable, machine, sizes[0], bool(measured), console)
        silent = [m.name for m in measured if m.curve() is None]
        if silent:
            raise RuntimeError(
                f"the drafter proposed nothing for {', '.join(silent)}: speculation "
                "was off; run 'dspark-k3 doctor'"
            )
        if refused:
            raise RuntimeError(f"{len(refused)} measured curves failed their check")


def _close(
    curves: Sequence[AcceptanceCurve],
    machine: StepTimeProfile,
    batch: int,
    ran: bool,
    console: Console,
) -> None:
    from experiments.advice import closing

    given = [curve for curve in curves if curve.label != "measured"] or list(curves)
    if not given:
        return
    text = closing(given[0], machine, batch)
    if ran:
        text += (
            " The drafter's acceptance was measured here; its speed on this CPU is "
            "no guide to a GPU, so all speeds come from the step-time profile."
        )
    console.print(text, markup=False, highlight=False)


@app.command()
def plot(
    results: Annotated[Path, typer.Argument(help="Results directory or .jsonl file.")],
    out: Annotated[Path | None, typer.Option(help="Default: beside it.")] = None,
) -> None:
    """Draw the four figures of a results directory again."""
    with _user_errors():
        from experiments import plots

        for path in plots.render(results, out):
            print(path)


@app.command()
def advise(
    acceptance: Acceptance = "k3-golden",
    profile: Profile = DEFAULT_PROFILE,
    batch: Annotated[str, typer.Option(help="Batch sizes, e.g. 1,8,32.")] = "1,8,32",
    max_draft_length: Annotated[int, typer.Option(help="Longest k, 1..7.")] = 7,
    difficulty: Annotated[
        str, typer.Option(help="How unequal rounds are: math, code or chat.")
    ] = "code",
    gpu: Gpu = None,
    confidence: Annotated[
        Path | None,
        typer.Option(help="Recorded rounds (calibrate --record), not --acceptance."),
    ] = None,
    calibration: Annotated[
        Path | None,
        typer.Option(help="With --confidence: calibration.json or its directory."),
    ] = None,
) -> None:
    """Say which draft length pays, fixed or by confidence, and why."""
    with _user_errors():
        if confidence is not None:
            _advise_on_rounds(confidence, calibration, profile, batch, gpu)
            return
        if calibration is not None:
            raise ValueError(
                "--calibration is for the confidences of recorded rounds: give them "
                "with --confidence FILE"
            )
        from experiments import report
        from experiments.acceptance_spec import parse_acceptance
        from experiments.advice import advise as advise_on
        from experiments.step_time import load_profile

        if not 1 <= max_draft_length <= _MAX_DRAFTS:
            raise ValueError(
                f"--max-draft-length is {max_draft_length}; use 1..{_MAX_DRAFTS}"
            )
        machine = load_profile(profile, gpu)
        curves = parse_acceptance(acceptance or "k3-golden", max_draft_length)
        sizes = _batches(batch, machine)
        console = _console()
        for curve in curves:
            rows = [
                advise_on(curve, machine, size, difficulty, max_draft_length)
                for size in sizes
            ]
            console.print(report.advice_table(curve, machine, rows))
            for row in rows:
                console.print(report.advice_words(row), markup=False, highlight=False)


def _advise_on_rounds(
    path: Path, calibration: Path | None, profile: str, batch: str, gpu: str | None
) -> None:
    from experiments import report
    from experiments import rounds as recorded
    from experiments.replay import replay
    from experiments.step_time import load_profile

    rounds = recorded.read(path)
    calibrated = None
    if calibration is not None:
        from drafters.calibration import read_calibration

        found = read_calibration(calibration)
        if found is None:
            raise ValueError(
                f"--calibration {calibration}: there is none; `dspark-k3 calibrate` "
                "writes one"
            )
        calibrated = rounds.survival(found.temperatures, found.shifts)
    machine = load_profile(profile, gpu)
    rows = [
        replay(rounds, machine, size, calibrated) for size in _batches(batch, machine)
    ]
    console = _console()
    console.print(report.replay_table(path.name, len(rounds.accepted), machine, rows))
    for row in rows:
        console.print(report.replay_words(row), markup=False, highlight=False)


@app.command()
def calibrate(
    draft: Annotated[Path, typer.Option(help="DSpark drafter directory.")],
    target: Annotated[Path | None, typer.Option(help="Target model directory.")] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(help='JSON lines, {"prompt": text}; default held-out text.'),
    ] = None,
    count: Annotated[int, typer.Option(help="Prompts used at most.")] = 40,
    max_tokens: Annotated[int, typer.Option(help="New tokens a prompt.")] = 96,
    temperature: Annotated[float, typer.Option(help="Of target and drafts.")] = 1.0,
    out: Annotated[
        Path | None, typer.Option(help="Default: calibration.json in the drafter's.")
    ] = None,
    record: Annotated[
        Path | None, typer.Option(help="Write the rounds here, JSON lines.")
    ] = None,
    recorded: Annotated[
        Path | None, typer.Option(help="Fit to these rounds, run no model.")
    ] = None,
    shifts: Annotated[
        bool, typer.Option(help="Beside a temperature a shift for each position.")
    ] = True,
) -> None:
    """Fit the drafter's confidence to what the target accepts, and say what it does.

    Runs both models without an engine, on the CPU, in fp32, or reads rounds that were
    recorded.
    """
    with _user_errors():
        if (target is None) == (recorded is None) or (recorded and record):
            raise ValueError(
                "give --target DIR to run the models, with --record FILE to keep the "
                "rounds, or --recorded FILE to fit to rounds that there are"
            )
        for path, option in ((target, "--target"), (draft, "--draft")):
            if path is not None:
                _check_model(path, option)
        if count < 2 or max_tokens < 2:
            raise ValueError(
                f"--count {count} and --max-tokens {max_tokens}: both must be 2 or more"
            )
        from drafters.calibration import FILE_NAME

        where = out or draft / FILE_NAME
        # Before minutes are spent on what could not be written.
        for path, option in ((where, "--out"), (record, "--record")):
            if path is not None and not path.parent.is_dir():
                raise ValueError(
                    f"{option} {path}: there is no directory {path.parent}; make it "
                    "first"
                )
        from experiments import calibrate as fitting
        from experiments import report
        from experiments import rounds as files
        from experiments.results import Recorder

        console = _console()
        given: dict[str, Any]
        if target is None:
            assert recorded is not None
            rounds = fitting.by_prompt(files.read(recorded))
            given = {"rounds_of": str(recorded)}
        else:
            chosen = _prompts(prompts, target, count)
            model, drafter = fitting.load_pair(target, draft)
            with _progress(console, len(chosen)) as update:
                rounds = fitting.record(
                    model,
                    drafter,
                    chosen,
                    temperature=temperature,
                    max_new_tokens=max_tokens,
                    progress=lambda done: update(f"prompt {done} of {len(chosen)}", 1),
                )
            given = {
                "target": target.name,
                "prompts": str(prompts or "held-out text"),
                "temperature": temperature,
                "max_new_tokens": max_tokens,
            }
        if record is not None:
            files.write(record, fitting.recorded(rounds))
            console.print(f"{record} written", markup=False, highlight=False)
        found = fitting.calibrate(rounds, shifted=shifts)
        console.print(report.calibration_table(found))
        before, after = found.errors
        if after >= before:
            raise RuntimeError(
                f"on rounds that it was not fitted on the calibration is no better: "
                f"mean error {before:.1%} before and {after:.1%} after. Nothing was "
                f"written; {found.fitted} rounds may be too few: give more prompts "
                "(--count, --prompts) or longer answers (--max-tokens)"
            )
        console.print(f"mean error {before:.1%} before, {after:.1%} after")
        made = fitting.document(found, Recorder().provenance | given)
        where.write_text(json.dumps(made, indent=1) + "\n")
        console.print(f"{where} written", markup=False, highlight=False, soft_wrap=True)


#: A model of bytes has at most so many tokens.
_BYTE_VOCABULARY = 512


def _prompts(path: Path | None, target: Path, count: int) -> list[list[int]]:
    """Token ids: of a file, or for a model of bytes held-out text of both kinds."""
    from experiments.calibrate import read_prompts

    if path is None:
        from experiments.prompts import KINDS, held_out_prompts

        words = json.loads((target / "config.json").read_text()).get("vocab_size", 0)
        if words > _BYTE_VOCABULARY:
            raise ValueError(
                f"{target} has {words} tokens; the held-out text is for models of "
                "bytes: give --prompts FILE"
            )
        half = -(-count // len(KINDS))
        # Of two prompts after each other one is fitted to and one judged.
        each = 2 * (-(-half // 2))
        kinds = [held_out_prompts(kind, each) for kind in KINDS]  # type: ignore[arg-type]
        return [prompt for kind in kinds for prompt in kind][:count]
    if not path.is_file():
        raise ValueError(f"--prompts {path} is no file")
    tokenizer = target / "tokenizer.json"

    def encode(text: str) -> list[int]:
        if not tokenizer.is_file():
            raise ValueError(
                f"{tokenizer} is not there, so text cannot be turned into tokens: give "
                "token ids as prompts"
            )
        from tokenizers import Tokenizer

        return list(Tokenizer.from_file(str(tokenizer)).encode(text).ids)

    return read_prompts(path, encode)[:count]


@app.command()
def build(
    arch: Annotated[
        list[str] | None,
        typer.Option(help="sm_90a, sm_100a or sm_103a; again for more. Default all."),
    ] = None,
    op: Annotated[
        list[str] | None, typer.Option(help="Kernel to compile; again for more.")
    ] = None,
    cache: Annotated[
        Path | None,
        typer.Option(help="Where they go; default DSPARK_K3_CACHE, else ~/.cache."),
    ] = None,
) -> None:
    """Compile the kernels ahead of time, so that nothing compiles while serving."""
    with _user_errors():
        for module in ("torch", "cutlass", "quack"):
            if importlib.util.find_spec(module) is None:
                raise RuntimeError(
                    f"the kernels need the CuTe DSL ({module} is not installed): "
                    "pip install 'dspark-k3[kernels]'"
                )
        if cache is not None:
            os.environ["DSPARK_K3_CACHE"] = str(cache)
        from verify_kernels.common.build import build as build_all
        from verify_kernels.common.build import plan
        from verify_kernels.common.variant import cache_directory, cache_problem

        wanted = plan(op or [], arch or [])
        if problem := cache_problem(cache_directory()):
            raise RuntimeError(f"{problem}; give a writable directory as --cache")
        console = _console()
        with _progress(console, len(wanted)) as update:
            built = build_all(wanted, lambda name: update(name, 1))
        console.print(
            f"{built.compiled} compiled, {built.present} already there, in "
            f"{cache_directory()}",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )


@app.command()
def doctor(
    json: Annotated[bool, typer.Option("--json", help="Machine-readable.")] = False,
) -> None:
    """Check versions, GPU, vLLM's seams and whether the plug-in is active."""
    with _user_errors():
        from dspark_k3.doctor import run

        raise typer.Exit(run(json=json))


if __name__ == "__main__":
    app()
