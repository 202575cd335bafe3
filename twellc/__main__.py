"""Run the command line with `python -m twellc`."""

from twellc.cli import main

if __name__ == "__main__":
    main()
