"""Measure on the GPU at hand: timing, contestants, and `twellc bench`."""
