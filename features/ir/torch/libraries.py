"""Build library models by name, without weights: timm, transformers, diffusers, torchvision.

Models are built on the ``meta`` device, so nothing is downloaded and no memory is needed.
"""

from __future__ import annotations

import importlib
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias

from ....common.errors import ProgramError
from ....common.versions import version_numbers
from .autocast import autocast_module, cuda_autocast, function_mode
from .export import shortened
from .presets import presets
from .program import TorchProgram

if TYPE_CHECKING:
    import torch

    from .presets import Inputs

#: Element types of a case: of weights and inputs, and the one products are cast to, if any.
DTYPES = {
    "fp32": ("float32", ""),
    "fp16": ("float16", ""),
    "bf16": ("bfloat16", ""),
    "amp-fp16": ("float32", "float16"),
    "amp-bf16": ("float32", "bfloat16"),
}
MODES, LAYOUTS = ("infer", "train"), ("nchw", "nhwc")
#: Implementation of attention: the library's choice for the PyTorch release, one operator, or
#: products and a softmax.
ATTENTION = ("", "fused", "written")
#: First PyTorch release with ``scaled_dot_product_attention``; for earlier ones libraries write
#: attention out.
_FUSED_SINCE = (2, 0)
#: Largest relative difference in parameters between a model and the measured one, since library
#: releases change details. Engineering estimate.
_OTHER = 0.1
#: Default length of a text in tokens. Engineering estimate.
_TOKENS = 128


@dataclass(frozen=True)
class ModelCase:
    """A library model and how it is run.

    Attributes:
        library: ``timm``, ``torchvision``, ``transformers``, ``diffusers``, or a Python module
            whose attribute ``model`` is called without arguments.
        model: Name in the library; for transformers and diffusers an entry of ``presets.yaml``, for
            transformers also ``class:field=value,…``; for a Python module also ``function:path``,
            a part of what the function returns.
        batch: Samples per step.
        img_size: Rows and columns of an image, or tokens of a text; 0 for the library's default.
        mode: ``infer`` or ``train``: forward, cross entropy, backward and SGD with momentum.
        dtype: A key of :data:`DTYPES`; ``amp-`` is f32 under autocast.
        layout: ``nchw``, or ``nhwc`` for channels last.
        torch: PyTorch release that runs it, such as ``1.13``; empty for a recent one.
        attention: One of :data:`ATTENTION`.
        parameters_m: Parameters in millions, which show whether branches were merged for inference
            (``timm.utils.reparameterize_model``); 0 if unknown.
        fast_norm: Whether timm's layer and group norms run in autocast's format
            (``timm.layers.set_fast_norm``) rather than in f32.
    """

    library: str
    model: str
    batch: int = 1
    img_size: int = 0
    mode: str = "infer"
    dtype: str = "fp32"
    layout: str = "nchw"
    torch: str = ""
    attention: str = ""
    parameters_m: float = 0.0
    fast_norm: bool = False

    def __post_init__(self) -> None:
        """Check the values of the case.

        Raises:
            ProgramError: A value is unknown, or the batch is not positive.
        """
        for what, value, known in (
            ("mode", self.mode, MODES),
            ("dtype", self.dtype, DTYPES),
            ("layout", self.layout, LAYOUTS),
            ("attention", self.attention, ATTENTION),
        ):
            if value not in known:
                raise ProgramError(
                    f"no {what} {value!r}", where=self.model, hint=f"known: {', '.join(known)}"
                )
        if self.batch < 1:
            raise ProgramError(f"a batch of {self.batch}", where=self.model, hint="at least 1")

    @property
    def fused_attention(self) -> bool:
        """Whether attention is one operator, for which PyTorch has a kernel."""
        if self.attention:
            return self.attention == "fused"
        # A release without a number, such as a nightly build, is recent.
        return (version_numbers(self.torch)[:2] or _FUSED_SINCE) >= _FUSED_SINCE

    @property
    def recorded(self) -> ModelCase:
        """The case without settings that do not affect the operators that run."""
        return replace(self, torch="", attention="fused" if self.fused_attention else "written")


