"""JAX functions as programs, lowered with example arguments for the platform of a device."""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib.util
import sys
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path

from ...common.errors import AbsentError, ProgramError
from ...common.types import JaxObject
from .platforms import Platform, platform_here

#: Attribute of a function, or name in its module, that holds its example arguments.
ARGUMENTS = "example_args"
#: The same for keyword arguments.
KEYWORDS = "example_kwargs"
_CONVENTION = (
    f"give the function its example arguments: FUNCTION.{ARGUMENTS} = (x, y) and "
    f"FUNCTION.{KEYWORDS} = {{...}}, or in the module functions {ARGUMENTS}() and {KEYWORDS}() "
    "that return them; jax.ShapeDtypeStruct is enough for an array"
)
_PASS = "pass its example arguments after it: opcast.predict(function, *arguments, …)"

#: Platform of the current lowering, for translations that depend on it. ``None`` outside of a
#: lowering and for JAX's default backend.
LOWERED_FOR: ContextVar[Platform | None] = ContextVar("LOWERED_FOR", default=None)


def _hint(function: object) -> str:
    """Return advice on a function that JAX cannot trace with its arguments."""
    if hasattr(function, "apply") and hasattr(function, "init"):
        return (
            "give a module's apply and its variables: opcast.predict(module.apply, jax.eval_shape("
            "module.init, jax.random.key(0), x), x)"
        )
    return (
        "does jax.eval_shape(function, *arguments) work with these arguments? an array's stand-in "
        "is jax.ShapeDtypeStruct(shape, dtype)"
    )


@dataclass(frozen=True)
class FunctionCall:
    """A function with its example arguments.

    Attributes:
        function: A plain function, one under ``jax.jit``, ``equinox.filter_jit`` or
            ``flax.nnx.jit``, or a ``jax.stages.Traced``.
        args: Positional arguments: arrays, ``jax.ShapeDtypeStruct``, or trees of them.
        kwargs: Keyword arguments.
        origin: Where the function came from, for messages.
    """

    function: object
    args: tuple[object, ...] = ()
    kwargs: Mapping[str, object] = field(default_factory=dict)
    origin: str = ""

    def lower(self, platform: Platform | None) -> JaxObject:
        """Lower the function.

        Args:
            platform: Target platform; ``None`` for JAX's default backend.

        Returns:
            A ``jax.stages.Lowered``.

        Raises:
            ProgramError: JAX cannot trace or lower the function.
        """
        from .jax_absent import assumed_device

        assumed = assumed_device(platform) if platform is not None else contextlib.nullcontext()
        before = LOWERED_FOR.set(platform)
        try:
            with assumed:
                return _lowered(self.function, self.args, self.kwargs, platform)
        except ProgramError as error:
            # Raised by a translation or a rule of the platform, with a better message.
            error.where = error.where or self.origin
            raise
        except Exception as error:
            given = self.args or self.kwargs
            raise ProgramError(
                f"the function cannot be traced: {type(error).__name__}: {error}",
                where=self.origin,
                hint=_hint(self.function) if given else _PASS,
            ) from error
        finally:
            LOWERED_FOR.reset(before)


def _lowered(
    function: JaxObject,
    args: tuple[object, ...],
    kwargs: Mapping[str, object],
    platform: Platform | None,
) -> JaxObject:
    if hasattr(function, "jaxpr") and hasattr(function, "lower"):
        return _lower_traced(function, platform)
    if hasattr(function, "trace"):
        return _lower_traced(function.trace(*args, **kwargs), platform)
    if hasattr(function, "lower") and not _has_abstract(args, kwargs):
        # Wrappers such as equinox's know which arguments are static and which are donated.
        lowered = _on_platform(function, platform).lower(*args, **kwargs)
        return getattr(lowered, "lowered", lowered)
    return _lower_traced(_trace_plain(function, args, kwargs), platform)


def _lower_traced(traced: JaxObject, platform: Platform | None) -> JaxObject:
    # Flax wraps JAX's own object.
    traced = getattr(traced, "traced", traced)
    # Passed even if it is JAX's default, which a mesh of absent devices does not reveal.
    name = (platform or platform_here()).name
    from .jax_absent import kernels_counted

    try:
        with kernels_counted(name):
            return traced.lower(lowering_platforms=(name,))
    except ProgramError:
        raise
    except Exception as error:
        raise ProgramError(
            f"the function cannot be lowered for {name}: {type(error).__name__}: {error}",
            hint="choose another implementation there, as by jax.lax.platform_dependent",
        ) from error


