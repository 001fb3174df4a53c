# SPDX-License-Identifier: Apache-2.0
"""Print what an installed distribution requires here, one requirement a line."""

from __future__ import annotations

import argparse
import importlib.metadata

from pip._vendor.packaging.requirements import Requirement


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("distribution")
    parser.add_argument("--extra", default="", help="only what this extra adds")
    parser.add_argument("--without", default="", help="names to leave out, a,b,c")
    arguments = parser.parse_args()
    without = set(arguments.without.split(","))
    for text in importlib.metadata.requires(arguments.distribution) or []:
        requirement = Requirement(text)
        marker = requirement.marker
        always = marker is None or marker.evaluate({"extra": ""})
        applies = marker is None or marker.evaluate({"extra": arguments.extra})
        if arguments.extra and always:
            continue
        if applies and requirement.name.lower() not in without:
            requirement.marker = None
            print(requirement)


if __name__ == "__main__":
    main()