def build(case: ModelCase, device: str = "meta") -> TorchProgram:
    """Build a model with its inputs as a program for :func:`opcast.predict`.

    Args:
        case: The model.
        device: PyTorch device to build it on; any but ``meta`` initialises random weights.

    Raises:
        ProgramError: The library is missing or has no such model.
    """
    import torch

    own, cast = (getattr(torch, name) if name else None for name in DTYPES[case.dtype])
    train = case.mode == "train"
    try:
        filling = _unfilled() if device == "meta" else nullcontext()
        with warnings.catch_warnings(), torch.device(device), filling, cuda_autocast():
            warnings.simplefilter("ignore")
            module, inputs, named = _BUILDERS.get(case.library, _imported)(case)
    except ProgramError:
        raise
    except Exception as error:
        raise ProgramError(
            f"{case.library} cannot build {case.model}: {type(error).__name__}: {shortened(error)}",
            where=case.model,
            hint=f"is it the name of a model of the installed {case.library}?",
        ) from error
    if not isinstance(module, torch.nn.Module):
        raise ProgramError(
            f"{case.library} makes a {type(module).__name__} of {case.model}",
            where=case.model,
            hint="a torch.nn.Module is wanted",
        )
    module = module.train(train).to(own)
    last = case.layout == "nhwc"
    if last:
        module = module.to(memory_format=torch.channels_last)

    def placed(x: torch.Tensor) -> torch.Tensor:
        x = x.to(own) if x.is_floating_point() else x
        return x.contiguous(memory_format=torch.channels_last) if last and x.dim() == 4 else x

    inputs, named = torch.utils._pytree.tree_map(placed, (inputs, dict(named)))
    return TorchProgram(
        autocast_module(module, cast) if cast else module,
        inputs,
        named,
        train="momentum" if train else "",
        loss="cross_entropy" if train else None,
        origin=case.model,
    )


#: Methods that only initialise a tensor's values.
_FILLS = frozenset(
    ("uniform_", "normal_", "erfinv_", "mul_", "add_", "clamp_", "fill_", "zero_", "copy_")
)


def _unfilled() -> AbstractContextManager[object]:
    """Return a mode that skips initialisation of tensors on ``meta``, which have no values."""
    import torch

    def unfilled(
        function: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object]
    ) -> object:
        own = args[0] if args and getattr(function, "__name__", "") in _FILLS else None
        filled = isinstance(own, torch.Tensor) and own.is_meta
        return own if filled else function(*args, **kwargs)

    return function_mode(unfilled)


def _package(name: str, what: str) -> object:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ProgramError(
            f"{what} needs the Python package {name}: {error}",
            hint=f"pip install {name}, or an import path that can be imported here",
        ) from error


def _call(package: object, path: str) -> Callable[..., object]:
    for name in path.split("."):
        package = getattr(package, name)
    assert callable(package), f"{path} is a {type(package).__name__}"
    return package


def _image(case: ModelCase, channels: int, size: int) -> torch.Tensor:
    import torch

    return torch.empty(case.batch, channels, size, size)


#: A module, and its inputs by position and by name.
_Built: TypeAlias = "tuple[object, tuple[torch.Tensor, ...], Mapping[str, Inputs]]"


def _timm(case: ModelCase) -> _Built:
    package = _package("timm", "a model of timm")
    create = _call(package, "create_model")
    with _settings(package, case):
        try:
            model = create(case.model, **({"img_size": case.img_size} if case.img_size else {}))
        except TypeError:
            # Convolutional networks take an image of any size.
            model = create(case.model)
    if case.mode == "infer" and case.parameters_m:
        merged = _call(package, "utils.reparameterize_model")(model)
        model = min(model, merged, key=lambda own: abs(_millions(own) - case.parameters_m))
    if case.parameters_m:
        _check_size(case, _millions(model))
    sizes = getattr(model, "default_cfg", {}).get("input_size", (3, 224, 224))
    return model, (_image(case, sizes[0], case.img_size or sizes[-1]),), {}


def _check_size(case: ModelCase, millions: float) -> None:
    """Reject a model that differs from the measured one, such as under a reassigned name.

    Raises:
        ProgramError: Its number of parameters differs from the case's.
    """
    if abs(millions - case.parameters_m) > _OTHER * case.parameters_m:
        raise ProgramError(
            f"{case.model} has {millions:g} million parameters here, not {case.parameters_m:g}",
            where=case.model,
            hint=f"the installed {case.library} builds another model by this name; is there a "
            "newer name?",
        )


def _millions(model: object) -> float:
    """Return the parameters of a model in millions, rounded as in tables."""
    assert hasattr(model, "parameters"), model
    return round(sum(p.numel() for p in model.parameters()) / 1e6, 2)


