"""Write a ReLU Llama with random bfloat16 weights as a Hugging Face directory, to measure compilation at full size.

python benchmarks/make_llama.py --size 1.5b build/llama-1.5b
python benchmarks/make_llama.py --smoke
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import harness
import torch
from transformers import LlamaConfig, LlamaForCausalLM

SIZES: dict[str, dict[str, Any]] = {
    "smoke": {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 2},
    "1.5b": {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 28, "num_attention_heads": 16},
    "7b": {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32},
}


@click.command()
@click.option("--size", type=click.Choice(sorted(SIZES)), default="1.5b", show_default=True)
@harness.smoke_option(size="smoke", folder=harness.scratch_folder)
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path))
def main(size: str, folder: Path) -> None:
    """Write the model to FOLDER."""
    count = write_llama(size, folder)
    click.echo(f"{folder}: {count / 1e9:.2f} billion parameters, {2 * count / 1e9:.2f} GB")


def write_llama(size: str, folder: Path) -> int:
    """Write a model of one of the `SIZES`; return how many parameters it has."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32000, hidden_act="relu", max_position_embeddings=4096, tie_word_embeddings=False, **SIZES[size]
    )
    with torch.device("meta"):
        model: Any = LlamaForCausalLM(config)
    model = model.to(torch.bfloat16).to_empty(device="cpu")
    for parameter in model.parameters():
        parameter.data.uniform_(-0.02, 0.02)
    model.config.dtype = torch.bfloat16
    model.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


if __name__ == "__main__":
    main()
