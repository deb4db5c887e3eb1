"""Convert an exported graph to a JAX function that keeps the model's lines and modules."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, cached_property
from pathlib import Path
from types import FunctionType
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax.extend import source_info_util

from ....common.errors import ProgramError
from . import products, reductions, shapes  # noqa: F401 (register translations)
from .decomposition import WRAPPERS, decomposed
from .eager import Place, place_of
from .export import Exported, jax_dtype
from .program import sparse_refusal
from .table import Call, Result, find, is_solver

if TYPE_CHECKING:
    import torch

# Frames of the translations are excluded, so that the model's own lines are reported.
for _own in ("features/ir", "predict", "cli", "__main__.py"):
    source_info_util.register_exclusion(str(Path(__file__).parents[3] / _own))
#: Operators on sparse matrices; 2:4 sparsity is a library product and not included.
_SPARSE = re.compile(r"aten\._?(to_sparse|sparse_(?!semi))")
#: Matches a line of a model that calls ``torch.utils.checkpoint`` or a wrapper of it. An export
#: contains what is computed there, but not that it is recomputed; only modules that run there are
#: known otherwise.
_CHECKPOINT = re.compile(r"checkpoint\w*\(")
#: Arguments that place a tensor in PyTorch and have no meaning in JAX.
_PLACEMENT = ("device", "layout", "pin_memory", "memory_format", "non_blocking", "generator")


def is_checkpointed(node: torch.fx.Node, regions: Mapping[str, int]) -> bool:
    """Return whether activation checkpointing recomputes a node of an export (its ``regions``)."""
    called = _CHECKPOINT.search(node.meta.get("stack_trace") or "")
    return bool(called) or _region(node, regions) is not None


def _region(node: torch.fx.Node, regions: Mapping[str, int]) -> int | None:
    stack = (node.meta.get("nn_module_stack") or {}).values()
    return next((regions[path] for path, _ in stack if path in regions), None)


def _through(function: Callable[..., Result], *args: object, **kwargs: object) -> Result:
    return function(*args, **kwargs)


@cache
def _frame(file: str, line: int) -> Callable[..., Result]:
    """Return a function that calls another and appears in tracebacks at a line of a file."""
    code = _through.__code__
    # Its only line is the one after its first.
    moved = code.replace(co_filename=file, co_firstlineno=line - 1, co_name="forward")
    return FunctionType(moved, {})


class Forward:
    """An exported graph as a JAX function.

    Args:
        exported: The export.

    Attributes:
        exported: The export.
        graph: The export in core ATen.
    """

    def __init__(self, exported: Exported) -> None:
        self.exported = exported
        self.graph = decomposed(exported, lambda name: find(name) is not None)
        self._check()

    def __call__(
        self,
        parameters: Mapping[str, jax.Array],
        state: Mapping[str, jax.Array],
        inputs: tuple[jax.Array, ...],
        key: jax.Array | None = None,
    ) -> tuple[tuple[object, ...], dict[str, jax.Array]]:
        """Run the forward pass.

        Args:
            parameters: Parameters, constants, and buffers that do not change, by name.
            state: Buffers that change.
            inputs: The user's tensors, in order.
            key: Random key; required if :attr:`random`.

        Returns:
            The user's outputs, flat, and the buffers after the pass.
        """
        run = _Run(self.exported, key)
        given = iter(inputs)
        values = []
        for spec in self.graph.graph_signature.input_specs:
            target = spec.target
            if spec.kind.name == "USER_INPUT":
                tensor = hasattr(spec.arg, "name") and not hasattr(spec.arg, "value")
                values.append(jnp.asarray(next(given)) if tensor else spec.arg.value)
            else:
                held = self._tied.get(target, target)
                values.append(jnp.asarray(state[held] if held in state else parameters[held]))
        found = run.graph(self.graph.graph_module, values)
        outputs, moved = [], dict(state)
        for spec, value in zip(self.graph.graph_signature.output_specs, found, strict=True):
            if spec.kind.name == "BUFFER_MUTATION":
                assert isinstance(value, jax.Array), spec.target
                moved[spec.target] = value
            elif spec.kind.name == "USER_OUTPUT":
                outputs.append(value)
        return tuple(outputs), moved

    @cached_property
    def parameters(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Parameters of :meth:`__call__`, by name."""
        return {n: t for n, t in self._held.items() if n not in self._changing}

    @cached_property
    def state(self) -> dict[str, jax.ShapeDtypeStruct]:
        """State of :meth:`__call__`, by name."""
        return {n: t for n, t in self._held.items() if n in self._changing}

    @cached_property
    def inputs(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """The user's tensors."""
        return tuple(
            self._abstract(node)
            for spec, node in zip(self._specs, self._placeholders, strict=True)
            if spec.kind.name == "USER_INPUT" and self._is_tensor(node)
        )

    @cached_property
    def trained(self) -> tuple[str, ...]:
        """Names of the parameters that take a gradient."""
        specs = [s for s in self._specs if s.kind.name == "PARAMETER"]
        tensors = self.exported.program.state_dict
        names = [s.target for s in specs if tensors[s.target].requires_grad]
        return tuple(name for name in names if name not in self._tied)

    @cached_property
    def random(self) -> bool:
        """Whether the graph draws random numbers."""
        import torch

        return any(
            _attention_dropout(node)
            if _name(node) == "aten.scaled_dot_product_attention.default"
            else isinstance(node.target, torch._ops.OpOverload)
            and torch.Tag.nondeterministic_seeded in node.target.tags
            for node in _nodes(self.graph.graph_module)
        )

    def values(self) -> dict[str, torch.Tensor]:
        """Return PyTorch's tensors of parameters, buffers and constants, by name."""
        program = self.graph
        held = {**dict(program.state_dict), **program.constants}
        return {name: held[name] for name in self._held}

    @property
    def _specs(self) -> list[torch.export.graph_signature.InputSpec]:
        return list(self.graph.graph_signature.input_specs)

    @cached_property
    def _placeholders(self) -> list[torch.fx.Node]:
        return [n for n in self.graph.graph.nodes if n.op == "placeholder"]

    @cached_property
    def _held(self) -> dict[str, jax.ShapeDtypeStruct]:
        return {
            spec.target: self._abstract(node)
            for spec, node in zip(self._specs, self._placeholders, strict=True)
            if spec.kind.name in ("PARAMETER", "BUFFER", "CONSTANT_TENSOR")
            and spec.target not in self._tied
        }

    @cached_property
    def _tied(self) -> dict[str, str]:
        """Parameters that share memory with another one, such as a head with its embedding."""
        first: dict[object, str] = {}
        tied = {}
        for name, tensor in self.exported.program.state_dict.items():
            memory = (tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.shape)
            if first.setdefault((*memory, tensor.stride()), name) != name:
                tied[name] = first[(*memory, tensor.stride())]
        return tied

    @cached_property
    def _changing(self) -> set[str]:
        specs = self.graph.graph_signature.output_specs
        return {spec.target for spec in specs if spec.kind.name == "BUFFER_MUTATION"}

    @staticmethod
    def _is_tensor(node: torch.fx.Node) -> bool:
        return hasattr(node.meta.get("val"), "dtype")

    def _abstract(self, node: torch.fx.Node) -> jax.ShapeDtypeStruct:
        value = node.meta["val"]
        dtype = jax_dtype(value.dtype, f"{self.exported.name}: {node.target}")
        return jax.ShapeDtypeStruct(tuple(value.shape), dtype)

    def _check(self) -> None:
        """Reject operators without a translation before tracing, all in one message.

        Raises:
            ProgramError: There is such an operator.
        """
        unknown: dict[str, str] = {}
        for node in _nodes(self.graph.graph_module):
            name = _name(node)
            known = find(name) or name in WRAPPERS or node.target is operator.getitem
            if not known and not _is_assertion(name):
                unknown.setdefault(name, str(place_of(node)))
        for spec in self._specs:
            if spec.kind.name in ("CUSTOM_OBJ", "TOKEN"):
                unknown.setdefault(f"input {spec.arg} of a custom class", "")
        if sparse := next(filter(_SPARSE.match, unknown), None):
            made = f"the program makes a sparse matrix ({sparse})"
            raise sparse_refusal(made, unknown[sparse] or self.exported.name)
        if unknown:
            raise ProgramError(
                "operators have no translation to JAX: "
                + ", ".join(f"{n} ({w})" if w else n for n, w in list(unknown.items())[:8]),
                where=self.exported.name,
                hint="predict the program without it and measure that operator by itself"
                if any(map(is_solver, unknown))
                else "write that part of the model by other operators of PyTorch, or price the "
                "operators that PyTorch itself launches: --framework torch-eager",
            )


def _attention_dropout(node: torch.fx.Node) -> bool:
    dropout = node.args[4] if len(node.args) > 4 else node.kwargs.get("dropout_p", 0.0)
    return bool(dropout)


def _nodes(module: torch.fx.GraphModule) -> Iterator[torch.fx.Node]:
    """Yield the calls of a graph and of the graphs that it wraps."""
    for node in module.graph.nodes:
        if node.op == "call_function":
            yield node
            if _name(node) in WRAPPERS:
                for own in node.args:
                    if getattr(own, "op", "") == "get_attr":
                        yield from _nodes(getattr(module, own.target))


def _name(node: torch.fx.Node) -> str:
    # ``aten.add.Tensor`` for an operator; an operator that wraps a graph has a plain name.
    return str(node.target) if "." in str(node.target) else getattr(node.target, "__name__", "?")


def _is_assertion(name: str) -> bool:
    return name.startswith(("aten._assert", "aten.sym_constrain", "aten._assert_tensor_metadata"))


class _Run:
    """One run of a graph and of the graphs inside it."""

    def __init__(self, exported: Exported, key: jax.Array | None) -> None:
        self._origin = exported.name
        self._regions = exported.regions
        self._key = key
        self._drawn = 0
        self._again = False

    def graph(self, module: torch.fx.GraphModule, inputs: list[object]) -> list[object]:
        values: dict[torch.fx.Node, object] = {}
        given = iter(inputs)
        called = []
        for node in module.graph.nodes:
            if node.op == "placeholder":
                values[node] = next(given)
            elif node.op == "get_attr":
                values[node] = getattr(module, node.target)
            elif node.op != "output":
                called.append(node)
        for again, nodes in self._parts(called):
            if again:
                self._checkpoint(nodes, values)
            else:
                values.update((node, self._node(node, values)) for node in nodes)
        return self._all_given(node.args[0], values)

    def _parts(self, nodes: list[torch.fx.Node]) -> Iterator[tuple[bool, list[torch.fx.Node]]]:
        """Yield consecutive nodes, and whether one call of checkpoint recomputes them."""
        own: list[torch.fx.Node] = []
        before, number = False, None
        for node in nodes:
            again = not self._again and is_checkpointed(node, self._regions)
            # Functions that a region calls beside modules belong to the modules before them.
            region = _region(node, self._regions) if again else None
            moved = again != before or (None not in (number, region) and number != region)
            if moved and own:
                yield before, own
                own = []
            number = region if moved or region is not None else number
            before = again
            own.append(node)
        yield before, own

    def _checkpoint(self, nodes: list[torch.fx.Node], values: dict[torch.fx.Node, object]) -> None:
        """Compute a region whose results the backward pass computes again."""
        inside = set(nodes)
        read = {n: values[n] for node in nodes for n in node.all_input_nodes if n in values}
        arrays = {n: v for n, v in read.items() if isinstance(v, jax.Array)}
        made = [node for node in nodes if not inside.issuperset(node.users)]

        def region(given: list[jax.Array]) -> list[object]:
            own = {**read, **dict(zip(arrays, given, strict=True))}
            for node in nodes:
                own[node] = self._node(node, own)
            return [own[node] for node in made]

        self._again = True
        found = jax.checkpoint(region)(list(arrays.values()))
        self._again = False
        values.update(zip(made, found, strict=True))

    def _node(self, node: torch.fx.Node, values: Mapping[torch.fx.Node, object]) -> object:
        args = self._all_given(node.args, values)
        name = _name(node)
        if node.target is operator.getitem:
            parts, at = args
            assert isinstance(parts, list | tuple) and isinstance(at, int), node
            if at < len(parts):
                return parts[at]
            self._absent(node)
            return None
        if name in WRAPPERS:
            inner = WRAPPERS[name]
            return self.graph(args[inner], args[inner + 1 :])
        if _is_assertion(name):
            return None
        kwargs = {
            key: self._given(value, values)
            for key, value in node.kwargs.items()
            if key not in _PLACEMENT
        }
        translation = find(name)
        assert translation is not None, name
        place = place_of(node)
        call = self._call(node, place)
        run = _frame(place.file, place.line) if place.file else _through
        try:
            with jax.named_scope(place.modules or self._origin):
                return _as_wanted(run(translation, call, *args, **kwargs), node, place)
        except ProgramError:
            raise
        except Exception as error:
            raise ProgramError(
                f"{name} is not translated as it is called here: {type(error).__name__}: {error}",
                where=str(place) or self._origin,
                hint="write that part of the model by other operators of PyTorch, or price the "
                "operators that PyTorch itself launches: --framework torch-eager",
            ) from error

    def _call(self, node: torch.fx.Node, place: Place) -> Call:
        first = node.meta.get("val")
        while isinstance(first, list | tuple):
            first = first[0]
        if not hasattr(first, "dtype"):
            return Call((), jnp.float32, self._fresh)
        return Call(tuple(first.shape), jax_dtype(first.dtype, str(place)), self._fresh)

    def _fresh(self) -> jax.Array:
        assert self._key is not None, "the graph draws no random numbers"
        self._drawn += 1
        return jax.random.fold_in(self._key, self._drawn)

    def _absent(self, node: torch.fx.Node) -> None:
        """Reject reading a result that JAX does not compute."""
        if not node.users:
            return
        raise ProgramError(
            f"result {node.args[1]} of {_name(node.args[0])} is not translated",
            where=str(place_of(node)),
            hint="the model reads places of maxima, or statistics that are kept for gradients",
        )

    def _all_given(
        self, args: Sequence[object], values: Mapping[torch.fx.Node, object]
    ) -> list[object]:
        return [self._given(value, values) for value in args]

    def _given(self, value: object, values: Mapping[torch.fx.Node, object]) -> object:
        if isinstance(value, list | tuple):
            return self._all_given(value, values)
        if type(value).__name__ == "Node":
            return values[value]
        if type(value).__module__ == "torch" and type(value).__name__ == "dtype":
            return jax_dtype(value, self._origin)
        return value


def _as_wanted(found: Result, node: torch.fx.Node, place: Place) -> Result | None:
    """Cast results to PyTorch's types; a wrong shape is a fault of the translation.

    Raises:
        ValueError: A shape differs from PyTorch's.
    """
    wanted = node.meta.get("val")
    many = isinstance(wanted, list | tuple)
    results = [found] if isinstance(found, jax.Array) else list(found)
    cast: list[jax.Array | None] = []
    for own, like in zip(results, wanted if many else [wanted], strict=False):
        if like is None or not hasattr(like, "dtype") or own is None:
            cast.append(own)
            continue
        if tuple(own.shape) != tuple(like.shape):
            # Unread moments of norms, kept for gradients.
            if cast:
                cast.append(own.astype(jax_dtype(like.dtype, str(place))))
                continue
            raise ValueError(f"it gives {tuple(own.shape)} instead of {tuple(like.shape)}")
        cast.append(own.astype(jax_dtype(like.dtype, str(place))))
    return cast if many else cast[0]
