"""Many programs on many devices; a program is lowered once per chip, not per design."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import pandas as pd

from ...common.errors import DeviceError, OpcastError, fault
from ...common.files import is_yaml
from ...common.interval import LATENCY_KEYS, Interval
from ...common.types import JsonMapping, JsonObject
from ...features.devices.catalogue import Design, load_designs
from ...models.power.energy import cost_fields
from ..devices import resolve_device

if TYPE_CHECKING:
    from ...features.devices.device import DeviceSpec
    from ...features.ir.torch.record import Recording
    from ..operator.torch_framework import TorchPredictor
    from .case import ProgramCase
    from .predictor import Predictor

#: A representation of a program.
Asked = TypeVar("Asked")
#: Returns the figures and notes of a program on each design of a chip, or an error.
Answers = Callable[[Callable[[], object], "Chip"], "list[JsonObject | Exception]"]

#: Separator between the notes of a row.
NOTES = " | "
#: Columns for the cost of one run, with its interval.
COST_KEYS = ("cost", "cost_lo", "cost_hi")
#: Columns of a table besides the parameters of designs.
_FIGURES = (
    *LATENCY_KEYS,
    "peak_memory_bytes",
    "device_memory_bytes",
    "fits",
    "energy_j",
    "energy_lo_j",
    "energy_hi_j",
    "framework",
    "lowering",
    "model",
    "in_domain_share",
)


@dataclass(frozen=True)
class Chip:
    """A device, or the designs of a device file with ranges.

    Attributes:
        name: Name as given by the user.
        designs: A single design, or several that share the kernels of the first.
    """

    name: str
    designs: tuple[Design, ...]


def find_chips(
    names: Sequence[str], known: Mapping[str, DeviceSpec], here: DeviceSpec | None = None
) -> list[Chip]:
    """Find devices by names or files; a file may have ranges (docs/devices.md).

    Args:
        names: Names as given on the command line.
        known: Devices that the model was trained on.
        here: The device ``local``, if it was measured already.

    Raises:
        DeviceError: A device is unknown, or a file is wrong.
    """
    chips = []
    for name in names:
        if is_yaml(str(name)):
            chips.append(Chip(name, tuple(load_designs(name))))
        else:
            own = here if here is not None and name == "local" else resolve_device(name, known)
            chips.append(Chip(name, (Design({}, own),)))
    return chips


def predict_many(
    programs: Sequence[Asked],
    chips: Sequence[Chip],
    answers: Mapping[str, Answers],
    progress: Callable[[int, int], None] | None = None,
    *,
    opened: Callable[[Asked], object],
    prices: Mapping[str, float] | None = None,
) -> pd.DataFrame:
    """Predict every program on every design.

    Args:
        programs: Inputs of ``opened``, such as files.
        chips: The devices.
        answers: :func:`by_xla`, and results of :func:`by_torch`, by framework.
        progress: Called with the numbers of finished and of all predictions.
        opened: Opens an entry of ``programs``, once per entry; the command line imports
            ``module.py:function`` like this.
        prices: Dollars per device hour, by name; an empty name applies to all others.

    Returns:
        A row per program, design and framework: ``program``, ``device``, the design's parameters,
        ``latency_us``, ``lo_us``, ``hi_us``, memory, energy, ``notes`` (joined by :data:`NOTES`)
        and ``error``; with prices also ``cost``, ``cost_lo`` and ``cost_hi`` of one run. A failed
        prediction has an ``error`` and no time. After Ctrl-C so do the remaining rows, counted by
        ``attrs["left"]``.
    """
    asked = [
        (str(program), design, framework)
        for program in programs
        for chip in chips
        for framework in answers
        for design in chip.designs
    ]
    rows: list[JsonObject] = []
    try:
        for program in programs:
            read = cache(partial(opened, program))
            for chip, framework in product(chips, answers):
                for found in answers[framework](read, chip):
                    design = asked[len(rows)][1]
                    if isinstance(found, Exception):
                        own: JsonObject = {"error": _said(found)}
                    else:
                        own = {**found, **_priced(found, design.device.name, prices), "error": ""}
                    rows.append(_row(*asked[len(rows)], own))
                if progress is not None:
                    progress(len(rows), len(asked))
    except KeyboardInterrupt:
        # Compiling for a dozen chips takes long, so finished rows are kept.
        if not rows:
            raise
    left = asked[len(rows) :]
    rows += [_row(*one, {"error": "not predicted: interrupted"}) for one in left]
    keys = dict.fromkeys(key for chip in chips for design in chip.designs for key in design.figures)
    costs = COST_KEYS if prices else ()
    columns = ["program", "device", *keys, *_FIGURES, *costs, "notes", "error"]
    frame = pd.DataFrame(rows, columns=columns)
    frame.attrs["left"] = len(left)
    return frame


def predict_on(
    program: object,
    devices: Sequence[str],
    batches: Sequence[int] | None,
    answers: Mapping[str, Answers],
    known: Mapping[str, DeviceSpec],
) -> pd.DataFrame:
    """Predict one program on several devices; a PyTorch program also at several batch sizes.

    Args:
        program: The program.
        devices: Names and files.
        batches: Batch sizes; if none, that of its inputs.
        answers: See :func:`predict_many`.
        known: Devices that the model was trained on.

    Returns:
        See :func:`predict_many`, with ``batch`` instead of ``program``, or with neither.

    Raises:
        DeviceError: There are no devices, or one is unknown.
    """
    from ...features.ir.torch.program import TorchProgram, with_batch

    if not devices:
        raise DeviceError("an empty list of devices", hint="give device=['h100-sxm', 'l4']")
    chips = find_chips(devices, known)
    if isinstance(program, TorchProgram) and batches:
        sizes = list(dict.fromkeys(batches))
        frame = predict_many(sizes, chips, answers, opened=partial(with_batch, program))
        frame.insert(0, "batch", frame["program"].astype(int))
    else:
        frame = predict_many([program], chips, answers, opened=lambda own: own)
    return frame.drop(columns="program")


def _row(program: str, design: Design, framework: str, found: JsonMapping) -> JsonObject:
    own = {"program": program, "device": design.device.name, "framework": framework}
    return {**own, **design.figures, **found}


def _priced(found: JsonMapping, device: str, prices: Mapping[str, float] | None) -> JsonObject:
    """Return the cost of one run, or a note that the device has no price."""
    if not prices or (price := price_of(device, prices)) is not None:
        return {**run_cost(found, price if prices else None)}
    lacks = f"no cost: --price has none for {device}"
    return {"notes": NOTES.join(filter(None, (str(found["notes"]), lacks)))}


def price_of(device: str, prices: Mapping[str, float]) -> float | None:
    """Return the price of a device hour; ``None`` if there is none for the device."""
    return prices.get(device, prices.get(""))


def run_cost(found: JsonMapping, price: float | None) -> dict[str, float]:
    """Return the cost of one run, in the price's currency; empty without a price.

    Args:
        found: Prediction with the keys of :data:`~opcast.common.interval.LATENCY_KEYS`.
        price: Price of a device hour.
    """
    seconds = Interval(*(float(found[key]) * 1e-6 for key in LATENCY_KEYS))
    return cost_fields(price, seconds, 1)


def by_xla(predictor: Predictor, like: ProgramCase) -> Answers:
    """Predict programs as XLA runs them; designs of a chip share the kernels of the first.

    Args:
        predictor: Loaded models.
        like: Settings of every prediction; its program and device are replaced.
    """

    def answers(opened: Callable[[], object], chip: Chip) -> list[JsonObject | Exception]:
        from ...features.ir.untrusted import well_formed

        first = chip.designs[0].device
        try:
            # A function is traced for the platform of each chip.
            options = replace(like.options, device=first)
            case = replace(like, program=opened(), options=options)
            source, lowered, _ = case.lower(predictor)
        except Exception as error:
            return [error] * len(chip.designs)

        def one(design: Design) -> JsonObject:
            with well_formed(source):
                found = predictor.predict_lowered(
                    lowered,
                    case.on(design.device),
                    strict=case.strict,
                    power_cap_w=case.power_cap_w,
                )
            notes = list(found.notes)
            if design is not chip.designs[0]:
                notes.append(f"designs of {chip.name} share the kernels of {first.name}")
            return _figures(found.to_dict(), notes)

        return [_caught(partial(one, design)) for design in chip.designs]

    return answers


def by_torch(
    predictors: Mapping[str, TorchPredictor], *, strict: bool = False
) -> dict[str, Answers]:
    """Predict PyTorch programs by PyTorch's kernels; a recording is shared by similar devices.

    Args:
        predictors: Loaded models, by framework.
        strict: Whether an operator without a learned estimate is an error.
    """
    # Only the last recording is kept, since programs come in order.
    last: list[tuple[object, Recording]] = []

    def answers(
        predictor: TorchPredictor, opened: Callable[[], object], chip: Chip
    ) -> list[JsonObject | Exception]:
        try:
            program = opened()
            before = last[0][1] if last and last[0][0] is program else None
            last[:] = [(program, predictor.record(program, chip.designs[0].device, before))]
        except Exception as error:
            return [error] * len(chip.designs)

        def one(design: Design) -> JsonObject:
            found = predictor.price(last[0][1], design.device, strict=strict)
            return _figures({**found.to_dict(), "model": predictor.model}, found.notes)

        return [_caught(partial(one, design)) for design in chip.designs]

    return {name: partial(answers, predictor) for name, predictor in predictors.items()}


def _caught(answer: Callable[[], JsonObject]) -> JsonObject | Exception:
    try:
        return answer()
    except Exception as error:
        return error


def _figures(data: Mapping[str, object], notes: Sequence[str]) -> JsonObject:
    """Return the columns of a table except the framework; a PyTorch program has no lowering."""
    own = {name: data.get(name) for name in _FIGURES if name != "framework"}
    return {**own, "notes": NOTES.join(notes)}


def _said(error: Exception) -> str:
    return str(error if isinstance(error, OpcastError) else fault(error))


#: Maximum lines with a drawn interval, since more bands would overlap.
_BANDS = 4
#: Maximum entries per column of the legend, and designs with their own colour and name: what fits
#: beside the axes.
_ENTRIES = 24


def plot_predictions(frame: pd.DataFrame, path: Path) -> None:
    """Plot times: over the first range of designs as lines, else as bars for each program.

    Intervals are drawn as bands of up to four lines, and as whiskers of bars. If there are too many
    lines to name each, the designs of a program share a colour and a name.

    Args:
        frame: Result of :func:`predict_many`.
        path: Image to write.
    """
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    known = frame[frame["error"] == ""]
    columns = list(map(str, frame.columns))
    axes_of = columns[columns.index("device") + 1 : columns.index(LATENCY_KEYS[0])]
    figure = Figure((8, 5))
    axes = figure.subplots()
    if axes_of:
        across, others = axes_of[0], axes_of[1:]
        designs = known.dropna(subset=[across]).groupby(["program", *others])
        others_of = known[known[across].isna()].groupby(["program", "device"])
        # All designs of a program share an entry, or each has its own.
        together = len(designs) + len(others_of) > _ENTRIES and bool(others)
        kinds = {key: key[:1] if together else key for key, _ in designs}
        places = {kind: place for place, kind in enumerate(dict.fromkeys(kinds.values()))}
        count = len(places) + len(others_of)
        # The colour cycle has ten colours.
        palette = colormaps["tab10" if count <= 10 else "turbo"].resampled(max(count, 10))
        for key, part in designs:
            line = part.sort_values(across)
            figures = list(map("{}={:g}".format, others, key[1:]))
            if together:
                figures = ["any " + ", ".join(others)]
            label = ", ".join([Path(str(key[0])).stem, *figures])
            colour = palette(places[kinds[key]])
            axes.plot(line[across], line["latency_us"] / 1e3, "o-", label=label, color=colour)
            if len(designs) <= _BANDS:
                ends = (line["lo_us"] / 1e3, line["hi_us"] / 1e3)
                axes.fill_between(line[across], *ends, alpha=0.15, color=colour)
        for place, ((program, device), part) in enumerate(others_of, len(places)):
            label = f"{Path(str(program)).stem} on {device}"
            style = ("--", ":", "-.")[place // 10 % 3]
            time = part["latency_us"].iloc[0] / 1e3
            axes.axhline(time, ls=style, lw=1, color=palette(place), label=label)
        axes.set(xlabel=across, ylabel="time (ms)", yscale="log")
    else:
        programs, devices = list(dict.fromkeys(known["program"])), dict.fromkeys(known["device"])
        width = 0.8 / max(1, len(devices))
        for place, device in enumerate(devices):
            part = known[known["device"] == device].set_index("program")
            at = [i + place * width for i, p in enumerate(programs) if p in part.index]
            own = part.loc[[p for p in programs if p in part.index]]
            error = [own["latency_us"] - own["lo_us"], own["hi_us"] - own["latency_us"]]
            bars = {"yerr": [e / 1e3 for e in error], "capsize": 2, "label": device}
            axes.bar(at, own["latency_us"] / 1e3, width, **bars)
        middle = [i + width * (len(devices) - 1) / 2 for i in range(len(programs))]
        axes.set_xticks(middle, [Path(str(p)).stem for p in programs], rotation=20, ha="right")
        axes.set(ylabel="time (ms)", yscale="log")
    handles, labels = axes.get_legend_handles_labels()
    named = dict(zip(labels, handles, strict=True))
    if len(named) > 6:
        # Beside the axes, so that it does not hide the plot.
        axes.legend(
            list(named.values()),
            list(named),
            fontsize=8,
            loc="upper left",
            bbox_to_anchor=(1.01, 1.0),
            ncols=-(-len(named) // _ENTRIES),
        )
    else:
        axes.legend(list(named.values()), list(named), fontsize=8)
    # Size the image to include the legend.
    figure.savefig(path, dpi=120, bbox_inches="tight")
