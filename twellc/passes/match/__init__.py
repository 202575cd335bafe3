"""The matcher: find feed-forward blocks in a graph, and say why others are refused."""
