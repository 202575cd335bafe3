"""What everything else builds on: errors, files, processes, records. Imports nothing of twellc above it."""
