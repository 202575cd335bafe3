from tests.runtimes import lean_folder

__all__ = ["lean_folder"]
