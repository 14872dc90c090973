"""The data set and the training step."""

from page_data import draw_folder

draw_folder()
steps = []


def step(images, labels, mask):
    assert images.shape == (256, 224, 224, 3) and labels.shape == mask.shape == (256,)
    steps.append(int(mask.sum()))
    assert steps in ([256], [256, 44])
