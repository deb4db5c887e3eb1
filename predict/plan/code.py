"""A plan as JAX code, to paste into the program."""

from __future__ import annotations

from ...common.files import own_data
from .program import PlannedProgram, Spec
from .space import Plan
from .stages import StagedProgram


def code_of(program: PlannedProgram, plan: Plan) -> str:
    """Return a plan as JAX code: a mesh, and shardings of arguments and of products' results."""
    cuts = [(own.name, program.argument_spec(own, plan)) for own in program.arguments]
    roots = dict.fromkeys(name.partition("[")[0].partition(".")[0] for name, _ in cuts)
    said = own_data("predict/plan/code.toml")
    text = said["shardings"].format(
        devices=plan.devices,
        shape=", ".join(str(n) for _, n in plan.mesh),
        axes=" ".join(f'"{axis}",' for axis, _ in plan.mesh),
        specs="".join(f"    {name!r}: {_spec(cut)},\n" for name, cut in cuts if any(cut)),
        trees="".join(f'shardings("{r}", {r.replace(" ", "_")}), ' for r in roots),
    )
    lines = text.splitlines()
    inside = program.lines(plan)
    if inside:
        lines.append("# Results of products, by jax.lax.with_sharding_constraint(x, spec):")
        lines += [f"#   {line}: {_spec(cut)}" for line, cut in inside.items()]
    if "fsdp" in plan.sizes:
        lines.append(
            "# Gather each parameter before its product by its spec without fsdp, as above."
        )
    if plan.change.remat:
        at = f", starting at {program.layers_at}" if program.layers_at else ""
        lines.append(
            f"# jax.checkpoint (Flax: nn.remat) around each of the first {plan.change.remat} equal "
            f"layers{at}."
        )
    if plan.change.micro > 1:
        lines += ["", *said["micro_batches"].format(parts=plan.change.micro).splitlines()]
        keys = ", ".join(own.name for own in program.arguments if own.is_key)
        lines += said["keys"].format(keys=keys).splitlines() if keys else []
    return "\n".join(lines) + "\n"


def pipeline_code(pipeline: StagedProgram, plan: Plan) -> str:
    """Return a plan with stages as JAX code: the layers of each stage, and the shardings inside."""
    layers, each = pipeline.cut.layers, plan.inside.devices
    lines = [f"# A pipeline of {plan.stages} stages over {each} devices each, in order:"]
    for stage in range(plan.stages):
        own = [n for n, at in enumerate(layers) if at == stage]
        line = pipeline.layers_at[stage]
        ends = ["everything before them"] if stage == 0 else []
        ends += ["everything after them, and the loss"] if stage == plan.stages - 1 else []
        lines.append(
            f"#   stage {stage}: layers {own[0]} to {own[-1]} of {len(layers)}"
            + (f", starting at {line}" if line else "")
            + "".join(f", {text}" for text in ends)
        )
    lines += [
        f"# The batch goes through them in {plan.change.micro} micro-batches, scheduled by 1F1B; "
        "gradients are",
        "# accumulated, and each stage updates its own parameters.",
    ]
    if each == 1:
        return "\n".join([*lines, "# Nothing is sharded inside a stage."]) + "\n"
    lines.append(f"# Below: the mesh of the first stage; stage s uses devices from s * {each} on.")
    return "\n".join(lines) + "\n" + code_of(pipeline.program, plan.inside)


def _spec(cut: Spec) -> str:
    parts = [
        "None" if not axes else f'"{axes[0]}"' if len(axes) == 1 else str(axes).replace("'", '"')
        for axes in cut
    ]
    while parts and parts[-1] == "None":
        parts.pop()
    return f"P({', '.join(parts)})"
