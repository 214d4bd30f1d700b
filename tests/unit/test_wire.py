"""What is encoded is what is decoded, in memory of the processor, whichever device the numerator is on."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pushreduce.algorithms.wire import Wire

WEIGHT, SHARE = 0.75, 1 / 3
PLACES = [
    "cpu",
    "staged",  # a GPU's way, as far as it goes without one
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")),
]


def numerator(device: str, dtype: torch.dtype) -> torch.Tensor:
    values = torch.randn(1001, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    values[-1] = WEIGHT
    return values.to(device, dtype)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", ["full", "bfloat16", "float16"])
def test_a_receiver_reads_what_the_sender_takes_off(name, dtype, place):
    device = "cuda" if place == "cuda" else "cpu"
    x = numerator(device, dtype)
    wire = Wire(name, x)
    if place == "staged":
        wire._pinned = torch.empty(len(x), dtype=wire.dtype)
    memory, other = (np.zeros(len(x) * wire.num_bytes_per_element, np.uint8) for _ in range(2))
    sent = wire.encode(x, SHARE, memory).clone()
    wire.encode(-x, SHARE, other)  # what is staged does not outlast the call
    received = wire.decode(memory, SHARE * WEIGHT, "from a test")
    assert sent.device == received.device == x.device
    assert torch.equal(received, sent)
    assert torch.equal(received, (x * SHARE).to(wire.dtype))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_receiver_refuses_what_is_not_finite(value):
    x = numerator("cpu", torch.float32)
    x[3] = value
    wire = Wire("full", x)
    memory = np.zeros(len(x) * 4, np.uint8)
    wire.encode(x, SHARE, memory)
    with pytest.raises(FloatingPointError, match="from a test are not finite"):
        wire.decode(memory, SHARE * WEIGHT, "from a test")


def test_a_receiver_refuses_values_of_another_weight():
    x = numerator("cpu", torch.float32)
    wire = Wire("full", x)
    memory = np.zeros(len(x) * 4, np.uint8)
    wire.encode(x, SHARE, memory)
    with pytest.raises(RuntimeError, match="torn, lost or applied twice"):
        wire.decode(memory, WEIGHT, "from a test")
