"""``edgellm`` and ``python -m edgellm``: the command, with Ctrl-C quiet from the first import on."""

import sys


def main() -> None:
    """The console script."""
    try:
        from edgellm.cli.main import main as command

        command()
    except KeyboardInterrupt:  # while modules are imported, or on the way out
        sys.exit(130)


if __name__ == "__main__":
    main()
