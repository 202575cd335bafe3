"""From a model of any kind to an ONNX graph with `twell` nodes, and to a plan with its manifest."""
