"""The entry of the script `twellc` and of `python -m twellc`."""

import signal


def main() -> None:
    """Run the command line. Ctrl-C ends it without a traceback, also while its modules are imported."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from twellc.cli import main as run

    run()


if __name__ == "__main__":
    main()
