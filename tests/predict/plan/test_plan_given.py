"""Programs that bring shardings of their own: from StableHLO and from HLO text."""

import pytest

from opcast.predict.plan.answer import plan
from opcast.predict.plan.case import AXES
from opcast.predict.plan.program import read_planned


@pytest.mark.slow
def test_own_shardings_are_the_starting_point(tmp_path):
    def text(first, second):
        return f"""
        module @step attributes {{mhlo.num_partitions = 4 : i32}} {{
          func.func public @main(
              %w: tensor<256x512xf32> {{mhlo.sharding = "{first}"}},
              %x: tensor<128x256xf32> {{mhlo.sharding = "{second}"}}) -> tensor<128x512xf32> {{
            %0 = stablehlo.dot_general %x, %w, contracting_dims = [1] x [0]
              : (tensor<128x256xf32>, tensor<256x512xf32>) -> tensor<128x512xf32>
            return %0 : tensor<128x512xf32>
          }}
        }}"""

    given = text("{devices=[4,1]<=[4]}", "{devices=[1,4]<=[4]}")
    options = {"cluster": "h100-sxm-x4", "lowering": "fused", "model": "roofline"}
    found = plan(given, **options, axes=("fsdp",), compiles=1)
    assert any("with its own shardings it takes" in note for note in found.notes)
    assert found.best.name == "fsdp=4"
    assert AXES[0] == "data"


def test_hlo_text_is_a_starting_point():
    def text(header):
        return f"""HloModule step, {header}

        ENTRY main {{
          w = f32[64,8]{{1,0}} parameter(0), sharding={{devices=[4,1]<=[4]}}
          m = f32[64,8]{{1,0}} parameter(1), sharding={{devices=[4,1]<=[4]}}
          x = f32[32,64]{{1,0}} parameter(2), sharding={{devices=[4,1]<=[4]}}
          y = f32[32,8]{{1,0}} dot(x, w), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}
          g = f32[64,8]{{1,0}} dot(x, y), lhs_contracting_dims={{0}}, rhs_contracting_dims={{0}}
          a = f32[64,8]{{1,0}} add(m, g)
          v = f32[64,8]{{1,0}} subtract(w, a)
          ROOT r = (f32[64,8]{{1,0}}, f32[64,8]{{1,0}}) tuple(v, a)
        }}"""

    alias = "input_output_alias={ {0}: (0, {}, may-alias), {1}: (1, {}, may-alias) }"
    donor = "buffer_donor={ (0, {}), (1, {}) }"
    for header in (alias, donor):
        found = read_planned(text(f"{header}, num_partitions=4"))
        # The moment has a parameter's shape and is no batch.
        assert [(a.role, a.output) for a in found.arguments] == [
            ("parameter", 0), ("state", 1), ("batch", -1)
        ]  # fmt: skip
        assert found.given is not None and not found.note
    # As ``lower(...).as_text(dialect="hlo")`` has it.
    found = read_planned(text(alias))
    assert found.given is None
    assert found.note.startswith("its own shardings over 4 devices are ignored")
