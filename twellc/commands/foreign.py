"""Names here of options of other tools. Importing this imports nothing large."""

from __future__ import annotations

_TRTEXEC, _POLYGRAPHY, _OPTIMUM, _TRTLLM = "trtexec", "polygraphy", "optimum-cli", "trtllm-build"
_VLLM = "vllm serve"
_RANKS = "--tensor-parallel N here"
_SHAPES = (
    "part of --optimization-profile NAME:MIN:OPT:MAX here, such as --optimization-profile input_ids:1x1:1x128:8x2048"
)
_PLAN = "-o/--output here: twellc compile MODEL -o FILE"
_MEMORY = "not needed here: TensorRT may take the memory that is free. Leave it out"
_PRECISION = "not offered here: plans are in bf16 or fp16, see --dtype"
_RUN = "not for compiling: twellc bench MODEL times a model here"
_HOST = "for trtexec itself, which runs the plan: twellc only builds it"

# Tool, its options as they are spelt there, and the answer.
_ANSWERS = (
    (_TRTEXEC, "--saveEngine", _PLAN),
    (_POLYGRAPHY, "--save-engine", _PLAN),
    (_TRTLLM, "--output_dir", _PLAN),
    (_TRTEXEC, "--loadEngine", "the argument here: twellc inspect PLAN shows a plan, twellc check MODEL PLAN runs it"),
    (_TRTLLM, "--checkpoint_dir", "the argument MODEL here"),
    (_OPTIMUM, "--model", "the argument MODEL here"),
    (_TRTEXEC, "--fp16", "--dtype fp16 here"),
    (_TRTEXEC, "--bf16", "--dtype bf16 here"),
    (_OPTIMUM, "--half", "--dtype fp16 here"),
    (_TRTEXEC, "--fp8 --int8 --int4 --best", _PRECISION),
    (_TRTEXEC, "--noTF32", "not needed here: nothing runs in TF32. Leave it out"),
    (_TRTEXEC, "--stronglyTyped --explicitBatch", "always on here. Leave it out"),
    (_TRTEXEC, "--minShapes --optShapes --maxShapes --shapes", _SHAPES),
    (_POLYGRAPHY, "--trt-min-shapes --trt-opt-shapes --trt-max-shapes --input-shapes", _SHAPES),
    (_OPTIMUM, "--batch_size --sequence_length", _SHAPES),
    (_TRTLLM, "--max_batch_size --max_input_len --max_seq_len", _SHAPES),
    (_TRTLLM, "--tp_size", _RANKS),
    (_VLLM, "--tensor-parallel-size", _RANKS),
    (_TRTEXEC, "--workspace --memPoolSize", _MEMORY),
    (_POLYGRAPHY, "--pool-limit", _MEMORY),
    (
        _TRTEXEC,
        "--plugins --staticPlugins --dynamicPlugins",
        "--plugin-library FILE here, for other people's; twellc's own are found without it",
    ),
    (_TRTEXEC, "--setPluginsToSerialize", "--embed-plugins here"),
    (
        _TRTEXEC,
        "--versionCompatible --hardwareCompatibilityLevel",
        "not offered here: a plan is of the TensorRT and the GPU that it was built for",
    ),
    (_TRTEXEC, "--builderOptimizationLevel --timingCacheFile", "not offered here. Leave it out"),
    (_TRTEXEC, "--skipInference --buildOnly", "what compile always does. Leave it out"),
    (_TRTEXEC, "--iterations --avgRuns --duration", "--repeats of twellc bench here"),
    (_TRTEXEC, "--warmUp --useCudaGraph", _RUN),
    (_TRTEXEC, "--dumpProfile --dumpLayerInfo", _HOST),
    (_TRTEXEC, "--loadInputs", "--arrays FILE.npz of twellc check and bench here"),
    (_POLYGRAPHY, "--load-inputs", "--arrays FILE.npz of twellc check and bench here"),
    (_TRTEXEC, "--exportOutput", "--json of twellc check here, which compares outputs itself"),
    (_POLYGRAPHY, "--save-outputs", "--json of twellc check here, which compares outputs itself"),
    (_POLYGRAPHY, "--atol --rtol", "not for you to choose here: the tolerance of twellc check follows from the model"),
    (_POLYGRAPHY, "--trt", "--backend tensorrt here"),
    (_POLYGRAPHY, "--onnxrt", "not offered here: twellc check computes the truth in float64 itself"),
    (_POLYGRAPHY, "--convert-to", "--backend none --onnx FILE here, to stop at ONNX"),
    (_OPTIMUM, "--task", "not needed here: config.json names the architecture. Leave it out"),
    (_OPTIMUM, "--opset", "not needed here: it follows from the graph. Leave it out"),
    (_OPTIMUM, "--framework --optimize", "not needed here. Leave it out"),
    (_OPTIMUM, "--monolith", "always on here. Leave it out"),
    (_OPTIMUM, "--trust-remote-code", "not offered here: code in a model's folder is never run"),
    (_OPTIMUM, "--cache_dir", "not needed here: only local folders are read; fetch one by hf download"),
    (_OPTIMUM, "--revision --token", "an option of hf download: only local folders are read here"),
    (_TRTLLM, "--gemm_plugin", "not needed here. Leave it out"),
)
FOREIGN = {option: (tool, answer) for tool, options, answer in _ANSWERS for option in options.split()}


def answer(option: str) -> str | None:
    """Return the name here of an option of another tool, as a sentence; None for one that no tool has."""
    known = FOREIGN.get(option)
    return None if known is None else f"{known[0]}'s {option} is {known[1]}."
