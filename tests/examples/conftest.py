from tests.runtimes import cpp_host, lean_folder

__all__ = ["cpp_host", "lean_folder"]
