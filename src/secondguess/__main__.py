"""The command line, as `python -m secondguess` and as the command `secondguess`."""

import sys


def main() -> int:
    """Run the command line and return its exit code. Ctrl-C is reported in one line from the first import on."""
    try:
        from secondguess.cli import main as run

        return run()
    except KeyboardInterrupt:
        print("secondguess: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.argv[0] = "secondguess"  # as reports have it
    sys.exit(main())
