"""Programs as nobody should send them, made from ones that are well formed."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

TEXT = """module @jit_step attributes {mhlo.num_partitions = 1 : i32, mhlo.num_replicas = 1 : i32} {
  func.func public @main(%x: tensor<64x256xf32>, %w: tensor<256x512xf32>) -> tensor<64xf32> {
    %zero = stablehlo.constant dense<0.0> : tensor<f32>
    %0 = stablehlo.dot_general %x, %w, contracting_dims = [1] x [0] :
      (tensor<64x256xf32>, tensor<256x512xf32>) -> tensor<64x512xf32>
    %1 = stablehlo.tanh %0 : tensor<64x512xf32>
    %2 = stablehlo.transpose %1, dims = [1, 0] : (tensor<64x512xf32>) -> tensor<512x64xf32>
    %3 = stablehlo.reduce(%2 init: %zero) applies stablehlo.add across dimensions = [0] :
      (tensor<512x64xf32>, tensor<f32>) -> tensor<64xf32>
    %4 = func.call @twice(%3) : (tensor<64xf32>) -> tensor<64xf32>
    return %4 : tensor<64xf32>
  }
  func.func private @twice(%x: tensor<64xf32>) -> tensor<64xf32> {
    %0 = stablehlo.add %x, %x : tensor<64xf32>
    return %0 : tensor<64xf32>
  }
}
"""
HLO = """HloModule m, is_scheduled=true

f {
  p = f32[64,256]{1,0} parameter(0)
  ROOT t = f32[64,256]{1,0} tanh(p)
}

ENTRY e {
  a = f32[64,256]{1,0} parameter(0)
  b = f32[64,256]{1,0} fusion(a), kind=kLoop, calls=f
  ROOT r = f32[256,64]{0,1} bitcast(b)
}
"""


def bytecode() -> bytes:
    """:data:`TEXT` as MLIR bytecode."""
    from opcast.features.ir.mlir.bindings import parse_module, write_bytecode

    return bytes(write_bytecode(parse_module(TEXT)))


def mutations(rng: np.random.Generator, programs: list[bytes]) -> Iterator[tuple[str, bytes]]:
    """Endless mutants of programs, with the kind of change."""
    kinds = list(_CHANGES)
    while True:
        kind = str(rng.choice(kinds))
        program = programs[rng.integers(len(programs))]
        yield kind, _CHANGES[kind](rng, program)


def _flipped(rng: np.random.Generator, data: bytes) -> bytes:
    found = bytearray(data)
    for place in rng.integers(0, len(found), rng.integers(1, 9)):
        found[place] = rng.integers(256)
    return bytes(found)


def _truncated(rng: np.random.Generator, data: bytes) -> bytes:
    return data[: rng.integers(1, len(data))]


def _repeated(rng: np.random.Generator, data: bytes) -> bytes:
    start, end = sorted(rng.integers(0, len(data), 2))
    return data[:end] + data[start:end] * int(rng.integers(1, 20)) + data[end:]


def _dropped(rng: np.random.Generator, data: bytes) -> bytes:
    start, end = sorted(rng.integers(0, len(data), 2))
    return data[:start] + data[end:]


def _swapped(rng: np.random.Generator, data: bytes) -> bytes:
    """Two words of a text change places, or two runs of bytes."""
    words = data.split(b" ")
    i, j = rng.integers(0, len(words), 2)
    words[i], words[j] = words[j], words[i]
    return b" ".join(words)


def _numbers(rng: np.random.Generator, data: bytes) -> bytes:
    """A number becomes another: negative, zero, huge."""
    new = rng.choice(["-1", "0", "1", "65536", "9223372036854775807", "1" * 40, "nan", "?"])
    old = str(rng.choice(["64", "256", "512", "0", "1"]))
    return data.replace(old.encode(), str(new).encode(), int(rng.integers(1, 4)))


_CHANGES = {
    "bytes": _flipped, "truncated": _truncated, "repeated": _repeated, "dropped": _dropped,
    "words": _swapped, "numbers": _numbers,
}  # fmt: skip


def nested(depth: int) -> dict[str, bytes]:
    """Programs that are well formed but for their depth."""
    open_, close = "(" * depth, ")" * depth
    regions = '"stablehlo.case"(%i) ({' * depth + "}) : () -> ()" * depth
    calls = "".join(
        f"func.func private @f{i}() {{ func.call @f{i + 1}() : () -> () return }}\n"
        for i in range(depth)
    )
    tuples = "tuple<" * depth + "i32" + ">" * depth
    return {
        "locations": f'module {{}} loc({"callsite(" * depth}"a" at "b"{close})'.encode(),
        "brackets": (open_ + close).encode(),
        "attributes": f"module attributes {{a = {'[' * depth}{']' * depth}}} {{}}".encode(),
        "regions": f"module {{ func.func @main(%i: tensor<i32>) {{ {regions} }} }}".encode(),
        "types": f"module {{ func.func @main(%a: {tuples}) {{ return }} }}".encode(),
        "calls": f"module {{ func.func public @main() {{ func.call @f0() : () -> () return }}\n"
        f"{calls} func.func private @f{depth}() {{ return }} }}".encode(),
        "itself": b"module { func.func public @main() { func.call @main() : () -> () return } }",
        "hlo": f"HloModule m\nENTRY e {{ ROOT a = {open_}f32[]{close} parameter(0) }}".encode(),
    }
