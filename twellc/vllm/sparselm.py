"""SparseLM in vLLM: the classes of configuration and model that transformers lacks."""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig, LlamaConfig

from twellc.loaders.sparselm import MODEL_TYPE


class SparseLlamaConfig(LlamaConfig):
    """A Llama's configuration with ReLU as its activation, whatever config.json says."""

    model_type = MODEL_TYPE

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Make it from the content of config.json."""
        return super().from_dict({**config_dict, "hidden_act": "relu"}, **kwargs)


def register_configuration() -> None:
    """Let transformers read config.json of a SparseLM."""
    AutoConfig.register(MODEL_TYPE, SparseLlamaConfig, exist_ok=True)


def register_model() -> None:
    """Let transformers make a SparseLM without its head."""
    from transformers import AutoModel, LlamaModel

    class SparseLlamaModel(LlamaModel):
        config_class = SparseLlamaConfig

    AutoModel.register(SparseLlamaConfig, SparseLlamaModel, exist_ok=True)
