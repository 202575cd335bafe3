"""Fine-tune a language model so that its feed-forward blocks become sparse, into a folder that `twellc compile` takes.

A model with SiLU or GELU blocks gets ReLU, at once or over --blend steps. To the loss of the language model the L1 term
of twellc.training is added. The output is a Hugging Face folder; beside the model stand `firing.profile`, which neurons
fired in the last steps, and `training.jsonl`, which `twellc report --training` shows. For N GPUs start it by
`torchrun --nproc-per-node N`.
"""

from __future__ import annotations

import math
import os
import shutil
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from torch import Tensor
from transformers.trainer_utils import get_last_checkpoint

import twellc
from twellc.base.errors import UserError, first_few, first_line
from twellc.base.files import places
from twellc.base.modules import Extra
from twellc.commands.options import FilePath
from twellc.commands.terminal import Command
from twellc.loaders.loaded import fingerprint
from twellc.samples.documents import read_documents
from twellc.samples.tokenizer import load_tokenizer
from twellc.training import SparseTrainer, SparsityCallback, TrainingLog, sparsify

ACCELERATE = Extra("examples/finetune", "accelerate", "accelerate", "train", tested=((1, 15),))
CHECKPOINTS, PROFILE, LOG = "checkpoints", "firing.profile", "training.jsonl"


