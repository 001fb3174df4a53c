# SPDX-License-Identifier: Apache-2.0
"""README and docs say what the recorded results say, and name only what exists."""

from __future__ import annotations

import json
import re
from dataclasses import fields
from pathlib import Path

from typer.testing import CliRunner

from dspark_k3 import settings
from dspark_k3.cli import app
from experiments import engine_sweep, results

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
DOCS = ROOT / "docs"
PAGES = {path: path.read_text() for path in (ROOT / "README.md", *DOCS.glob("*.md"))}
RESULTS = PAGES[DOCS / "results.md"]
#: Without line breaks.
FLOWED = " ".join(" ".join(page.split()) for page in PAGES.values())
RECORDED = ROOT / "experiments" / "results" / "cpu"
#: Drafts and batches of the table of steps.
POINTS = ((0, 1), (0, 8), (7, 1), (7, 8))


def test_results_table_is_the_recorded_run() -> None:
    lines = results.read(RECORDED)
    lengths = [
        line
        for line in lines
        if line["metric"] == "acceptance_length" and line["label"] == "measured"
    ]
    names = list(dict.fromkeys(line["variant"] for line in lengths))
    assert len(names) == 4
    for name in names:
        mine = {x["shape"]["k"]: x for x in lengths if x["variant"] == name}
        assert all(all(x["gates"].values()) for x in mine.values())
        cells = " | ".join(f"{mine[k]['value']:.2f}" for k in range(1, 8))
        text, heat = name.removeprefix("tiny ").split(" T=")
        assert f"| {text} | {heat} | {cells} |" in RESULTS


def test_kernel_table_is_the_recorded_run() -> None:
    """Time, share and the fastest peer of every row, from the lines of the run."""
    points = {}
    for line in results.read(ROOT / "experiments" / "results" / "h200"):
        shape = line["shape"]
        if line.get("op") == "skinny_gemm" and line["variant"] == "pdl":
            sizes = f"{shape['n']} x {shape['k']}"
            name = f"skinny_gemm {shape['name']}, TP {shape['tp']}, {sizes}"
        elif line.get("op") == "attn_res" and line["variant"] == "pdl":
            name = f"attn_res, {shape['blocks']} blocks"
        elif line.get("op") == "moe_front" and line["variant"] == "pdl":
            sizes = f"{shape['n']} x {shape['k']}"
            name = f"moe_front in one launch, TP {shape['tp']}, {sizes}"
        else:
            continue
        assert line["label"] == "measured" and all(line["gates"].values())
        points[f"{name} | {shape['m']}"] = line
    found = re.findall(
        r"^\| ((?:skinny_gemm|moe_front|attn_res)[^|]*) \| (\d+) \| (\S+) \| (\d+) % "
        r"\| (\S+) (\w+) \|$",
        RESULTS,
        re.M,
    )
    assert len(found) == 19
    for name, rows, us, share, peer_us, peer in found:
        line = points[f"{name} | {rows}"]
        peers = {k: us for k, us in line["peers"].items() if not k.startswith("ours")}
        best = min(peers, key=lambda name: peers[name])
        assert us == f"{line['us']:.2f}"
        assert share == f"{100 * line['bandwidth_share']:.0f}"
        assert (peer_us, peer) == (f"{line['peers'][best]:.2f}", best.split(":")[0])


def test_mla_table_is_the_recorded_run() -> None:
    """Every row, the count of points, and the times of the layer and of the drafter."""
    lines = results.read(ROOT / "experiments" / "results" / "h200" / "mla.jsonl")
    points = [x for x in lines if x.get("op") == "mla" and x["variant"] == "pdl"]
    assert all(all(x["gates"].values()) for x in points)
    core, ahead = {}, 0
    for line in (x for x in points if x["shape"]["part"] == "core"):
        shape, peers = line["shape"], line["peers"]
        by = f"{shape['requests']} x {shape['width']}"
        core[f"{shape['heads']} | {by} | {shape['context']:,}"] = [
            f"{us:.1f}"
            for us in (line["us"], peers["fa3:plain"], peers["flashmla:plain"])
        ]
        best = min(us for name, us in peers.items() if not name.startswith("ours"))
        ahead += line["us"] <= best
    found = re.findall(r"^\| (\d+ \| \d x \d \| [\d,]+) \| (.*) \|$", RESULTS, re.M)
    assert len(found) == 11
    for name, cells in found:
        assert cells.split(" | ") == core[name]
    assert f"at {ahead} of {len(core)} points" in RESULTS
    assert f"at {len(core) - ahead} of {len(core)} points" in README
    for line in (x for x in points if x["shape"]["part"] != "core"):
        part = line["shape"]["part"]
        stock = line["peers"][
            "vllm:plain" if part == "sublayer" else "triton_mla:plain"
        ]
        for us in (line["us"], stock):
            said = f"{us:.1f}" if part == "sublayer" else f"{us:.0f}"
            assert re.search(rf"\b{re.escape(said)}\b", RESULTS)


