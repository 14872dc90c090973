"""ResNet-50: 25.6 million parameters, SGD."""

from configs.base import Config

config = Config(
    model="resnet",
    width=64,
    depths=(3, 4, 6, 3),
    virtual_batch_size=256,  # one group for each GPU with 256 images
    epochs=100,
    warmup_epochs=5,
    optimizer="sgd",
    rate=0.4,  # 0.1 per 256 images
    weight_decay=5e-5,
    clip=10.0,
    policy="none",
    erasing=0.0,
    mixup=0.2,
    cutmix=0.0,
)
