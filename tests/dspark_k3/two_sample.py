# SPDX-License-Identifier: Apache-2.0
"""A two-sample test for discrete outcomes."""

from collections import Counter
from collections.abc import Hashable, Sequence

from scipy.stats import chi2_contingency


def two_sample_p(
    first: Sequence[Hashable], second: Sequence[Hashable], least: int = 10
) -> float:
    """P-value of the G test of homogeneity of two samples.

    Outcomes seen fewer than ``least`` times in both samples together share one cell,
    so that the chi-square approximation holds.
    """
    counts = (Counter(first), Counter(second))
    together = counts[0] + counts[1]
    cells = [outcome for outcome, count in together.items() if count >= least]
    table = [[count[outcome] for outcome in cells] for count in counts]
    for row, count in zip(table, counts, strict=True):
        row.append(sum(count.values()) - sum(row))
    if table[0][-1] + table[1][-1] == 0:
        table = [row[:-1] for row in table]
    assert len(table[0]) >= 2, "one outcome only: nothing to compare"
    return float(chi2_contingency(table, lambda_="log-likelihood").pvalue)
