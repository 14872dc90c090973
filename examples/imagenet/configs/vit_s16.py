"""ViT-S/16: 22 million parameters; the settings of DeiT (Touvron et al., 2021)."""

from configs.base import Config

config = Config(model="vit", width=384, depths=(12,), heads=6)