@contextmanager
def _settings(package: object, case: ModelCase) -> Iterator[None]:
    """Configure timm's attention and norms as in the case."""
    before = _call(package, "layers.is_fast_norm")()
    _call(package, "layers.set_fused_attn")(case.fused_attention)
    _call(package, "layers.set_fast_norm")(case.fast_norm)
    try:
        yield
    finally:
        _call(package, "layers.set_fused_attn")(True)
        _call(package, "layers.set_fast_norm")(before)


def _torchvision(case: ModelCase) -> _Built:
    model = _call(_package("torchvision", "a model of torchvision"), "models.get_model")(
        case.model, weights=None
    )
    return model, (_image(case, 3, case.img_size or 224),), {}


def _imported(case: ModelCase) -> _Built:
    """Build a model by calling ``module.name`` without arguments; it takes RGB images."""
    package = _package(case.library, f"model {case.model!r}")
    name, _, part = case.model.partition(":")
    model = _call(package, name)()
    for own in filter(None, part.split(".")):
        model = getattr(model, own)
    return model, (_image(case, 3, case.img_size or 224),), {}


def _transformers(case: ModelCase) -> _Built:
    """Build a preset, or a class such as ``ViTForImageClassification:hidden_size=768``.

    Raises:
        ProgramError: The name is neither.
    """
    import torch

    if case.model in presets():
        return _preset(case)
    package = _package("transformers", "a model of transformers")
    name, _, fields = case.model.partition(":")
    if not hasattr(package, name):
        raise ProgramError(
            f"transformers has no class {name!r}, and no preset has the name",
            where=case.model,
            hint=f"a class such as BertModel:num_hidden_layers=6, or one of {_names(case)}",
        )
    config = getattr(package, name).config_class(**_fields(fields))
    model = _of_transformers(getattr(package, name), config, case)
    if model.main_input_name == "pixel_values":
        size = case.img_size or int(getattr(config, "image_size", 224))
        return model, (_image(case, int(getattr(config, "num_channels", 3)), size),), {}
    return model, (torch.zeros(case.batch, case.img_size or _TOKENS, dtype=torch.int64),), {}


def _of_transformers(kind: Any, config: object, case: ModelCase) -> Any:
    """Build a model of a transformers class, with attention written out if the case requires."""
    written = {} if case.fused_attention else {"attn_implementation": "eager"}
    return kind._from_config(config, **written)


def _diffusers(case: ModelCase) -> _Built:
    """Build a preset.

    Raises:
        ProgramError: There is no preset of that name.
    """
    if case.model in presets():
        return _preset(case)
    raise ProgramError(
        f"no preset of diffusers has the name {case.model!r}",
        where=case.model,
        hint=f"known: {_names(case)}; or a function of your own that makes it, by import path",
    )


def _names(case: ModelCase) -> str:
    own = (name for name, p in presets().items() if p.builds.startswith(f"{case.library}."))
    return ", ".join(own)


def _preset(case: ModelCase) -> _Built:
    """Build a model of ``presets.yaml``."""
    own = presets()[case.model]
    name, _, kind = own.builds.partition(".")
    found = getattr(_package(name, f"model {case.model!r}"), kind)
    # Its advice on element types concerns loaded weights.
    logging.getLogger(name).setLevel(logging.ERROR)
    if name == "transformers":
        model = _of_transformers(found, found.config_class(**own.config), case)
    else:
        model = found(**own.config)
        if not case.fused_attention and hasattr(model, "set_attn_processor"):
            processors = _package("diffusers.models.attention_processor", "written attention")
            model.set_attn_processor(_call(processors, "AttnProcessor")())
    if own.method:
        model = _calling(model, own.method)
    return model, (), own.made(case.batch, case.img_size)


def _calling(model: torch.nn.Module, method: str) -> torch.nn.Module:
    """Wrap a method of a module as a module."""
    import torch

    class Calling(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, *args: object, **kwargs: object) -> object:
            return getattr(self.model, method)(*args, **kwargs)

    return Calling()


def _fields(text: str) -> dict[str, int | float | str]:
    """Parse the fields of a configuration written as ``name=value,…``."""
    found: dict[str, int | float | str] = {}
    for part in filter(None, text.split(",")):
        name, _, value = part.partition("=")
        for read in (int, float, str):
            try:
                found[name] = read(value)
                break
            except ValueError:
                continue
    return found


_BUILDERS: dict[str, Callable[[ModelCase], _Built]] = {
    "timm": _timm,
    "torchvision": _torchvision,
    "transformers": _transformers,
    "diffusers": _diffusers,
}
