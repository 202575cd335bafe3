"""Edit a traced program, and run it."""
