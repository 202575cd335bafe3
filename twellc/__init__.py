"""twellc compiles transformers with sparse feed-forward layers into TensorRT engines."""

__version__ = "0.1.0"
