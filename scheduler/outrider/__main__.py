"""The `outrider` command, also as `python -m outrider`."""

import sys


def main() -> int:
    """Run the command. Ctrl-C while its modules load ends it as quietly as later; a missing package is one sentence."""
    try:
        from outrider.tools.cli import main as command
    except KeyboardInterrupt:
        return 130
    except ImportError as error:
        sys.stderr.write(f"outrider: a package that outrider needs cannot be imported: {error}.\n")
        return 3
    return command()


if __name__ == "__main__":
    raise SystemExit(main())
