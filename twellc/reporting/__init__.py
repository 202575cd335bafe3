"""`twellc report`: a page about a model's sparsity, what became of its blocks, and what was measured."""
