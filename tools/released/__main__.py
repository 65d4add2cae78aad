"""Fetch released models: `python tools/released smollm2`, or `all`; `--folders` for the dequantised ones, too."""

from __future__ import annotations

import argparse
import sys

from released_models import RELEASES, FetchError, fetch, make_folder


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "names", nargs="+", choices=[*RELEASES, "all"], metavar="NAME", help=", ".join([*RELEASES, "all"])
    )
    parser.add_argument(
        "--folders", action="store_true", help="write the dequantised folder in bfloat16 beside each file"
    )
    options = parser.parse_args()
    for name in RELEASES if "all" in options.names else options.names:
        try:
            print(f"{name}: {fetch(RELEASES[name])}", flush=True)
            if options.folders:
                print(f"{name}: {make_folder(RELEASES[name])}", flush=True)
        except FetchError as error:
            print(f"{name}: {error}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
