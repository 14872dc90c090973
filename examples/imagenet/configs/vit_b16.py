"""ViT-B/16: 86 million parameters; the settings of DeiT (Touvron et al., 2021)."""

from configs.base import Config

config = Config(model="vit", width=768, depths=(12,), heads=12)