@dataclass(frozen=True)
class Sequences(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Token ids, cut into sequences of equal length; what is left at the end is dropped."""

    tokens: NDArray[np.int32]
    length: int

    def __len__(self) -> int:
        return len(self.tokens) // self.length

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = torch.from_numpy(self.tokens[index * self.length :][: self.length].astype(np.int64))
        return {"input_ids": ids, "labels": ids}


def read_texts(option: str, files: Sequence[Path], model: Path, vocabulary: int, length: int, field: str) -> Sequences:
    """Read texts as one long row of tokens, documents one behind the other.

    Raises:
        UserError: A file cannot be read, or all of them have fewer tokens than one sequence.
    """
    encode = load_tokenizer(model, vocabulary)
    parts: list[NDArray[np.int32]] = []
    for path in files:
        for where, document in read_documents(path, field, option):
            ids: list[int] = []
            is_text = False
            for piece, _ in document:
                is_text = isinstance(piece, str)
                ids += encode.encode(piece) if isinstance(piece, str) else piece
            if ids and not 0 <= min(ids) <= max(ids) < vocabulary:
                raise UserError(where, "has token ids that the model has not", expected=f"0 to {vocabulary - 1}")
            parts.append(np.asarray([*encode.before, *ids, *encode.after] if ids and is_text else ids, dtype=np.int32))
    tokens = np.concatenate(parts) if parts else np.empty(0, np.int32)
    if len(tokens) < length:
        raise UserError(
            f"{option} {first_few(files)}",
            "is less than one sequence",
            got=f"{len(tokens)} tokens",
            expected=f"--sequence {length} at least",
        )
    return Sequences(tokens, length)


def load_model(path: Path, checkpointing: bool) -> Any:
    """Load a model in float32.

    Raises:
        UserError: transformers cannot, or weights are missing, which it would draw.
    """
    if not (path / "config.json").is_file():
        raise UserError(f"--model {path}", "is not a Hugging Face folder", expected="a folder with config.json")
    kind: Any = transformers.AutoModelForCausalLM
    try:
        model, found = kind.from_pretrained(path, dtype=torch.float32, local_files_only=True, output_loading_info=True)
    except Exception as error:  # transformers raises what it likes for a damaged file
        raise UserError(f"--model {path}", f"transformers cannot load it ({first_line(error)})") from error
    if found["missing_keys"]:
        raise UserError(
            f"--model {path}",
            "weights are missing",
            got=first_few(sorted(found["missing_keys"])),
            fix="Check that config.json and the weights belong together.",
        )
    if checkpointing:
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": False})
    return model


def prepare(model: Any, blend: int) -> Any:
    """Put ReLU where SiLU or GELU was, and the kernels into the blocks; return how activations move on, if they do.

    Raises:
        UserError: There is no block for them.
    """
    moving, refusal = None, None
    try:
        moving = sparsify(model, steps=blend)
    except UserError as error:  # no matter where there are blocks with ReLU
        refusal = error
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        twellc.optimize(model, training=True)
    if not twellc.optimized_blocks(model):
        raise refusal or UserError(
            type(model).__name__,
            "none of its blocks can be trained by the kernels",
            fix="Set dropout inside of its feed-forward blocks to 0 in config.json.",
        )
    return moving


def checkpoint_to_resume(output: Path, model: Path) -> str | None:
    """Return the last checkpoint in a folder; None where there is none yet.

    Raises:
        UserError: The run in the folder began with another model, or what is there is not of a run.
    """
    log = output / LOG
    if log.is_file():
        run = TrainingLog.read(log, f"--output {output}").run
        if run.sha256 != fingerprint(model):
            raise UserError(
                f"--resume in {output}",
                "the run there began with another model",
                got=str(model),
                expected=f"{run.model}, SHA-256 {run.sha256[:12]}…",
                fix="Give that model, or another --output.",
            )
    elif output.is_dir() and any(output.iterdir()):
        raise UserError(
            f"--resume in {output}",
            f"the folder is not empty, and there is no {LOG} in it",
            expected="the --output of an earlier run",
            fix="Give that, or add --overwrite in the place of --resume.",
        )
    folder = output / CHECKPOINTS
    last: str | None = get_last_checkpoint(str(folder)) if folder.is_dir() else None
    return last


@click.command(cls=Command, context_settings={"show_default": True}, help=__doc__)
@click.option("--model", type=FilePath(), required=True, help="A causal language model, as save_pretrained writes it.")
@click.option("--text", type=FilePath(), required=True, multiple=True, help="What to train on; more files may follow.")
@click.argument("texts", nargs=-1, type=FilePath())
@click.option("--held-out", type=FilePath(), multiple=True, help="Texts to measure the loss on at each checkpoint.")
@click.option("--output", type=FilePath(), required=True, help="The folder to write.")
@click.option("--resume", is_flag=True, help="Go on from the last checkpoint in --output.")
@click.option("--steps", type=click.IntRange(1), default=1000, help="Steps of the optimizer.")
@click.option("--batch", type=click.IntRange(1), default=8, help="Sequences in a forward, on each GPU.")
@click.option("--accumulate", type=click.IntRange(1), default=1, help="Forwards in a step.")
@click.option("--sequence", type=click.IntRange(2), default=1024, help="Tokens in a sequence.")
@click.option("--lr", type=click.FloatRange(0, min_open=True), default=3e-5, help="Peak learning rate.")
@click.option("--warm-up", type=click.IntRange(0), default=50, help="Steps until it is reached; then a cosine to 0.")
@click.option("--constant", is_flag=True, help="Keep the learning rate after that, instead.")
@click.option("--l1", type=click.FloatRange(0), default=2e-5, help="Coefficient of the L1 term.")
@click.option("--l1-warm-up", type=click.IntRange(0), default=100, help="Steps until the coefficient is reached.")
@click.option("--blend", type=click.IntRange(0), default=0, help="Steps over which SiLU or GELU becomes ReLU.")
@click.option("--reinitialise/--no-reinitialise", default=False, help="Bring dead neurons back after each step.")
@click.option("--checkpointing", is_flag=True, help="Compute activations again in the backward: less memory.")
@click.option("--log-every", type=click.IntRange(1), default=10, help="Steps between records of the log.")
@click.option("--save-every", type=click.IntRange(1), default=200, help="Steps between checkpoints.")
@click.option("--profile-steps", type=click.IntRange(1), default=50, help="Last steps that the profile is of.")
@click.option("--field", default="text", help="Field or column of the text in .jsonl, .json, .csv and .tsv files.")
@click.option("--seed", type=click.IntRange(0, 2**32 - 1), default=0)
@click.option("--device", type=click.Choice(["auto", "cpu"]), default="auto")
@click.option("--overwrite", is_flag=True, help="Begin anew in a folder that is not empty.")
def main(**options: Any) -> None:
    """Fine-tune a model."""
    try:
        run(**options)
    except torch.OutOfMemoryError as error:
        raise UserError(
            "GPU", f"its memory ran out ({first_line(error)})", fix="Use a smaller --batch, or --checkpointing."
        ) from error
    except UserError:
        if os.environ.get("RANK", "0") != "0":
            sys.exit(2)  # the first process says it
        raise


def run(
    model: Path,
    text: tuple[Path, ...],
    texts: tuple[Path, ...],
    held_out: tuple[Path, ...],
    output: Path,
    resume: bool,
    overwrite: bool,
    **options: Any,
) -> None:
    """Fine-tune a model; the options are those of the command.

    Raises:
        UserError: Something that was given does not work, or the loss becomes NaN.
    """
    ACCELERATE.load("utils")  # transformers' Trainer needs it
    if not resume and not overwrite and output.is_dir() and any(output.iterdir()):
        raise UserError(f"--output {output}", "the folder is not empty", fix="Add --resume, or --overwrite.")
    if not math.isfinite(options["lr"]):
        raise UserError("--lr", "is not finite", got=str(options["lr"]), expected="a number above 0")
    if output.exists() and not output.is_dir():
        raise UserError(f"--output {output}", "is a file", expected="a folder")
    if places(output) & places(model):
        raise UserError(f"--output {output}", "is the folder of the model", fix="Write to another place.")
    begin = checkpoint_to_resume(output, model) if resume else None
    network = load_model(model, options["checkpointing"])
    vocabulary, length = network.config.get_text_config().vocab_size, options["sequence"]
    sizes = (model, vocabulary, length, options["field"])
    data = read_texts("--text", [*text, *texts], *sizes)
    measured = read_texts("--held-out", held_out, *sizes) if held_out else None
    moving = prepare(network, options["blend"])
    output.mkdir(parents=True, exist_ok=True)
    sparsity = SparsityCallback(
        network,
        l1=options["l1"],
        l1_warm_up=options["l1_warm_up"],
        blend=moving,
        log=output / LOG,
        began_with=model,
        reinitialise=options["reinitialise"],
        profile_steps=options["profile_steps"],
        seed=options["seed"],
        overwrite=resume or overwrite,
    )
    on_gpu = torch.cuda.is_available() and options["device"] != "cpu"
    uses_cache = getattr(network.config, "use_cache", True)  # which the Trainer switches off
    arguments = transformers.TrainingArguments(
        output_dir=str(output / CHECKPOINTS),
        max_steps=options["steps"],
        seed=options["seed"],
        use_cpu=not on_gpu,
        per_device_train_batch_size=options["batch"],
        per_device_eval_batch_size=options["batch"],
        bf16=on_gpu,
        gradient_accumulation_steps=options["accumulate"],
        learning_rate=options["lr"],
        lr_scheduler_type="constant_with_warmup" if options["constant"] else "cosine",
        warmup_steps=options["warm_up"],
        weight_decay=0.1,
        adam_beta2=0.95,
        logging_steps=options["log_every"],
        save_strategy="steps",
        save_steps=options["save_every"],
        save_total_limit=2,
        report_to=[],
        eval_strategy="no" if measured is None else "steps",
        eval_steps=options["save_every"],
        logging_nan_inf_filter=False,
    )
    trainer: Any = SparseTrainer(
        model=network, args=arguments, train_dataset=data, eval_dataset=measured, sparsity=sparsity
    )
    if begin is None and trainer.is_world_process_zero():  # --resume must not find those of a run before
        shutil.rmtree(output / CHECKPOINTS, ignore_errors=True)
    trainer.train(resume_from_checkpoint=begin)
    network.config.use_cache = uses_cache
    shards = getattr(trainer.accelerator.state, "fsdp_plugin", None)
    if shards is not None:  # else transformers saves no model
        shards.set_state_dict_type("FULL_STATE_DICT")
    trainer.save_model(str(output))
    if trainer.is_world_process_zero():
        copy_tokenizer(model, output)
    trainer.accelerator.wait_for_everyone()
    if sparsity.window is not None:
        name = first_few([path.name for path in (*text, *texts)])
        profile = sparsity.window.profile(output, name)
        if trainer.is_world_process_zero():
            profile.write(output / PROFILE, overwrite=True)
            click.echo(f"twellc compile {output} -o MODEL.plan --firing-profile {output / PROFILE}")


def copy_tokenizer(model: Path, output: Path) -> None:
    """Put the files of the tokenizer beside the trained model."""
    for path in model.iterdir():
        is_tokenizer = "token" in path.name or path.name in ("vocab.json", "merges.txt", "vocab.txt", "spiece.model")
        if path.is_file() and is_tokenizer and path.suffix not in (".bin", ".safetensors", ".py"):
            (output / path.name).write_bytes(path.read_bytes())


if __name__ == "__main__":
    main()
