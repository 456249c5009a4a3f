"""The command ``tandem``, also as ``python -m tandem``."""

import sys


def command() -> int:
    """Runs ``tandem.cli.main``. Ctrl-C while that is imported, which takes a tenth of a second, ends as it does later: in one line, with status 130."""
    try:
        from tandem.cli.main import main
        from tandem.runtime.process.fast_exit import fast_exit
    except KeyboardInterrupt:
        sys.stderr.write("tandem: interrupted\n")
        return 130
    with fast_exit():
        sys.exit(main())


if __name__ == "__main__":
    sys.exit(command())