def _on_platform(wrapper: JaxObject, platform: Platform | None) -> JaxObject:
    """Copy a wrapper around a jitted function so that it lowers for a platform."""
    jitted = {
        name: value
        for name, value in vars(wrapper).items()
        if hasattr(value, "trace") and hasattr(value, "lower")
    }
    changed = copy.copy(wrapper)
    for name, value in jitted.items():
        # Wrappers may be frozen dataclasses.
        object.__setattr__(changed, name, _Jitted(value, platform))
    return changed


@dataclass(frozen=True)
class _Jitted:
    """Replaces a jitted function while it is lowered."""

    function: JaxObject
    platform: Platform | None

    def lower(self, *args: object, **kwargs: object) -> JaxObject:
        return _lower_traced(self.function.trace(*args, **kwargs), self.platform)


def _has_abstract(args: tuple[object, ...], kwargs: Mapping[str, object]) -> bool:
    import jax

    leaves = jax.tree.leaves((args, kwargs))
    return any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves)


def _trace_plain(
    function: Callable[..., object], args: tuple[object, ...], kwargs: Mapping[str, object]
) -> JaxObject:
    """Trace a function that is not jitted, keeping constant what JAX cannot trace."""
    import jax

    if isinstance(function, functools.partial) and _has_abstract(function.args, function.keywords):
        args, kwargs = (*function.args, *args), {**function.keywords, **kwargs}
        return _trace_plain(function.func, args, kwargs)
    # If the function is a tree of arrays (equinox), its parameters become arguments, not constants.
    own = jax.tree.leaves(function)
    if not (len(own) == 1 and own[0] is function):
        return _trace_plain(_call, (function, *args), kwargs)
    try:
        return _trace_moving(function, args, kwargs, numbers=True)
    except (TypeError, ValueError) as error:
        # Python numbers may determine shapes, axes or powers, and results may be no arrays.
        try:
            return _trace_moving(function, args, kwargs, numbers=False)
        except (TypeError, ValueError):
            raise error from None


def _trace_moving(
    function: Callable[..., object],
    args: tuple[object, ...],
    kwargs: Mapping[str, object],
    *,
    numbers: bool,
) -> JaxObject:
    """Trace a function of its arrays, and if ``numbers``, of its positional Python numbers.

    Arguments changed in place (modules and optimisers of flax.nnx) are also results.
    """
    import jax
    import numpy as np

    arrays = (jax.Array, jax.ShapeDtypeStruct, np.ndarray, np.generic)
    plain = (int, float, complex)
    leaves, tree = jax.tree.flatten((args, dict(kwargs)))
    # Keyword arguments that are plain Python values select behaviour (train=True).
    first = len(jax.tree.leaves(args))
    moving = [
        isinstance(leaf, arrays)
        or (n < first and numbers and isinstance(leaf, plain) and not isinstance(leaf, bool))
        for n, leaf in enumerate(leaves)
    ]

    def called(given: tuple[tuple[object, ...], dict[str, object]]) -> object:
        before = jax.tree.leaves(given)
        result = function(*given[0], **given[1])
        after = jax.tree.leaves(given)
        kinds = (*arrays, *plain)
        kept = jax.tree.map(lambda leaf: leaf if isinstance(leaf, kinds) else None, result)
        made = jax.tree.leaves(result)
        changed = [
            leaf
            for old, leaf in zip(before, after, strict=False)
            if leaf is not old and isinstance(leaf, arrays) and not any(leaf is m for m in made)
        ]
        return (kept, changed) if changed else kept

    # Use the function itself where possible, since JAX caches traces by function.
    if numbers and all(moving) and not _has_objects((args, kwargs), (*arrays, *plain)):
        return jax.jit(function).trace(*args, **kwargs)

    def whole(*args: object, **kwargs: object) -> object:
        return called((args, kwargs))

    if all(moving):
        # Keeps the names of arguments, which plans show.
        return jax.jit(functools.update_wrapper(whole, function)).trace(*args, **kwargs)

    def fixed(*arrays: object) -> object:
        given = iter(arrays)
        values = [next(given) if own else leaf for own, leaf in zip(moving, leaves, strict=True)]
        return called(jax.tree.unflatten(tree, values))

    fixed.__name__ = getattr(function, "__name__", "function")
    return jax.jit(fixed).trace(*(a for own, a in zip(moving, leaves, strict=True) if own))


