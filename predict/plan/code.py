"""A plan as code of JAX, to paste into the program."""

from __future__ import annotations

from ...common.files import own_data
from .program import PlannedProgram, Spec
from .space import Plan
from .stages import StagedProgram


def code_of(program: PlannedProgram, plan: Plan) -> str:
    """A plan as code of JAX: a mesh, the cut of each argument, and those of products' results."""
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
            "# Before a product reads a parameter, its spec without fsdp gathers it, as above."
        )
    if plan.change.remat:
        at = f", which begin at {program.layers_at}" if program.layers_at else ""
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
    """A plan with stages as code of JAX: which layers they have, and the shardings inside."""
    layers, each = pipeline.cut.layers, plan.inside.devices
    lines = [f"# A pipeline of {plan.stages} stages over {each} devices each, in order:"]
    for stage in range(plan.stages):
        own = [n for n, at in enumerate(layers) if at == stage]
        line = pipeline.layers_at[stage]
        ends = ["what comes before them"] if stage == 0 else []
        ends += ["what comes behind them, and the loss"] if stage == plan.stages - 1 else []
        lines.append(
            f"#   stage {stage}: layers {own[0]} to {own[-1]} of {len(layers)}"
            + (f", which begin at {line}" if line else "")
            + "".join(f", {text}" for text in ends)
        )
    lines += [
        f"# The batch goes through them in {plan.change.micro} micro-batches, as 1F1B orders them; "
        "gradients are",
        "# added up, and each stage updates its own parameters.",
    ]
    if each == 1:
        return "\n".join([*lines, "# Nothing is cut inside of a stage."]) + "\n"
    lines.append(f"# Below: the mesh of the first stage; stage s has devices s * {each} and on.")
    return "\n".join(lines) + "\n" + code_of(pipeline.program, plan.inside)


def _spec(cut: Spec) -> str:
    parts = [
        "None" if not axes else f'"{axes[0]}"' if len(axes) == 1 else str(axes).replace("'", '"')
        for axes in cut
    ]
    while parts and parts[-1] == "None":
        parts.pop()
    return f"P({', '.join(parts)})"
