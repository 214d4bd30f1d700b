"""The models fit the images that they are given, or say in one line that they do not."""

import pytest
import torch
from torch import nn

from pushreduce.workloads.models import build_model


def num_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(
    "shape", [(1, 8, 8), (3, 8, 15), (1, 16, 16), (1, 28, 28), (3, 32, 32), (3, 50, 224)]
)
def test_cnn_takes_any_image_from_8x8(shape: tuple[int, int, int]) -> None:
    model = build_model("cnn", shape, num_classes=7)
    assert model(torch.zeros(2, *shape)).shape == (2, 7)
    assert num_parameters(model) < 700_000
    assert not any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules())


def test_cnn_has_about_260_thousand_parameters_on_fashion_mnist() -> None:
    assert num_parameters(build_model("cnn", (1, 28, 28), 10)) == 260_602


def test_mlp_takes_any_image() -> None:
    assert build_model("mlp", (3, 5, 7), 4)(torch.zeros(2, 3, 5, 7)).shape == (2, 4)
    assert num_parameters(build_model("mlp", (1, 28, 28), 10)) == 50_890


def test_cnn_refuses_smaller_images() -> None:
    with pytest.raises(ValueError, match="8x8 or more, not 7x9"):
        build_model("cnn", (1, 7, 9), 10)


@pytest.mark.parametrize("num_channels", [1, 3])
def test_resnet18_cifar_keeps_the_resolution_in_its_stem(num_channels: int) -> None:
    model = build_model("resnet18-cifar", (num_channels, 32, 32), num_classes=10)
    # The published size of this form with 3 channels, 11 173 962, and 64 x 9 fewer for each channel less.
    assert num_parameters(model) == 11_173_962 - (3 - num_channels) * 64 * 9
    features = {}
    model.layer1.register_forward_hook(lambda _module, _inputs, output: features.update(layer1=output))
    assert model(torch.zeros(2, num_channels, 32, 32)).shape == (2, 10)
    assert features["layer1"].shape == (2, 64, 32, 32)


def test_the_seed_decides_the_initial_model() -> None:
    def initial(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        return nn.utils.parameters_to_vector(build_model("cnn", (1, 8, 8), 10).parameters())

    assert torch.equal(initial(3), initial(3))
    assert not torch.equal(initial(3), initial(4))


@pytest.mark.parametrize(("name", "side"), [("squeezenet1_1", 64), ("googlenet", 64)])
def test_torchvision_classifiers_return_plain_logits_in_training(name: str, side: int) -> None:
    model = build_model(name, (3, side, side), num_classes=5)
    assert model.training
    assert model(torch.zeros(2, 3, side, side)).shape == (2, 5)


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("resnet-50", (3, 32, 32), r"unknown model 'resnet-50'; did you mean .*resnet50"),
        ("qqqq", (3, 32, 32), r"unknown model 'qqqq'; see torchvision"),
        ("fcn_resnet50", (3, 32, 32), r"unknown model 'fcn_resnet50'"),  # segmentation, not a classifier
        ("squeezenet1_1", (1, 28, 28), r"colour images"),
        ("alexnet", (3, 32, 32), r"\Athe model alexnet cannot take 32x32 images \([^\n]*\); choose[^\n]*\Z"),
    ],
)
def test_models_that_do_not_fit_are_refused(name: str, shape: tuple[int, int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_model(name, shape, num_classes=10)
