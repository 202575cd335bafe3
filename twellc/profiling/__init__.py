"""`twellc profile`: which neurons of a model fire for the user's inputs, and how often."""
