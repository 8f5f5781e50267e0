"""What a capture's error is explained by."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import cgplan
from cgplan.captures.failures import explain_failure
from cgplan.errors import CaptureError, CgplanError, HostSyncError, ModelError
from cgplan.modes import BatchDescriptor


def test_the_end_of_a_capture_asks_what_needed_the_host() -> None:
    """As CUDA's errors are."""
    invalid = CaptureError(
        "the capture is not valid: CUDA error: operation failed due to a previous error during capture",
        remedy="-",
    )
    found = HostSyncError(
        "operator aten::item needs the host, at model.py:7", remedy="Keep it on the device."
    )

    def explained(error: CaptureError, found: HostSyncError | None) -> CgplanError:
        key = BatchDescriptor(4)
        return explain_failure(error, f"FULL {key}", capturing=True, free=None, host_sync=found)

    assert type(explained(invalid, None)) is CaptureError
    named = explained(invalid, found)
    assert isinstance(named, HostSyncError)
    assert (
        named.message == "capture of FULL size=4: operator aten::item needs the host, at model.py:7"
    )
    unjoined = CaptureError("the capture is not valid: a side stream was not joined", remedy="-")
    assert type(explained(unjoined, found)) is CaptureError


def test_a_model_of_torchs_modules_alone_is_blamed_in_torch() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(4, 4)).eval()
    specs = {"input": cgplan.Input(shape=("num_tokens", 8), dtype="float32", pad=0)}
    with pytest.raises(ModelError, match=r"linear\.py:\d+: `return F.linear\(") as caught:
        cgplan.capture(model, specs, compilation={"cudagraph_capture_sizes": [4]}, device="cpu")
    declared = "Check the declared inputs, input [num_tokens, 8] padded with 0, against the model's forward(input)."
    assert caught.value.remedy == declared


def test_an_input_without_rows_is_told() -> None:
    specs = {"input": cgplan.Input(shape=(3, 64, 64), dtype="float32", pad=0)}
    with pytest.raises(ModelError, match="expected 4D input") as caught:
        cgplan.capture(nn.BatchNorm2d(3).eval(), specs, device="cpu")
    assert (
        "input [3, 64, 64] padded with 0 (no dimension is num_tokens), against"
        in caught.value.remedy
    )


def test_a_function_that_builds_the_model_is_told() -> None:
    specs = {"input": cgplan.Input(shape=("num_tokens", 8), dtype="float32", pad=0)}
    with pytest.raises(ModelError) as caught:
        cgplan.capture(lambda: nn.Linear(8, 8), specs, device="cpu")
    assert caught.value.remedy.endswith("Pass a model, not a function that builds it.")


def test_an_input_that_kwargs_took_is_told() -> None:
    """As misspelt inputs of models of transformers."""

    class Pictures(nn.Module):
        def forward(self, pixel_values: Tensor | None = None, **kwargs: object) -> torch.Size:
            return pixel_values.shape  # type: ignore[union-attr]

    specs = {"pixel_value": cgplan.Input(shape=("num_tokens", 8), dtype="float32", pad=0)}
    with pytest.raises(ModelError, match="has no attribute 'shape'") as caught:
        cgplan.capture(Pictures().eval(), specs, device="cpu")
    assert caught.value.remedy.startswith(
        "The forward has no argument 'pixel_value': its **kwargs took it. Did you mean "
        "'pixel_values'? Check the declared inputs"
    )
