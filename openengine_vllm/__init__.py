"""The openengine.v1 gRPC contract on a stock vLLM engine.

Nothing is imported here that a client could do without; the version is looked up when it is
asked for.
"""

from typing import TYPE_CHECKING

__all__ = ["__version__"]

if TYPE_CHECKING:
    __version__: str
else:

    def __getattr__(name):
        if name != "__version__":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from importlib.metadata import PackageNotFoundError, version

        try:
            return version("openengine-vllm")
        except PackageNotFoundError:
            return "0+unknown"  # a source tree that isn't installed
