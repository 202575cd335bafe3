"""From a model of any kind to an ONNX graph with `twell` nodes."""
