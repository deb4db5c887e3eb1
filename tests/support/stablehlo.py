"""Small programs of StableHLO, read as the package reads them."""

from collections.abc import Mapping

from opcast.features.ir.program import Op, Program
from opcast.features.ir.stablehlo_reader import parse, read_module


def read_mlir(
    data: str | bytes, origin: str = "", *, trip_counts: Mapping[str, int] | int | None = None
) -> Program:
    return read_module(parse(data, origin), origin, trip_counts=trip_counts)


def func(body: str, args: str = "%x: tensor<8xf32>", result: str = "tensor<8xf32>") -> str:
    return f"func.func @main({args}) -> {result} {{\n{body}\n}}\n"


def ops_of(program: Program, opcode: str) -> list[Op]:
    return [op for c in program.computations.values() for op in c.ops if op.opcode == opcode]


def only(program: Program, opcode: str) -> Op:
    (op,) = ops_of(program, opcode)
    return op
