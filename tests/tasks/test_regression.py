"""Bayesian regression against scipy's multivariate normal and scikit-learn's Gaussian process."""

import numpy as np
import pytest
import torch
from scipy.stats import multivariate_normal, norm
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import ConstantKernel, DotProduct

from tasks import Regression

TASKS = [
    Regression(),
    Regression(dimensions=1, pairs=4, noise=2, prior=3),
    Regression(dimensions=3, pairs=9, noise=0.01),
]


def pairs(tokens: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """x and y of one sequence."""
    x, y = tokens[0::2].double().numpy(), tokens[1::2].double().numpy()
    assert (x[:, -2:] == 0).all()
    assert (y[:, :-2] == 0).all()
    assert (y[:, -1] == 1).all()
    return x[:, :-2], y[:, -2]


@pytest.mark.parametrize("task", TASKS)
def test_predictive_is_the_ratio_of_joint_densities(task):
    """p(y_i | before) = p(y_1 .. y_i) / p(y_1 .. y_{i-1}), both multivariate normal with the weights integrated out."""
    batch = task.sample(3, seed=1)
    for n in range(3):
        x, y = pairs(batch.tokens[n])
        covariance = task.prior**2 * x @ x.T + task.noise**2 * np.eye(task.pairs)
        for i in range(task.pairs):
            mean, variance = batch.posterior[n, i].tolist()
            past = multivariate_normal(cov=covariance[:i, :i]).logpdf(y[:i]) if i else 0.0
            for offset in (-1.0, 0.0, 2.0):
                value = mean + offset * np.sqrt(variance)
                joint = multivariate_normal(cov=covariance[: i + 1, : i + 1]).logpdf([*y[:i], value])
                assert norm(mean, np.sqrt(variance)).logpdf(value) == pytest.approx(joint - past, rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("task", TASKS)
def test_predictive_equals_a_gaussian_process(task):
    batch = task.sample(3, seed=2)
    for n in range(3):
        x, y = pairs(batch.tokens[n])
        for i in range(1, task.pairs):
            kernel = ConstantKernel(task.prior**2) * DotProduct(sigma_0=0, sigma_0_bounds="fixed")
            oracle = GaussianProcessRegressor(kernel, alpha=task.noise**2, optimizer=None).fit(x[:i], y[:i])
            mean, deviation = oracle.predict(x[i : i + 1], return_std=True)
            answer = batch.posterior[n, i].numpy()
            np.testing.assert_allclose(answer, [mean[0], deviation[0] ** 2 + task.noise**2], rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("task", TASKS)
def test_belief_is_the_ridge_solution(task):
    batch = task.sample(3, seed=3)
    for n in range(3):
        x, y = pairs(batch.tokens[n])
        for i in range(task.pairs):
            precision = x[:i].T @ x[:i] / task.noise**2 + np.eye(task.dimensions) / task.prior**2
            expected = np.linalg.solve(precision, x[:i].T @ y[:i]) / task.noise**2
            np.testing.assert_allclose(batch.belief[n, i], expected, rtol=1e-6, atol=1e-9)


def test_the_first_answer_is_the_prior_and_the_baseline_stays_there():
    task = Regression(noise=0.3, prior=2)
    batch = task.sample(20, seed=4)
    prior = task.baselines(batch)["prior"]
    torch.testing.assert_close(prior[:, 0], batch.posterior[:, 0], rtol=0, atol=1e-12)
    squares = (batch.tokens[:, 0::2, :-2].double() ** 2).sum(-1)
    torch.testing.assert_close(prior[..., 1], 0.3**2 + 4 * squares, rtol=1e-12, atol=0)


def test_data_have_the_stated_moments():
    task = Regression(noise=0.7, prior=1.5, pairs=2)
    tokens = task.sample(20_000, seed=5).tokens.double()
    x, y = tokens[:, 0, :-2], tokens[:, 1, -2]
    assert x.mean().abs() < 4 / np.sqrt(x.numel())
    assert x.var() == pytest.approx(1, abs=4 * np.sqrt(2 / x.numel()))
    assert y.var() == pytest.approx(0.7**2 + 8 * 1.5**2, rel=0.05)


def test_entropy_at_a_repeated_input_never_rises():
    task = Regression(dimensions=4, pairs=6)
    tokens = task.sample(30, seed=6).tokens.clone()
    tokens[:, 0::2] = tokens[:, :1]
    variance = task.posterior(tokens)[..., 1]
    assert (variance.diff(dim=1) < 0).all()


def test_predictive_does_not_depend_on_the_axes():
    task = Regression(dimensions=5)
    tokens = task.sample(20, seed=7).tokens
    rotation = torch.linalg.qr(torch.randn(5, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64))[0]
    turned = tokens.clone()
    turned[..., :5] = (tokens[..., :5].double() @ rotation).float()
    torch.testing.assert_close(task.posterior(turned), task.posterior(tokens), rtol=1e-4, atol=1e-5)
