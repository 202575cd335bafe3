"""Inputs to run a model on: random ones, arrays, texts and their tokenizer, files in batches."""
