"""Domain restriction, on planted clouds whose dimensions are known."""

import numpy as np
import pytest
import torch
from planted import activations

from probes import ProbeError, domain_restriction

DOMAINS = ["a", "b", "c", "d"]


def cloud(count, dims, seed=0, feature=24):
    """Values whose domains vary in ``dims`` directions each, their own, and have one centre: v of one head."""
    generator = np.random.default_rng(seed)
    points = np.zeros((len(DOMAINS) * count, feature))
    for i in range(len(DOMAINS)):
        points[i * count : (i + 1) * count, i * dims : (i + 1) * dims] = generator.normal(size=(count, dims))
    domain = [name for name in DOMAINS for _ in range(count)]
    return activations(v=torch.from_numpy(points)[:, None, None].float()), domain, torch.zeros(len(domain), 1).long()


def test_domains_in_their_own_subspaces_lower_the_dimension_by_as_much_as_was_planted():
    acts, domain, position = cloud(400, 3)
    found = domain_restriction(acts, domain, position)
    row = found.row("participation_fall")
    # Isotropic in 3 of 12 dimensions each. The trace of a squared covariance of n points is
    # tr S^2 + (E|x|^4 - tr S^2) / n.
    mixed, own = 9 / (0.75 + (15 - 0.75) / 400), 9 / (3 + (15 - 3) / 400)
    assert row["estimate"] == pytest.approx(mixed - own, abs=0.1)
    assert row["low"] < row["estimate"] < row["high"]
    assert row["p_value"] == pytest.approx(1 / 201)
    assert found.value("pc1_rise") == pytest.approx(1 / 3 - 1 / 12, abs=0.06)


def test_domains_that_say_nothing_give_no_effect():
    generator = np.random.default_rng(3)
    acts = activations(v=torch.from_numpy(generator.normal(size=(200, 1, 1, 12))).float())
    domain = [DOMAINS[i % 4] for i in range(200)]
    for statistic in ("participation_fall", "pc1_rise"):
        row = domain_restriction(acts, domain, torch.zeros(200, 1).long()).row(statistic)
        assert row["low"] < 0 < row["high"]
        assert row["p_value"] > 0.05


def test_the_interval_is_at_least_as_wide_as_repeated_draws_spread():
    estimates, widths = [], []
    for seed in range(30):
        row = domain_restriction(*cloud(40, 3, seed), permutations=40).row("participation_fall")
        estimates.append(row["estimate"])
        widths.append(row["high"] - row["low"])
    assert 0.9 < np.mean(widths) / (2 * 1.96 * np.std(estimates, ddof=1)) < 2


@pytest.mark.parametrize("domain", [["a"] * 8, ["a"] * 5 + ["b"] * 3])
def test_too_few_prompts_of_a_domain_are_refused(domain):
    acts = activations(v=torch.randn(8, 1, 1, 4))
    with pytest.raises(ProbeError, match="at least 4 prompts"):
        domain_restriction(acts, domain, torch.zeros(8, 1).long())
