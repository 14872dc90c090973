"""A ViT of two layers for generated images: two minutes on two CPU cores."""

from configs.base import Config

config = Config(
    model="vit",
    width=64,
    depths=(2,),
    heads=4,
    patch=8,
    side=64,
    eval_resize=72,
    dtype="float32",  # bfloat16 is slow on a CPU
    batch=32,
    epochs=8,
    warmup_epochs=1,
    rate=1e-3,
    ema=0.98,
)
