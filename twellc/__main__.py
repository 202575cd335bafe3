"""Run the command line with `python -m twellc`."""

from twellc.cli import main

main()
