"""What a block takes on a GPU, from measured times, and what becomes of it."""
