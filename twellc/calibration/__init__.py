"""Profiles: what was counted of the neurons of a model, and what compiling does with it."""
