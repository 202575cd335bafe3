"""What options of other tools are called here. Importing this imports nothing large."""

from __future__ import annotations

_TRTEXEC, _POLYGRAPHY, _OPTIMUM, _TRTLLM = "trtexec", "polygraphy", "optimum-cli", "trtllm-build"
_VLLM = "vllm serve"
_RANKS = "--tensor-parallel N here"
_SHAPES = "part of --profile NAME:MIN:OPT:MAX here, such as --profile input_ids:1x1:1x128:8x2048"
_PLAN = "-o/--output here: twellc compile MODEL -o FILE"
_MEMORY = "not needed here: TensorRT may take the memory that is free. Leave it out"
_PRECISION = "not offered here: plans are in bf16 or fp16, see --dtype"
_RUN = "not for compiling: twellc bench MODEL times a model here"
_HOST = "for trtexec itself, which runs the plan: twellc only builds it"

# By option, as spelt there: the tool, and what to do instead.
FOREIGN: dict[str, tuple[str, str]] = {
    "--saveEngine": (_TRTEXEC, _PLAN),
    "--save-engine": (_POLYGRAPHY, _PLAN),
    "--output_dir": (_TRTLLM, _PLAN),
    "--loadEngine": (_TRTEXEC, "the argument here: twellc inspect PLAN shows a plan, twellc check MODEL PLAN runs it"),
    "--checkpoint_dir": (_TRTLLM, "the argument MODEL here"),
    "--model": (_OPTIMUM, "the argument MODEL here"),
    "--fp16": (_TRTEXEC, "--dtype fp16 here"),
    "--bf16": (_TRTEXEC, "--dtype bf16 here"),
    "--half": (_OPTIMUM, "--dtype fp16 here"),
    "--fp8": (_TRTEXEC, _PRECISION),
    "--int8": (_TRTEXEC, _PRECISION),
    "--int4": (_TRTEXEC, _PRECISION),
    "--best": (_TRTEXEC, _PRECISION),
    "--noTF32": (_TRTEXEC, "not needed here: nothing runs in TF32. Leave it out"),
    "--stronglyTyped": (_TRTEXEC, "what is always done here. Leave it out"),
    "--explicitBatch": (_TRTEXEC, "what is always done here. Leave it out"),
    "--minShapes": (_TRTEXEC, _SHAPES),
    "--optShapes": (_TRTEXEC, _SHAPES),
    "--maxShapes": (_TRTEXEC, _SHAPES),
    "--shapes": (_TRTEXEC, _SHAPES),
    "--trt-min-shapes": (_POLYGRAPHY, _SHAPES),
    "--trt-opt-shapes": (_POLYGRAPHY, _SHAPES),
    "--trt-max-shapes": (_POLYGRAPHY, _SHAPES),
    "--input-shapes": (_POLYGRAPHY, _SHAPES),
    "--batch_size": (_OPTIMUM, _SHAPES),
    "--sequence_length": (_OPTIMUM, _SHAPES),
    "--max_batch_size": (_TRTLLM, _SHAPES),
    "--max_input_len": (_TRTLLM, _SHAPES),
    "--max_seq_len": (_TRTLLM, _SHAPES),
    "--tp_size": (_TRTLLM, _RANKS),
    "--tensor-parallel-size": (_VLLM, _RANKS),
    "--workspace": (_TRTEXEC, _MEMORY),
    "--memPoolSize": (_TRTEXEC, _MEMORY),
    "--pool-limit": (_POLYGRAPHY, _MEMORY),
    "--plugins": (_TRTEXEC, "--plugin-library FILE here, for other people's; twellc's own are found without it"),
    "--staticPlugins": (_TRTEXEC, "--plugin-library FILE here, for other people's; twellc's own are found without it"),
    "--dynamicPlugins": (_TRTEXEC, "--plugin-library FILE here, for other people's; twellc's own are found without it"),
    "--setPluginsToSerialize": (_TRTEXEC, "--embed-plugins here"),
    "--versionCompatible": (_TRTEXEC, "not offered here: a plan is of the TensorRT and the GPU that it was built for"),
    "--hardwareCompatibilityLevel": (
        _TRTEXEC,
        "not offered here: a plan is of the TensorRT and the GPU that it was built for",
    ),
    "--builderOptimizationLevel": (_TRTEXEC, "not offered here. Leave it out"),
    "--timingCacheFile": (_TRTEXEC, "not offered here. Leave it out"),
    "--skipInference": (_TRTEXEC, "what compile always does. Leave it out"),
    "--buildOnly": (_TRTEXEC, "what compile always does. Leave it out"),
    "--iterations": (_TRTEXEC, "--repeats of twellc bench here"),
    "--avgRuns": (_TRTEXEC, "--repeats of twellc bench here"),
    "--duration": (_TRTEXEC, "--repeats of twellc bench here"),
    "--warmUp": (_TRTEXEC, _RUN),
    "--useCudaGraph": (_TRTEXEC, _RUN),
    "--dumpProfile": (_TRTEXEC, _HOST),
    "--dumpLayerInfo": (_TRTEXEC, _HOST),
    "--loadInputs": (_TRTEXEC, "--inputs FILE.npz of twellc check and bench here"),
    "--load-inputs": (_POLYGRAPHY, "--inputs FILE.npz of twellc check and bench here"),
    "--exportOutput": (_TRTEXEC, "--json of twellc check here, which compares outputs itself"),
    "--save-outputs": (_POLYGRAPHY, "--json of twellc check here, which compares outputs itself"),
    "--atol": (_POLYGRAPHY, "not for you to choose here: the tolerance of twellc check follows from the model"),
    "--rtol": (_POLYGRAPHY, "not for you to choose here: the tolerance of twellc check follows from the model"),
    "--trt": (_POLYGRAPHY, "--backend tensorrt here"),
    "--onnxrt": (_POLYGRAPHY, "not offered here: twellc check computes the truth in float64 itself"),
    "--convert-to": (_POLYGRAPHY, "--backend none --onnx FILE here, to stop at ONNX"),
    "--task": (_OPTIMUM, "not needed here: config.json names the architecture. Leave it out"),
    "--opset": (_OPTIMUM, "not needed here: it follows from the graph. Leave it out"),
    "--framework": (_OPTIMUM, "not needed here. Leave it out"),
    "--monolith": (_OPTIMUM, "what is always done here. Leave it out"),
    "--optimize": (_OPTIMUM, "not needed here. Leave it out"),
    "--trust-remote-code": (_OPTIMUM, "not offered here: code in a model's folder is never run"),
    "--cache_dir": (_OPTIMUM, "not needed here: only local folders are read; fetch one by hf download"),
    "--revision": (_OPTIMUM, "an option of hf download: only local folders are read here"),
    "--token": (_OPTIMUM, "an option of hf download: only local folders are read here"),
    "--gemm_plugin": (_TRTLLM, "not needed here. Leave it out"),
}


def answer(option: str) -> str | None:
    """Say what an option of another tool is called here; None for one that no tool has."""
    known = FOREIGN.get(option)
    return None if known is None else f"{known[0]}'s {option} is {known[1]}."
