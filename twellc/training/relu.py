"""Replace SiLU or GELU by ReLU."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from twellc.base.errors import UserError, first_few
from twellc.base.torch_private import DropoutNd
from twellc.base.transformers_private import activation_classes
from twellc.eager.module_blocks import blocks_at
from twellc.eager.optimization import refuse_other_than_modules
from twellc.eager.tracing import as_it_was
from twellc.eager.training_block import BlendedActivation
from twellc.training.penalty import refuse_other_counts

# Approximations of GELU, QuickGELU too, differ from it by no more than this.
_NEAR = 0.025
_RELU = "relu"


class Blend:
    """Activations on their way to ReLU.

    Attributes:
        modules: Paths of the blocks that have got a ReLU.
        steps: Over how many steps their activations become ReLU; 0: at once.
    """

    def __init__(
        self,
        modules: Sequence[str],
        activations: Sequence[BlendedActivation],
        steps: int,
        named: Sequence[tuple[Any, str, str]] = (),
    ) -> None:
        """Make one.

        Args:
            modules: Paths of the blocks.
            activations: Their activations.
            steps: See `steps`.
            named: Configurations that name the activation, the name of the field, and its value for ReLU.
        """
        self.modules, self.steps = list(modules), steps
        self._activations = list(activations)
        self._named = [(config, field, getattr(config, field), relu) for config, field, relu in named]

    def share(self, step: int) -> float:
        """Return the share of ReLU at a step, 0 to 1."""
        return 1.0 if self.steps == 0 else min(1.0, step / self.steps)

    def set_step(self, step: int) -> None:
        """Set the activations for a step, from 0 on; call this before the step.

        On the way to ReLU the configuration of a Hugging Face model names an activation that transformers does not
        have, such as "silu, 250/500 of the way to relu", so that a model saved then is not loaded as another one.

        Raises:
            UserError: The step is not an integer from 0 on.
        """
        refuse_other_counts(step=step)
        share = self.share(step)
        with ExitStack() as undo:
            for each in self._activations:
                _set(each, "share", share, undo)
            for config, field, original, relu in self._named:
                on_the_way = f"{original}, {step}/{self.steps} of the way to {_RELU}" if share > 0 else original
                _set(config, field, relu if share == 1 else on_the_way, undo)
            undo.pop_all()


def _set(owner: Any, name: str, value: Any, undo: ExitStack) -> None:
    undo.callback(setattr, owner, name, getattr(owner, name))
    setattr(owner, name, value)


def sparsify(model: nn.Module, *, steps: int = 0) -> Blend:
    """Replace SiLU or GELU by ReLU in the feed-forward blocks of a model, in place.

    The model has to be trained further. The configuration of a Hugging Face model is changed, too: a saved model loads
    with ReLU, and cannot be loaded before the activation is a ReLU. Call this before
    `twellc.optimize(model, training=True)`.

    Args:
        model: The model. Its blocks are submodules, or written out in a larger module without a gate;
            their activation is a submodule.
        steps: Over how many steps the activation becomes a ReLU: (1 - t) act(z) + t relu(z), t from 0 to 1. Until
            then blocks are computed densely. 0: at once.

    Returns:
        The changed blocks with the state of their activations: `set_step` moves them on.

    Raises:
        UserError: No block has such an activation, or the model's configuration cannot name the new one. After this,
            and any other error, the model is unchanged.
    """
    refuse_other_than_modules("sparsify", model)
    refuse_other_counts(steps=steps)
    with ExitStack() as undo:
        replaced = list(_replace(model, steps > 0, undo))
        if not replaced:
            where = type(model).__name__
            expected = "blocks that twellc.optimize would take with a ReLU, with their activation as a submodule"
            raise UserError(where, "has no feed-forward block with a SiLU or GELU to replace", expected=expected)
        named = _configure(model, replaced) if hasattr(model, "config") else []
        activations = [each for each in model.modules() if isinstance(each, BlendedActivation)]
        blend = Blend([path.rpartition(".")[0] for path, _ in replaced], activations, steps, named)
        blend.set_step(0)
        undo.pop_all()
    return blend


def _replace(model: nn.Module, blended: bool, undo: ExitStack) -> Iterator[tuple[str, nn.Module]]:
    """Replace activations; yield the path of each, and the original."""
    for path, module in list(model.named_modules()):
        candidates = [name for name, child in module.named_children() if _is_silu_or_gelu(child)]
        # In eval mode torch's encoder layer uses the activation that it had when it was made.
        if len(candidates) != 1 or isinstance(module, nn.TransformerEncoderLayer):
            continue
        (name,) = candidates
        original = getattr(module, name)
        replacement = (BlendedActivation(original) if blended else nn.ReLU()).train(original.training)
        undo.callback(module._modules.__setitem__, name, original)
        module._modules[name] = replacement
        found = blocks_at(path, module)
        module._modules[name] = original
        # In training an activation on its way to ReLU must be that of the gate alone, without a square behind it.
        taken = bool(found) and (not blended or all(block.activation == "relu" for block in found))
        if taken and len(blocks_at(path, module)) < len(found):
            module._modules[name] = replacement
            yield f"{path}.{name}".lstrip("."), original


def _is_silu_or_gelu(module: nn.Module) -> bool:
    """Whether a module computes SiLU or GELU, or nearly."""
    if next(module.parameters(), None) is not None or list(module.children()) or isinstance(module, DropoutNd):
        return False
    z = torch.linspace(-6, 6, 97)
    try:
        with torch.no_grad(), as_it_was(module):
            y = module(z)
    except Exception:  # it is not a function of one tensor
        return False
    if not isinstance(y, torch.Tensor) or y.shape != z.shape:
        return False
    return any(bool((y - other).abs().max() < _NEAR) for other in (functional.silu(z), functional.gelu(z)))


# ---- the configuration of a Hugging Face model ----


def _configure(model: Any, replaced: Sequence[tuple[str, nn.Module]]) -> list[tuple[Any, str, str]]:
    """Find out how the configuration names ReLU, and check that with it the configuration describes this model.

    Returns:
        The argument `named` of `Blend`. The configuration stays as it is.

    Raises:
        UserError: It describes another one.
    """
    classes = activation_classes()
    known = dict(_configurations(model))
    named: dict[tuple[int, str], tuple[Any, str, str]] = {}
    for path, original in replaced:
        for config in _above(path, known):
            for name, value in vars(config).items():
                relu = value
                if name == "feed_forward_proj" and isinstance(value, str):  # T5's, such as gated-gelu
                    relu = f"{value.rpartition('-')[0]}-{_RELU}".lstrip("-")
                elif isinstance(value, str) and value in classes and type(classes[value]) is type(original):
                    relu = _RELU
                if relu != value:
                    named[id(config), name] = config, name, relu
    described = _described(model, named.values())
    wanted: dict[str, type[nn.Module]] = {
        path: type(module)
        for path, module in model.named_modules()
        if next(module.parameters(), None) is None and not list(module.children())
    }
    for path, _ in replaced:
        wanted.pop(f"{path}.original", None)
        wanted[path] = nn.ReLU
    other = [path for path, kind in wanted.items() if type(described.get(path)) is not kind]
    if other:
        raise UserError(
            type(model).__name__,
            "its configuration cannot say that these blocks alone have another activation",
            got=f"another activation at {first_few(sorted(set(other)))}",
            fix="Set the activation in its config.json, load the model, and leave sparsify out.",
        )
    return list(named.values())


def _described(model: Any, named: Iterable[tuple[Any, str, str]]) -> dict[str, nn.Module]:
    """Return the modules of a model made from a copy of the configuration with these changes; none if that fails."""
    copies: dict[int, Any] = {}
    try:
        config = copy.deepcopy(model.config, copies)
        for original, name, relu in named:
            if id(original) in copies:
                setattr(copies[id(original)], name, relu)
        with torch.device("meta"):
            return dict(type(model)(config).named_modules())
    except Exception:
        return {}


def _configurations(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the configurations of modules that have one, by path."""
    for path, module in model.named_modules():
        config = vars(module).get("config")
        if config is not None and hasattr(config, "to_dict"):
            yield path, config


def _above(path: str, known: dict[str, Any]) -> list[Any]:
    """Return the configurations of all modules above one, each once."""
    found: dict[int, Any] = {}
    while path:
        path = path.rpartition(".")[0]
        if path in known:
            found[id(known[path])] = known[path]
    return list(found.values())
