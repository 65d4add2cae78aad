"""The command line, as `python -m secondguess`."""

import sys

from secondguess.cli import main

if __name__ == "__main__":
    sys.argv[0] = "secondguess"  # as reports have it
    sys.exit(main())
