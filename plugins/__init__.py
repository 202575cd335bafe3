"""The TwELL kernels and TensorRT plugins, and the torch ops over them."""
