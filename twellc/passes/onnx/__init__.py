"""The passes over an ONNX graph."""
