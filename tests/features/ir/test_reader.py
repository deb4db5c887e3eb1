from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import export
from jaxlib.mlir.dialects import stablehlo

from opcast.common.errors import OpcastError, ProgramError
from opcast.features.ir.mlir.bindings import parse_module, write_bytecode
from opcast.features.ir.program import Op, Program
from opcast.features.ir.reader import SourceProgram, read_program
from opcast.features.ir.untrusted import nesting

X = jax.ShapeDtypeStruct((8, 4), "float32")
W = jax.ShapeDtypeStruct((4, 4), "float32")


#: StableHLO's versions: a minor one for each few months, of which jaxlib reads the last years'.
_NEWEST = int(stablehlo.get_current_version().split(".")[1])
VERSIONS = (stablehlo.get_minimum_version(), "1.0.0", f"1.{_NEWEST // 2}.0", f"1.{_NEWEST}.0")
CONVENTIONS = range(
    export.minimum_supported_calling_convention_version,
    export.maximum_supported_calling_convention_version + 1,
)


@jax.jit
def model(x: jax.Array, w: jax.Array) -> Any:
    def step(carry: jax.Array, _: None) -> Any:
        return jnp.tanh(carry @ w), carry.sum()

    carry, sums = jax.lax.scan(step, x, length=3)
    return jax.lax.cond(sums[0] > 0, jnp.sin, jnp.cos, carry), sums


def shape(program: Program) -> list[Any]:
    """Everything but names of files and lines, which text and bytecode may lack."""

    def op_key(op: Op) -> Any:
        source = op.source and (op.source.op, op.source.index)
        return (
            op.name, op.opcode, op.operands, op.results, op.attrs, op.called, op.is_tuple, source,
        )  # fmt: skip

    return [(n, c.root, [op_key(op) for op in c.ops]) for n, c in program.computations.items()]


@pytest.fixture(scope="module")
def reference() -> SourceProgram:
    source = read_program(model.lower(X, W).as_text())
    # Read now: StableHLO's serialiser takes a module's content away.
    assert source.program.computations
    return source


def forms(folder: Path) -> dict[str, Any]:
    lowered = model.lower(X, W)
    text = lowered.as_text()
    exported = export.export(model)(X, W)
    bytecode = write_bytecode(lowered.compiler_ir("stablehlo"))
    portable = bytes(exported.mlir_module_serialized)
    serialised = bytes(exported.serialize())
    # Suffixes lie on purpose: content decides.
    files = {"a.txt": text.encode(), "b.mlir": bytecode, "c.hlo": portable, "d": serialised}
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return {
        "text": text,
        "text with comments": f"// a program\n\n{text}",
        "bytes of text": text.encode(),
        "bytecode": bytecode,
        "portable artifact": portable,
        "export file": serialised,
        "exported": exported,
        "lowered": lowered,
        "module": lowered.compiler_ir("stablehlo"),
        **{f"path {name}": folder / name for name in files},
        "path as text": str(folder / "a.txt"),
    }


def test_every_form_gives_the_same_program(tmp_path: Path, reference: SourceProgram) -> None:
    # JAX moves constants when it exports, so exports are compared with an export.
    exported = read_program(export.export(model)(X, W))
    of_export = ("portable artifact", "export file", "exported", "path c.hlo", "path d")
    for name, source in forms(tmp_path).items():
        found = read_program(source)
        expected = exported if name in of_export else reference
        assert found.kind == "stablehlo", name
        assert found.content_hash == expected.content_hash, name
        assert shape(found.program) == shape(expected.program), name
    names = [
        sorted(c for c in p.program.computations if "." not in c) for p in (exported, reference)
    ]
    assert names[0] == names[1]


@pytest.mark.parametrize("version", VERSIONS)
def test_files_of_every_version_that_jax_reads(version: str, reference: SourceProgram) -> None:
    """From the oldest StableHLO that JAX's promise of compatibility covers to its own."""
    data = stablehlo.serialize_portable_artifact(reference.module, version)
    assert shape(read_program(data).program) == shape(reference.program)


@pytest.mark.parametrize("version", CONVENTIONS)
def test_exports_of_every_calling_convention(version: int) -> None:
    x = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    exported = export.export(jax.jit(jnp.tanh), platforms=["cpu"])(x)
    with_version = replace(exported, calling_convention_version=version)
    source = read_program(bytes(with_version.serialize()))
    assert source.platforms == ("cpu",)
    assert [op.opcode for op in source.program.entry_computation.ops] == ["parameter", "tanh"]


def test_functions_with_arguments(reference: SourceProgram) -> None:
    assert shape(read_program(model, X, W).program) == shape(reference.program)
    plain = read_program(lambda x: jnp.tanh(x), X)
    assert [op.opcode for op in plain.program.entry_computation.ops] == ["parameter", "tanh"]


def test_hlo_text(tmp_path: Path) -> None:
    compiled = model.lower(X, W).compile()
    text = compiled.as_text()
    assert text is not None
    path = tmp_path / "x.mlir"
    path.write_text(text)
    for source in (text, text.encode(), path, compiled):
        found = read_program(source)
        assert found.kind == "hlo"
        assert found.program.dialect == "hlo"
        assert shape(found.program) == shape(read_program(text).program)
    with pytest.raises(ProgramError, match="no MLIR module"):
        _ = read_program(text).module


