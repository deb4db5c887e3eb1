"""What optimisers move and launch, counted by hand; copies of autocast."""

import pytest

torch = pytest.importorskip("torch")

from opcast.features.ir.torch.program import TorchProgram  # noqa: E402
from opcast.features.ir.torch.runs import record  # noqa: E402
from opcast.predict.operator.aten_streams import streams  # noqa: E402
from opcast.predict.operator.aten_work import works  # noqa: E402

#: Tensors as large as the parameters that each moves. AdamW: decay 2, both moments 3 + 2 + 3 (the
#: gradient, given twice, is read once), a root 2, a division 2, an addition 2, the step 4; fused it
#: reads four and writes three. SGD reads two and writes one, with momentum also 2 + 3 for that.
TENSORS = {"adamw": 20, "adamw-fused": 7, "adamw-loop": 20, "sgd": 3, "momentum": 8}


@pytest.mark.parametrize("name", [*TENSORS, "momentum-fused"])
def test_optimisers_move_what_their_kernels_read_and_write(name):
    layers = [torch.nn.Linear(1024, 1024, bias=False) for _ in range(3)]
    net = torch.nn.Sequential(*layers).to("meta")
    program = TorchProgram(net, (torch.zeros(8, 1024, device="meta"),), {}, name, "sum")
    found = [w for w in works(record(program).calls) if w.phase == "optimizer"]
    moved = sum(w.bytes for w in found) / (3 * 1024**2 * 4)
    assert moved == pytest.approx(TENSORS.get(name, 5), rel=1e-4)


@pytest.mark.parametrize(
    ("width", "layers", "launches"),
    [
        # 48 chunks of 65,536 elements, three tensors: one launch for each of nine operators.
        (1024, 3, 9),
        # 1,536 chunks, 320 a launch: five of each, and the steps' numbers.
        (4096, 6, 8 * 5 + 1),
        # 120 tensors: 110 a launch of one list, 64 of two, 48 of three. One list: the steps, the
        # decay, the second moment's, the division and the addition; two: the first moment with its
        # gradient, and the root; three: the square and the step.
        (8, 120, 2 * 5 + 2 * 2 + 3 * 2),
    ],
)
def test_lists_are_cut_as_pytorch_cuts_them(width, layers, launches):
    net = torch.nn.Sequential(*(torch.nn.Linear(width, width, bias=False) for _ in range(layers)))
    inputs = (torch.zeros(8, width, device="meta"),)
    found = works(record(TorchProgram(net.to("meta"), inputs, {}, "adamw", "sum")).calls)
    assert sum(w.launches for w in found if w.phase == "optimizer") == launches


@pytest.mark.parametrize(("how", "between"), [("adamw", 6), ("adamw-loop", 1)])
def test_a_cache_holds_a_tensor_of_a_list_only_if_it_holds_the_list(how, between):
    layers = [torch.nn.Linear(1024, 1024, bias=False) for _ in range(6)]
    net = torch.nn.Sequential(*layers).to("meta")
    recording = record(TorchProgram(net, (torch.zeros(8, 1024, device="meta"),), {}, how, "sum"))
    found = works(recording.calls)
    near = streams([w.uses for w in found], [w.bytes for w in found], recording.kept)
    names = [w.name.removeprefix("_foreach_").removesuffix("_") for w in found]
    # The root of the second moments that the division reads was written right before: over lists
    # the roots of all six others between, in a loop over parameters nothing.
    (root, *_) = near[next(i for i, name in enumerate(names) if name == "div" and i)]
    assert names[names.index("sqrt") + 1] == "div"
    assert root.bytes == 4 * 1024**2 and root.distance == 2 * between * 4 * 1024**2


def test_autocast_copies_each_weight_once_a_step_and_its_gradient_back():
    class Twice(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.net = torch.nn.Linear(64, 64, bias=False)

        def forward(self, x):
            with torch.autocast("cpu", torch.bfloat16):
                return self.net(self.net(x))

    recording = record(TorchProgram(Twice(), (torch.zeros(8, 64),), {}, "sgd", "sum"))
    copies = [
        (c.phase, c.inputs[0].shape, c.outputs[0].dtype)
        for c in recording.calls
        if c.name == "aten._to_copy"
    ]
    assert copies.count(("forward", (64, 64), "bfloat16")) == 1
    assert copies.count(("backward", (64, 64), "float32")) == 1
