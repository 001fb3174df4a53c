# SPDX-License-Identifier: Apache-2.0
"""Published acceptance data, with sources.

* DSpark, arXiv 2607.05147: Table 1 (acceptance length at temperature 1, block 7,
  bonus included) and Fig. 2 (conditional rates, read off the figure, +-0.01).
* Kimi K3: SemiAnalysis InferenceX "golden" acceptance lengths of
  Inferact/Kimi-K3-DSpark (probabilistic drafts, block verification, thinking on),
  as quoted by scripts that use them; a secondary source.

Benchmark-level rates were not published. ``BETA`` holds the exponent that turns the
domain's Fig. 2 rates into a curve with the benchmark's Table 1 length, so those
curves are modelled, while Fig. 2 and the golden curve are recorded.
"""

from __future__ import annotations

import difflib

from experiments.acceptance import AcceptanceCurve

BENCHMARKS = (
    "gsm8k",
    "math500",
    "aime25",
    "mbpp",
    "humaneval",
    "lcb",
    "mt-bench",
    "alpaca",
    "arena-hard",
)
DOMAIN_OF = dict(
    zip(BENCHMARKS, ("math",) * 3 + ("code",) * 3 + ("chat",) * 3, strict=True)
)
TARGETS = ("qwen3-4b", "qwen3-8b", "qwen3-14b", "gemma4-12b")
DRAFTERS = ("dspark", "dflash", "eagle3")

#: Conditional rates a_1..a_7 on Qwen3-4B (DSpark Fig. 2).
FIGURE_2: dict[tuple[str, str], tuple[float, ...]] = {
    ("math", "dspark"): (0.905, 0.890, 0.888, 0.885, 0.887, 0.890, 0.882),
    ("math", "dflash"): (0.885, 0.827, 0.820, 0.834, 0.841, 0.839, 0.828),
    ("math", "eagle3"): (0.810, 0.823, 0.838, 0.844, 0.850, 0.855, 0.850),
    ("code", "dspark"): (0.885, 0.872, 0.860, 0.861, 0.858, 0.859, 0.851),
    ("code", "dflash"): (0.866, 0.815, 0.797, 0.801, 0.810, 0.801, 0.777),
    ("code", "eagle3"): (0.771, 0.774, 0.781, 0.791, 0.787, 0.794, 0.784),
    ("chat", "dspark"): (0.735, 0.738, 0.740, 0.744, 0.758, 0.766, 0.761),
    ("chat", "dflash"): (0.718, 0.648, 0.638, 0.661, 0.682, 0.692, 0.688),
    ("chat", "eagle3"): (0.534, 0.590, 0.642, 0.678, 0.708, 0.729, 0.733),
}

#: Acceptance length by (target, drafter), in the order of BENCHMARKS (Table 1).
TABLE_1: dict[tuple[str, str], tuple[float, ...]] = {
    ("qwen3-4b", "eagle3"): (5.14, 4.62, 3.92, 3.69, 4.16, 3.77, 2.39, 2.26, 2.55),
    ("qwen3-4b", "dflash"): (5.40, 4.85, 4.15, 4.40, 4.74, 4.18, 3.07, 2.96, 2.83),
    ("qwen3-4b", "dspark"): (6.11, 5.70, 4.89, 5.13, 5.38, 4.86, 3.64, 3.54, 3.29),
    ("qwen3-8b", "eagle3"): (5.30, 4.77, 3.91, 3.96, 4.33, 4.17, 2.66, 2.54, 2.54),
    ("qwen3-8b", "dflash"): (5.33, 4.91, 4.07, 4.36, 4.64, 4.39, 3.11, 2.98, 2.81),
    ("qwen3-8b", "dspark"): (6.17, 5.78, 5.01, 5.16, 5.52, 5.17, 3.72, 3.58, 3.21),
    ("qwen3-14b", "eagle3"): (5.24, 4.60, 3.71, 3.81, 4.14, 4.01, 2.62, 2.47, 2.48),
    ("qwen3-14b", "dflash"): (5.41, 4.84, 3.98, 4.44, 4.59, 4.33, 3.10, 2.94, 2.72),
    ("qwen3-14b", "dspark"): (6.21, 5.74, 4.94, 5.26, 5.43, 5.02, 3.70, 3.58, 3.13),
    ("gemma4-12b", "eagle3"): (5.87, 5.46, 4.83, 4.72, 5.37, 4.16, 3.19, 3.06, 2.72),
    ("gemma4-12b", "dflash"): (5.45, 5.04, 4.22, 4.39, 4.95, 3.70, 2.98, 2.84, 2.59),
    ("gemma4-12b", "dspark"): (6.05, 5.78, 5.12, 5.11, 5.64, 4.51, 3.49, 3.35, 2.92),
}

