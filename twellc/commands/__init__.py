"""The commands of `twellc`, a file for each, with its output."""
