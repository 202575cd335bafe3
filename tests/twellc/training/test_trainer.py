"""transformers' Trainer with the L1 term: what it adds, logs and refuses."""

import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import twellc
from tests import models
from tests.twellc.training.test_optimize import in_training
from twellc.base.errors import UserError
from twellc.training import SparseTrainer, SparseTrainerMixin, SparsityCallback, TrainingLog, sparsify

pytest.importorskip("accelerate")


class Ids(torch.utils.data.Dataset):
    """The same sequences of 8 tokens in each epoch."""

    def __init__(self, count: int = 32) -> None:
        self.ids = torch.randint(3, 96, (count, 8), generator=torch.Generator().manual_seed(2))

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


def arguments(folder: Path, **changes: Any) -> Any:
    import transformers

    options = {
        "output_dir": str(folder),
        "max_steps": 4,
        "per_device_train_batch_size": 4,
        "logging_steps": 2,
        "use_cpu": True,
        "report_to": [],
        "save_strategy": "no",
        "optim": "sgd",
        "learning_rate": 0.1,
        "disable_tqdm": True,
        "lr_scheduler_type": "constant",
        **changes,
    }
    return transformers.TrainingArguments(**options)


def trainer_of(folder: Path, kind: Any = SparseTrainer, model: Any = None, **options: Any) -> Any:
    """Make a Trainer of a model; `recipe` is what the callback is given, and other options the Trainer's arguments."""
    model = in_training(use_cache=False)[0] if model is None else model
    recipe, callbacks = options.pop("recipe", {"l1": 1e-2}), options.pop("callbacks", None)
    data = {"train_dataset": Ids(), "eval_dataset": Ids(4), "callbacks": callbacks}
    return kind(model=model, args=arguments(folder, **options), sparsity=SparsityCallback(model, **recipe), **data)


def trained(folder: Path, kind: Any = SparseTrainer, **options: Any) -> Any:
    trainer = trainer_of(folder, kind, **options)
    trainer.train()
    return trainer