#: Thousandths of the exponent on the domain's Fig. 2 rates that gives the Table 1
#: length, in the order of BENCHMARKS.
_BETA_THOUSANDTHS: dict[tuple[str, str], tuple[int, ...]] = {
    ("qwen3-4b", "dspark"): (721, 925, 1409, 1016, 894, 1160, 942, 986, 1106),
    ("qwen3-8b", "dspark"): (693, 884, 1329, 1001, 829, 996, 909, 968, 1149),
    ("qwen3-14b", "dspark"): (675, 904, 1375, 951, 870, 1073, 917, 968, 1193),
    ("gemma4-12b", "dspark"): (750, 884, 1258, 1026, 776, 1370, 1009, 1076, 1322),
    ("qwen3-4b", "dflash"): (734, 969, 1347, 1033, 879, 1146, 949, 1003, 1074),
    ("qwen3-8b", "dflash"): (762, 941, 1398, 1053, 922, 1038, 930, 993, 1086),
    ("qwen3-14b", "dflash"): (730, 973, 1458, 1014, 944, 1068, 934, 1014, 1140),
    ("gemma4-12b", "dflash"): (715, 883, 1304, 1038, 793, 1437, 993, 1069, 1228),
    ("qwen3-4b", "eagle3"): (755, 965, 1317, 1100, 892, 1062, 1010, 1085, 928),
    ("qwen3-8b", "eagle3"): (698, 901, 1323, 975, 826, 888, 878, 933, 933),
    ("qwen3-14b", "eagle3"): (719, 974, 1445, 1043, 900, 954, 896, 968, 963),
    ("gemma4-12b", "eagle3"): (512, 642, 876, 692, 504, 892, 686, 727, 853),
}
BETA = {
    key: tuple(value / 1000 for value in row) for key, row in _BETA_THOUSANDTHS.items()
}

#: Acceptance length of Kimi-K3-DSpark served with k = 1..8 drafts.
K3_GOLDEN_LENGTHS = (1.85, 2.51, 3.00, 3.36, 3.62, 3.75, 3.84, 4.00)

#: Static confidence threshold on Qwen3-4B (DSpark Fig. 5, read off):
#: theta -> (rows of a verify step, acceptance length).
FIGURE_5: dict[str, dict[float, tuple[float, float]]] = {
    "math": {
        0.0: (8.0, 6.15),
        0.2: (8.0, 6.15),
        0.4: (7.9, 6.1),
        0.5: (7.8, 6.1),
        0.6: (7.55, 6.0),
        0.7: (7.0, 5.75),
        0.8: (6.35, 5.5),
        0.9: (4.95, 4.58),
    },
    "code": {
        0.0: (8.0, 5.4),
        0.2: (8.0, 5.4),
        0.4: (7.7, 5.4),
        0.5: (7.45, 5.35),
        0.6: (7.0, 5.2),
        0.7: (6.45, 5.05),
        0.8: (5.6, 4.7),
        0.9: (4.05, 3.73),
    },
    "chat": {
        0.0: (8.0, 3.65),
        0.2: (7.7, 3.6),
        0.4: (5.95, 3.5),
        0.5: (4.9, 3.3),
        0.6: (4.1, 3.05),
        0.7: (3.35, 2.75),
        0.8: (2.6, 2.35),
        0.9: (2.1, 2.0),
    },
}


def _k3_golden() -> AcceptanceCurve:
    # Each k was its own serving run. Lengths up to the block of 7 have falling
    # differences; the k = 8 point (+0.16 after +0.09) is another run's and cannot
    # be a survival rate of the same curve, so the curve ends at 7.
    lengths = (1.0, *K3_GOLDEN_LENGTHS[:7])
    survival = [round(lengths[j + 1] - lengths[j], 6) for j in range(7)]
    return AcceptanceCurve.from_survival(
        "k3-golden",
        survival,
        "recorded",
        "InferenceX golden acceptance lengths of Inferact/Kimi-K3-DSpark, k = 1..7",
    )


def figure_2(domain: str, drafter: str) -> AcceptanceCurve:
    """Domain curve on Qwen3-4B from Fig. 2; seven positions."""
    return AcceptanceCurve.from_conditional(
        f"{drafter}-{domain}",
        FIGURE_2[domain, drafter],
        "recorded",
        f"DSpark Fig. 2, Qwen3-4B, {domain}, {drafter}",
    )


def table_1(target: str, drafter: str, benchmark: str) -> AcceptanceCurve:
    """Benchmark curve: Fig. 2 domain rates to the power BETA; seven positions."""
    index = BENCHMARKS.index(benchmark)
    domain = figure_2(DOMAIN_OF[benchmark], drafter)
    beta = BETA[target, drafter][index]
    return AcceptanceCurve(
        f"{drafter}-{target}-{benchmark}",
        tuple(value**beta for value in domain.survival),
        "modelled",
        f"DSpark Table 1 length {TABLE_1[target, drafter][index]:.2f}; shape of "
        f"Fig. 2 {DOMAIN_OF[benchmark]}, beta {beta:g}",
    )


def names() -> list[str]:
    """All names that :func:`curve` knows."""
    figure = [f"{drafter}-{domain}" for domain, drafter in FIGURE_2]
    table = [f"{d}-{t}-{b}" for t in TARGETS for d in DRAFTERS for b in BENCHMARKS]
    return ["k3-golden", *figure, *table]


def curve(name: str) -> AcceptanceCurve:
    """Published curve by name, for example "k3-golden" or "dspark-qwen3-4b-gsm8k".

    Raises:
        ValueError: unknown name; the message lists close matches.
    """
    key = name.strip().lower()
    if key == "k3-golden":
        return _k3_golden()
    for domain, drafter in FIGURE_2:
        if key == f"{drafter}-{domain}":
            return figure_2(domain, drafter)
    for target, drafter in TABLE_1:
        prefix = f"{drafter}-{target}-"
        if key.startswith(prefix) and key.removeprefix(prefix) in BENCHMARKS:
            return table_1(target, drafter, key.removeprefix(prefix))
    close = difflib.get_close_matches(key, names(), n=4, cutoff=0.4)
    hint = ", ".join(close) if close else "k3-golden, dspark-math, dspark-chat"
    raise ValueError(
        f"no published acceptance curve is called {name!r}; close matches: {hint}"
    )
