"""Many programs on many devices: a program is lowered for each chip, not for each design."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import pandas as pd

from ...common.errors import DeviceError, OpcastError, fault
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

#: What stands for a program.
Asked = TypeVar("Asked")
#: Figures and notes of a program on each design of a chip, or why one has none.
Answers = Callable[[Callable[[], object], "Chip"], "list[JsonObject | Exception]"]

#: Between the notes of a row.
NOTES = " | "
#: Cost of one run with its interval.
COST_KEYS = ("cost", "cost_lo", "cost_hi")
#: Columns of a table besides the figures of the designs.
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
        name: As it was asked for.
        designs: One, or several that share the kernels of the first.
    """

    name: str
    designs: tuple[Design, ...]


def find_chips(
    names: Sequence[str], known: Mapping[str, DeviceSpec], here: DeviceSpec | None = None
) -> list[Chip]:
    """Find devices by names or files; a file may have ranges (docs/devices.md).

    Args:
        names: As the command line has them.
        known: Devices that the model was trained on.
        here: What ``local`` is, if it was measured already.

    Raises:
        DeviceError: A device is unknown, or a file is wrong.
    """
    chips = []
    for name in names:
        if str(name).lower().endswith((".yaml", ".yml")):
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
        programs: What ``opened`` takes, such as files.
        chips: The devices.
        answers: :func:`by_xla`, and what :func:`by_torch` gives, by framework.
        progress: Told how many of all predictions are done.
        opened: Makes what is read of an entry of ``programs``, once for each; the command line
            imports ``module.py:function`` so.
        prices: Of a device for an hour, by name; under an empty name, of all others.

    Returns:
        A row for each program, design and framework: ``program``, ``device``, the figures of the
        design, ``latency_us``, ``lo_us``, ``hi_us``, memory, energy, ``notes`` (joined by
        :data:`NOTES`) and ``error``; with prices also ``cost``, ``cost_lo`` and ``cost_hi`` of one
        run. What cannot be predicted has an ``error`` and no time. After Ctrl-C so do the rows that
        are left, of which ``attrs["left"]`` is the number.
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
        # Compiling for a dozen chips takes long; what is known is kept.
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
    """Predict one program on several devices, of PyTorch at several numbers of samples.

    Args:
        program: The program.
        devices: Names and files.
        batches: Numbers of samples; if none, as its inputs have them.
        answers: As of :func:`predict_many`.
        known: Devices that the model was trained on.

    Returns:
        As of :func:`predict_many`, with ``batch`` instead of ``program``, or with neither.

    Raises:
        DeviceError: There are no devices, or one is unknown.
    """
    from ...features.ir.torch.program import TorchProgram, with_batch

    if not devices:
        raise DeviceError("an empty list of devices", hint="such as device=['h100-sxm', 'l4']")
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
    """Cost of one run, or a further note that no price is known for the device."""
    if not prices or (price := price_of(device, prices)) is not None:
        return {**run_cost(found, price if prices else None)}
    lacks = f"no cost: --price names none of {device}"
    return {"notes": NOTES.join(filter(None, (str(found["notes"]), lacks)))}


def price_of(device: str, prices: Mapping[str, float]) -> float | None:
    """Price of a device for an hour; ``None`` if none is given that holds for it."""
    return prices.get(device, prices.get(""))


def run_cost(found: JsonMapping, price: float | None) -> dict[str, float]:
    """Keys of the cost of one run, in the price's currency; none without a price.

    Args:
        found: Has the keys of a time (:data:`~opcast.common.interval.LATENCY_KEYS`).
        price: Of the device for an hour.
    """
    seconds = Interval(*(float(found[key]) * 1e-6 for key in LATENCY_KEYS))
    return cost_fields(price, seconds, 1)


def by_xla(predictor: Predictor, like: ProgramCase) -> Answers:
    """Predict programs as XLA runs them; designs of a chip share the kernels of the first.

    Args:
        predictor: Loaded models.
        like: What is asked about every program; program and device are those of each row.
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
    """Predict programs of PyTorch by its own kernels, recorded once for devices of the same ones.

    Args:
        predictors: Loaded models, by framework.
        strict: Whether an operator without a learned estimate is an error.
    """
    # Kept with its program: the last one only, since they come in order.
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
    """Columns of a table but the framework; one of PyTorch has no lowering."""
    own = {name: data.get(name) for name in _FIGURES if name != "framework"}
    return {**own, "notes": NOTES.join(notes)}


def _said(error: Exception) -> str:
    return str(error if isinstance(error, OpcastError) else fault(error))


#: Most lines whose intervals are drawn: more bands would cover each other.
_BANDS = 4
#: Most lines of a legend's column, and of designs that have a colour and a name each: what fits
#: beside the axes.
_ENTRIES = 24


def plot_predictions(frame: pd.DataFrame, path: Path) -> None:
    """Plot times: over the first range of designs as lines, else as bars for each program.

    Intervals are drawn as bands of up to four lines, and as whiskers of bars. Where there are too
    many lines to name each, the designs of a program share a colour and a name.

    Args:
        frame: Of :func:`predict_many`.
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
        # All designs of a program, or each of them.
        together = len(designs) + len(others_of) > _ENTRIES and bool(others)
        kinds = {key: key[:1] if together else key for key, _ in designs}
        places = {kind: place for place, kind in enumerate(dict.fromkeys(kinds.values()))}
        count = len(places) + len(others_of)
        # The cycle of colours ends at ten.
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
        # Beside the axes: it would hide what they show.
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
    # As wide and as high as the legend needs.
    figure.savefig(path, dpi=120, bbox_inches="tight")
