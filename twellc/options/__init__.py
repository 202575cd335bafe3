"""Options of the commands: their names, defaults and meaning."""
