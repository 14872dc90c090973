"""What a recipe says; each other file here is one, by the name `config`."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Config:
    """A model, its optimizer and its input. Lengths are in pixels."""

    model: str  # "vit" or "resnet"
    width: int  # channels of ViT's tokens, or of ResNet's first convolution
    depths: tuple[int, ...]  # blocks of each stage; a ViT has one
    heads: int = 0
    patch: int = 16
    side: int = 224
    eval_resize: int = 256  # the shorter side, before the window in the centre
    dtype: str = "bfloat16"  # of the computation; parameters are float32
    batch: int = 1024  # over all devices
    # Pictures of which batch normalization takes moments: the ghost batches of Hoffer et al., 2017.
    virtual_batch_size: int = 0  # 0, or no less than the batch: the batch
    epochs: int = 300
    warmup_epochs: float = 10
    optimizer: str = "adamw"  # or "sgd", with Nesterov's momentum
    rate: float = 1e-3  # of learning, at its peak, for this batch
    weight_decay: float = 0.05
    clip: float = 1.0  # of the gradients' norm
    ema: float = 0.9999
    smoothing: float = 0.1
    jitter: float = 0.3  # of brightness, contrast and saturation
    policy: str = "rand"  # "rand", "auto" or "none"
    magnitude: int = 9
    erasing: float = 0.25
    mixup: float = 0.8  # Beta's parameter; 0: none
    cutmix: float = 1.0

    def __post_init__(self) -> None:
        size = self.virtual_batch_size
        if self.batch < 1 or self.rate <= 0:
            raise ValueError(f"batch={self.batch} and rate={self.rate} must be above 0")
        if size < 0:
            raise ValueError(f"virtual_batch_size={size} is negative; 0 takes the whole batch")
        if 0 < size < self.batch and self.batch % size:
            raise ValueError(
                f"batch={self.batch} is no multiple of virtual_batch_size={size}: take one that is"
            )
