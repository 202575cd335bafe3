"""Write a ReLU Llama with random bfloat16 weights as a Hugging Face directory, to measure compilation at full size.

python benchmarks/make_llama.py --size 1.5b build/llama-1.5b
"""

from __future__ import annotations

from pathlib import Path

import click
import torch
from transformers import LlamaConfig, LlamaForCausalLM

_SIZES = {
    "1.5b": {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 28, "num_attention_heads": 16},
    "7b": {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32},
}


@click.command()
@click.option("--size", type=click.Choice(sorted(_SIZES)), default="1.5b", show_default=True)
@click.argument("folder", type=click.Path(path_type=Path))
def main(size: str, folder: Path) -> None:
    """Write the model to FOLDER."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32000, hidden_act="relu", max_position_embeddings=4096, tie_word_embeddings=False, **_SIZES[size]
    )
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        parameter.data.uniform_(-0.02, 0.02)
    model.config.dtype = torch.bfloat16
    model.save_pretrained(folder)
    count = sum(parameter.numel() for parameter in model.parameters())
    click.echo(f"{folder}: {count / 1e9:.2f} billion parameters, {2 * count / 1e9:.2f} GB")


if __name__ == "__main__":
    main()
