# SPDX-License-Identifier: Apache-2.0
"""The Weaver head's products against float64: norms, gathered rows, RoPE, the gate, odd sizes."""

import pytest
import torch
from torch import Tensor

from tests.poison import poisoned_memory  # noqa: F401
from vllm_weaver.kernels import weaver_linear
from vllm_weaver.kernels.weaver_linear import gate_up, project, qkv

DTYPES = [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)]
SIZES = [(1, 16, True), (3, 272, True), (3, 272, False), (12, 24, False), (33, 272, False)]
"""Rows, K and whether weights are held: less than one step of the loop, and more."""


@pytest.fixture
def held(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Holds no weights for a parameter False; they are for few rows."""
    if not request.param:
        monkeypatch.setattr(weaver_linear, "HELD_ROWS", 0)


def randn(*shape: int, seed: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def norm(x: Tensor, weight: Tensor) -> Tensor:
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()


def check(got: Tensor, expected: Tensor, tolerance: float) -> None:
    scale = float(expected.abs().max())
    torch.testing.assert_close(got.double().cpu(), expected, rtol=tolerance, atol=tolerance * scale)


@pytest.mark.parametrize("dtype, tolerance", DTYPES, ids=str)
@pytest.mark.parametrize("rows, k, held", SIZES, indirect=["held"])
@pytest.mark.parametrize("normed, gathered", [(True, None), (False, False), (False, True)])
def test_project(
    device: torch.device,
    rows: int,
    k: int,
    held: None,
    normed: bool,
    gathered: bool | None,
    dtype: torch.dtype,
    tolerance: float,
) -> None:
    """gathered None: no residual."""
    n = 40
    x, weight = randn(rows, k, seed=1, dtype=dtype), randn(n, k, seed=2, dtype=dtype) / 4
    norm_weight, bias = randn(k, seed=3, dtype=dtype), randn(n, seed=4, dtype=torch.float32)
    residual = randn(rows if gathered is False else 50, n, seed=5, dtype=dtype)
    index = (torch.arange(rows) * 7 % 50).int()
    expected = (norm(x, norm_weight) if normed else x.double()) @ weight.double().T + bias.double()
    if gathered is not None:
        expected += (residual[index] if gathered else residual).double()
    out = project(
        x.to(device),
        weight.to(device),
        bias.to(device),
        norm_weight=norm_weight.to(device) if normed else None,
        residual=None if gathered is None else residual.to(device),
        index=index.to(device) if gathered else None,
    )
    assert out.dtype == dtype
    check(out, expected, tolerance)


@pytest.mark.parametrize("dtype, tolerance", DTYPES, ids=str)
@pytest.mark.parametrize("rows, k, held", SIZES, indirect=["held"])
@pytest.mark.parametrize("n", [5, 32])
def test_gate_up(
    device: torch.device, n: int, rows: int, k: int, held: None, dtype: torch.dtype, tolerance: float
) -> None:
    x, weight = randn(rows, k, seed=1, dtype=dtype), randn(2 * n, k, seed=2, dtype=dtype) / 4
    norm_weight, bias = randn(k, seed=3, dtype=dtype), randn(2 * n, seed=4, dtype=torch.float32)
    gate, up = (norm(x, norm_weight) @ weight.double().T + bias.double()).chunk(2, -1)
    out = gate_up(x.to(device), weight.to(device), bias.to(device), norm_weight.to(device))
    check(out[:, :n], torch.nn.functional.silu(gate) * up, tolerance)
    assert out.shape[1] % 16 == 0 and out[:, n:].eq(0).all()


@pytest.mark.parametrize("dtype, tolerance", DTYPES, ids=str)
@pytest.mark.parametrize("gathered, queries", [(True, True), (False, True), (False, False)])
@pytest.mark.parametrize("heads, dim", [(2, 8), (3, 36)])
@pytest.mark.parametrize("n, held", [(2, True), (3, False), (7, False)], indirect=["held"])
def test_qkv(
    device: torch.device,
    n: int,
    held: None,
    heads: int,
    dim: int,
    gathered: bool,
    queries: bool,
    dtype: torch.dtype,
    tolerance: float,
) -> None:
    """Two requests of n rows; rows with a place outside the cache write nothing."""
    k, width, length = 24, heads * dim, 7
    x = randn(20 if gathered else 2 * n, k, seed=1, dtype=dtype)
    weight, norm_weight = randn(3 * width, k, seed=2, dtype=dtype) / 4, randn(k, seed=3, dtype=dtype)
    bias = randn(3 * width, seed=4, dtype=torch.float32)
    angles = randn(5, dim // 2, seed=5, dtype=torch.float32)
    index, positions = ((torch.arange(2 * n) * step % size).int() for step, size in ((7, 20), (4, 5)))
    places = torch.tensor([2, -1, 6, 0, length, 1, 4, 3, 0, length + 1, 5, 1, -1, 6])[: 2 * n].int()
    cache = torch.full((2, 2, length, heads, dim), float("nan"), dtype=dtype)
    expected = norm(x[index] if gathered else x, norm_weight) @ weight.double().T + bias.double()
    expected = expected.view(2 * n, 3, heads, dim)
    cos, sin = (f(angles)[positions][:, None, None].double() for f in (torch.cos, torch.sin))
    first, second = expected[:, :2].chunk(2, -1)
    expected[:, :2] = torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
    cached = cache.to(device)
    q = qkv(
        x.to(device),
        weight.to(device),
        bias.to(device),
        norm_weight.to(device),
        (angles.cos().to(device), angles.sin().to(device)),
        positions.to(device),
        places.to(device),
        cached,
        index=index.to(device) if gathered else None,
        queries=queries,
    )
    assert (q is not None) == queries
    if q is not None:
        check(q, expected[:, 0], tolerance)
    written = torch.zeros(2, length, dtype=torch.bool)
    for row, place in enumerate(places.tolist()):
        if 0 <= place < length:
            written[row // n, place] = True
            check(cached[:, row // n, place], expected[row, 1:], tolerance)
    assert torch.equal(cached.isnan().all(-1).all(-1).cpu(), ~written.expand(2, -1, -1))


def test_rows_do_not_mix(device: torch.device) -> None:
    x = randn(3, 16, seed=1, dtype=torch.float32)
    weight, bias, norm_weight = randn(16, 16, seed=2, dtype=torch.float32), torch.zeros(16), torch.ones(16)
    call = [t.to(device) for t in (weight, bias)]
    clean = project(x.to(device), *call, norm_weight=norm_weight.to(device))
    x[0], x[2] = float("nan"), float("inf")
    out = project(x.to(device), *call, norm_weight=norm_weight.to(device))
    assert torch.equal(out[1], clean[1])


def test_wrong_arguments_are_named() -> None:
    x, weight, bias = torch.zeros(2, 16), torch.zeros(8, 16), torch.zeros(8)
    with pytest.raises(ValueError, match="bias"):
        project(x, weight, bias[:7])
    with pytest.raises(ValueError, match="weight has strides"):
        project(x, torch.zeros(16, 8).T, bias)
    with pytest.raises(ValueError, match="residual"):
        project(x, weight, bias, residual=torch.zeros(3, 8))
