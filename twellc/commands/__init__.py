"""The commands of `twellc`, a file for each, with what it prints."""
