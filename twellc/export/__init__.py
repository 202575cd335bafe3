"""Write a program as ONNX with `twell` nodes, and build TensorRT plans from it."""