def test_the_loss_that_is_trained_on(tmp_path: Path) -> None:
    """Steps of the Trainer are those of a loop with the term in its loss; accumulation changes nothing."""
    whole = trained(tmp_path, max_grad_norm=1e9)
    parts = trained(tmp_path, per_device_train_batch_size=2, gradient_accumulation_steps=2, max_grad_norm=1e9)
    for one, other in zip(whole.model.parameters(), parts.model.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
    logged = [[each for each in trainer.state.log_history if "density" in each] for trainer in (whole, parts)]
    for one, other in zip(*logged, strict=True):
        for name in ("loss", "l1", "density", "dead"):
            assert one[name] == pytest.approx(other[name], rel=1e-3), name

    model = models.llama(use_cache=False).train()
    terms: list[Tensor] = []
    for layer in model.model.layers:
        layer.mlp.down_proj.register_forward_pre_hook(lambda _, args: terms.append(args[0].abs().sum(-1).mean()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    order = [index for each in order_of(tmp_path) for index in each]
    for step in range(4):
        ids = Ids().ids[order[4 * step : 4 * step + 4]]
        loss = model(input_ids=ids, labels=ids).loss
        (loss + 1e-2 * torch.stack(terms).mean()).backward()
        terms.clear()
        optimizer.step()
        optimizer.zero_grad()
    for one, other in zip(whole.model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)


def order_of(folder: Path) -> list[list[int]]:
    seen: list[list[int]] = []
    data = Ids()

    class Watched(SparseTrainer):
        def compute_loss(self, model: Any, inputs: Any, *rest: Any, **named: Any) -> Any:
            seen.append([int((data.ids == row).all(1).nonzero()[0]) for row in inputs["input_ids"]])
            return super().compute_loss(model, inputs, *rest, **named)

    trained(folder, Watched)
    return seen


def test_what_is_logged(tmp_path: Path) -> None:
    trainer = trained(tmp_path, recipe={"l1": 1e-2, "l1_warm_up": 1, "reinitialise": True, "log": tmp_path / "t.jsonl"})
    log = TrainingLog.read(tmp_path / "t.jsonl")
    assert [each.step for each in log.steps] == [2, 4]
    assert (log.model, log.run.sha256) == ("LlamaForCausalLM", "")
    assert [each.coefficient for each in log.steps] == [1e-2, 1e-2]
    history = [each for each in trainer.state.log_history if "density" in each]
    for record, each in zip(log.steps, history, strict=True):
        assert each["density"] == pytest.approx(sum(record.density) / 2) and each["l1"] == pytest.approx(record.l1)
        assert record.tokens == 2 * 4 * 8
    # The Trainer's own loss has the term in it: of two steps with 1/2 and all of the coefficient in the first record.
    assert history[1]["loss"] == pytest.approx(log.steps[1].loss + 1e-2 * log.steps[1].l1, rel=1e-3)
    assert json.dumps(trainer.state.log_history)


def test_every_step_is_in_the_log_and_every_measured_loss(tmp_path: Path) -> None:
    """Where the Trainer logs at other steps than it measures, and the last steps are fewer than it logs after."""
    model, log = in_training(use_cache=False)[0], tmp_path / "t.jsonl"
    model(input_ids=Ids().ids)  # before training: of no step
    options: dict[str, Any] = {"max_steps": 7, "logging_steps": 3, "eval_strategy": "steps", "eval_steps": 2}
    trainer = trainer_of(tmp_path, model=model, recipe={"l1": 1e-2, "log": log}, **options)
    trainer.train()
    records = TrainingLog.read(log).steps
    assert [each.step for each in records] == [2, 3, 4, 6, 7]
    assert [each.eval_loss is not None for each in records] == [True, False, True, True, True]
    assert [each.tokens for each in records] == [32 * steps for steps in (2, 1, 1, 2, 1)]
    model.eval()
    with torch.no_grad():
        expected = float(model(input_ids=Ids(4).ids, labels=Ids(4).ids).loss)
    assert records[-1].eval_loss == pytest.approx(expected, rel=1e-4)
    whole = log.read_bytes()
    with pytest.raises(UserError, match=r"t\.jsonl: is the log of an earlier run; got 5 records of LlamaForCausalLM"):
        trainer.train()
    assert log.read_bytes() == whole
    trainer.remove_callback(trainer._sparsity)
    trainer.add_callback(SparsityCallback(model, l1=0, log=log, overwrite=True))  # again, from the beginning of a log
    trainer._sparsity = trainer.callback_handler.callbacks[-1]
    trainer.train()
    assert [each.tokens for each in TrainingLog.read(log).steps] == [32 * steps for steps in (2, 1, 1, 2, 1)]


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_log_replaces_no_other_file(overwrite: bool, tmp_path: Path) -> None:
    model = in_training(use_cache=False)[0]
    data, link = tmp_path / "train.jsonl", tmp_path / "link.jsonl"
    data.write_text('{"text": "all that I have"}\n')
    link.symlink_to(tmp_path / "none")
    for path, message in (
        (data, "train.jsonl: is not a log of training; .* Name another file"),
        (link, "link.jsonl: is a link to a file that is not there"),
        (tmp_path, "is a folder"),
        (tmp_path / "none" / "log.jsonl", "the output folder does not exist"),
    ):
        with pytest.raises(UserError, match=message):
            trained(tmp_path / "out", model=model, recipe={"log": path, "overwrite": overwrite})
    assert data.read_text() == '{"text": "all that I have"}\n' and link.is_symlink()


@pytest.mark.slow
def test_what_is_saved_on_the_way_to_relu(tmp_path: Path) -> None:
    """It loads as what it is, or not at all; so does the best model, which may be one of before."""
    import transformers

    model = models.llama("silu", use_cache=False)
    blend = sparsify(model, steps=4)
    twellc.optimize(model, training=True)
    options = {"save_strategy": "steps", "save_steps": 1, "eval_strategy": "steps", "eval_steps": 1, "max_steps": 5}
    recipe = {"l1": 0, "blend": blend}
    trainer = trainer_of(tmp_path, model=model, recipe=recipe, load_best_model_at_end=True, **options)
    trainer.train()
    saved = [tmp_path / f"checkpoint-{step}" / "config.json" for step in range(1, 6)]
    said = [json.loads(each.read_text())["hidden_act"] for each in saved]
    assert said == [f"silu, {step}/4 of the way to relu" for step in (1, 2, 3)] + ["relu", "relu"]
    assert model.config.hidden_act == said[trainer.state.best_global_step - 1]
    transformers.AutoModelForCausalLM.from_pretrained(saved[-1].parent)
    with pytest.raises(KeyError, match="silu, 2/4 of the way to relu"):
        transformers.AutoModelForCausalLM.from_pretrained(saved[1].parent)
    with pytest.raises(UserError, match="no such activation; got hidden_act 'silu, 2/4 of the way to relu'"):
        twellc.inspect(saved[1].parent)


@pytest.mark.slow
def test_the_log_of_a_run_that_was_cut_short(tmp_path: Path) -> None:
    """It has each token once, also where the checkpoint is of another step than those that the Trainer logs."""
    import transformers

    class CutShort(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 5:
                raise KeyboardInterrupt

    def run(name: str, *callbacks: Any, resume: bool = False) -> list[Any]:
        log = tmp_path / f"{name}.jsonl"
        options: dict[str, Any] = {"max_steps": 6, "logging_steps": 2, "save_strategy": "steps", "save_steps": 3}
        recipe = {"l1": 1e-2, "log": log}
        trainer = trainer_of(tmp_path / name, recipe=recipe, callbacks=list(callbacks), **options)
        trainer.train(resume_from_checkpoint=resume)
        return TrainingLog.read(log).steps

    whole = run("whole")
    assert [(each.step, each.tokens) for each in whole] == [(2, 64), (3, 32), (4, 32), (6, 64)]
    with pytest.raises(KeyboardInterrupt):
        run("cut", CutShort())
    assert run("cut", resume=True) == whole


@pytest.mark.slow
def test_logging_by_epochs(tmp_path: Path) -> None:
    by_epoch = dict.fromkeys(("logging_strategy", "save_strategy"), "epoch")
    options: dict[str, Any] = {"max_steps": -1, "num_train_epochs": 2, **by_epoch}
    trained(tmp_path, recipe={"l1": 1e-2, "log": tmp_path / "t.jsonl"}, **options)
    records = TrainingLog.read(tmp_path / "t.jsonl").steps
    assert [(each.step, each.tokens) for each in records] == [(8, 256), (16, 256)]


class Breaks(SparseTrainer):
    """Has an infinite gradient in its fourth step."""

    def training_step(self, *rest: Any, **named: Any) -> Any:
        loss = super().training_step(*rest, **named)
        if self.state.global_step == 3:
            self.model.lm_head.weight.grad.fill_(math.inf)
        return loss


def test_other_trainers(tmp_path: Path) -> None:
    import transformers

    class Mine(SparseTrainerMixin, transformers.Trainer):
        pass

    assert [each for each in trained(tmp_path, Mine).state.log_history if "dead" in each]
    model = in_training(use_cache=False)[0]
    given = {"args": arguments(tmp_path), "train_dataset": Ids()}
    trainer = transformers.Trainer(model=model, callbacks=[SparsityCallback(model, l1=1e-3)], **given)
    with pytest.raises(UserError, match=r"the loss has no L1 term.*SparseTrainer"):
        trainer.train()
    model = in_training(use_cache=False)[0]
    trainer = transformers.Trainer(
        model=model, callbacks=[SparsityCallback(model, l1=0, log=tmp_path / "p.jsonl")], **given
    )
    trainer.train()
    log = TrainingLog.read(tmp_path / "p.jsonl")
    assert [each.l1 for each in log.steps] == [0, 0] and all(1 < each.loss < 10 for each in log.steps)
    assert all(0 < share < 1 for each in log.steps for share in each.density)


def test_evaluation_has_no_term(tmp_path: Path) -> None:
    trainer = trained(tmp_path)
    found = trainer.evaluate()["eval_loss"]
    model = trainer.model.eval()
    with torch.no_grad():
        assert found == pytest.approx(float(model(input_ids=Ids(4).ids, labels=Ids(4).ids).loss), rel=1e-4)


@pytest.mark.parametrize("how", ["steps", pytest.param("epoch", marks=pytest.mark.slow)])
def test_weights_that_are_not_finite_are_not_saved(how: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"save_strategy": how, "max_grad_norm": 0.0}
    if how == "steps":
        options["save_steps"] = 2
    else:
        options |= {"per_device_train_batch_size": 16, "max_steps": -1, "num_train_epochs": 3, "logging_steps": 100}
    with pytest.raises(UserError, match=r"step 4: (weights are|the loss is) NaN or infinite"):
        trained(tmp_path, Breaks, **options)
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-2"]


def test_several_gpus_in_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers

    model = in_training(use_cache=False)[0]
    given = arguments(tmp_path)
    monkeypatch.setattr(transformers.TrainingArguments, "n_gpu", property(lambda self: 2))
    with pytest.raises(UserError, match="several GPUs in one process; got 2 GPUs"):
        SparseTrainer(model=model, args=given, train_dataset=Ids(), sparsity=SparsityCallback(model))


def test_a_model_that_is_not_optimized() -> None:
    with pytest.raises(UserError, match="has no feed-forward block in training"):
        SparsityCallback(copy.deepcopy(models.llama()))
