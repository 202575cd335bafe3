"""The version, which CMakeLists.txt and pyproject.toml read here."""

__version__ = "0.1.0"
