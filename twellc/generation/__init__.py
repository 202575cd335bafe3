"""Text from causal language models: a key-value cache, decoding, sampling, and the class `LLM` over them."""
