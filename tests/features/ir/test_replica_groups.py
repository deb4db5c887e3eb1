from __future__ import annotations

import pytest

from opcast.common.errors import ProgramError
from opcast.features.ir.replica_groups import (
    expand_lists,
    mesh_groups,
    parse_replica_groups,
)


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("{{0,1},{2,3}}", ((0, 1), (2, 3))),
        ("{}", ((0, 1, 2, 3, 4, 5, 6, 7),)),
        ("[2,4]<=[8]", ((0, 1, 2, 3), (4, 5, 6, 7))),
        # Rows 0 1 2 3 and 4 5 6 7 transposed: columns become groups.
        ("[4,2]<=[2,4]T(1,0)", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("[2,2]<=[4]T(1,0)", ((0, 2), (1, 3))),
        # Device 4 a + 2 b + c, groups over (a, c), one for each b.
        ("[2,4]<=[2,2,2]T(1,0,2)", ((0, 1, 4, 5), (2, 3, 6, 7))),
        ("dense<[[0, 1, 2], [3, 4, -1]]> : tensor<2x3xi64>", ((0, 1, 2), (3, 4))),
        ("dense<0> : tensor<1x1xi64>", ((0,),)),
        # Device 2 x + y.
        ("mesh['x'=4,'y'=2] {'x'}", ((0, 2, 4, 6), (1, 3, 5, 7))),
        ("mesh['x'=4,'y'=2] {'x','y'}", ((0, 1, 2, 3, 4, 5, 6, 7),)),
        ("@mesh {'y'}", ((0, 1), (2, 3), (4, 5), (6, 7))),
        # The major half of x: device 4 x0 + 2 x1 + y, groups over x0.
        ("@mesh {'x':(1)2}", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("@turned {'a'}", ((3, 2, 1, 0),)),
        (
            "#stablehlo.replica_group_mesh_axes<mesh = @mesh, "
            'axes = [#stablehlo.axis_ref<name = "x", sub_axis_info = (2)2>]>',
            ((0, 2), (1, 3), (4, 6), (5, 7)),
        ),
        (
            "#stablehlo.replica_group_mesh_axes<mesh = #stablehlo.mesh<axes=["
            '<name = "a", size = 2>, <name = "b", size = 2>], '
            "device_ids=dense<[0, 2, 1, 3]> : tensor<4xi64>>, "
            'axes = [#stablehlo.axis_ref<name = "b">]>',
            ((0, 2), (1, 3)),
        ),
    ],
)
def test_replica_groups(text: str, groups: tuple[tuple[int, ...], ...]) -> None:
    meshes = {"mesh": {"x": 4, "y": 2}, "turned": {"a": 4}}
    ids = {"turned": (3, 2, 1, 0)}
    assert parse_replica_groups(text, meshes, n_devices=8, device_ids=ids) == groups


def test_replica_groups_as_numbers() -> None:
    assert expand_lists([[0, 2], [1, -1]], 0) == ((0, 2), (1,))
    assert expand_lists([], 3) == ((0, 1, 2),)
    # The order of the named axes is the order within a group: device 2 x + y, y before x.
    assert mesh_groups({"x": 2, "y": 2}, [("y", 1, 2), ("x", 1, 2)]) == ((0, 2, 1, 3),)


@pytest.mark.parametrize("text", ["what", "@nope {'x'}", "mesh['x'=4] {'z'}", "[3,2]<=[4]"])
def test_bad_replica_groups(text: str) -> None:
    with pytest.raises(ProgramError):
        parse_replica_groups(text, {})
