"""The `outrider` command, also as `python -m outrider`."""


def main() -> int:
    """Run the command; Ctrl-C while its modules load ends it as quietly as later."""
    try:
        from outrider.tools.cli import main as command
    except KeyboardInterrupt:
        return 130
    return command()


if __name__ == "__main__":
    raise SystemExit(main())
