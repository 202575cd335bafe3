"""SparseLM in vLLM: the configuration and the model that transformers has no classes for."""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig, LlamaConfig

from twellc.loaders.sparselm import MODEL_TYPE


class SparseLlamaConfig(LlamaConfig):
    """A Llama's configuration, whose activation is ReLU whatever config.json says."""

    model_type = MODEL_TYPE

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Make it of what config.json holds."""
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
