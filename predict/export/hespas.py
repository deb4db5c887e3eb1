"""opcast as a compute estimator of HESPAS (https://github.com/imec-int/hespas).

If an estimator has handlers of operations, HESPAS calls one for every operation; otherwise it asks
for whole modules. So there are two estimators: ``opcast`` lowers each block of computation as a
whole, fused as the target would, and ``opcast_op`` estimates each operation separately. HESPAS
caches results by configuration, which includes ``model_hash``, so that results of another model are
never reused.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hespas.estimator.compute_estimator import ComputeEstimator
from hespas.estimator.config_option import ConfigOption
from hespas.estimator.estimator import register_default_op_handler, register_op_handler
from hespas.estimator.result import ModuleResult, OpResult

from ...common.errors import ModelError, ProgramError
from ..devices import resolve_device
from ..locate import model_hash
from ..program.predictor import Prediction, Predictor, load

#: Terminators of functions and regions, which launch nothing.
_FREE = ("func.return", "stablehlo.return")
_DEVICE = "Name of a device, or of a device file"
_MODEL = "Name or folder of a model"
_HASH = "Digest of the model: opcast hespas fills it in"
#: SSA values of MLIR, such as ``%2``, ``%arg0`` and ``%3#1`` (a result of a multi-result op).
_VALUE = re.compile(r"%[\w$.-]+(?:#\d+)?")
_RESULT = re.compile(r"^\s*%[\w$.-]+(?::\d+)?\s*=\s*")


class OpcastEstimator(ComputeEstimator):
    """Estimates whole modules, without the dispatch of a program.

    Options: ``device``, ``model``, ``lowering`` and ``model_hash``.
    """

    display_name = "opcast"
    device = ConfigOption(str, description=_DEVICE)
    model = ConfigOption(str, description=_MODEL, default="default")
    lowering = ConfigOption(str, description="auto, xla, fused or op", default="auto")
    model_hash = ConfigOption(str, description=_HASH)

    def __post_init__(self) -> None:
        """Load the model.

        Raises:
            ModelError: The model's digest differs from the one in the configuration.
        """
        self.predictor = _predictor(self)
        # Blocks are parts of one program, which is dispatched only once.
        whole = resolve_device(self.device, self.predictor.devices)
        self.spec = replace(whole, dispatch=0.0)

    def _get_whole_module_result(self, module: Any) -> object:
        prediction = self.predictor.predict(
            module.mlir_string, device=self.spec, lowering=self.lowering, fallback="op"
        )
        seconds, metadata = _answer(prediction)
        return ModuleResult(
            success=True, module=module, runtime_estimate=seconds, metadata=metadata
        )


class OpcastOpEstimator(ComputeEstimator):
    """Estimates operations one by one. Options: ``device``, ``model`` and ``model_hash``."""

    display_name = "opcast_op"
    device = ConfigOption(str, description=_DEVICE)
    model = ConfigOption(str, description=_MODEL, default="default")
    model_hash = ConfigOption(str, description=_HASH)

    def __post_init__(self) -> None:
        """Load the model, as :class:`OpcastEstimator` does."""
        self.predictor = _predictor(self)

    @register_op_handler(["stablehlo.dot_general", "stablehlo.dot", "stablehlo.convolution"])
    def handle_product(self, op_info: object) -> object:
        """Estimate a product on the matrix unit."""
        return self._estimate(op_info)

    @register_default_op_handler
    def handle_other(self, op_info: object) -> object:
        """Estimate any other operation."""
        return self._estimate(op_info)

    def _estimate(self, op_info: Any) -> object:
        if op_info.op_name in _FREE:
            return OpResult(success=True, op_info=op_info, runtime_estimate=0.0, metadata={})
        text = op_program(op_info.op_line, op_info.input_types, op_info.output_types)
        # A single operation has nothing to fuse and needs no compiler.
        prediction = self.predictor.predict(text, device=self.device, lowering="op")
        # Kernels only: the dispatch of a program would be added to every operation.
        seconds = sum(k.total_us for k in prediction.kernels) / 1e6
        metadata = {
            "source": prediction.kernels[0].source if prediction.kernels else "",
            "unit": "s",
        }
        return OpResult(success=True, op_info=op_info, runtime_estimate=seconds, metadata=metadata)


def _predictor(estimator: Any) -> Predictor:
    digest = model_hash(estimator.model)
    if digest != estimator.model_hash:
        raise ModelError(
            f"the configuration was written for model {estimator.model_hash}, but this is {digest}",
            where=f"model {estimator.model!r}",
            hint="run it with: opcast hespas CONFIG",
        )
    return load(estimator.model)


def _answer(prediction: Prediction) -> tuple[float, dict[str, object]]:
    """Return seconds, and metadata for HESPAS."""
    return prediction.latency_us / 1e6, {
        "lo_s": prediction.lo_us / 1e6,
        "hi_s": prediction.hi_us / 1e6,
        "kernels": len(prediction.kernels),
        "lowering": prediction.lowering,
        "in_domain_share": prediction.in_domain_share,
    }


def op_program(
    line: str,
    inputs: Sequence[tuple[Sequence[int], object]],
    outputs: Sequence[tuple[Sequence[int], object]],
) -> str:
    """Return a module whose only function consists of the operation.

    Args:
        line: The operation as MLIR prints it, such as ``%2 = stablehlo.add %0, %1 : …``.
        inputs: Shape and element type of each operand.
        outputs: Shape and element type of each result.

    Raises:
        ProgramError: The numbers of operands and of types in the text differ.
    """
    body = _RESULT.sub("", line.strip(), count=1)
    # Operands come first in MLIR's generic and pretty forms; values used within a region follow and
    # are not arguments.
    names = [m.group() for m in _VALUE.finditer(body)][: len(inputs)]
    if body.startswith("stablehlo.reduce("):
        # Printed in pairs of an operand and its initial value; the types list all operands first.
        names = names[::2] + names[1::2]
    if len(names) < len(inputs):
        raise ProgramError(
            f"the operation has {len(names)} operands, but types for {len(inputs)}", where=line[:80]
        )
    # A value used twice (x * x) is one argument.
    own = {name: f"%in{i}" for i, name in enumerate(dict.fromkeys(names))}
    body = _VALUE.sub(lambda m: own.get(m.group(), m.group()), body)
    types = dict(zip(names, map(_tensor, inputs), strict=True))
    arguments = ", ".join(f"{own[name]}: {types[name]}" for name in own)
    results = [_tensor(o) for o in outputs]
    left = "" if not results else "%out = " if len(results) == 1 else f"%out:{len(results)} = "
    values = ["%out"] if len(results) == 1 else [f"%out#{i}" for i in range(len(results))]
    back = f"return {', '.join(values)} : {', '.join(results)}" if results else "return"
    return (
        f"module {{\n  func.func public @main({arguments}) -> ({', '.join(results)}) {{\n"
        f"    {left}{body}\n    {back}\n  }}\n}}\n"
    )


def _tensor(kind: tuple[Sequence[int], object]) -> str:
    shape, dtype = kind
    return f"tensor<{''.join(f'{n}x' for n in shape)}{dtype}>"
