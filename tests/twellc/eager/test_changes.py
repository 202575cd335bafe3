"""After an error, a refusal or an interrupt a model is what it was: `optimize`, `restore`, `sparsify`, in any order.

By default two sequences of changes, with `-m ""` some more. `TWELLC_FUZZ_EXAMPLES=100 pytest -m ""
tests/twellc/eager/test_changes.py` runs longer, and with other examples each time.
"""

from __future__ import annotations

import copy
import io
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import twellc
from tests import models
from tests.drawn import examples
from tests.models import Gated, Plain
from tests.twellc.eager.test_optimize import tokens
from twellc.base.errors import UserError
from twellc.eager import changes, fp8, fp8_linear, optimization
from twellc.eager.fp8_linear import holds_fp8
from twellc.eager.optimization import blocks_in_training
from twellc.loaders.huggingface import open_directory
from twellc.plugins.fp8 import Fp8
from twellc.training import Blend, L1Penalty, reinitialise_dead, relu, sparsify, take_counts

CHANGING = {str(module.__file__) for module in (optimization, changes, fp8, fp8_linear, relu)}
ERRORS = (KeyboardInterrupt, torch.OutOfMemoryError, ZeroDivisionError)


@contextmanager
def failing(step: int | None, error: type[BaseException]) -> Iterator[list[int]]:
    """Let the call number `step` that the files of `CHANGING` make, of Python or of C, fail; count them."""
    count = [0]

    def watch(frame: Any, event: str, function: Any) -> None:
        if event not in ("call", "c_call") or frame.f_code.co_filename not in CHANGING:
            return
        count[0] += 1
        if count[0] - 1 == step:
            sys.setprofile(None)
            raise error("injected")

    before = sys.getprofile()
    sys.setprofile(watch)
    try:
        yield count
    finally:
        sys.setprofile(before)


def state(model: nn.Module) -> dict[str, Any]:
    """Return all that makes a model what it is; of values a copy."""
    found: dict[str, Any] = {"keys": list(model.state_dict())}
    for path, module in model.named_modules():
        for name, held in vars(module).items():
            found[f"{path}: {name}"] = list(held.items()) if isinstance(held, dict) else held
        found[f"{path}: class"] = type(module)
        found[f"{path}: options"] = [
            block.training and block.training.options for block in vars(module).get("_twellc", ())
        ]
    for name, each in [*model.named_parameters(), *model.named_buffers()]:
        found[f"{name}: value"] = each.detach().clone()
        found[f"{name}: form"] = each.requires_grad, each.dtype, each.stride(), each.device
    found["config"] = copy.deepcopy(vars(model.config)) if hasattr(model, "config") else None
    return found


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    return [name for name in before.keys() | after.keys() if not _same(before.get(name), after.get(name))]


def _same(first: Any, second: Any, *, is_copy: bool = True) -> bool:
    """Whether values are; tensors that are held have to be the same objects, of copies the bytes."""
    if first is second:
        return True
    if isinstance(first, Tensor) or isinstance(second, Tensor):
        return is_copy and first.dtype == second.dtype and torch.equal(_bits(first), _bits(second))
    if isinstance(first, list | tuple) and isinstance(second, list | tuple):
        return len(first) == len(second) and all(
            _same(one, other, is_copy=False) for one, other in zip(first, second, strict=True)
        )
    return bool(first == second)


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8) if tensor.dim() else tensor.reshape(1).view(torch.uint8)


def counted(module: Any, *_: Any) -> None:
    """Count calls in two buffers: in one in place, and in one anew."""
    module.calls.add_(1)
    module.last = module.calls + 1


def make_model() -> Any:
    model = models.llama("silu", num_hidden_layers=1).bfloat16()
    model.register_buffer("calls", torch.zeros((), dtype=torch.int64), persistent=False)
    model.register_buffer("last", torch.zeros((), dtype=torch.int64))
    model.register_forward_pre_hook(counted)
    model.lm_head.weight.requires_grad_(False)
    return model.train()


