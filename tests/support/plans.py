"""Steps of equal layers to plan, and a compiler that takes what a test says."""

import jax
import jax.numpy as jnp

from opcast.predict.plan.judge import CompiledPlan, PlanRow

BATCH, WIDTH, LAYERS = 512, 64, 4


def layered(layer, loss=lambda y: jnp.mean(y * y), rate=0.1):
    """A training step of layers ``y + layer(y, p)``."""

    def step(params, x):
        def loss_of(params):
            y = x
            for p in params:
                y = y + layer(y, p)
            return loss(y)

        return jax.tree.map(lambda p, g: p - rate * g, params, jax.grad(loss_of)(params))

    return step


def lowered_of(step):
    up = jax.ShapeDtypeStruct((WIDTH, 4 * WIDTH), jnp.float32)
    down = jax.ShapeDtypeStruct((4 * WIDTH, WIDTH), jnp.float32)
    x = jax.ShapeDtypeStruct((BATCH, WIDTH), jnp.float32)
    return jax.jit(step, donate_argnums=0).lower([{"up": up, "down": down}] * LAYERS, x)


def compiled(key, us, **own):
    """What a compiler says of a plan that takes so many microseconds."""
    plain = {
        **dict.fromkeys(("latency_us", "lo_us", "hi_us", "compute_us"), us),
        **dict.fromkeys(("communication_us", "exposed_communication_us", "moved_bytes"), 0.0),
        "fits": True,
        "lowering": "fused",
        "collectives": {},
        "waits": [],
        "notes": [],
        "energy_j": 1.0,
        "seconds": 1.0,
    }
    return CompiledPlan(key=key, **{**plain, **own})


def judge_by(monkeypatch, judge):
    """Put a function of the job, a key and a program in the place of the compiler."""

    def judged(job, programs):
        return [judge(job, key, program) for key, program in programs]

    monkeypatch.setattr("opcast.predict.plan.search.judge_plans", judged)
    monkeypatch.setattr("opcast.predict.plan.search.judge_alone", lambda *_: PlanRow(error="none"))
