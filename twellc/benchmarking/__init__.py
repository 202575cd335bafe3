"""Measurements on the GPU at hand."""
