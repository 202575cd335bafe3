"""The sizes of inputs that a model takes."""