def _has_objects(tree: object, kinds: tuple[type, ...]) -> bool:
    """Return whether a tree has nodes, other than containers, that may change in place."""
    import jax

    def may_change(node: object) -> bool:
        frozen = getattr(getattr(node, "__dataclass_params__", None), "frozen", False)
        return not (frozen or isinstance(node, tuple | list | dict | None))

    leaves = jax.tree.leaves(tree, is_leaf=may_change)
    return not all(isinstance(leaf, kinds) for leaf in leaves)


def _call(function: Callable[..., object], *args: object, **kwargs: object) -> object:
    return function(*args, **kwargs)


def is_function_path(text: str) -> bool:
    """Return whether a text names a function in a Python file: ``train.py:step``."""
    file, colon, name = text.rpartition(":")
    return bool(colon) and file.endswith(".py") and name.isidentifier()


def load_function(text: str) -> FunctionCall:
    """Import a Python file and return one of its functions with its example arguments.

    The arguments are ``FUNCTION.example_args``, else ``example_args`` of the module: a tuple, or a
    function that returns one. Keyword arguments are ``example_kwargs`` in the same places. Instead
    of both, ``example_args`` may be a pair of a tuple and a dictionary.

    Args:
        text: ``path/to/module.py:function``. The import runs the code of the module.

    Raises:
        AbsentError: The file has no such function.
        ProgramError: The file cannot be imported, or there are no arguments.
    """
    file, _, name = text.rpartition(":")
    path = Path(file).expanduser()
    with _importable(path.parent):
        module = _imported(path, text)
        function = getattr(module, name, None)
        if not callable(function):
            names = [
                n
                for n, v in vars(module).items()
                if callable(v) and not isinstance(v, type) and not n.startswith("_")
            ]
            names = [n for n in names if n not in (ARGUMENTS, KEYWORDS)]
            raise AbsentError(
                f"{path.name} has no function {name!r}",
                where=text,
                hint=f"it has: {', '.join(names) or 'none'}",
            )
        args, kwargs = _example(function, module, text)
    return FunctionCall(function, args, kwargs, text)


@contextlib.contextmanager
def _importable(folder: Path) -> Iterator[None]:
    """Let a module import its neighbours, as if it were run as a script."""
    place = str(folder.resolve())
    sys.path.insert(0, place)
    try:
        yield
    finally:
        sys.path.remove(place)


def _imported(path: Path, where: str) -> JaxObject:
    if not path.is_file():
        raise ProgramError("no such file", where=where)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    # Dataclasses and pickles look up their module by name.
    sys.modules.setdefault(path.stem, module)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise ProgramError(
            f"importing it fails: {type(error).__name__}: {error}",
            where=where,
            hint="does python run it? code for a script belongs under if __name__ == '__main__'",
        ) from error
    return module


def _example(
    function: Callable[..., object], module: JaxObject, where: str
) -> tuple[tuple[object, ...], dict[str, object]]:
    args, named = (_given(function, module, name, where) for name in (ARGUMENTS, KEYWORDS))
    if args is None and named is None:
        raise ProgramError("the function has no example arguments", where=where, hint=_CONVENTION)
    kwargs: dict[str, object] = {}
    match () if args is None else args:
        case (tuple(inner), dict(own)) if named is None and _are_names(own):
            args, kwargs = inner, own
        case tuple() | list() as given:
            args = tuple(given)
        case other:
            raise ProgramError(
                f"{ARGUMENTS} is a {type(other).__name__}, not a tuple",
                where=where,
                hint=_CONVENTION,
            )
    if named is not None:
        if not isinstance(named, dict) or not _are_names(named):
            raise ProgramError(
                f"{KEYWORDS} is not a dictionary of arguments by name",
                where=where,
                hint=_CONVENTION,
            )
        kwargs = named
    return args, kwargs


def _given(function: Callable[..., object], module: JaxObject, name: str, where: str) -> object:
    """Return what a function, or else its module, defines under a name; ``None`` if nothing."""
    found = getattr(function, name, None)
    if found is None:
        found = getattr(module, name, None)
    if not callable(found):
        return found
    try:
        return found()
    except Exception as error:
        raise ProgramError(
            f"{name}() fails: {type(error).__name__}: {error}", where=where
        ) from error


def _are_names(values: Mapping[object, object]) -> bool:
    return all(isinstance(key, str) for key in values)
