"""Predicted times of blocks on a GPU, from measured ones, and the decision for each block."""
