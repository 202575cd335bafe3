"""Passes over an ExportedProgram: find feed-forward blocks, decide, rewrite them into `twell` ops."""