class Changes(RuleBasedStateMachine):
    """What is done to a model, each step with an error in it or without; the model computes the same in all forms."""

    faults = st.one_of(st.none(), st.tuples(st.integers(0, 250), st.sampled_from(ERRORS)))

    @initialize()
    def begin(self) -> None:
        self.model: Any = make_model()
        self.blend: Blend | None = None
        self.expected: Tensor | None = None

    def change(self, action: Callable[[], Any], fault: tuple[int, type[BaseException]] | None = None) -> Any:
        before = state(self.model)
        try:
            with failing(*(fault or (None, KeyboardInterrupt))):
                result = action()
        except (*ERRORS, UserError) as error:
            changed = differences(before, state(self.model))
            assert not changed, f"after {error!r}: {changed}"
            return None
        return result

    @property
    def is_relu(self) -> bool:
        return self.blend is not None and self.blend.share(9) == 1

    @precondition(lambda self: self.blend is None)
    @rule(steps=st.sampled_from([0, 4]), fault=faults)
    def sparsify(self, steps: int, fault: Any) -> None:
        self.blend = self.change(lambda: sparsify(self.model, steps=steps), fault)
        if steps == 0:
            self.expected = None  # a ReLU from now on

    @precondition(lambda self: self.blend is not None)
    @rule(step=st.sampled_from([0, 1, 4, -1]), fault=faults)
    def move(self, step: int, fault: Any) -> None:
        blend = self.blend
        assert blend is not None
        self.change(lambda: blend.set_step(step), fault)
        self.expected = None

    @precondition(lambda self: self.blend is not None)
    @rule(training=st.booleans(), compression=st.sampled_from([None, 4, 8]), fault=faults)
    def optimize(self, training: bool, compression: int | None, fault: Any) -> None:
        self.change(lambda: twellc.optimize(self.model, training=training, compression=compression), fault)

    @precondition(lambda self: self.blend is not None)
    @rule(most=st.sampled_from([None, 0.0, 0.5]), fault=faults)
    def quantise(self, most: float | None, fault: Any) -> None:
        samples = None if most is None else [tokens()]
        before = holds_fp8(self.model)
        options: dict[str, Any] = {"weights": "fp8:blocks", "fp8_error": most, "samples": samples}
        self.change(lambda: twellc.optimize(self.model, **options), fault)
        if holds_fp8(self.model) != before:
            self.expected = None

    @rule(fault=faults)
    def restore(self, fault: Any) -> None:
        if self.change(lambda: twellc.restore(self.model), fault) is not None:
            assert not twellc.optimized_blocks(self.model)

    @rule(name=st.sampled_from(["samples", "kinds", "none", "one", "layers", "match", "compression", "train", "nan"]))
    def refused(self, name: str) -> None:
        fp8: dict[str, Any] = {"weights": "fp8:blocks", "fp8_error": 0.5}
        options: dict[str, dict[str, Any]] = {
            "samples": {**fp8, "samples": [tokens(), tokens() + 1000]},
            "kinds": {**fp8, "samples": 3},
            "none": {**fp8, "samples": iter(())},
            "one": {**fp8},
            "layers": {"layers": "("},
            "match": {"layers": "no such layer", "training": not blocks_in_training(self.model)},
            "compression": {"compression": 3},
            "train": {"weights": "fp8:blocks", "training": True},
            "nan": {"weights": "fp8:blocks"},
        }
        weight = self.model.model.layers[0].mlp.up_proj.weight
        kept = weight[0, 0].item()
        if name == "nan":
            weight.data[0, 0] = float("nan")
        before, said = state(self.model), ""
        try:
            twellc.optimize(self.model, **options[name])
        except (UserError, IndexError) as error:
            said = str(error)
        # Without a block that is left to be taken there is nothing to be quantised, nor to be named by `layers`.
        if said or name not in ("nan", "match", "samples"):
            assert said and not differences(before, state(self.model)), (name, differences(before, state(self.model)))
        weight.data[0, 0] = kept

    @precondition(lambda self: bool(blocks_in_training(self.model)))
    @rule()
    def train(self) -> None:
        penalty = L1Penalty(self.model.train(), 0.1)
        (self.model(input_ids=tokens()).logits.float().square().mean() + penalty(0)).backward()
        reinitialise_dead(self.model, take_counts(self.model), step=0)
        assert self.model.model.layers[0].mlp.up_proj.weight.grad is not None
        penalty.close()
        self.expected = None

    @rule()
    def save_and_load_a_state(self) -> None:
        stream = io.BytesIO()
        torch.save(self.model.state_dict(), stream)
        stream.seek(0)
        other = copy.deepcopy(self.model)
        for each in other.parameters():
            each.data.zero_()
        other.load_state_dict(torch.load(stream))
        assert torch.equal(self.logits(other), self.logits(self.model))

    @precondition(lambda self: self.blend is None or self.model.config.hidden_act == "relu")
    @rule()
    def save_and_load_files(self) -> None:
        plain = twellc.restore(copy.deepcopy(self.model))
        with tempfile.TemporaryDirectory() as folder:
            plain.save_pretrained(folder)
            loaded, _, _ = open_directory(Path(folder))
        assert holds_fp8(loaded) == holds_fp8(plain)
        self.compare(self.logits(loaded), self.logits(plain))

    def logits(self, model: Any) -> Tensor:
        """Run a copy in eval mode, which counts no calls."""
        with torch.no_grad():
            found: Tensor = copy.deepcopy(model).eval()(input_ids=tokens()).logits
        return found.float()

    @invariant()
    def computes_the_same(self) -> None:
        found = self.logits(self.model)
        if self.expected is None:
            self.expected = found
        self.compare(found, self.expected)

    def compare(self, found: Tensor, expected: Tensor) -> None:
        """Forms of a model round otherwise, in bfloat16; FP8 changes more."""
        assert (found - expected).norm() <= 0.02 * expected.norm()