def test_what_a_compiler_takes(reference: SourceProgram) -> None:
    module = parse_module(reference.compile_input)
    assert "stablehlo.tanh" in str(module)
    assert reference.kind == "stablehlo"


def test_hash_ignores_locations_and_tells_programs_apart() -> None:
    plain = model.lower(X, W)
    hashes = [read_program(plain.as_text(debug_info=debug)).content_hash for debug in (True, False)]
    assert hashes[0] == hashes[1]
    other = read_program(model, X, jax.ShapeDtypeStruct((4, 4), "float32"), trip_counts=3)
    assert other.content_hash == hashes[0]
    assert read_program(jax.jit(jnp.sin), X).content_hash != hashes[0]


def test_origin_is_the_file(tmp_path: Path) -> None:
    path = tmp_path / "model.mlir"
    path.write_text(jax.jit(jnp.tanh).lower(X).as_text())
    found = read_program(path)
    assert found.origin == str(path)
    source = found.program.entry_computation.root_op.source
    assert source is not None
    assert source.file == str(path)
    assert source.line == 3
    assert read_program(found) is found


def test_trip_counts_reach_the_program() -> None:
    def until(x: jax.Array) -> jax.Array:
        return jax.lax.while_loop(lambda c: c.sum() < 3, lambda c: c * 2, x)

    lowered = jax.jit(until).lower(X)
    for source in (lowered.as_text(), lowered.compile().as_text()):
        program = read_program(source, trip_counts=5).program
        loops = [op for c in program.computations.values() for op in c.ops if op.opcode == "while"]
        assert [op.attrs["trip_count"] for op in loops] == [5]


def damaged() -> dict[str, Any]:
    lowered = model.lower(X, W)
    text = lowered.as_text()
    exported = export.export(model)(X, W)
    portable = bytes(exported.mlir_module_serialized)
    serialised = bytes(exported.serialize())
    bytecode = write_bytecode(lowered.compiler_ir("stablehlo"))
    hlo = lowered.compile().as_text() or ""
    return {
        "empty": "",
        "blank": " \n\t ",
        "comment": "// nothing\n",
        "no bytes": b"",
        "words": "these are not\nthe ops you look for",
        "half text": text[: len(text) // 2],
        "half bytecode": bytecode[: len(bytecode) // 2],
        "magic": b"ML\xefR",
        "newer bytecode": b"ML\xefR\xff\xff\xff",
        "half portable": portable[: len(portable) // 2],
        "changed portable": portable[:200] + bytes(200) + portable[400:],
        "half export": serialised[: len(serialised) // 2],
        "magic in noise": b"\x00\x01ML\xefR" + bytes(range(256)),
        "noise": bytes(range(256)) * 4,
        "zeros": bytes(1000),
        "hlo header": "HloModule x\n",
        "half hlo": hlo[: len(hlo) // 2],
        "hlo without its entry": hlo[: hlo.index("ENTRY")],
        "wrong types": "func.func @main(%a: tensor<2xf32>) -> tensor<3xf32> {\n"
        " return %a : tensor<2xf32> }",
        "number": 3,
        "nothing": None,
        "missing file": Path("no/such/file.mlir"),
        "missing file by name": "no/such/file.mlir",
        "folder": Path(),
        "not lowerable": lambda x: x.no_such_attribute,
    }


def test_damaged_input_is_refused_with_a_reason_and_in_silence(
    capfd: pytest.CaptureFixture[str],
) -> None:
    cases = damaged()
    capfd.readouterr()
    for name, source in cases.items():
        with pytest.raises(ProgramError) as caught:
            _ = read_program(source, *([X] if callable(source) else [])).program
        assert caught.value.what, name
        assert len(str(caught.value)) < 1500, name
        assert isinstance(caught.value, OpcastError)
    assert capfd.readouterr().err == ""


def test_parser_errors_name_file_and_line(tmp_path: Path) -> None:
    path = tmp_path / "bad.mlir"
    path.write_text(
        "func.func @main(%a: tensor<2xf32>) -> tensor<2xf32> {\n"
        "  %b = stablehlo.add %a, %zzz : tensor<2xf32>\n"
        "  return %b : tensor<2xf32>\n}\n"
    )
    with pytest.raises(ProgramError) as caught:
        read_program(path)
    assert caught.value.where == f"{path}:2:26"
    assert "undeclared SSA value" in caught.value.what


def test_signs_of_device_lists_are_no_brackets() -> None:
    """A module that shards each of 3000 ops over ``[1,8]<=[8]`` nests one bracket deep."""
    op = "  %v{} = f32[8] negate(%v{}), sharding={{devices=[8,1]<=[8] last_tile_dim_replicate}}\n"
    ops = "".join(op.format(i + 1, i) for i in range(3000))
    text = f"HloModule m\n\nENTRY main {{\n  %v0 = f32[8] parameter(0)\n{ops}}}\n"
    assert nesting(text) == 2
    assert len(read_program(text).program.entry_computation.ops) == 3001
    assert nesting("tensor<" * 300 + ">" * 300 + "->" * 5) == 300
