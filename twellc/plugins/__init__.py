"""The TwELL kernels and TensorRT plugins, and the torch ops over them."""

from twellc.plugins.registration import register

__all__ = ["register"]
