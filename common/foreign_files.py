"""Files of other tools that users take for a program, told by content or suffix, and what to do."""

from __future__ import annotations

import re
from pathlib import PurePath
from typing import NamedTuple


class Foreign(NamedTuple):
    """A file of another tool.

    Attributes:
        what: What it is.
        hint: What to do instead.
    """

    what: str
    hint: str


_SIZES = (
    "predict the program that uses them; for a transformer, its sizes are enough: opcast simulate "
    "--hf config.json, or opcast simulate-serving --hf config.json"
)
_KERAS = (
    "load it in Keras with the JAX backend and export a jitted call: jax.export.export(jax.jit("
    "lambda *a: model.stateless_call(*a)[0]))(…).serialize()"
)
_PYTORCH = (
    "build the module, load the weights into it and predict it: opcast.predict(module, *inputs, "
    "device=…); or write torch.export.save(torch.export.export(module, inputs), 'model.pt2') for "
    "opcast predict model.pt2"
)
_FRAMEWORK = "export it to StableHLO from the framework that it was written in"
_ONNX = Foreign("an ONNX graph", _FRAMEWORK)
_HDF5 = Foreign("an HDF5 file, as Keras saves models and weights", _KERAS)
_SAFETENSORS = Foreign("a safetensors file: weights without a program", _SIZES)
_GGUF = Foreign("a GGUF file: weights without a program", _SIZES)
_TFLITE = Foreign("a TensorFlow Lite model", _FRAMEWORK)
_CHECKPOINT = Foreign("a PyTorch checkpoint: weights, or a pickled module", _PYTORCH)
_PT2 = Foreign(
    "a program of torch.export, which holds ATen operators instead of StableHLO",
    "give its path to opcast predict on a machine with PyTorch, which translates it; elsewhere "
    "only StableHLO is read, which opcast.save(module, *inputs, path=…, device=…) writes",
)
_DAMAGED = Foreign(
    "a .pt2 file that is empty, cut off or damaged",
    "write it again: torch.export.save(torch.export.export(module, inputs), 'model.pt2')",
)
_KERAS_ZIP = Foreign("a Keras model", _KERAS)
_PYTHON = Foreign(
    "Python source, not a program",
    "name a function of it: opcast predict FILE.py:FUNCTION; or write its program with jax.export",
)
_NOTEBOOK = Foreign("a Jupyter notebook", "export the function in it: jax.export, or opcast.save")
_CONFIG = Foreign("the configuration of a model", "opcast simulate --hf FILE predicts its steps")
_SCRIPT = Foreign("a TorchScript program", _PYTORCH)
_KERNEL = Foreign(
    "the code of a kernel, not a program of tensors",
    "predict the program that calls it: opcast predict FILE.py:FUNCTION; a kernel's own work is "
    "stated by its cost estimate (docs/lowering.md)",
)
_SETTINGS = Foreign(
    "a YAML file, as devices, clusters and workloads are described by",
    "give it to --device, --cluster or --workload, and a program as PROGRAM",
)
_TABLE = Foreign("a table", "opcast evaluate and opcast train take tables; PROGRAM is a program")
_ARRAYS = Foreign("arrays of NumPy: data without a program", _SIZES)
_PLAN = Foreign("a TensorRT engine", _FRAMEWORK)
_GZIP = Foreign("a file compressed by gzip", "decompress it first: gunzip FILE")

#: By suffix, for formats that their content does not identify, or not as well.
_BY_SUFFIX = {
    ".onnx": _ONNX,
    ".h5": _HDF5,
    ".hdf5": _HDF5,
    ".keras": _KERAS_ZIP,
    ".safetensors": _SAFETENSORS,
    ".gguf": _GGUF,
    ".tflite": _TFLITE,
    ".pt2": _DAMAGED,
    ".pt": _CHECKPOINT,
    ".pth": _CHECKPOINT,
    ".ckpt": _CHECKPOINT,
    ".py": _PYTHON,
    ".ipynb": _NOTEBOOK,
    ".pb": Foreign("a TensorFlow graph", _FRAMEWORK),
    ".engine": _PLAN,
    ".plan": _PLAN,
    **dict.fromkeys((".cu", ".ptx", ".cubin", ".hip", ".ll", ".cpp", ".c"), _KERNEL),
    **dict.fromkeys((".yaml", ".yml", ".toml"), _SETTINGS),
    **dict.fromkeys((".csv", ".parquet", ".tsv", ".xlsx"), _TABLE),
    **dict.fromkeys((".npy", ".npz"), _ARRAYS),
}
#: Bytes that such a file has, and at which place.
_BY_CONTENT = (
    (0, b"\x89HDF\r\n\x1a\n", _HDF5),
    (0, b"GGUF", _GGUF),
    (4, b"TFL3", _TFLITE),
    (0, b"\x1f\x8b", _GZIP),
)
#: Most bytes of the end of a zip archive: 22, and a comment.
_ZIP_END = 22 + 65535
#: How StableHLO, HLO or an export begins, whatever the file is called.
_PROGRAM = re.compile(rb"\s*(?:(?://|#)[^\n]*\n\s*)*(?:module\b|HloModule\b|ML\xefR)")


def foreign_file(name: str, data: bytes) -> Foreign | None:
    """Recognise a file that holds no program; ``None`` if it may hold one.

    Args:
        name: Its name; content takes precedence over the suffix.
        data: Its content.
    """
    # Bytecode may stand inside an export, so it is looked for everywhere.
    if _PROGRAM.match(data) or b"ML\xefR" in data:
        return None
    for place, magic, found in _BY_CONTENT:
        if data[place : place + len(magic)] == magic:
            return found
    # The length of a JSON header, then the header.
    if data[8:10] == b'{"' and 0 < int.from_bytes(data[:8], "little") <= len(data):
        return _SAFETENSORS
    if data.startswith(b"PK\x03\x04"):
        if b"archive_format" in data[:4096] or b"/models/model.json" in data:
            # An archive ends with the list of its files, through which it is read.
            return _PT2 if b"PK\x05\x06" in data[-_ZIP_END:] else _DAMAGED
        # Code of TorchScript stands beside its constants.
        if b"/code/__torch__" in data or b"/constants.pkl" in data:
            return _SCRIPT
        return _BY_SUFFIX.get(PurePath(name).suffix.lower(), _CHECKPOINT)
    # A pickle of protocol 2 or later, as older versions of PyTorch save.
    if data[:1] == b"\x80" and data[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05"):
        return _CHECKPOINT
    if data.lstrip().startswith(b"{") and b'"model_type"' in data:
        return _CONFIG
    return _BY_SUFFIX.get(PurePath(name).suffix.lower())