def test_some_sequences_of_changes() -> None:
    run_state_machine_as_test(Changes, settings=examples(3, 6))


@pytest.mark.slow
def test_sequences_of_changes() -> None:
    run_state_machine_as_test(Changes, settings=examples(12, 20))


# ---- single steps ----


def blocks() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Gated(), Plain(), Gated()).eval()


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("change", ["optimize", "restore", "train"])
def test_strides_are_undone_without_a_copy(change: str, error: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights of the last block cannot be stored anew: memory of those before is gone by then."""
    model = blocks()
    if change != "optimize":
        twellc.optimize(model)
    before = state(model)
    held = [StorageWeakRef(each.down.weight.untyped_storage()) for each in model]
    store, calls = changes.store, []

    def fail(*arguments: Any, **named: Any) -> None:
        calls.append(arguments)
        if len(calls) == 3:
            assert [each.expired() for each in held] == [True, True, False]
            raise error
        store(*arguments, **named)

    monkeypatch.setattr(changes, "store", fail)
    with pytest.raises(error):
        twellc.restore(model) if change == "restore" else twellc.optimize(model, training=change == "train")
    assert not differences(before, state(model)) and len(calls) == 3


def test_a_forward_that_fails_on_a_sample() -> None:
    """What it has changed before is put back, too."""

    class Failing(nn.Module):
        calls: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.inner = blocks()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            self.calls = self.calls * 2
            self.inner[0].register_forward_hook(lambda *_: None)
            self.inner.train()
            self.register_buffer("more", torch.ones(2))
            if len(x) == 4:
                raise ZeroDivisionError
            return self.inner(x)  # type: ignore[no-any-return]

    model: Any = twellc.optimize(Failing(), training=True)
    before = state(model)
    wish: dict[str, Any] = {"weights": "fp8:blocks", "fp8_error": 0.5}
    with pytest.raises(ZeroDivisionError):
        twellc.optimize(model, **wish, samples=[torch.randn(3, 16), torch.randn(4, 16)])
    assert not differences(before, state(model)) and len(blocks_in_training(model)) == 3
    twellc.optimize(model, **wish, samples=[torch.randn(3, 16)])
    assert model.calls == 0 and not hasattr(model, "more") and not model.inner[0]._forward_hooks
    assert all(each.weights is not None for each in twellc.optimized_blocks(model))


def test_no_memory_for_the_last_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    model = twellc.optimize(blocks(), training=True)
    before, left = state(model), [7]

    def fail(*arguments: Any) -> Fp8:
        left[0] -= 1
        if not left[0]:
            raise torch.OutOfMemoryError
        return quantize(*arguments)

    quantize = Fp8.quantize
    monkeypatch.setattr(Fp8, "quantize", fail)
    with pytest.raises(torch.OutOfMemoryError):
        twellc.optimize(model, weights="fp8:blocks")
    assert not differences(before, state(model))


def test_a_warning_that_is_an_error() -> None:
    model = twellc.optimize(nn.Sequential(Gated()).train(), training=True)
    model[0].activation = nn.SiLU()
    before = state(model)
    with warnings.catch_warnings(), pytest.raises(UserWarning, match="no submodule is a feed-forward block"):
        warnings.simplefilter("error")
        twellc.optimize(model)
    assert not differences(before, state(model))


@pytest.mark.parametrize("samples", [3, "text", {"x": 1}, torch.tensor(1.0)])
def test_what_are_no_samples(samples: Any) -> None:
    with pytest.raises(UserError, match="samples: are not what a module is called with"):
        twellc.optimize(blocks(), weights="fp8:blocks", fp8_error=0.1, samples=samples)


@pytest.mark.parametrize(
    "options", [{"weights": "fp8:blocks", "layers": "[12]"}, {"compression": 2}, {"compression": 2, "training": True}]
)
def test_the_last_of_all_steps_fails(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    model = twellc.optimize(blocks(), layers="0", training=options.get("training", False))
    before = state(model)

    def fail(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(optimization, "_report", fail)
    with pytest.raises(KeyboardInterrupt):
        twellc.optimize(model, **options)
    assert not differences(before, state(model)) and len(twellc.optimized_blocks(model)) == 1
