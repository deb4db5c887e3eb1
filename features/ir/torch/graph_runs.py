"""Runs exported graphs node by node, so that each operator is known by its node."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from .decomposition import WRAPPERS, setting_of

if TYPE_CHECKING:
    import torch

#: Functions of PyTorch, which modes of functions see, for operators of an export.
_FUNCTIONS = {
    "aten.scaled_dot_product_attention.default": "scaled_dot_product_attention",
    "aten.dropout.default": "dropout",
    "aten.rms_norm.default": "rms_norm",
    "aten.lstm_cell.default": "lstm_cell",
}


def run_graph(
    module: torch.fx.GraphModule,
    inputs: Sequence[object],
    before: Callable[[torch.fx.Node], object],
    after: Callable[[torch.fx.Node, object], object] = lambda node, found: None,
) -> object:
    """Run a graph; each value dies after its last use.

    Args:
        module: The graph.
        inputs: What it is given.
        before: Told of each call of a function before it runs.
        after: Told of it and its results when it has run.
    """
    import torch

    class Runner(torch.fx.Interpreter):  # type: ignore[misc]
        def run_node(self, node: torch.fx.Node) -> object:
            if node.op != "call_function":
                return super().run_node(node)
            before(node)
            found = super().run_node(node)
            after(node, found)
            return found

        def call_function(
            self, target: object, args: tuple[object, ...], kwargs: dict[str, object]
        ) -> object:
            name = getattr(target, "__name__", "")
            if name in WRAPPERS:
                # Node by node, so that each has its own place.
                at = WRAPPERS[name]
                with setting_of(name, args[:at]):
                    return run_graph(args[at], args[at + 1 :], before, after)
            known = _FUNCTIONS.get(str(target))
            if known:
                target = getattr(torch.nn.functional, known, None) or getattr(torch, known)
            return super().call_function(target, args, kwargs)

        def call_module(
            self, target: str, args: tuple[object, ...], kwargs: dict[str, object]
        ) -> object:
            return None if "guard" in str(target) else super().call_module(target, args, kwargs)

    return Runner(module).run(*inputs)
