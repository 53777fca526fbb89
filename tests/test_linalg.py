"""One conformance test over all covariance operators, each against its dense matrix."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from oracles import IMAGE, assert_acts_as, numbers, random_covariances, root_matrix
from scipy import fft
from torch import Tensor

from mmdgs.errors import NonFiniteError
from mmdgs.linalg.krylov import Krylov
from mmdgs.linalg.operators import (
    CLOSED_FORM_ROWS,
    Covariance,
    Dense,
    Diagonal,
    eigen,
    raise_non_finite,
)
from mmdgs.linalg.repair import SHARE, error_floor, lifted
from mmdgs.linalg.spectral import Spectral

B, D = 4, 12  # IMAGE holds 12 numbers
MATRICES = random_covariances(B, D, seed=3)
VARIANCES = torch.linspace(0.2, 3.0, B * D, dtype=torch.float64).reshape(B, D)
EYE = torch.eye(D, dtype=torch.float64)
Case = tuple[Covariance, Tensor]


def diagonal(event: tuple[int, ...]) -> Case:
    return Diagonal(VARIANCES.reshape(B, *event)), torch.diag_embed(VARIANCES)


def isotropic(event: tuple[int, ...]) -> Case:
    variance = torch.tensor(0.7, dtype=torch.float64)
    return Diagonal(variance.expand(B, *event)), 0.7 * EYE.expand(B, D, D)


def dense(event: tuple[int, ...]) -> Case:
    return Dense.from_matrix(MATRICES, torch.Size(event)), MATRICES


def krylov(event: tuple[int, ...]) -> Case:
    def product(v: Tensor) -> Tensor:
        return torch.einsum("bij,nbj->nbi", MATRICES, v)

    return Krylov(product, VARIANCES.reshape(B, *event), steps=D, floor=1e-6), MATRICES


def spectral(event: tuple[int, ...]) -> Case:
    axes = tuple(range(1, 1 + len(event)))
    basis = fft.dctn(EYE.reshape(D, *event).numpy(), axes=axes, norm="ortho")
    q = torch.from_numpy(basis).reshape(D, D)  # (places, frequencies)
    return Spectral(VARIANCES.reshape(B, *event)), (q * VARIANCES[:, None]) @ q.mT


@pytest.mark.parametrize("event", [(D,), IMAGE], ids=["vectors", "images"])
@pytest.mark.parametrize("make", [diagonal, isotropic, dense, krylov, spectral])
@pytest.mark.parametrize("transformed", [False, True], ids=["itself", "affine"])
def test_operator_is_its_dense_matrix(
    make: Callable[[tuple[int, ...]], Case], event: tuple[int, ...], transformed: bool
) -> None:
    operator, matrix = make(event)
    if transformed:
        kind = type(operator)
        operator, matrix = operator.affine(0.3, 0.2), 0.3 * matrix + 0.2 * EYE
        assert type(operator) is kind
    # Condition numbers are below 1e3, so that float64 leaves 12 digits and more.
    like = numbers(B, *event)
    assert_acts_as(operator, matrix, like, 1e-11)
    root = root_matrix(operator, like)
    torch.testing.assert_close(root, root.mT, rtol=1e-11, atol=1e-11)


def test_values_are_lifted_and_counted() -> None:
    values = torch.tensor([[2.0, 0.1, -3.0, 0.5], [1.0, 1.0, 1.0, 0.49]], dtype=torch.float64)
    raised, fraction = lifted(values, 0.5)
    assert torch.equal(
        raised, torch.tensor([[2.0, 0.5, 0.5, 0.5], [1.0, 1.0, 1.0, 0.5]], dtype=torch.float64)
    )
    assert fraction.tolist() == [0.5, 0.25]


def test_the_floor_by_the_rule_is_a_share_of_what_lies_below_zero() -> None:
    values = torch.tensor([[2.0, -0.3, 0.2, -0.4], [1.0, 0.0, 0.5, 1e-9]], dtype=torch.float64)
    s = math.sqrt((0.09 + 0.16) / 2)  # of the negative values alone
    torch.testing.assert_close(
        error_floor(values, 1e-6)[:, 0], torch.tensor([SHARE * s, 1e-6], dtype=torch.float64)
    )
    raised, fraction = lifted(values, 1e-6, SHARE)
    torch.testing.assert_close(
        raised,
        torch.tensor(
            [[2.0, SHARE * s, SHARE * s, SHARE * s], [1.0, 1e-6, 0.5, 1e-6]], dtype=torch.float64
        ),
    )
    assert fraction.tolist() == [0.75, 0.5]
    # Standard errors count where they are larger, and up to the same limit.
    errors = torch.tensor([[4.0, 0.0, 0.0, 0.1], [0.0, 0.4, 1.0, 0.0]], dtype=torch.float64)
    raised, fraction = lifted(values, 1e-6, SHARE, errors)
    expected = [[2.0, SHARE * s, SHARE * s, SHARE * s], [1.0, 0.3, 0.75, 1e-6]]
    torch.testing.assert_close(raised, torch.tensor(expected, dtype=torch.float64))
    assert fraction.tolist() == [0.75, 0.75]
    assert torch.equal(lifted(values, 1e-6, 0.0, errors)[0], values.clamp(min=1e-6))
    # An untrained network is no more uncertain than a flat prior.
    assert error_floor(-100 * values.abs(), 1e-6).flatten().tolist() == [1.0, 1.0]
    # A value of weight 2 counts as two values.
    weights = torch.tensor([[1.0, 2.0, 1.0, 1.0]]).double()
    twice = torch.tensor([[2.0, -0.3, -0.3, 0.2, -0.4]], dtype=torch.float64)
    torch.testing.assert_close(
        error_floor(values[:1], 1e-6, SHARE, weights), error_floor(twice, 1e-6)
    )
    # The rule knows no scale, beyond that of the least floor.
    torch.testing.assert_close(error_floor(100 * values, 1e-4), 100 * error_floor(values, 1e-6))


def test_non_finite_rows_are_named() -> None:
    matrix = torch.eye(2).repeat(4, 1, 1)
    raise_non_finite("covariance", matrix)  # finite: passes
    matrix[1, 0, 1] = float("nan")
    matrix[3, 1, 1] = float("inf")
    with pytest.raises(NonFiniteError, match="chain 1, 3;") as caught:
        Dense.from_matrix(matrix, torch.Size([2]))
    assert caught.value.chains == [1, 3]


HARD = {
    "zero": [[0.0, 0.0], [0.0, 0.0]],
    "multiple of I": [[3.0, 0.0], [0.0, 3.0]],
    "diagonal": [[1.0, 0.0], [0.0, 4.0]],
    "diagonal, reversed": [[4.0, 0.0], [0.0, 1.0]],
    "off the diagonal alone": [[0.0, 2.0], [2.0, 0.0]],
    "the same, negative": [[0.0, -2.0], [-2.0, 0.0]],
    "singular": [[1.0, 1.0], [1.0, 1.0]],
    "indefinite": [[1.0, 3.0], [3.0, -2.0]],
    "negative": [[-2.0, 0.5], [0.5, -1.0]],
    "nearly a multiple of I": [[1.0, 1e-17], [1e-17, 1.0 + 1e-15]],
    "one far smaller": [[1.0, 1e-9], [1e-9, 1e-12]],
    "huge": [[1e200, 1e199], [1e199, -1e200]],
    "tiny": [[1e-200, 1e-201], [1e-201, 3e-200]],
}


def assert_decomposes(matrix: Tensor) -> None:
    """Within some roundings of the largest entry, as LAPACK: the values, V values V' = A, and V' V
    = I.
    """
    values, vectors = eigen(matrix)
    scale = matrix.abs().amax((1, 2))[:, None]
    rounding = 16 * torch.finfo(matrix.dtype).eps
    assert ((values - torch.linalg.eigvalsh(matrix)).abs() <= rounding * scale).all()
    rebuilt = (vectors * values[:, None, :]) @ vectors.mT
    assert ((rebuilt - matrix).abs() <= rounding * scale[..., None]).all()
    eye = torch.eye(matrix.shape[1], dtype=matrix.dtype).expand_as(matrix)
    torch.testing.assert_close(vectors.mT @ vectors, eye, rtol=0, atol=rounding)
    assert (values[:, :-1] <= values[:, 1:]).all()


@pytest.mark.parametrize("matrix", HARD.values(), ids=HARD.keys())
def test_the_closed_form_of_two_by_two_matrices_in_hard_cases(matrix: list[list[float]]) -> None:
    # So many that the closed form is used.
    assert_decomposes(torch.tensor(matrix, dtype=torch.float64).repeat(CLOSED_FORM_ROWS, 1, 1))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("d", [1, 2, 3])
@pytest.mark.parametrize("count", [1, 1_000])
def test_eigenvalues_and_vectors(
    d: int, count: int, dtype: torch.dtype, generator: torch.Generator
) -> None:
    matrix = torch.randn(count, d, d, generator=generator, dtype=torch.float64).to(dtype)
    assert_decomposes(matrix + matrix.mT)
