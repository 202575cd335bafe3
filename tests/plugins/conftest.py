from tests.compilers import nvcc
from tests.runtimes import lean_folder

__all__ = ["lean_folder", "nvcc"]
