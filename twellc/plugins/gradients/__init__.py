"""Gradients of the `twell` ops: what a block keeps for its backward, and both directions on CPU and GPU."""
