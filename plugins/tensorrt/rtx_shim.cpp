// libtensorrt_rtx.so without a version: a library with nothing in it but the dependency on libtensorrt_rtx.so.1.
//
// The ONNX parser of TensorRT-RTX 1.7 opens the unversioned name when it meets a plugin node, the PyPI wheel ships only
// the versioned file, and the process dies. A program that loads this file first has satisfied that name, and a symbol
// looked up through it is found in its dependency, without a change to site-packages.
