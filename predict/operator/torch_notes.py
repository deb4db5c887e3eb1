"""Notes on predictions of PyTorch programs: assumptions and limits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ...common.versions import is_newer
from ...features.devices.device import DeviceSpec
from ...features.ir.torch.record import CUDNN
from ...models.program.pytorch import CpuTorchModel
from .aten_prices import has_tf32
from .aten_traffic import SORTS
from .aten_work import ATTENTION, PRODUCT, AtenKernel
from .cpu_prices import cpu_notes
from .step_operators import FLASH2
from .torch_choices import attention_library, why_written

if TYPE_CHECKING:
    from ...features.ir.torch.record import Recording

#: Newest PyTorch release with measured whole models (timm.parquet of the published-torch pack).
MEASURED_RELEASE = "2.9"
_PREFERRED = (
    "attention is cuDNN's, which PyTorch prefers on this chip since its cuDNN is 9.15.1, as in its "
    "packages for CUDA 13; with an older one, or for CUDA 12, "
)
#: Note on recurrent layers of an export.
RECURRENT = (
    "recurrent layers are priced step by step, as written out; cuDNN, which PyTorch calls on GPUs, "
    "may be up to ten times faster, which the interval allows for"
)


def release_notes(release: str) -> tuple[str, ...]:
    """Return a note if a release is newer than all measured ones."""
    if not is_newer(release, MEASURED_RELEASE):
        return ()
    return (
        f"PyTorch {release} is newer than the newest release with measured models "
        f"({MEASURED_RELEASE}): it is predicted as that one",
    )


def kernel_name(work: AtenKernel, spec: DeviceSpec) -> str:
    """Return an operator's name; for attention with the library that PyTorch calls."""
    library = attention_library(spec, work) if work.kind == ATTENTION else ""
    return f"{work.name} ({library})" if library else work.name


GRAPHS = (
    "the model asks torch.compile for CUDA graphs: the host launches each pass once; no measured "
    "model ran so, and parts that PyTorch leaves out of a graph (inputs that change, operators on "
    "the CPU) take longer"
)


def compiled_notes(parts: Sequence[str]) -> tuple[str, ...]:
    """Return a note on parts that the model itself compiles, in an eager prediction.

    Args:
        parts: Names of the compiled parts.
    """
    if not parts:
        return ()
    named = ", ".join(parts[:3]) + (f" and {len(parts) - 3} more" if len(parts) > 3 else "")
    return (
        f"the model passes {named} to torch.compile, which is priced operator by operator here; "
        "the lower bound of the interval assumes that the whole model is compiled: --framework "
        "torch-compiled",
    )


def attention_notes(
    recording: Recording,
    spec: DeviceSpec,
    found: Sequence[AtenKernel],
    older_us: float | None,
) -> tuple[str, ...]:
    """Return notes on the attention library, and on what other PyTorch releases call.

    Args:
        recording: Recording of the program.
        spec: The device.
        found: Kernels of the program.
        older_us: Time with the kernels of an older release, if they differ.
    """
    if spec.platform == "cpu":
        return ()
    notes = []
    calls = [w for w in found if w.kind == ATTENTION]
    # Not those for which the program allows nothing else.
    by_cudnn = [
        w
        for w in calls
        if attention_library(spec, w) == CUDNN and attention_library(spec, w, cudnn=False) != CUDNN
    ]
    if older_us is not None:
        notes.append(
            f"{_PREFERRED}no fused kernel supports it (a mask rules out FlashAttention, grouped "
            "keys the memory-efficient kernel): keys and values are repeated, the softmax goes "
            f"through memory, and the program takes {older_us / 1e3:.3g} ms, which the interval "
            "includes; repeating keys and values in the model (repeat_interleave) avoids that"
        )
    elif by_cudnn:
        plain = any(not w.masked for w in by_cudnn)
        factor = FLASH2.get(spec.architecture, 1.0)
        notes.append(
            _PREFERRED
            + "it is "
            + (
                "FlashAttention 2 (as with sdpa_kernel(SDPBackend.FLASH_ATTENTION)), about "
                f"{factor:g} times as long over many queries"
                if plain
                else "the memory-efficient kernel, which supports masks and is slower"
            )
        )
    written = [use for use, one in recording.attention.items() if not one]
    notes += dict.fromkeys(
        f"attention is written out (SDPBackend.MATH): {why_written(spec, use)}" for use in written
    )
    return tuple(notes)


def kernel_notes(
    framework: str,
    spec: DeviceSpec,
    found: Sequence[AtenKernel],
    times: np.ndarray,
    sources: Sequence[str],
    host_bound: bool,
) -> tuple[str, ...]:
    """Return notes on the kernels of a program and the limits of their times.

    Args:
        framework: ``torch-eager`` or ``torch-compiled``.
        spec: The device.
        found: ``n`` kernels.
        times: Seconds with both bounds of the 90 % interval, shape ``(n, 3)``.
        sources: Family that each was learned from, or ``roofline``.
        host_bound: Whether the host takes longer to launch the kernels than they run.
    """
    if spec.platform == "cpu":
        known = CpuTorchModel.find().devices
        return cpu_notes(spec, found, framework == "torch-compiled", known)
    kernels = (
        "ATen operators as eager PyTorch launches them, one kernel after the other, without CUDA "
        "graphs"
        if framework == "torch-eager"
        else "products and attention of PyTorch's libraries, with chains of element-wise operators "
        "fused as torch.compile does; the backward pass keeps what the forward pass computed"
    )
    train = any(w.phase == "backward" for w in found)
    notes = [
        kernels
        + ("; the backward pass is autograd's graph, the optimizer is foreach's" if train else "")
        + "; for the same program under XLA omit --framework"
    ]
    if host_bound:
        compiled = framework == "torch-compiled"
        faster = "CUDA graphs" if compiled else "torch.compile or CUDA graphs"
        notes.append(
            "the host's launches take longer than the kernels: a larger batch takes little longer, "
            f"and {faster} would be faster; the estimate applies to libraries such as "
            "transformers; plain modules on a fast processor may take as little as the lower bound"
        )
    guessed = times[[s == "roofline" for s in sources], 0].sum() / (times[:, 0].sum() or 1.0)
    if guessed > 0.25:
        notes.append(f"{guessed:.0%} of the kernel time is a roofline of {spec.name}")
    if has_tf32(spec) and any(w.dtype == "f32" and w.kind == PRODUCT for w in found):
        notes.append(
            "f32 matrix products run in full f32, PyTorch's default; after "
            "torch.set_float32_matmul_precision('high') they are predicted in TF32"
        )
    if any(f"aten.{w.name}" in SORTS for w in found):
        notes.append(
            "sorts and selections (topk, median, kthvalue, mode) are priced by the passes of a "
            "radix sort over their values, not by measured kernels"
        )
    return tuple(notes)
