"""Use opcast in other programs: single latencies, and predictions of called functions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..common.errors import DeviceError, OpcastError
from ..common.interval import InSeconds, latency_fields
from ..common.units import duration

if TYPE_CHECKING:
    from ..features.devices.device import DeviceSpec
    from ..features.kernels.kernel import Kernel
    from .operator.torch_price import TorchPrediction
    from .program.predictor import Prediction


@dataclass(frozen=True)
class Latency(InSeconds):
    """Predicted time of one execution of an operator or kernel, in microseconds.

    Attributes:
        latency_us: Estimate.
        lo_us: Lower bound of the 90 % interval.
        hi_us: Upper bound.
        device: Name of the device.
        in_domain: Whether the model was trained on similar operators or kernels.
    """

    latency_us: float
    lo_us: float
    hi_us: float
    device: str
    in_domain: bool


#: Maximum number of answers cached by :func:`latency`; a full cache is emptied. It bounds memory in
#: long runs: with names and stamps an answer takes about 1.5 kB. Engineering estimate.
ANSWERS = 20_000
_answers: dict[tuple[object, ...], Latency] = {}


class BudgetExceeded(OpcastError):
    """A function is predicted to take longer than its budget."""


def latency(
    what: str | Kernel, device: str | Path | DeviceSpec, *, model: str | Path = "default"
) -> Latency:
    """Predict an operator of a library, or a kernel of a lowered program.

    Thread-safe. Models stay loaded, and answers are cached until the model's folder or the device's
    file changes.

    Args:
        what: An operator, such as ``linear m=4096 n=4096 k=4096 dtype=bf16``, or a kernel from
            ``opcast.lower``.
        device: Name, path of a device file, or description; operators need a name or a file.
        model: Name or folder of the model.

    Raises:
        ProgramError: The text does not describe an operator.
        DeviceError: The device is unknown.
        ModelError: The model does not exist or does not know the operator.
    """
    from .devices import device_stamp
    from .locate import OPERATOR_MODEL, model_stamp

    # Descriptions are identified by their figures, not by object identity.
    place = repr(device) if not isinstance(device, str | Path) else str(device)
    stamp = device_stamp(device) if isinstance(device, str | Path) else ()
    # The default model differs between operators and kernels.
    default = str(model) == "default" and isinstance(what, str)
    own = model_stamp(OPERATOR_MODEL if default else model)
    ask = (True, what) if isinstance(what, str) else (False, what.hash)
    key = (*ask, place, stamp, str(model), own)
    # Look-ups are atomic; threads that miss simultaneously compute the same answer.
    found = _answers.get(key)
    if found is None:
        found = _latency(what, device, model)
        if len(_answers) >= ANSWERS:
            _answers.clear()
        _answers[key] = found
    return found


def _latency(what: str | Kernel, device: str | Path | DeviceSpec, model: str | Path) -> Latency:
    from ..features.devices.device import DeviceSpec
    from .api import loaded
    from .devices import resolve_device
    from .operator.case import OperatorCase
    from .operator.predict import predict_op
    from .program.prediction import check_known

    if isinstance(what, str):
        if isinstance(device, DeviceSpec):
            raise DeviceError(
                "an operator is predicted for a device by name",
                where=device.name,
                hint="give its name, or write the description to a file",
            )
        found = predict_op(OperatorCase(what, str(device), str(model)))
        return Latency(found.latency_us, found.lo_us, found.hi_us, found.device, found.in_domain)
    predictor = loaded(model)
    spec = resolve_device(device, predictor.devices)
    one = predictor.model_for(spec).predict_kernels([what], spec)
    check_known([what], one.source)
    times = latency_fields(float(one.latency[0]), float(one.lo[0]), float(one.hi[0]))
    return Latency(**times, device=spec.name, in_domain=bool(one.in_domain[0]))


@dataclass(repr=False)
class Budget:
    """Predictions collected by :func:`budget`.

    Attributes:
        device: Device of the predictions.
        limit: Maximum seconds of a function; ``None`` for no limit.
        predictions: Predictions by name of the function, or of the module's class; further calls
            with other shapes have ``#2`` and so on appended.
    """

    device: DeviceSpec
    limit: float | None = None
    predictions: dict[str, Prediction | TorchPrediction] = field(default_factory=dict)

    def __repr__(self) -> str:
        # A device's description and a prediction's kernels would fill pages.
        times = {name: duration(found.latency_us) for name, found in self.predictions.items()}
        return f"Budget(device={self.device.name!r}, limit={self.limit}, predictions={times})"

    def check(self) -> None:
        """Raise an error for the slowest function if it exceeds the limit.

        Raises:
            BudgetExceeded: A function exceeds the limit.
        """
        if self.limit is None or not self.predictions:
            return
        name, worst = max(self.predictions.items(), key=lambda item: item[1].latency_us)
        if worst > self.limit:
            kernel = worst.top(1)[0] if worst.kernels else None
            most = f"; {kernel.name} takes {duration(kernel.total_us)} of it" if kernel else ""
            raise BudgetExceeded(
                f"predicted to take {duration(worst.latency_us)} on {worst.device}, more than "
                f"{duration(self.limit * 1e6)}{most}",
                where=name,
            )


@contextmanager
def budget(
    limit: float | None = None,
    *,
    device: str | Path | DeviceSpec,
    model: str | Path = "default",
    lowering: str = "auto",
    framework: str = "torch-eager",
    quiet: bool = False,
) -> Iterator[Budget]:
    """Predict and print the time of JAX's jitted functions and PyTorch's modules called inside.

    Functions are traced when called, and lowered for the platform of ``device``. JAX compiles a
    function once per shape: functions called before the block are not seen, nor are JAX's own
    small functions. For a module, its forward pass is predicted, not the surrounding step
    (``opcast.predict(…, train=…)``); PyTorch must be imported before the block.

    Args:
        limit: Maximum seconds of each function or module.
        device: Name, path of a device file, or description.
        model: Name or folder of the model.
        lowering: ``auto``, ``xla``, ``fused`` or ``op``, for JAX functions.
        framework: Framework that runs modules, as in ``opcast.predict``; modules compiled by
            ``torch.compile`` use ``torch-compiled`` unless it is ``xla``.
        quiet: Whether to print nothing.

    Yields:
        The predictions, filled when the block ends.

    Raises:
        BudgetExceeded: A function is predicted to take longer than ``limit``.
        OpcastError: The limit is not a positive number, the device is unknown, a function cannot be
            predicted, or there is a limit and no function was first called inside.
    """
    from ..features.ir.jax_compat import recorded_functions
    from ..features.ir.torch.program import recorded_modules
    from .api import loaded, predict
    from .devices import resolve_device

    # First, so that a wrong limit or an unknown name fails before anything runs.
    if limit is not None and not (isinstance(limit, int | float) and limit > 0.0):
        raise OpcastError(
            f"the limit is {limit!r}", where="opcast.budget", hint="give seconds, such as 0.005"
        )
    spec = resolve_device(device, loaded(model).devices)
    result = Budget(spec, limit)
    with recorded_functions() as functions, recorded_modules() as modules:
        yield result
    if not functions and not modules:
        # A limit that was not compared with anything must not seem to be kept.
        unseen = "no jitted function was called for the first time inside the block, and no module"
        why = "JAX compiles a function once for each shape: jax.clear_caches() before the block"
        if limit is not None:
            raise OpcastError(unseen, where="opcast.budget", hint=why)
        if not quiet:
            print(f"opcast.budget: {unseen} ({why})")
    # After the block, since prediction compiles functions, which would be recorded, too.
    asked: list[tuple[str, Callable[[], Prediction | TorchPrediction]]] = [
        (
            own.name,
            partial(predict, own.function, *own.args, device=spec, model=model, lowering=lowering),
        )
        for own in functions
    ]
    for call in modules:
        compiled = framework.replace("torch-eager", "torch-compiled")
        options = {"model": model, "framework": compiled if call.compiled else framework}
        one: Any = partial(predict, call.module, *call.args, device=spec, **call.kwargs, **options)
        asked.append((call.name, one))
    for stem, ask in asked:
        times = sum(name.split("#")[0] == stem for name in result.predictions)
        name = stem if not times else f"{stem}#{times + 1}"
        found = ask()
        result.predictions[name] = found
        if not quiet:
            span = f"{duration(found.lo_us)} to {duration(found.hi_us)}"
            print(f"{name}: {duration(found.latency_us)} ({span}) on {found.device}")
    result.check()