def test_paths_and_make_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    text = "\n".join(PAGES.values())
    assert set(re.findall(r"make ([a-z]+[a-z-]*) ", README)) <= targets
    named = re.findall(r"(?:experiments|tests|drafters|dspark_k3)/[\w./-]+", text)
    assert len(named) >= 8
    for path in named:
        assert (ROOT / path.rstrip(".")).exists(), path


def test_links_and_images_lead_somewhere() -> None:
    for path, page in PAGES.items():
        for link in re.findall(r"\]\(([^)#]+)\)", page):
            assert (path.parent / link).exists(), f"{path.name}: {link}"


def test_settings_page_has_every_setting() -> None:
    """With its default."""
    page = PAGES[DOCS / "settings.md"]
    rows = dict(re.findall(r"^\| `(\w+)` \| (.+?) \|", page, re.M))
    found = settings.read({})
    names = {each.name for each in fields(found)} - set(settings._FOUND)
    assert set(rows) == names
    for name in names - {"ops"}:
        assert json.loads(rows[name].strip("`")) == getattr(found, name), name
    for op in settings.OPS:
        assert f"`{op}`" in page


def test_commands_in_readme_are_understood() -> None:
    commands = set(re.findall(r"bin/dspark-k3 ([a-z]+)", README))
    assert commands == {"advise", "sweep", "plot", "doctor", "build"}
    for command in commands:
        assert CliRunner().invoke(app, [command, "--help"]).exit_code == 0


def test_tiny_k3_table_is_the_recorded_run() -> None:
    """Acceptance lengths of the run through our executor, every text equal."""
    lines = results.read(ROOT / "experiments" / "results" / "h200" / "tiny_k3.jsonl")
    values = {line["variant"]: line for line in lines}
    table = [values[f"tiny-k3 fixed-graph-k{k} greedy batch8"] for k in range(1, 8)]
    assert all(all(line["gates"].values()) for line in table)
    cells = " | ".join(f"{line['value']:.2f}" for line in table)
    assert f"| {cells} |" in RESULTS
    stdlib, generated = (
        values[f"tiny-k3 fixed-graph-k7 T=1 {kind}"]["value"]
        for kind in ("stdlib", "generated")
    )
    assert (
        f"it is {stdlib:.2f} on standard-library text and {generated:.2f} on "
        "generated text"
    ) in RESULTS


def test_sweep_table_is_the_recorded_run() -> None:
    """Every row, how far the model is off, and how many points had a fast host."""
    recorded = ROOT / "experiments" / "results" / "h200" / "engine_sweep.jsonl"
    found = engine_sweep.points(results.read(recorded))
    plain = engine_sweep.plain_of(found)
    off = max(
        abs(gpu / model - 1)
        for _, gpu, model in (p.over(plain[p.target, p.batch]) for p in found)
    )
    assert 0.005 < off <= 0.006 and "within 0.6 % of every point" in FLOWED
    fast = sum(p.host <= engine_sweep.HOST for p in found)
    assert f"at {fast} of {len(found)} points" in FLOWED
    rows = re.findall(
        r"^\| (\d) \| ([\d.]+)(.*) \| (\S+)x \| (\S+)x \| (\S+)x \|$", README, re.M
    )
    assert len(rows) == 8
    for batch, tokens, drafts, *cells in rows:
        theirs, ours = (
            next(
                p
                for p in found
                if (p.target, p.batch) == (target, int(batch))
                and p.k == (0 if drafts == ", plain" else 7)
                and f"{p.tokens:.2f}" == f"{float(tokens):.2f}"
            )
            for target in ("stock", "ours" if drafts == ", plain" else "drafter")
        )
        base = plain["stock", int(batch)]
        gains = theirs.over(base)[1], ours.over(base)[1], ours.over(theirs)[1]
        assert cells == [f"{gain:.2f}" for gain in gains]


