"""An extension of vLLM's worker (``--worker-extension-cls nixl_rests.Rests``) that adds nothing to it: it is imported where
the worker runs, before NIXL is, and lets NIXL's progress thread rest.

That thread polls without a pause, which takes most of a core of every engine, idle or not. NIXL has a setting for it and
no way to set it from outside.
"""

from nixl_cu12 import _bindings

REST = 5000
"""Microseconds."""


_Plain = _bindings.nixlAgentConfig


class _Config(_Plain):
    """Where NIXL says 0 it says `REST`."""

    @property
    def pthrDelay(self) -> int:
        return int(_Plain.pthrDelay.__get__(self))

    @pthrDelay.setter
    def pthrDelay(self, wanted: int) -> None:
        _Plain.pthrDelay.__set__(self, wanted or REST)


_bindings.nixlAgentConfig = _Config


class Rests:
    """Nothing."""
