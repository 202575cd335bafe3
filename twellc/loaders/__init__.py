"""Load what users bring as an ExportedProgram."""
