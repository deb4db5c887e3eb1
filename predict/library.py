"""opcast inside other programs: one latency, and the predicted time of functions and modules."""

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
        lo_us: Lower end of the 90 % interval.
        hi_us: Upper end.
        device: Name of the device.
        in_domain: Whether the model was trained on similar ones.
    """

    latency_us: float
    lo_us: float
    hi_us: float
    device: str
    in_domain: bool


#: Answers that :func:`latency` remembers; a full memory is emptied. It bounds the memory of long
#: runs: with names and stamps an answer takes about 1.5 kB. Engineering estimate.
ANSWERS = 20_000
_answers: dict[tuple[object, ...], Latency] = {}


class BudgetExceeded(OpcastError):
    """A function is predicted to take longer than its budget."""


def latency(
    what: str | Kernel, device: str | Path | DeviceSpec, *, model: str | Path = "default"
) -> Latency:
    """Predict one operator of a library, or one kernel of a lowered program.

    May be called from several threads. What was loaded stays loaded, and answers are remembered
    for as long as the model's folder and the device's file are the same.

    Args:
        what: An operator, such as ``linear m=4096 n=4096 k=4096 dtype=bf16``, or a kernel of
            ``opcast.lower``.
        device: Name, path of a device file, or description; operators need a name or a file.
        model: Name or folder of the model.

    Raises:
        ProgramError: The text does not describe an operator.
        DeviceError: The device is unknown.
        ModelError: There is no such model, or it does not know the operator.
    """
    from .devices import device_stamp
    from .locate import OPERATOR_MODEL, model_stamp

    # Written out, a description is told from others by its figures, whatever object holds them.
    place = repr(device) if not isinstance(device, str | Path) else str(device)
    stamp = device_stamp(device) if isinstance(device, str | Path) else ()
    # The default is another model for operators than for kernels.
    default = str(model) == "default" and isinstance(what, str)
    own = model_stamp(OPERATOR_MODEL if default else model)
    ask = (True, what) if isinstance(what, str) else (False, what.hash)
    key = (*ask, place, stamp, str(model), own)
    # Look-ups are atomic; threads that miss at once find the same.
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
    """What :func:`budget` saw.

    Attributes:
        device: Device that they are for.
        limit: Seconds that no function may exceed; ``None`` for no limit.
        predictions: Prediction by name of the function, or of the module's class; one called with
            several shapes has its name followed by ``#2`` and so on.
    """

    device: DeviceSpec
    limit: float | None = None
    predictions: dict[str, Prediction | TorchPrediction] = field(default_factory=dict)

    def __repr__(self) -> str:
        # The description of a device and the kernels of a prediction fill pages.
        times = {name: duration(found.latency_us) for name, found in self.predictions.items()}
        return f"Budget(device={self.device.name!r}, limit={self.limit}, predictions={times})"

    def check(self) -> None:
        """Raise for the slowest function beyond the limit.

        Raises:
            BudgetExceeded: There is one.
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
    """Predict what is called inside, and print its time: JAX's jitted functions, PyTorch's modules.

    Functions are traced as they are called, and lowered for the platform of ``device``. JAX
    compiles a function once for each shape: one that was called before stays unseen, as do JAX's
    own small functions. Of a module its forward pass is predicted, not the step around it
    (``opcast.predict(…, train=…)``); PyTorch must be imported before the block.

    Args:
        limit: Seconds that no function or module may exceed.
        device: Name, path of a device file, or description.
        model: Name or folder of the model.
        lowering: ``auto``, ``xla``, ``fused`` or ``op``, of JAX's functions.
        framework: Whose kernels a module has, as of ``opcast.predict``; one that ``torch.compile``
            made has those of ``torch-compiled``, unless it is ``xla``.
        quiet: Print nothing.

    Yields:
        The predictions, filled when the block ends.

    Raises:
        BudgetExceeded: A function is predicted to take longer than ``limit``.
        OpcastError: The limit is no positive number, the device is unknown, a function cannot be
            predicted, or there is a limit and none was first called inside.
    """
    from ..features.ir.jax_compat import recorded_functions
    from ..features.ir.torch.program import recorded_modules
    from .api import loaded, predict
    from .devices import resolve_device

    # First of all, so that a bad limit or an unknown name fails before anything runs.
    if limit is not None and not (isinstance(limit, int | float) and limit > 0.0):
        raise OpcastError(
            f"the limit is {limit!r}", where="opcast.budget", hint="give seconds, such as 0.005"
        )
    spec = resolve_device(device, loaded(model).devices)
    result = Budget(spec, limit)
    with recorded_functions() as functions, recorded_modules() as modules:
        yield result
    if not functions and not modules:
        # A limit that was compared with nothing must not pass for one that is kept.
        unseen = "no jitted function was called for the first time inside the block, and no module"
        why = "JAX compiles a function once for each shape: jax.clear_caches() before the block"
        if limit is not None:
            raise OpcastError(unseen, where="opcast.budget", hint=why)
        if not quiet:
            print(f"opcast.budget: {unseen} ({why})")
    # After the block: predicting compiles, which would be recorded too.
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
