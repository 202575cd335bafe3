"""The `twell` ops in Torch-TensorRT: converters that put the plugins into the engines that it builds.

    import torch_tensorrt, twellc, twellc.torch_tensorrt

    twellc.torch_tensorrt.register()
    engine = torch_tensorrt.dynamo.compile(twellc.rewrite(program).program, inputs=[…])
    model = torch.compile(twellc.optimize(model), backend="torch_tensorrt")

An engine with the plugins needs them where it is loaded, too: call `register` there before `torch_tensorrt.load` or
`torch.export.load`. Importing this module imports neither torch nor Torch-TensorRT.
"""

from __future__ import annotations

import logging

from twellc.base.errors import UserError, first_line
from twellc.base.modules import Extra

TORCH_TENSORRT = Extra("twellc.torch_tensorrt", "torch_tensorrt", "Torch-TensorRT", "torch-tensorrt", tested=((2, 11),))
_LOG = logging.getLogger("twellc")


def register() -> None:
    """Register the plugins in TensorRT, and converters of the `twell` ops in Torch-TensorRT.

    A second call does nothing. Calls of an op that the plugins do not take, such as those in float32, are left to
    torch; the logger `twellc` says why.

    Raises:
        UserError: Torch-TensorRT is not installed, or its TensorRT does not take the plugins.
    """
    converters = TORCH_TENSORRT.load("dynamo.conversion._ConverterRegistry")
    TORCH_TENSORRT.warn_of_untried(_LOG)
    from twellc.plugins.ops import GATED_MLP, MLP
    from twellc.plugins.registration import register as register_plugins
    from twellc.torch_tensorrt.converter import convert, takes

    try:
        import tensorrt

        register_plugins(tensorrt)
        for op in (GATED_MLP, MLP):
            known = converters.DYNAMO_ATEN_CONVERTERS.get(op, ())
            if not any(each.converter_implementation is convert for each in known):
                put = converters.dynamo_tensorrt_converter(op, capability_validator=takes, supports_dynamic_shapes=True)
                put(convert)
    except (ImportError, AttributeError, TypeError) as error:  # another release
        what = f"{TORCH_TENSORRT.title} does not take converters of twellc ({first_line(error)})"
        got, fix = TORCH_TENSORRT.version(), f"Install it: pip install 'twellc[{TORCH_TENSORRT.extra}]'."
        raise UserError(TORCH_TENSORRT.user, what, got=got, expected=TORCH_TENSORRT.tried(), fix=fix) from error
