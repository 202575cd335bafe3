"""The sizes that a model's inputs may have: conditions in a traced program, relations that a plan's manifest names."""
