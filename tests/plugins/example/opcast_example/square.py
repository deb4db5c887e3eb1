"""A product of a matrix with itself, as a program of the zoo."""

import jax
from flax import linen as nn

from opcast.datagen.zoo.families.parts import Input, Model, precision, value_loss
from opcast.datagen.zoo.registry import COMMON, COMMON_CHOICES, Family

FAMILY = Family(
    "square", "A dense layer that keeps its width", "", {**COMMON, "width": 64}, COMMON_CHOICES
)


class Square(nn.Module):
    width: int
    p: object

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        return self.p.dense(self.width)(x)


def model(s):
    shape = (s["batch"], s["width"])
    return Model(
        Square(s["width"], precision(s)), {"x": Input(shape)}, {"values": Input(shape)}, value_loss
    )
