"""Leaf: a module of an engine view, or several, with a native forward."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

import torch
from torch import nn

from hfpaged.runtime.placing import Forward


class Leaf(ABC):
    """Native forwards of modules: operations of the program of their dtype, which has packed copies of their weights.

    Attributes:
        kind: what the modules are, in a word.
        modules: by their names in the view.
        adds_to_input: the result is the input and something more, which is what native and own result are compared in.
    """

    kind: str
    adds_to_input = False

    def __init__(self, modules: Mapping[str, nn.Module]):
        self.modules = dict(modules)

    @abstractmethod
    def forwards(self) -> dict[str, Forward]:
        """By name, the function that stands for each module's own forward and gives the same results.

        Input that the kernels do not take (of another dtype) it hands on to the module's own forward.
        """

    @abstractmethod
    def admit(self) -> None:
        """Ask the guards about the modules as they are now.

        Raises:
            FusionRefused: one does not admit a module any more.
        """


def own_forward(module: nn.Module) -> Forward:
    """The forward of the module's class, whatever was put in its place on the instance."""
    return type(module).forward.__get__(module)


def rows_of(x: torch.Tensor) -> torch.Tensor:
    """`x` as the kernels read it."""
    return x if x.is_contiguous() else x.contiguous()