def test_step_table_is_the_recorded_run() -> None:
    """GPU times of steps and layers, stock beside ours, from one run."""
    lines = results.read(ROOT / "experiments" / "results" / "h200" / "k3_tp16.jsonl")
    assert len({(line["commit"], line["command"]) for line in lines}) == 1
    values = {}
    for line in lines:
        shape = line["shape"]
        at = (shape.get("kind"), shape["k"], shape["batch"])
        values[line["metric"], *at, line["variant"]] = line
    assert all(all(line["gates"].values()) for line in lines)

    def us(metric: str, kind: str | None, at: tuple[int, int], digits: int) -> str:
        found = [values[metric, kind, *at, side] for side in ("stock", "ours")]
        return " | ".join(f"{line['value']:.{digits}f} µs" for line in found)

    for at in POINTS:
        k, batch = at
        cells = [
            f"{k} | {batch} | {batch * (k + 1)}",
            us("step_gpu_us", None, at, 0),
            us("layer_gpu_us", "kda", at, 1),
            us("layer_gpu_us", "mla", at, 1),
        ]
        assert f"| {' | '.join(cells)} |" in RESULTS
    halves = [
        [values["layer_mlp_gpu_us", "kda", *at, side]["value"] for at in POINTS]
        for side in ("stock", "ours")
    ]
    for side, said in zip(halves, ("{} of stock's KDA", "{} of ours"), strict=True):
        listed = ", ".join(f"{us:.1f}" for us in side[:-1]) + f" and {side[-1]:.1f}"
        assert said.format(listed + " µs" * (side is halves[0])) in FLOWED
    shares = results.read(ROOT / "experiments" / "results" / "h200" / "k3_tp1.jsonl")
    steps = {
        (x["shape"]["k"], x["shape"]["batch"], x["variant"]): x["value"]
        for x in shares
        if x["metric"] == "step_gpu_us"
    }
    ratios = [
        f"{steps[k, b, 'ours'] / steps[k, b, 'stock']:.2f}"
        for k in (0, 7)
        for b in (1, 8)
    ]
    said = f"{', '.join(ratios[:3])} and {ratios[3]}"
    assert f"takes\n{said} times as long as stock's" in RESULTS


def test_experts_table_is_the_recorded_run() -> None:
    lines = results.read(ROOT / "experiments" / "results" / "h200" / "experts.jsonl")
    points = {
        (line["shape"]["tp"], line["shape"]["m"]): line
        for line in lines
        if line.get("op") == "experts"
        and line["variant"] == "pdl"
        and line["shape"]["part"] == "experts"
        and line["shape"]["routing"] == "independent"
    }
    assert len(points) == 5
    for (tp, rows), line in points.items():
        assert line["gates"] and all(line["gates"].values())
        peers = (line["peers"][f"{name}:plain"] for name in ("humming", "marlin"))
        cells = [
            f"TP {tp} | {rows} | {line['shape']['distinct']} | {line['us']:.1f}",
            f"{line['bandwidth_share']:.0%}".replace("%", " %"),
            *(f"{us:.1f}" for us in peers),
        ]
        assert f"| {' | '.join(cells)} |" in RESULTS


def test_advice_from_the_recorded_profiles_is_what_is_said() -> None:
    for side, tokens in (("stock", 201), ("ours", 300)):
        profile = ROOT / "experiments" / "profiles" / f"k3-tp16-{side}-93.json"
        asked = ["--acceptance", "k3-golden", "--batch", "1", "--profile", str(profile)]
        found = CliRunner().invoke(app, ["advise", *asked])
        assert found.exit_code == 0
        assert re.search(rf"│ +1 │ +7 │ +{tokens} │", found.output), found.output
        assert f"{tokens} tokens a second" in FLOWED or f"{tokens} from ours" in FLOWED
