"""The base of all other folders: errors, files, processes, records. Imports nothing else of twellc."""
