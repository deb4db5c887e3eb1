"""A built program of the zoo: a function, the shapes of its arguments, and values for them."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np

from ...common.types import JaxObject

if TYPE_CHECKING:
    import jax
    from jax import export

    from .registry import Setting

PyTree = Any
"""Arrays or their types in nested containers of any kind, as JAX names it."""

Draw = Callable[[np.random.Generator], np.ndarray]
"""Makes the value of one argument."""


@dataclass(frozen=True)
class Workload:
    """A program of the zoo with fixed sizes; nothing is allocated until ``arguments`` is called.

    Attributes:
        name: Family, distinguishing settings and mode, such as "resnet-depth=50-batch=8-train".
        family: Name of its family.
        settings: Every parameter of the family with its value.
        function: The Python callable.
        abstract_args: Its positional arguments as pytrees of ShapeDtypeStruct.
        donate_argnums: Arguments whose buffers the program may overwrite.
        n_params: Number of trained parameters.
        draws: Generators of the arguments, in flattening order.
    """

    name: str
    family: str
    settings: Mapping[str, Setting]
    function: Callable[..., PyTree]
    abstract_args: tuple[PyTree, ...]
    donate_argnums: tuple[int, ...]
    n_params: int
    draws: tuple[Draw, ...] = field(repr=False)

    @property
    def jitted(self) -> JaxObject:
        """The function under ``jax.jit``, with its donated arguments; unused ones are kept."""
        import jax

        return jax.jit(self.function, donate_argnums=self.donate_argnums, keep_unused=True)

    def lower(self, platform: str | None = None) -> jax.stages.Lowered:
        """Lower to StableHLO.

        Args:
            platform: "cpu", "cuda", "tpu" …; None for JAX's default backend.
        """
        platforms = None if platform is None else (platform,)
        if platforms is None and self.settings["data_parallel"] != 1:
            import jax

            platforms = (jax.default_backend(),)  # an abstract mesh does not reveal it
        lowered: jax.stages.Lowered = self.jitted.trace(*self.abstract_args).lower(
            lowering_platforms=platforms
        )
        return lowered

    def mlir(self, debug_info: bool = True, platform: str | None = None) -> str:
        """StableHLO text, by default with the source location of every op."""
        return self.lower(platform).as_text(debug_info=debug_info)

    def arguments(self, seed: int = 0) -> list[np.ndarray]:
        """Values for all arguments, flat, in the order of the parameters of ``main``.

        Parameters are initialised as in training from scratch, optimizer state is zero, integers
        are uniform within their valid range. Under data parallelism shapes are global.

        Args:
            seed: Seed of all random values.
        """
        # One generator for all: values depend on the order of arguments, which is fixed.
        rng = np.random.default_rng(seed)
        return [draw(rng) for draw in self.draws]

    def unflatten(self, flat: Sequence[object]) -> tuple[PyTree, ...]:
        """Positional arguments of ``function`` from a flat list, such as ``arguments`` returns."""
        import jax

        tree = jax.tree.structure(self.abstract_args)
        args: tuple[PyTree, ...] = jax.tree.unflatten(tree, flat)
        return args

    def serialize(self, format: str, platform: str | None = None) -> bytes:
        """The program as bytes of the given format (see ``registry.export``)."""
        if format == "text":
            return self.mlir(platform=platform).encode()
        if format == "bytecode":
            module: JaxObject = self.lower(platform).compiler_ir("stablehlo")
            buffer = io.BytesIO()
            module.operation.write_bytecode(buffer)
            return buffer.getvalue()
        exported = self._exported(platform)
        # ``mlir_module_serialized`` is a portable artifact with StableHLO's guarantees of
        # compatibility.
        return bytes(
            exported.mlir_module_serialized if format == "portable" else exported.serialize()
        )

    def _exported(self, platform: str | None) -> export.Exported:
        """The program over flat arguments and results.

        JAX cannot serialize the classes of optimizer states, so trees are flattened.
        """
        import jax
        from jax import export

        function, arguments, donated = self.flattened()
        function.__name__ = self.function.__name__
        backend = platform or jax.default_backend()
        return export.export(
            jax.jit(function, donate_argnums=donated, keep_unused=True),
            # jax.export names platforms, not backends.
            platforms=["cuda" if backend == "gpu" else backend],
        )(*arguments)

    def flattened(self) -> tuple[Callable[..., tuple[object, ...]], list[Any], list[int]]:
        """The function over flat arguments and results, those arguments, and the donated ones."""
        import jax

        sizes = [len(jax.tree.leaves(arg)) for arg in self.abstract_args]
        starts = list(accumulate(sizes, initial=0))
        donated = [i for n in self.donate_argnums for i in range(starts[n], starts[n + 1])]

        def flat(*values: object) -> tuple[object, ...]:
            return tuple(jax.tree.leaves(self.function(*self.unflatten(values))))

        return flat, jax.tree.leaves(self.abstract_args), donated
