"""Image classifiers by name. Torchvision is imported only for those that come from it."""

from __future__ import annotations

import difflib
import math

import torch
from torch import nn

_OWN_MODELS = ("mlp", "cnn", "resnet18-cifar")


def check_model_name(name: str) -> None:
    """ValueError, with similar names, unless `build_model` knows the name."""
    if name in _OWN_MODELS:
        return
    from torchvision import models

    known = [*_OWN_MODELS, *models.list_models(module=models)]
    if name not in known:
        similar = difflib.get_close_matches(name, known)
        hint = f"did you mean {' or '.join(similar)}?" if similar else "see torchvision.models for the names"
        raise ValueError(f"unknown model {name!r}; {hint}")


def build_model(name: str, image_shape: tuple[int, int, int], num_classes: int) -> nn.Module:
    """A new float32 classifier on the CPU: [batch, *image_shape] -> logits [batch, num_classes].

    Initialised from torch's global generator.

    Raises:
        ValueError: unknown model, or one that cannot take such images.
    """
    check_model_name(name)
    if name == "mlp":
        return _build_mlp(image_shape, num_classes)
    if name == "cnn":
        return SmallCNN(image_shape, num_classes)
    if name == "resnet18-cifar":
        return _build_resnet18_cifar(image_shape[0], num_classes)
    return _build_torchvision(name, image_shape, num_classes)


class SmallCNN(nn.Sequential):
    """Three convolutions with GroupNorm and two linear layers.

    260 602 parameters for 1x28x28 and 10 classes. Takes any image from 8x8. Small images keep their
    resolution in the first layer, and the last pooling leaves 2 to 5 pixels a side:
    the linear layer stays small.
    """

    def __init__(self, image_shape: tuple[int, int, int], num_classes: int) -> None:
        num_channels, height, width = image_shape
        if min(height, width) < 8:
            raise ValueError(f"the model cnn needs images of 8x8 or more, not {height}x{width}")
        first = 2 if min(height, width) >= 16 else 1
        sides = (height // first // 2, width // first // 2)
        last = (max(2, sides[0] // 3), max(2, sides[1] // 3))
        num_features = 128 * (sides[0] // last[0]) * (sides[1] // last[1])
        super().__init__(
            nn.Conv2d(num_channels, 32, kernel_size=3, padding=1),
            nn.GroupNorm(8, 32),
            nn.ReLU(),
            nn.MaxPool2d(first),
            nn.Conv2d(32, 64, kernel_size=3, padding=1),
            nn.GroupNorm(8, 64),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(64, 128, kernel_size=3, padding=1),
            nn.GroupNorm(8, 128),
            nn.ReLU(),
            nn.MaxPool2d(last),
            nn.Flatten(),
            nn.Linear(num_features, 144),
            nn.ReLU(),
            nn.Linear(144, num_classes),
        )


def _build_mlp(image_shape: tuple[int, int, int], num_classes: int) -> nn.Module:
    """One hidden layer of 64: a step takes a fraction of a millisecond, so that many simulated ranks fit one processor.

    50 890 parameters for 1x28x28 and 10 classes.
    """
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(math.prod(image_shape), 64),
        nn.ReLU(),
        nn.Linear(64, num_classes),
    )


def _build_resnet18_cifar(num_channels: int, num_classes: int) -> nn.Module:
    """ResNet-18 for small images: a 3x3 stem that keeps the resolution, and no max-pooling."""
    from torchvision.models import resnet18

    model = resnet18(weights=None, num_classes=num_classes)
    model.conv1 = nn.Conv2d(num_channels, 64, kernel_size=3, stride=1, padding=1, bias=False)
    nn.init.kaiming_normal_(model.conv1.weight, mode="fan_out", nonlinearity="relu")
    model.maxpool = nn.Identity()
    return model


def _build_torchvision(name: str, image_shape: tuple[int, int, int], num_classes: int) -> nn.Module:
    from torchvision import models

    if image_shape[0] != 3:
        raise ValueError(
            f"the model {name} takes colour images and these are grey; use --model cnn or resnet18-cifar"
        )
    options = {}
    if name in ("googlenet", "inception_v3"):
        # Their auxiliary classifiers would make the output of training a tuple of three losses to weigh.
        options = {"aux_logits": False, "init_weights": True}
    model = models.get_model(name, weights=None, num_classes=num_classes, **options)
    # Many architectures have a smallest or only image size and say so no earlier than in forward().
    model.eval()
    try:
        with torch.no_grad():
            model(torch.zeros(1, *image_shape))
    except (RuntimeError, AssertionError, ValueError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(
            f"the model {name} cannot take {image_shape[1]}x{image_shape[2]} images ({reason}); "
            "choose another --image-size or --model"
        ) from error
    return model.train()
