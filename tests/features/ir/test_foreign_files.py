"""What people give to `opcast predict` that is no program, and the answer that helps them."""

import io
import json
import pickle
import struct
import zipfile

import pytest

from opcast.common.errors import ProgramError
from opcast.features.ir.reader import read_program
from opcast.features.ir.untrusted import foreign_file

HEADER = json.dumps({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
SAFETENSORS = struct.pack("<Q", len(HEADER)) + HEADER + bytes(8)


def archive(*names):
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as file:
        for name in names:
            file.writestr(name, "{}")
    return data.getvalue()


@pytest.mark.parametrize(
    ("name", "data", "what", "hint"),
    [
        ("model.onnx", b"\x08\x07\x12\x07pytorch", "an ONNX graph", "StableHLO"),
        ("model.h5", b"\x89HDF\r\n\x1a\n\0", "an HDF5 file", "JAX backend"),
        ("model.safetensors", SAFETENSORS, "a safetensors file", "--hf config.json"),
        ("renamed.bin", SAFETENSORS, "a safetensors file", "simulate"),
        ("model.gguf", b"GGUF\x03\0\0\0", "a GGUF file", "simulate-serving"),
        ("train.py", b"import jax\n\ndef step(x): return x\n", "Python source", ".py:FUNCTION"),
        ("model.pt", archive("m/data.pkl"), "a PyTorch checkpoint", "torch.export.export"),
        ("old.pth", pickle.dumps({}, 2), "a PyTorch checkpoint", "opcast.predict(module"),
        (
            "script.pt",
            archive("m/code/__torch__/m.py", "m/constants.pkl"),
            "a TorchScript",
            "export",
        ),
        ("kernel.cu", b"__global__ void k() {}", "code of a kernel", "FILE.py:FUNCTION"),
        ("kernel.ptx", b".version 8.0", "code of a kernel", "cost estimate"),
        ("chip.yaml", b"name: mine", "a YAML file", "--device"),
        ("table.csv", b"a,b", "a table", "PROGRAM is a program"),
        ("w.npy", b"\x93NUMPY", "arrays of NumPy", "--hf"),
        ("model.keras", archive("config.json"), "a Keras model", "stateless_call"),
        ("model.tflite", b"\x1c\0\0\0TFL3", "a TensorFlow Lite model", "framework"),
        ("config.json", b'{"model_type": "llama"}', "the configuration", "--hf"),
        ("junk.pt2", b"PK\x03\x04junk", "damaged", "write it again"),
        ("empty.pt2", b"", "empty", "torch.export.save"),
        ("cut.pt2", archive("m/archive_format")[:-40], "cut off", "torch.export.save"),
        ("step.mlir.gz", b"\x1f\x8b\x08\0", "compressed by gzip", "gunzip"),
    ],
    # Archives hold the time at which they are made, which differs between the processes of a run.
    ids=lambda value: value if isinstance(value, str) else "data",
)
def test_files_of_other_tools_are_told_with_what_to_do(tmp_path, name, data, what, hint):
    path = tmp_path / name
    path.write_bytes(data)
    with pytest.raises(ProgramError) as told:
        read_program(path)
    assert told.value.what.startswith("this is ")
    assert what in told.value.what
    assert hint in told.value.hint
    assert told.value.where == str(path)


def test_an_export_of_pytorch_is_told_where_only_its_bytes_are_given():
    found = foreign_file("model", archive("m/archive_format"))
    assert found is not None and "torch.export" in found.what and "opcast.save" in found.hint


@pytest.mark.parametrize("name", ["step.mlir", "step.py", "step.pt2", "step"])
def test_a_program_is_one_whatever_it_is_called(tmp_path, name):
    text = "// a comment\nmodule @f {func.func @main(%a: tensor<2xf32>) -> tensor<2xf32> {\n"
    text += "  return %a : tensor<2xf32>\n}}\n"
    path = tmp_path / name
    path.write_text(text)
    assert read_program(path).kind == "stablehlo"
    assert foreign_file(name, b"HloModule m\n") is None
    assert foreign_file(name, b"\x10\0\0\0export ML\xefR rest") is None
